"""The cache where nothing goes wrong: keys, layers, format, bundles, the size cap, errors."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from fkjit.cache.file import cache_key, decode, encode, stored_fields
from fkjit.cache.lookup import Cache, CacheStats, default_cache
from fkjit.errors import CacheError, NotCachedError, ParameterError
from fkjit.settings import settings
from tests.cache.kit import IMAGE, Build, fields, filled, forbidden


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
    long = "y" * 3000
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
