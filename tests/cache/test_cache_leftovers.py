"""Places out of reach, and what failures leave behind: nothing for good, and no exception."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time

import pytest

from fkjit.cache import disk as cache_disk
from fkjit.cache.lookup import Cache, default_cache
from fkjit.cli import doctor
from fkjit.errors import CacheError, NotCachedError, ParameterError
from fkjit.settings import from_environment, settings
from tests.cache.kit import (
    AS_ROOT,
    FIELDS,
    IMAGE,
    KEY,
    NOBODY,
    child,
    filled,
    get,
    leftovers,
    normal_log,  # noqa: F401  (autouse)
    opened,
    the_file,
)
from tests.cli.kit import run

# ---- out of reach


def unreachable(kind: str, place):
    """A path that `stat` fails on, otherwise than with "no such file"."""
    return place / ("n" * 300 if kind == "long" else "locked/inside")


EVERY_WAY = """
for where in (PLACE, PLACE.with_suffix(".fkb"), PLACE.with_suffix(".fkc")):
    cache = Cache(PLACE / "v1", [where])
    assert get(cache).image == IMAGE
    strict = Cache(PLACE / "v1", [where], require_cached=True)
    for act in (
        lambda: strict.get_or_build({**FIELDS, "target": "x"}, build, describe="x"),
        lambda: Cache(None, [where]).export(PLACE / "out.fkb"),
        lambda: Cache(PLACE / "v1").import_(where),
        cache.clear,
    ):
        try:
            act()
        except fkjit.errors.CacheError as error:
            pass
    list(cache.entries(bundles=True)), cache.stats()
    assert "bundle" in doctor._bundle_fault(where)
"""


@pytest.mark.parametrize("kind", ["long", "locked"])
def test_places_out_of_reach_never_raise_out_of_calls(tmp_path, kind):
    first = "import zipfile, fkjit.cache.bundle, fkjit.errors\nfrom fkjit.cli import doctor\n"
    place = unreachable(kind, tmp_path)
    if kind == "locked":
        if not AS_ROOT:
            pytest.skip("only root can become another user, whom the mode stops")
        place.parent.mkdir(mode=0)
        first += f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    with opened(tmp_path):
        child(first + EVERY_WAY, place)


def test_the_bundle_path_out_of_reach_is_a_sentence_in_the_refusal(tmp_path):
    strict = Cache(tmp_path / ("n" * 300), [tmp_path / ("m" * 300)], require_cached=True)
    with pytest.raises(NotCachedError, match=r"n \(does not exist\), .*m \(does not exist\)"):
        get(strict)


# ---- export


def test_bad_entries_are_left_out_of_an_export(tmp_path, monkeypatch):
    monkeypatch.setenv("FKJIT_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    default_cache.cache_clear()
    filled(tmp_path / "v1", ("sm_80", "sm_86", "sm_90a"))
    data = bytearray(the_file(tmp_path / "v1").read_bytes())
    data[-1] ^= 1  # which a listing does not see
    the_file(tmp_path / "v1").write_bytes(bytes(data))
    done = run("cache", "export", str(tmp_path / "b.fkb"))
    default_cache.cache_clear()
    assert done.status == 1 and "2 entries" in done.out
    assert f"left out {KEY[:12]}: checksum mismatch" in done.err
    assert Cache(tmp_path / "c").import_(tmp_path / "b.fkb").imported == 2
    other = Cache(tmp_path / "v1").export(tmp_path / "c.fkb")
    assert (other.entries, [key for key, _ in other.refused]) == (2, [KEY])


def test_a_killed_export_leaves_nothing(tmp_path):
    filled(tmp_path / "v1")
    body = """
    real = os.write
    import zipfile
    def die(*_):
        assert PLACE.stat()
        os.kill(os.getpid(), signal.SIGKILL)
    zipfile.ZipFile.close = die
    Cache(PLACE / "v1").export(PLACE / "b.fkb")
    """
    child(body, tmp_path, rc=-signal.SIGKILL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1"]


def test_an_export_that_fails_leaves_the_old_bundle_and_nothing_else(tmp_path, monkeypatch):
    cache = filled(tmp_path / "v1")
    before = cache.export(tmp_path / "b.fkb").path.read_bytes()

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CacheError, match="cannot be written"):
        cache.export(tmp_path / "b.fkb")
    assert (tmp_path / "b.fkb").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.fkb", "v1"]


# ---- quarantine, locks, the cap


def test_setting_a_link_aside_does_not_touch_what_it_leads_to(tmp_path):
    target = tmp_path / "mine.txt"
    target.write_text("not an entry")
    os.utime(target, (1e9, 1e9))
    path = the_file(tmp_path / "v1")
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    assert get(Cache(tmp_path / "v1")).image == IMAGE
    assert target.stat().st_mtime == 1e9 and target.read_text() == "not an entry"
    [aside] = (tmp_path / "v1" / "quarantine").iterdir()
    assert aside.is_symlink()


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOLCK, errno.ENOSYS])
def test_locks_that_do_not_work_are_tried_once(tmp_path, monkeypatch, code):
    asked = []

    def refuse(*_):
        asked.append(1)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    cache, begin = Cache(tmp_path), time.monotonic()
    for index in range(20):
        assert get(cache, fields={**FIELDS, "target": f"t{index}"}).origin == "compiled"
    assert time.monotonic() - begin < cache_disk.LOCK_SECONDS / 4
    assert len(asked) == 1
    assert leftovers(tmp_path) == []


def test_a_kernel_that_is_refused_leaves_no_file(tmp_path):
    def refused():
        raise ValueError("NVRTC does not want it")

    cache = Cache(tmp_path)
    for index in range(5):
        with pytest.raises(ValueError, match="does not want"):
            cache.get_or_build({**FIELDS, "target": f"t{index}"}, refused, describe="x")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_is_being_written_counts_against_the_cap(tmp_path):
    filled(tmp_path, tuple(f"t{index}" for index in range(4)))
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.fkc"))
    young = tmp_path / "ab" / f".{'a' * 64}.1.ff.tmp"
    young.parent.mkdir(exist_ok=True)
    young.write_bytes(bytes(size))
    disk = Cache(tmp_path, max_bytes=size + size // 2).disk
    assert disk is not None and disk.sweep() >= 2
    assert young.exists()
    kept = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert kept <= size + size // 2


# ---- settings


@pytest.mark.parametrize("text", ["9" * 400, "1e400", "9" * 400 + "GiB", "-1", str(2**63)])
def test_a_size_that_is_none(text):
    with pytest.raises(ParameterError, match=r"^FKJIT_CACHE_SIZE='.{1,60}…?' is not a size") as e:
        from_environment({"FKJIT_CACHE_SIZE": text})
    assert len(str(e.value)) < 200


@pytest.mark.parametrize("text", ["garbage", "sm_", "sm_60", "compute_90x", "\x1b[31m", "9" * 5000])
def test_a_target_that_is_none_names_the_variable(text):
    with pytest.raises(ParameterError, match=r"^FKJIT_TARGET='"):
        from_environment({"FKJIT_TARGET": text})
    assert from_environment({"FKJIT_TARGET": " sm_90a "}).target == "sm_90a"
    assert any("FKJIT_TARGET=" in p for p in doctor.diagnose({"FKJIT_TARGET": text})["problems"])
