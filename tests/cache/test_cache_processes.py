"""The cache among processes: races, locks that are stuck or missing, killed writers, forks."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time

import pytest

from fkjit.cache import disk as cache_disk
from fkjit.cache.file import decode, encode, stored_fields
from fkjit.cache.lookup import Cache
from fkjit.settings import settings
from tests.cache.kit import (
    FIELDS,
    IMAGE,
    KEY,
    Build,
    child,
    get,
    leftovers,
    normal_log,  # noqa: F401  (autouse)
    race,
    start,
    the_file,
)

# ---- many processes


def test_sixteen_processes_build_once(tmp_path):
    lines = race(
        """
        import time
        plain = build
        def build():
            time.sleep(0.1)
            return plain()
        get(Cache(PLACE))
        """,
        tmp_path,
    )
    assert lines.count("built") == lines.count("compiled") == 1
    assert lines.count("disk") == 15
    assert decode(the_file(tmp_path).read_bytes(), KEY).image == IMAGE
    assert leftovers(tmp_path) == []


def test_sixteen_processes_without_locks_while_entries_are_evicted_damaged_and_cleared(tmp_path):
    lines = race(
        """
        import random
        def no_lock(*_):
            raise OSError(37, "No locks available")
        fcntl.flock = no_lock
        chance = random.Random(os.getpid())
        for turn in range(12):
            cache = Cache(PLACE, max_bytes=40000)
            name = "t%d" % chance.randrange(6)
            entry = get(cache, {**FIELDS, "target": name})
            assert entry.meta["fields"]["target"] == name
            if chance.random() < 0.2 and entry.path is not None:
                try:
                    with open(entry.path, "r+b") as file:
                        file.write(b"damage")
                except OSError:
                    pass
        cache.clear()
        """,
        tmp_path,
        env={"FKJIT_LOG": "quiet"},
    )
    assert lines.count("compiled") + lines.count("disk") == 16 * 12
    assert [path for path in leftovers(tmp_path) if path.suffix == ".tmp"] == []
    assert get(Cache(tmp_path)).image == IMAGE


def test_a_waiting_process_says_so_and_then_builds_without_the_lock(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cache_disk, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(cache_disk, "LOCK_SECONDS", 0.3)
    (tmp_path / "locks").mkdir()
    with open(tmp_path / "locks" / f"{KEY}.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert get(Cache(tmp_path)).origin == "compiled"
        err = capsys.readouterr().err
        assert "waiting for another process that is compiling norm.rms sm_80" in err
        assert "compiling norm.rms sm_80 without it" in err
        monkeypatch.setenv("FKJIT_LOG", "quiet")
        settings.cache_clear()
        assert get(Cache(tmp_path), fields={**FIELDS, "target": "b"}).origin == "compiled"
    assert capsys.readouterr().err == ""
    assert get(Cache(tmp_path)).origin == "disk"


def test_a_waiting_process_takes_what_the_holder_built(tmp_path):
    with Cache(tmp_path).disk.lock(KEY, "a"):
        waiting = start("get(Cache(PLACE))", tmp_path)
        while "waiting" not in waiting.stderr.readline():
            pass
        stored = stored_fields(FIELDS)
        Cache(tmp_path).disk.write(KEY, encode({"key": KEY, "fields": stored}, IMAGE))
    out, _ = waiting.communicate(timeout=30)
    assert out.split() == ["disk"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_locks_do_not_work_it_goes_on_without(tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert get(Cache(tmp_path)).origin == "compiled"
    assert get(Cache(tmp_path)).origin == "disk"


# ---- killed writers: the child dies at the named step, by SIGKILL

DIE = """
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def temporary(path):
    return str(path).endswith(".tmp")
def step(module, name, when, before=True):
    real = getattr(module, name)
    def call(*arguments, **named):
        if not when(*arguments):
            return real(*arguments, **named)
        if not before:
            real(*arguments, **named)
        die()
    setattr(module, name, call)
always = lambda *_: True
"""
STEPS = {  # step: (what arms it, whether the entry is there for the next reader)
    "before the lock": ("step(filelock, 'FileLock', always)", False),
    "with the lock": (
        "step(fkjit.cache.disk.DiskCache, 'read', lambda s, k: s.calls() > 1)",
        False,
    ),
    "in the build": ("build = die", False),
    "before the temporary file": ("step(os, 'open', lambda p, *_: temporary(p))", False),
    "temporary file open": ("step(os, 'open', lambda p, *_: temporary(p), False)", False),
    "half written": (
        "real = os.write; step(os, 'write', lambda d, b: d > 2 and real(d, b[:99]))",
        False,
    ),
    "written": ("step(os, 'fsync', always)", False),
    "synced": ("step(os, 'fsync', always, False)", False),
    "before the rename": ("step(os, 'replace', always)", False),
    "renamed": ("step(os, 'replace', always, False)", True),
    "folder synced": ("step(fkjit.cache.file, '_sync_folder', always, False)", True),
    "before the sweep": ("step(fkjit.cache.disk.DiskCache, 'sweep', always)", True),
    "before the lock file goes": ("step(os, 'unlink', lambda p: str(p).endswith('.lock'))", True),
    "lock file gone": ("step(os, 'unlink', lambda p: str(p).endswith('.lock'), False)", True),
}
COUNTED = """
reads = []
fkjit.cache.disk.DiskCache.calls = lambda self: reads.append(1) or len(reads)
"""


@pytest.mark.parametrize("name", STEPS)
def test_a_writer_killed_at_any_step(tmp_path, capsys, name):
    arm, stored = STEPS[name]
    child(DIE + COUNTED + arm + "\nget(Cache(PLACE))", tmp_path, rc=-signal.SIGKILL)
    begin, build = time.monotonic(), Build()
    entry = get(Cache(tmp_path), build)
    assert (entry.image, entry.origin) == (IMAGE, "disk" if stored else "compiled")
    assert build.calls == (not stored)
    assert "waiting" not in capsys.readouterr().err  # no lock stayed held
    assert time.monotonic() - begin < cache_disk.LOCK_SECONDS / 2
    assert decode(the_file(tmp_path).read_bytes(), KEY).image == IMAGE
    for path in leftovers(tmp_path):
        os.utime(path, (1e9, 1e9))
    get(Cache(tmp_path), fields={**FIELDS, "target": "next"})
    assert leftovers(tmp_path) == []
    assert Cache(tmp_path).stats().entries == 2
    assert Cache(tmp_path).stats().quarantined_files == 0


def test_a_half_written_temporary_file_is_swept_by_age_only(tmp_path):
    child(DIE + STEPS["half written"][0] + "\nget(Cache(PLACE))", tmp_path, rc=-signal.SIGKILL)
    [half] = [path for path in leftovers(tmp_path) if path.suffix == ".tmp"]
    assert half.stat().st_size == 99
    get(Cache(tmp_path))
    assert half.exists()  # its writer might still be at it
    os.utime(half, (1e9, 1e9))
    Cache(tmp_path).disk.sweep()
    assert not half.exists()


# ---- forks


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_another_thread_builds(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_disk, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(cache_disk, "PATIENCE_SECONDS", 0.1)
    cache, building, go = Cache(tmp_path), threading.Event(), threading.Event()

    def slow():
        building.set()
        go.wait(30)
        return IMAGE, {}

    thread = threading.Thread(
        target=cache.get_or_build, args=(FIELDS, slow), kwargs={"describe": "a"}
    )
    thread.start()
    building.wait(30)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        entry = get(cache, Build(b"built by the child"))
        os._exit(0 if (entry.image, entry.origin) == (b"built by the child", "compiled") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    go.set()
    thread.join()
    assert get(cache).image == IMAGE


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_children_read_the_same_bundle(tmp_path):
    names = [f"t{index}" for index in range(8)]
    for name in names:
        get(Cache(tmp_path / "a"), Build(name.encode() * 5000), {**FIELDS, "target": name})
    Cache(tmp_path / "a").export(tmp_path / "b.fkb")
    cache = Cache(None, [tmp_path / "b.fkb"], require_cached=True)
    get(cache, fields={**FIELDS, "target": "t0"})  # the index is read before the fork
    pids = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            same = [
                get(cache, fields={**FIELDS, "target": name}).image == name.encode() * 5000
                for name in names
            ]
            os._exit(0 if all(same) else 1)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 4


def test_a_lock_is_released_after_a_failed_build(tmp_path, monkeypatch):
    disk = Cache(tmp_path).disk
    taken, acquire = [], disk._acquire
    monkeypatch.setattr(disk, "_acquire", lambda *a: taken.append(acquire(*a)) or taken[-1])
    with pytest.raises(ValueError, match="no"), disk.lock(KEY, "norm.rms"):
        assert taken[0].is_locked
        raise ValueError("no")
    assert not taken[0].is_locked
