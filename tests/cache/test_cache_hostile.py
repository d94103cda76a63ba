"""Bytes from anywhere: bundles and entries that lie, and names that a terminal would obey."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fkjit.cache.bundle import MANIFEST, open_bundle
from fkjit.cache.file import cache_key, encode, read_entry, stored_fields
from fkjit.cache.lookup import Cache
from fkjit.cli import console
from fkjit.errors import CacheError, NotCachedError
from fkjit.terminal import one_line, printable
from tests.cache.kit import (
    FIELDS,
    IMAGE,
    KEY,
    Build,
    filled,
    get,
    normal_log,  # noqa: F401  (autouse)
    the_file,
)

NAME = f"{KEY}.fkc"
ESCAPE = "\x1b]0;owned\x07\x1b[31m\u202e"


def entry_bytes(image: bytes = IMAGE, **meta: object) -> bytes:
    stored = stored_fields(FIELDS)
    return encode({"key": KEY, "fields": stored, **meta}, image)


def packed(path: Path, data: bytes, name: str = NAME, how: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", how) as archive:
        archive.writestr(name, data)
    return path


def use(bundle: Path, place: Path) -> list[str]:
    """Every way a bundle is read; texts of the errors. Only CacheError may come."""
    said: list[str] = []

    def attempt(act: Callable[[], object]) -> None:
        try:
            act()
        except CacheError as error:
            said.append(str(error))

    attempt(lambda: open_bundle(bundle).keys())
    attempt(lambda: open_bundle(bundle).read(KEY))
    attempt(lambda: list(open_bundle(bundle).metadata()))
    attempt(lambda: said.extend(why for _, why in Cache(place).import_(bundle).refused))
    entry = get(Cache(None, [bundle]))
    assert entry.image == IMAGE  # from the bundle if it is good, else built
    strict = Cache(None, [bundle], require_cached=True)
    attempt(lambda: get(strict, fields={**FIELDS, "target": "other"}))
    return said


def patched(path: Path, at: int, fmt: str, value: int, record: bytes) -> Path:
    """A field of the first `record` (its signature) of a zip, overwritten."""
    data = bytearray(path.read_bytes())
    struct.pack_into(fmt, data, data.index(record) + at, value)
    path.write_bytes(bytes(data))
    return path


# ---- bundles that lie


def test_a_damaged_packed_member_is_one_error_that_names_it(tmp_path):
    path = packed(tmp_path / "b.fkb", entry_bytes(os.urandom(5000)))
    data = bytearray(path.read_bytes())
    data[1000] ^= 255
    path.write_bytes(bytes(data))
    with pytest.raises(CacheError, match=rf"b\.fkb: member {NAME} is not a readable member"):
        open_bundle(path).read(KEY)
    assert any(NAME in text for text in use(path, tmp_path / "v1"))


def zip64(path: Path, size: int) -> Path:
    """A stored member whose sizes in the list of members are 64-bit ones."""
    data = entry_bytes()
    packed(path, data, how=zipfile.ZIP_STORED)
    raw = bytearray(path.read_bytes())
    begin = raw.index(b"PK\1\2")
    end = raw.index(b"PK\5\6")
    head = raw[begin:end]
    struct.pack_into("<II", head, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    extra = struct.pack("<HHQQ", 1, 16, size, size)
    struct.pack_into("<H", head, 30, len(extra))
    directory = head + extra
    tail = raw[end:]
    struct.pack_into("<I", tail, 12, len(directory))
    path.write_bytes(bytes(raw[:begin] + directory + tail))
    return path


@pytest.mark.parametrize("power", [33, 40, 62, 63, 64])
def test_sizes_of_64_bits_are_bounded_before_anything_is_read(tmp_path, power):
    path = zip64(tmp_path / "b.fkb", 2**power - 1)
    with pytest.raises(CacheError, match=r"b\.fkb"):
        open_bundle(path).read(KEY)
    assert use(path, tmp_path / "v1")


def test_a_huge_list_of_members_is_not_read(tmp_path):
    path = packed(tmp_path / "b.fkb", entry_bytes())
    patched(path, 12, "<I", 0xFFFFFFF0, b"PK\5\6")
    with open(path, "r+b") as file:
        file.truncate(1 << 33)  # sparse
    assert all("b.fkb" in text or "REQUIRE" in text for text in use(path, tmp_path / "v1"))


def test_a_bomb_is_not_unpacked(tmp_path):
    path = packed(tmp_path / "b.fkb", bytes(64 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(CacheError, match=rf"member {NAME}.*claims 67108864 bytes"):
        open_bundle(path).read(KEY)
    assert use(path, tmp_path / "v1")


def test_members_that_are_one_another_are_not_read(tmp_path):
    path = packed(tmp_path / "b.fkb", entry_bytes(os.urandom(20000)))
    raw = bytearray(path.read_bytes())
    begin, end = raw.index(b"PK\1\2"), raw.index(b"PK\5\6")
    one = bytes(raw[begin:end])
    many = b"".join(one.replace(NAME.encode(), b"%064x.fkc" % n) for n in range(200))
    tail = raw[end:]
    struct.pack_into("<HHI", tail, 8, 200, 200, len(many))
    path.write_bytes(bytes(raw[:begin]) + many + bytes(tail))
    with pytest.raises(CacheError, match="claim more bytes than it has"):
        open_bundle(path).keys()


@pytest.mark.parametrize("suffix", ["b.fkb", "b", "b.fkc", f"{KEY}.fkc"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_do_not_hang(tmp_path, suffix, kind):
    path = tmp_path / suffix
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    said = use(path, tmp_path / "v1")
    assert said or not suffix.endswith(".fkb")


def test_a_pipe_among_the_entries_of_a_folder(tmp_path):
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / NAME)
    assert any("not a regular file" in text for text in use(tmp_path / "b", tmp_path / "v1"))


@pytest.mark.parametrize("where", ["cache", "folder", "single"])
def test_a_sparse_entry_of_8_gib(tmp_path, where):
    folder = tmp_path / ("v1" if where == "cache" else "b")
    path = the_file(folder)
    path.parent.mkdir(parents=True)
    head = struct.pack("<6sH32sIQ", b"FKJIT\0", 1, bytes(32), 100, (8 << 30) - 152)
    path.write_bytes(head)
    os.truncate(path, 8 << 30)
    with pytest.raises(CacheError, match="claims 8589934592 bytes"):
        read_entry(path, KEY)
    if where == "cache":
        assert get(Cache(folder)).image == IMAGE
    else:
        assert use(path if where == "single" else folder, tmp_path / "v1")


@pytest.mark.parametrize("depth", [20, 100_000])
def test_nested_json(tmp_path, depth):
    text = b'{"key":"%s","fields":' % KEY.encode() + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
    summed = struct.pack("<IQ", len(text), 0) + text
    data = b"FKJIT\0\1\0" + hashlib.sha256(summed).digest() + summed
    path = packed(tmp_path / "b.fkb", data, how=zipfile.ZIP_STORED)
    assert any("JSON" in why for why in use(path, tmp_path / "v1"))


@pytest.mark.parametrize(
    "wrong",
    [{"describe": 5}, {"created": "now"}, {"created": 1e300}, {"params": []}, {"arguments": {}}],
)
def test_metadata_of_another_type(tmp_path, wrong):
    path = packed(tmp_path / "b.fkb", entry_bytes(**wrong))
    assert any(next(iter(wrong)) in why for why in use(path, tmp_path / "v1"))


# ---- the manifest


def test_a_member_that_the_manifest_does_not_know_is_not_read(tmp_path):
    filled(tmp_path / "a").export(tmp_path / "b.fkb")
    other = {**FIELDS, "target": "other"}
    key = cache_key(stored_fields(other))
    data = encode({"key": key, "fields": stored_fields(other)}, b"added later")
    with zipfile.ZipFile(tmp_path / "b.fkb", "a") as archive:
        archive.writestr(f"{key}.fkc", data)
    with pytest.raises(CacheError, match=rf"member {key}\.fkc: is not in manifest"):
        open_bundle(tmp_path / "b.fkb").read(key)
    assert Cache(tmp_path / "v1").import_(tmp_path / "b.fkb").imported == 2


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"format": 2, "members": {}}', '{"format": 1, "members": 5}', "[" * 100_000],
)
def test_a_manifest_that_is_none_makes_the_bundle_unreadable(tmp_path, text):
    with zipfile.ZipFile(tmp_path / "b.fkb", "w") as archive:
        archive.writestr(NAME, entry_bytes())
        archive.writestr(MANIFEST, text)
    with pytest.raises(CacheError, match=f"b.fkb: member {MANIFEST}"):
        open_bundle(tmp_path / "b.fkb").keys()
    assert use(tmp_path / "b.fkb", tmp_path / "v1")


def test_the_manifest_names_the_toolchains(tmp_path):
    cache = Cache(tmp_path / "a")
    get(cache, fields={**FIELDS, "nvrtc": "13.0 x", "cuda_headers": "abc"})
    cache.export(tmp_path / "b.fkb")
    with zipfile.ZipFile(tmp_path / "b.fkb") as archive:
        manifest = json.loads(archive.read(MANIFEST))
    made_by = {"nvrtc": "13.0 x", "cuda_headers": "abc", "archs": [80], "targets": ["sm_80"]}
    assert manifest["toolchains"] == [made_by]


# ---- mutations


def mutate(data: bytes, chance: random.Random) -> bytes:
    """One of the things that happen to files, or that somebody does to them."""
    made = bytearray(data)
    marks = [made.find(mark) for mark in (b"PK\3\4", b"PK\1\2", b"PK\5\6")]
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(made))
        if chance.random() < 0.6:  # near a header, where numbers are
            at = min(len(made) - 9, max(marks[chance.randrange(3)], 0) + chance.randrange(50))
        kind = chance.randrange(6)
        if kind == 0:
            made[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            made[at] = chance.choice((0, 1, 127, 128, 255))
        elif kind == 2:
            made[at : at + 4] = struct.pack("<I", chance.choice((0, 2**31, 2**32 - 1, 2**30)))
        elif kind == 3:
            del made[at : at + chance.choice((1, 4, 1000))]
        elif kind == 4:
            made[at:at] = chance.randbytes(chance.choice((1, 4, 1000)))
        else:
            source = chance.randrange(len(made))
            made[at : at + 100] = made[source : source + 100]
        if len(made) < 60:
            break
    return bytes(made)


def test_mutated_bundles(tmp_path, every_variant, monkeypatch):
    """Nothing but CacheError, and never another image than the right one."""
    monkeypatch.setenv("FKJIT_LOG", "quiet")
    from fkjit.settings import settings

    settings.cache_clear()
    filled(tmp_path / "a", ("sm_80",)).export(tmp_path / "stored.fkb")
    texts = [(tmp_path / "stored.fkb").read_bytes()]
    texts += [packed(tmp_path / "packed.fkb", entry_bytes()).read_bytes()]
    texts += [zip64(tmp_path / "large.fkb", len(entry_bytes())).read_bytes()]
    refused = 0
    for turn in range(10_000 if every_variant else 250):
        path = tmp_path / f"{turn % 8}.fkb"
        path.write_bytes(mutate(texts[turn % 3], random.Random(turn)))
        refused += len(use(path, tmp_path / "v1")) > 1
    print(f"{turn + 1} mutated bundles, {refused} refused")
    assert refused > turn / 4


# ---- names and descriptions


def test_control_characters_are_written_out():
    assert printable("a\x1b[31mb\r\x9b\u202e\tc\n\ud800") == (
        "a\\x1b[31mb\\r\\x9b\\u202e\tc\n\\ud800"
    )
    assert one_line("a\nb") == "a\\nb"


def test_escape_sequences_never_reach_a_terminal(tmp_path, capsys):
    described = f"norm.rms {ESCAPE}\nfkjit: all is well"
    cache = Cache(tmp_path / ESCAPE / "v1")
    cache.get_or_build(FIELDS, Build(), describe=described)
    the_file(cache.directory).write_bytes(b"damaged")
    Cache(cache.directory).get_or_build(FIELDS, Build(), describe=described)
    strict = Cache(cache.directory, [tmp_path / f"{ESCAPE}.fkb"], require_cached=True)
    with pytest.raises(NotCachedError) as caught:
        strict.get_or_build({**FIELDS, "target": "x"}, Build(), describe=described)
    err = capsys.readouterr().err
    assert "is bad" in err and "\\x1b]0;owned" in err and "\x1b" not in err
    assert all(line.startswith("fkjit: ") for line in err.splitlines())
    assert "\\x1b]0;owned" in str(caught.value) and "\x1b" not in str(caught.value)
    out = console.console()
    out.print(console.add_rows(console.table("name"), [[described]]))
    out.print(described, style="red")
    shown = capsys.readouterr().out
    assert shown.count("\\x1b]0;owned") == 2 and "\x07" not in shown and "\u202e" not in shown


def test_a_member_with_another_name_is_no_entry(tmp_path):
    path = packed(tmp_path / "b.fkb", entry_bytes(), name=f"{ESCAPE}.fkc")
    assert open_bundle(path).keys() == []
