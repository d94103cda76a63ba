"""The cache where nothing goes wrong: keys, layers, format, bundles, the size cap, errors."""

from __future__ import annotations

import json
import os
import threading
import time
import zipfile
from pathlib import Path

import pytest

from fkjit import cache_entry
from fkjit.cache import Cache, CacheStats, Entry, default_cache, materialise
from fkjit.cache_file import cache_key, decode, encode, stored_fields
from fkjit.errors import CacheError, NotCachedError, ParameterError
from fkjit.settings import settings

IMAGE = b"\x7fELF" + bytes(range(256)) * 40


def fields(**changed: str | bytes) -> dict[str, str | bytes]:
    base = {"schema": "1", "kernel": "norm.rms", "text": "x" * 5000, "target": "sm_80"}
    return {**base, **changed}


class Build:
    """A build function that counts its calls."""

    def __init__(self, image: bytes = IMAGE, **meta: object) -> None:
        self.image, self.meta, self.calls = image, meta or {"target": "sm_80"}, 0

    def __call__(self) -> tuple[bytes, dict[str, object]]:
        self.calls += 1
        return self.image, dict(self.meta)


def forbidden() -> tuple[bytes, dict[str, object]]:
    raise AssertionError("built although it is cached")


def filled(directory: Path, targets: tuple[str, ...] = ("sm_80", "sm_90a")) -> Cache:
    cache = Cache(directory)
    for target in targets:
        cache.get_or_build(fields(target=target), Build(), describe=f"norm.rms {target}")
    return cache


@pytest.fixture
def environment(monkeypatch):
    """Set FKJIT_* variables for one test."""

    def use(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        settings.cache_clear()
        default_cache.cache_clear()

    yield use
    monkeypatch.undo()
    settings.cache_clear()
    default_cache.cache_clear()


# ---- keys


def test_key_depends_on_every_field_and_on_nothing_else():
    base = cache_key(stored_fields(fields()))
    assert len(base) == 64
    assert base == cache_key(stored_fields(dict(reversed(fields().items()))))
    others = [fields(**{name: "other"}) for name in fields()]
    others += [fields(text="x" * 4999 + "y"), fields(text=b"x" * 5000), fields(extra="")]
    keys = {cache_key(stored_fields(other)) for other in others}
    assert len(keys) == len(others)
    assert base not in keys


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": "bc"}, {"ab": "c"}),
        ({"a": "b", "c": "d"}, {"a": "bcd"}),
        ({"a": "x"}, {"a": b"x"}),
        ({"a": b""}, {"a": ""}),
    ],
)
def test_key_fields_do_not_run_into_each_other(one, other):
    assert cache_key(stored_fields(one)) != cache_key(stored_fields(other))


def test_a_text_that_looks_like_a_digest_is_not_taken_for_one():
    long = "y" * 300
    digest = stored_fields({"text": long})["text"]
    assert digest.startswith("text:")
    assert stored_fields({"text": digest})["text"] != digest


def test_a_field_that_is_no_text_is_refused():
    with pytest.raises(ParameterError, match="field block=128 is int"):
        stored_fields({"block": 128})  # pyright: ignore


# ---- layers


def test_layers_in_order(tmp_path):
    build = Build(registers=(1, 2), target="sm_80")
    cache = Cache(tmp_path / "v1")
    first = cache.get_or_build(fields(), build, describe="norm.rms sm_80")
    again = cache.get_or_build(fields(), forbidden, describe="norm.rms sm_80")
    later = Cache(tmp_path / "v1").get_or_build(fields(), forbidden, describe="other label")
    assert [first.origin, again.origin, later.origin] == ["compiled", "memory", "disk"]
    assert first.image == again.image == later.image == IMAGE
    assert first.meta == again.meta == later.meta
    assert first.meta["registers"] == [1, 2]
    assert first.meta["describe"] == "norm.rms sm_80"
    assert first.meta["key"] == cache_key(stored_fields(fields()))
    assert abs(first.meta["created"] - time.time()) < 60
    assert first.path == later.path
    assert first.path is not None
    assert decode(first.path.read_bytes()).image == IMAGE
    assert build.calls == 1
    assert cache.stats().hits == {"memory": 1, "disk": 0, "bundle": 0, "compiled": 1}


def test_other_fields_are_another_entry(tmp_path):
    cache, build = Cache(tmp_path), Build(b"other")
    cache.get_or_build(fields(), Build(), describe="a")
    assert cache.get_or_build(fields(target="sm_86"), build, describe="b").image == b"other"
    assert build.calls == 1
    assert cache.stats().entries == 2


def test_without_a_directory_only_memory_remembers():
    cache, build = Cache(None), Build()
    assert cache.get_or_build(fields(), build, describe="a").path is None
    assert cache.get_or_build(fields(), forbidden, describe="a").origin == "memory"
    assert [info.origin for info in cache.entries()] == ["memory"]
    assert cache.clear() == (0, 0)
    assert cache.get_or_build(fields(), build, describe="a").origin == "compiled"


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path):
    cache = Cache(tmp_path)

    def broken():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.get_or_build(fields(), broken, describe="a")
    assert cache.stats().entries == cache.stats().in_memory == 0
    assert cache.get_or_build(fields(), Build(), describe="a").image == IMAGE
    assert list((tmp_path / "locks").iterdir()) == []


@pytest.mark.parametrize("meta", [{"x": object()}, {"key": "mine"}])
def test_metadata_that_cannot_be_kept_is_refused(tmp_path, meta):
    with pytest.raises(CacheError, match=r"metadata of norm\.rms"):
        Cache(tmp_path).get_or_build(fields(), Build(**meta), describe="norm.rms")


@pytest.mark.parametrize("on_disk", [True, False])
def test_one_build_for_sixteen_threads(tmp_path, on_disk):
    cache = Cache(tmp_path if on_disk else None)
    build, start, seen = Build(), threading.Barrier(16), []

    def slow():
        time.sleep(0.05)
        return build()

    def work():
        start.wait()
        seen.append(cache.get_or_build(fields(), slow, describe="a").image)

    threads = [threading.Thread(target=work) for _ in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert build.calls == 1
    assert seen == [IMAGE] * 16


def test_entries_list_metadata_oldest_first(tmp_path):
    cache = filled(tmp_path)
    old = cache.get_or_build(fields(target="sm_90a"), forbidden, describe="")
    os.utime(old.path, (1e9, 1e9))
    found = list(cache.entries())
    assert [info.meta["fields"]["target"] for info in found] == ["sm_90a", "sm_80"]
    assert {info.image_bytes for info in found} == {len(IMAGE)}
    assert found[0].last_used == 1e9
    assert found[0].path == old.path


def test_stats_and_clear_touch_only_what_the_cache_made(tmp_path):
    cache = filled(tmp_path)
    for foreign in (
        tmp_path / "note.fkc",
        tmp_path / "ab" / "thesis.tmp",
        tmp_path / "x" / "y.fkc",
    ):
        foreign.parent.mkdir(exist_ok=True)
        foreign.write_text("mine")
    stats = cache.stats()
    assert isinstance(stats, CacheStats)
    assert (stats.entries, stats.in_memory, stats.write_error) == (2, 2, None)
    assert cache.clear() == (2, stats.bytes)
    assert cache.stats().entries == cache.stats().in_memory == 0
    assert (tmp_path / "note.fkc").exists()
    assert (tmp_path / "ab" / "thesis.tmp").exists()
    assert (tmp_path / "x" / "y.fkc").exists()


# ---- last use and the size cap


@pytest.mark.parametrize(("age", "renewed"), [(7300, True), (600, False)])
def test_a_use_is_noted_at_most_once_an_hour(tmp_path, age, renewed):
    path = filled(tmp_path, ("sm_80",)).get_or_build(fields(), forbidden, describe="").path
    then = time.time() - age
    os.utime(path, (then, then))
    Cache(tmp_path).get_or_build(fields(), forbidden, describe="")
    assert (path.stat().st_mtime > then + 60) is renewed


def entry_size() -> int:
    meta = {"key": "0" * 64, "fields": stored_fields(fields(target="t00")), "describe": "t00"}
    return len(encode({**meta, "created": 1234567890.123, "target": "sm_80"}, IMAGE))


def test_eviction_takes_the_least_recently_used(tmp_path):
    names = [f"t{index:02}" for index in range(10)]
    filled(tmp_path, tuple(names))
    used = {}
    for index, name in enumerate(names):
        key = cache_key(stored_fields(fields(target=name)))
        used[name] = Cache(tmp_path).disk.path(key)
        os.utime(used[name], (1e9 + index, 1e9 + index))
    Cache(tmp_path).get_or_build(fields(target="t00"), forbidden, describe="")  # used now
    small = Cache(tmp_path, max_bytes=6 * entry_size() + 100)
    last = small.get_or_build(fields(target="new"), Build(), describe="new")
    left = {name for name, path in used.items() if path.exists()}
    assert left == {"t00", "t07", "t08", "t09"}  # with the new one: under 0.9 of the cap
    assert last.path.exists()
    assert small.stats().bytes <= small.max_bytes


def test_the_entry_just_written_survives_a_cap_below_its_size(tmp_path):
    cache = Cache(tmp_path, max_bytes=10)
    first = cache.get_or_build(fields(), Build(), describe="a")
    assert first.path.exists()
    second = cache.get_or_build(fields(target="b"), Build(), describe="b")
    assert second.path.exists()
    assert not first.path.exists()


# ---- bundles


def test_a_bundle_is_deterministic_and_a_plain_zip(tmp_path):
    cache = filled(tmp_path / "v1")
    one, two = cache.export(tmp_path / "1.fkb"), cache.export(tmp_path / "2.fkb")
    assert (one.entries, one.refused) == (2, ())
    assert one.path.read_bytes() == two.path.read_bytes()
    with zipfile.ZipFile(one.path) as archive:
        assert {item.compress_type for item in archive.infolist()} == {zipfile.ZIP_STORED}
        assert archive.testzip() is None
        for name in archive.namelist():
            assert decode(archive.read(name), name.removesuffix(".fkc")).image == IMAGE
    assert not list(tmp_path.glob("*.tmp"))


def test_export_of_chosen_keys_and_of_what_no_directory_holds(tmp_path):
    cache = filled(tmp_path / "v1")
    key = cache_key(stored_fields(fields(target="sm_90a")))
    assert cache.export(tmp_path / "one.fkb", [key]).entries == 1
    with pytest.raises(CacheError, match=r"entry 0000.*in no cache layer"):
        cache.export(tmp_path / "none.fkb", ["0" * 64])
    assert not (tmp_path / "none.fkb").exists()
    memory = Cache(None)
    memory.get_or_build(fields(), Build(), describe="a")
    assert memory.export(tmp_path / "memory.fkb").entries == 1
    assert Cache(None, [tmp_path / "memory.fkb"]).get_or_build(fields(), forbidden, describe="")


def test_import_counts(tmp_path):
    filled(tmp_path / "a").export(tmp_path / "b.fkb")
    cache = filled(tmp_path / "c", ("sm_80",))
    report = cache.import_(tmp_path / "b.fkb")
    assert (report.imported, report.present, report.refused) == (1, 1, ())
    assert cache.import_(tmp_path / "b.fkb").present == 2
    assert cache.get_or_build(fields(target="sm_90a"), forbidden, describe="").origin == "disk"


def test_import_refuses_bad_entries_and_says_why(tmp_path):
    filled(tmp_path / "a")
    good = sorted((tmp_path / "a").rglob("*.fkc"))
    data = bytearray(good[0].read_bytes())
    data[-1] ^= 1
    with zipfile.ZipFile(tmp_path / "b.fkb", "w") as archive:
        archive.writestr(good[0].name, bytes(data))
        archive.writestr("../../" + "e" * 64 + ".fkc", good[1].read_bytes())
        archive.writestr("README", "hello")
    report = Cache(tmp_path / "c").import_(tmp_path / "b.fkb")
    assert report.imported == report.present == 0
    reasons = dict(report.refused)
    assert reasons[good[0].stem] == "checksum mismatch"
    assert "not eeee" in reasons["e" * 64]
    assert not list(tmp_path.rglob("e" * 64 + "*"))


def test_import_of_something_else(tmp_path):
    (tmp_path / "text.fkb").write_text("hello")
    for path in (tmp_path / "text.fkb", tmp_path / "missing.fkb", tmp_path / "missing"):
        with pytest.raises(CacheError, match=r"cache import: .*not a readable bundle"):
            Cache(tmp_path / "c").import_(path)
    with pytest.raises(CacheError, match="FKJIT_CACHE_DIR"):
        Cache(None).import_(tmp_path / "text.fkb")


@pytest.mark.parametrize("kind", ["zip", "deflated", "root", "sharded", "flat", "single"])
def test_every_kind_of_bundle_is_read_and_imported(tmp_path, kind):
    source = filled(tmp_path / "root" / "v1", ("sm_80",))
    file = next((tmp_path / "root").rglob("*.fkc"))
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / file.name).write_bytes(file.read_bytes())
    source.export(tmp_path / "zip.fkb")
    with zipfile.ZipFile(tmp_path / "deflated.fkb", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(file, "some/folder/" + file.name)
    places = {"zip": "zip.fkb", "deflated": "deflated.fkb", "sharded": "root/v1"}
    bundle = file if kind == "single" else tmp_path / places.get(kind, kind)
    cache = Cache(tmp_path / "v1", [bundle], require_cached=True)
    entry = cache.get_or_build(fields(), forbidden, describe="")
    assert (entry.origin, entry.image) == ("bundle", IMAGE)
    assert not (tmp_path / "v1").exists()
    assert [info.origin for info in cache.entries(bundles=True)] == ["bundle"]
    assert list(cache.entries()) == []
    assert cache.import_(bundle).imported == 1
    assert Cache(tmp_path / "v1").get_or_build(fields(), forbidden, describe="").origin == "disk"


def test_a_bundle_replaced_while_open_is_read_anew(tmp_path):
    filled(tmp_path / "a", ("sm_80",)).export(tmp_path / "b.fkb")
    cache = Cache(None, [tmp_path / "b.fkb"])
    assert cache.get_or_build(fields(), forbidden, describe="").origin == "bundle"
    filled(tmp_path / "c", ("sm_86", "sm_89", "sm_80")).export(tmp_path / "b.fkb")
    assert cache.get_or_build(fields(target="sm_89"), forbidden, describe="").origin == "bundle"


def test_the_users_directory_comes_before_bundles(tmp_path):
    filled(tmp_path / "a", ("sm_80",)).export(tmp_path / "b.fkb")
    cache = Cache(tmp_path / "a", [tmp_path / "b.fkb"])
    assert cache.get_or_build(fields(), forbidden, describe="").origin == "disk"


# ---- FKJIT_REQUIRE_CACHED


def test_require_cached_names_the_field_that_differs(tmp_path):
    filled(tmp_path)
    Cache(tmp_path).get_or_build(fields(kernel="gemm.tiled"), Build(), describe="gemm.tiled")
    strict = Cache(tmp_path, require_cached=True)
    assert strict.get_or_build(fields(), forbidden, describe="").origin == "disk"
    with pytest.raises(NotCachedError) as caught:
        strict.get_or_build(fields(target="sm_86"), forbidden, describe="norm.rms sm_86")
    message = str(caught.value)
    assert "FKJIT_REQUIRE_CACHED=1: norm.rms sm_86 is in no cache layer" in message
    assert "differs in target ('sm_86' here, 'sm_" in message
    assert "text" not in message.split("differs in")[1].split(";")[0]
    with pytest.raises(NotCachedError, match=r"differs in text \(text:[0-9a-f]+… here, text:"):
        strict.get_or_build(fields(text="z" * 900), forbidden, describe="norm.rms sm_80")
    with pytest.raises(NotCachedError, match=r"differs in nvrtc \('13' here, absent there\)"):
        strict.get_or_build(fields(nvrtc="13"), forbidden, describe="norm.rms sm_80")


def test_require_cached_prefers_the_same_kernel_as_the_nearest(tmp_path):
    cache = Cache(tmp_path)
    cache.get_or_build(fields(nvrtc="1", headers="1"), Build(), describe="norm.rms")
    cache.get_or_build(fields(kernel="k", text="other"), Build(), describe="k")
    strict = Cache(tmp_path, require_cached=True)
    with pytest.raises(NotCachedError, match=r"\(norm\.rms, disk\), differs in headers .*, nvrtc"):
        strict.get_or_build(fields(nvrtc="2", headers="2"), forbidden, describe="norm.rms")


def test_require_cached_with_nothing_anywhere(tmp_path):
    strict = Cache(tmp_path / "none", [tmp_path / "b.fkb"], require_cached=True)
    with pytest.raises(NotCachedError, match=r"none \(does not exist\), .*b\.fkb \(does not exist"):
        strict.get_or_build(fields(), forbidden, describe="norm.rms")


# ---- settings


def test_default_cache_follows_the_environment(tmp_path, environment):
    filled(tmp_path / "a").export(tmp_path / "b.fkb")
    environment(
        FKJIT_CACHE_DIR=str(tmp_path / "c"),
        FKJIT_CACHE_SIZE="3MiB",
        FKJIT_BUNDLE_PATH=str(tmp_path / "b.fkb"),
        FKJIT_REQUIRE_CACHED="1",
    )
    cache = default_cache()
    assert cache.directory == tmp_path / "c" / "v1"
    assert cache.max_bytes == cache.disk.max_bytes == 3 << 20
    assert cache is default_cache()
    assert cache.get_or_build(fields(), forbidden, describe="").origin == "bundle"
    with pytest.raises(NotCachedError):
        cache.get_or_build(fields(target="sm_75"), forbidden, describe="")


def test_a_relative_directory_does_not_follow_chdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = Cache(Path("here"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    cache.get_or_build(fields(), Build(), describe="")
    assert len(list((tmp_path / "here").rglob("*.fkc"))) == 1


# ---- an image as a file


def some_entry() -> Entry:
    return Cache(None).get_or_build(fields(), Build(), describe="norm.rms")


def test_materialise_is_the_image_alone_and_goes_away():
    with materialise(some_entry()) as path:
        assert path.read_bytes() == IMAGE
        assert path.suffix == ".cubin"
    assert not path.exists()


@pytest.mark.parametrize(
    ("folders", "where"),
    [
        (("/proc/none", "/dev/shm"), "/dev/shm/fkjit-"),
        (("/proc/none", "/etc/hostname"), "/proc/self/fd/"),
    ],
)
def test_materialise_where_temporary_files_fail(monkeypatch, folders, where):
    monkeypatch.setattr(cache_entry, "_FOLDERS", folders)
    with materialise(some_entry()) as path:
        assert str(path).startswith(where)
        assert path.read_bytes() == IMAGE
    assert not path.exists()


def test_materialise_on_a_full_temporary_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(cache_entry, "_FOLDERS", (str(tmp_path), "/dev/shm"))
    write = cache_entry.write_all

    def full_once(descriptor: int, data: bytes) -> None:
        monkeypatch.setattr(cache_entry, "write_all", write)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_entry, "write_all", full_once)
    with materialise(some_entry()) as path:
        assert path.read_bytes() == IMAGE
        assert path.parent == Path("/dev/shm")
    assert list(tmp_path.iterdir()) == []


def test_materialise_with_no_place_at_all_says_so(monkeypatch):
    monkeypatch.setattr(cache_entry, "_FOLDERS", ("/proc/none",))
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(CacheError, match=r"no place for the 10244 bytes of norm\.rms"):
        materialise(some_entry()).__enter__()


# ---- the format


def test_format_is_as_documented():
    meta = {"key": cache_key({"a": "b"}), "fields": {"a": "b"}}
    data = encode(meta, b"image")
    assert data[:8] == b"FKJIT\0\x01\x00"
    length = int.from_bytes(data[40:44], "little")
    assert json.loads(data[52 : 52 + length]) == meta
    assert int.from_bytes(data[44:52], "little") == 5
    assert data[52 + length :] == b"image"
    found = decode(data)
    assert (found.meta, found.image) == (meta, b"image")
