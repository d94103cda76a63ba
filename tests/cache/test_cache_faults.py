"""The cache against damaged, swapped and forged entries, and files that are no entries."""

from __future__ import annotations

import os
import shutil

import pytest

from fkjit.cache import disk as cache_disk
from fkjit.cache.file import cache_key, decode, encode, read_metadata, stored_fields
from fkjit.cache.lookup import Cache
from fkjit.errors import CacheError, NotCachedError
from tests.cache.kit import FIELDS, IMAGE, KEY, Build, get, normal_log, the_file  # noqa: F401

# ---- damaged files


def small() -> bytes:
    stored = stored_fields({"a": "b"})
    return encode({"key": cache_key(stored), "fields": stored}, b"image bytes")


def test_every_flipped_bit_is_seen():
    data = small()
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CacheError):
                decode(bytes(damaged))


def test_every_truncation_and_every_tail_is_seen():
    data = small()
    for length in range(len(data)):
        with pytest.raises(CacheError):
            decode(data[:length])
    for tail in (b"\0", b"x" * 5000):
        with pytest.raises(CacheError, match="where its header says"):
            decode(data + tail)


def flip(at: int):
    def damage(data: bytes) -> bytes:
        return (
            data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
            if at >= 0
            else flip(len(data) + at)(data)
        )

    return damage


DAMAGE = {
    "magic": flip(2),
    "version": flip(6),
    "checksum": flip(20),
    "metadata length": flip(41),
    "image length": flip(45),
    "metadata": flip(60),
    "image": flip(-1),
    "half": lambda data: data[: len(data) // 2],
    "last byte": lambda data: data[:-1],
    "empty": lambda data: b"",
    "zeroes": lambda data: bytes(len(data)),
    "tail": lambda data: data + b"\0",
    "edited header": lambda data: data.replace(b'"target":"sm_80"', b'"target":"sm_90"'),
    "text": lambda data: b"<html>not found</html>",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_entry_is_set_aside_and_rebuilt(tmp_path, capsys, kind):
    get(Cache(tmp_path))
    path = the_file(tmp_path)
    good, before = path.read_bytes(), path.stat()
    damaged = DAMAGE[kind](good)
    assert damaged != good
    with open(path, "r+b") as file:  # the same inode, and its old time
        file.truncate(0)
        file.write(damaged)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    cache, build = Cache(tmp_path), Build(b"built anew")
    entry = get(cache, build)
    assert (entry.origin, entry.image, build.calls) == ("compiled", b"built anew", 1)
    assert cache.stats().quarantined == cache.stats().quarantined_files == 1
    assert [file.read_bytes() for file in (tmp_path / "quarantine").iterdir()] == [damaged]
    assert "is bad" in capsys.readouterr().err
    later = get(Cache(tmp_path))
    assert (later.origin, later.image) == ("disk", b"built anew")


def test_swapped_entries_are_seen(tmp_path):
    other = {**FIELDS, "target": "sm_86"}
    get(Cache(tmp_path))
    wrong = get(Cache(tmp_path), Build(b"other"), other)
    shutil.copyfile(wrong.path, the_file(tmp_path))
    entry = get(Cache(tmp_path), Build(b"right"))
    assert (entry.origin, entry.image) == ("compiled", b"right")
    assert get(Cache(tmp_path), fields=other).image == b"other"


def test_a_forged_key_is_seen_even_with_a_right_checksum(tmp_path):
    get(Cache(tmp_path))
    meta = decode(the_file(tmp_path).read_bytes()).meta
    meta["fields"]["target"] = "sm_86"
    the_file(tmp_path).write_bytes(encode(meta, b"forged"))
    with pytest.raises(CacheError, match="key is not that of its fields"):
        read_metadata(the_file(tmp_path))
    assert get(Cache(tmp_path)).image == IMAGE


@pytest.mark.parametrize("kind", ["directory", "pipe", "dangling link", "link to a device"])
def test_something_else_under_the_name_of_an_entry(tmp_path, kind):
    path = the_file(tmp_path)
    path.parent.mkdir(parents=True)
    {
        "directory": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "dangling link": lambda: path.symlink_to(tmp_path / "nowhere"),
        "link to a device": lambda: path.symlink_to("/dev/zero"),
    }[kind]()
    assert get(Cache(tmp_path)).origin == "compiled"
    assert get(Cache(tmp_path)).origin == "disk"
    assert path.is_file()
    assert not path.is_symlink()


def test_quarantine_keeps_the_last_few(tmp_path):
    for index in range(cache_disk.QUARANTINE_FILES + 4):
        get(Cache(tmp_path))
        the_file(tmp_path).write_bytes(b"%d" % index)
    Cache(tmp_path).disk.sweep()
    kept = sorted((tmp_path / "quarantine").iterdir())
    assert len(kept) == cache_disk.QUARANTINE_FILES
    assert int(kept[-1].read_bytes()) == cache_disk.QUARANTINE_FILES + 2


def test_a_good_entry_that_replaced_a_bad_one_is_not_set_aside(tmp_path):
    get(Cache(tmp_path))
    disk = Cache(tmp_path).disk
    disk._quarantine(KEY, "read before the other process replaced it")
    assert the_file(tmp_path).exists()
    assert disk.quarantined == 0


def test_a_damaged_bundle_falls_through_to_a_build(tmp_path, capsys):
    get(Cache(tmp_path / "a"))
    Cache(tmp_path / "a").export(tmp_path / "b.fkb")
    data = bytearray((tmp_path / "b.fkb").read_bytes())
    data[5000] ^= 1
    (tmp_path / "b.fkb").write_bytes(bytes(data))
    (tmp_path / "c.fkb").write_bytes(bytes(data[:3000]))
    cache = Cache(tmp_path / "v1", [tmp_path / "b.fkb", tmp_path / "c.fkb", tmp_path / "d.fkb"])
    assert get(cache).origin == "compiled"
    err = capsys.readouterr().err
    assert f"b.fkb: member {KEY}.fkc: is not what manifest.json says" in err
    assert "c.fkb is not a readable bundle" in err
    assert "d.fkb does not exist" in err
    assert (tmp_path / "b.fkb").read_bytes() == bytes(data)
    strict = Cache(None, [tmp_path / "b.fkb", tmp_path / "c.fkb"], require_cached=True)
    with pytest.raises(NotCachedError):
        get(strict)
