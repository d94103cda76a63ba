"""The cache where things go wrong: races, damaged files, unusable places, killed writers, forks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from fkjit import cache_disk
from fkjit.cache import Cache, Entry
from fkjit.cache_file import cache_key, decode, encode, read_metadata, stored_fields
from fkjit.errors import CacheError, NotCachedError
from fkjit.settings import settings

ROOT = Path(__file__).resolve().parent.parent
FIELDS = {"schema": "1", "kernel": "norm.rms", "text": "x" * 5000, "target": "sm_80"}
KEY = cache_key(stored_fields(FIELDS))
IMAGE = b"\x7fELF" + bytes(range(256)) * 40
AS_ROOT = os.geteuid() == 0
NOBODY = 54321  # no line in /etc/passwd

# Every child begins with this: FIELDS, IMAGE, a cache in argv[1], and a build that leaves a mark.
PRELUDE = textwrap.dedent(
    """
    import fcntl, os, resource, signal, sys
    from pathlib import Path
    import fkjit.cache_file, fkjit.cache_disk
    from fkjit.cache import Cache, default_cache, materialise
    FIELDS = {"schema": "1", "kernel": "norm.rms", "text": "x" * 5000, "target": "sm_80"}
    IMAGE = b"\\x7fELF" + bytes(range(256)) * 40
    PLACE = Path(sys.argv[1])
    def build():
        print("built", flush=True)
        return IMAGE, {"target": "sm_80"}
    def get(cache, fields=FIELDS):
        entry = cache.get_or_build(fields, build, describe="norm.rms sm_80")
        assert entry.image == IMAGE
        print(entry.origin, flush=True)
        return entry
    """
)


def start(body: str, place: Path, prefix: tuple[str, ...] = (), **more) -> subprocess.Popen:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FKJIT_")}
    environ |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **more.pop("env", {})}
    code = PRELUDE + textwrap.dedent(body)
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", code, str(place)],
        env={name: value for name, value in environ.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def child(body: str, place: Path, *, rc: int = 0, **more) -> tuple[list[str], str]:
    """Run `body` in a process of its own: (lines it printed, stderr)."""
    process = start(body, place, **more)
    out, err = process.communicate(timeout=60)
    assert process.returncode == rc, err
    return out.split(), err


class Build:
    def __init__(self, image: bytes = IMAGE) -> None:
        self.image, self.calls = image, 0

    def __call__(self):
        self.calls += 1
        return self.image, {"target": "sm_80"}


def get(cache: Cache, build: Build | None = None, fields=None) -> Entry:
    return cache.get_or_build(fields or FIELDS, build or Build(), describe="norm.rms sm_80")


def the_file(directory: Path) -> Path:
    return directory / KEY[:2] / f"{KEY}.fkc"


def leftovers(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.suffix in (".tmp", ".lock")]


@pytest.fixture(autouse=True)
def normal_log(monkeypatch):
    monkeypatch.delenv("FKJIT_LOG", raising=False)
    settings.cache_clear()
    yield
    settings.cache_clear()


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
    assert f"b.fkb: entry {KEY[:12]} is bad: checksum mismatch" in err
    assert "c.fkb is not a readable bundle" in err
    assert "d.fkb does not exist" in err
    assert (tmp_path / "b.fkb").read_bytes() == bytes(data)
    strict = Cache(None, [tmp_path / "b.fkb", tmp_path / "c.fkb"], require_cached=True)
    with pytest.raises(NotCachedError):
        get(strict)


# ---- many processes


def race(body: str, directory: Path, count: int = 16, **more) -> list[str]:
    """`count` children released at the same instant; what they printed."""
    read_end, write_end = os.pipe()
    body = "sys.stdin.read()\n" + textwrap.dedent(body)
    children = [start(body, directory, stdin=read_end, **more) for _ in range(count)]
    os.close(read_end)
    os.close(write_end)  # the end of their stdin: go
    lines = []
    for process in children:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "Traceback" not in err
        lines += out.split()
    return lines


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
    "before the lock": ("step(fkjit.cache_disk, 'FileLock', always)", False),
    "with the lock": (
        "step(fkjit.cache_disk.DiskCache, 'read', lambda s, k: s.calls() > 1)",
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
    "folder synced": ("step(fkjit.cache_file, '_sync_folder', always, False)", True),
    "before the sweep": ("step(fkjit.cache_disk.DiskCache, 'sweep', always)", True),
    "before the lock file goes": ("step(os, 'unlink', lambda p: str(p).endswith('.lock'))", True),
    "lock file gone": ("step(os, 'unlink', lambda p: str(p).endswith('.lock'), False)", True),
}
COUNTED = """
reads = []
fkjit.cache_disk.DiskCache.calls = lambda self: reads.append(1) or len(reads)
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


# ---- places that cannot be written


def test_interrupted_writes_remove_their_temporary_file(tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        get(Cache(tmp_path))
    assert [path for path in leftovers(tmp_path) if path.suffix == ".tmp"] == []
    monkeypatch.undo()
    assert get(Cache(tmp_path)).origin == "compiled"


@pytest.mark.parametrize(
    "kind", ["below a file", "below /proc", "a file itself", "below /dev/null"]
)
def test_a_place_where_no_directory_can_be(tmp_path, capsys, kind):
    (tmp_path / "file").write_text("mine")
    places = {"below a file": tmp_path / "file" / "v1", "below /proc": Path("/proc/none/v1")}
    place = places.get(kind, tmp_path / "file" if "itself" in kind else Path("/dev/null/v1"))
    cache, build = Cache(place), Build()
    assert get(cache, build).origin == "compiled"
    assert get(cache, build).origin == "memory"
    assert get(cache, build, {**FIELDS, "target": "b"}).path is None
    err = capsys.readouterr().err
    assert err.count("cannot be written") == 1
    assert "FKJIT_CACHE_DIR" in err
    assert cache.stats().write_error is not None
    assert len(list(cache.entries())) == 2
    assert cache.export(tmp_path / "b.fkb").entries == 2
    assert cache.import_(tmp_path / "b.fkb").refused[0][1].startswith("cannot be written")
    assert cache.clear() == (0, 0)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(CacheError, match="cannot be written"):
        Cache(tmp_path / "v1").export(tmp_path / "file" / "b.fkb")


@pytest.fixture
def open_folder():
    """A directory that a process without our rights can reach (pytest's own are private)."""
    folder = Path(tempfile.mkdtemp(prefix="fkjit-test-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


DROP = f"""
if os.geteuid() == 0:  # root would be let through
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
"""


def test_a_directory_without_write_permission_is_read(open_folder):
    directory = open_folder / "v1"
    get(Cache(directory))
    os.utime(the_file(directory), (1e9, 1e9))
    folders = [directory, *(path for path in directory.iterdir() if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    body = DROP + 'get(Cache(PLACE)); get(Cache(PLACE), {**FIELDS, "target": "b"})'
    out, err = child(body, directory)
    for folder in folders:
        folder.chmod(0o755)
    assert out == ["disk", "built", "compiled"]
    assert err.count("cannot be written") == 1
    assert Cache(directory).stats().entries == 1


def test_a_damaged_entry_in_a_read_only_directory_stays_and_is_rebuilt(open_folder):
    directory = open_folder / "v1"
    get(Cache(directory))
    the_file(directory).write_bytes(b"damaged")
    the_file(directory).parent.chmod(0o555)
    out, err = child(DROP + "get(Cache(PLACE))", directory)
    the_file(directory).parent.chmod(0o755)
    assert out == ["built", "compiled"]
    assert "is bad (truncated" in err
    assert the_file(directory).read_bytes() == b"damaged"


@pytest.mark.parametrize("kind", ["entry", "folder"])
def test_an_entry_that_may_not_be_read(open_folder, kind):
    directory = open_folder / "v1"
    get(Cache(directory))
    (the_file(directory) if kind == "entry" else directory).chmod(0o000)
    out, _ = child(DROP + "get(Cache(PLACE))", directory)
    directory.chmod(0o755)
    assert out == ["built", "compiled"]


def private_mounts() -> bool:
    """Whether this machine lets us mount a file system that only a child sees."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    command = [unshare, "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


needs_mounts = pytest.mark.skipif(not private_mounts(), reason="no private mounts here")


def in_mount(script: str) -> tuple[str, ...]:
    """A command prefix: its own mounts, made by `script`, then the rest of the command."""
    return ("unshare", "-m", "sh", "-ec", script + '\nexec "$@"', "sh")


@needs_mounts
def test_a_full_file_system(tmp_path):
    script = f"mount -t tmpfs -o size=64k none {tmp_path}; mkdir {tmp_path}/v1"
    body = """
    for index in range(10):
        get(Cache(PLACE / "v1"), {**FIELDS, "target": "t%d" % index})
    files = list(PLACE.rglob("*.fkc"))
    assert 3 <= len(files) <= 5, files
    for path in files:
        fkjit.cache_file.read_entry(path, path.stem)
    assert not list(PLACE.rglob("*.tmp"))
    get(Cache(PLACE / "v1"), {**FIELDS, "target": "t0"})
    get(Cache(PLACE / "v1"), {**FIELDS, "target": "t9"})
    """
    out, err = child(body, tmp_path, prefix=in_mount(script))
    assert out[:20] == ["built", "compiled"] * 10
    assert out[20:] == ["disk", "built", "compiled"]
    assert "No space left on device" in err


@needs_mounts
def test_a_read_only_file_system(tmp_path):
    get(Cache(tmp_path / "v1"))
    os.utime(the_file(tmp_path / "v1"), (1e9, 1e9))
    script = f"mount --bind {tmp_path} {tmp_path}; mount -o remount,ro,bind {tmp_path}"
    body = """
    cache = Cache(PLACE / "v1")
    get(cache)
    get(cache, {**FIELDS, "target": "b"})
    try:
        cache.clear()
    except Exception as error:
        print(type(error).__name__)
    """
    out, err = child(body, tmp_path, prefix=in_mount(script))
    assert out == ["disk", "built", "compiled", "CacheError"]
    assert "Read-only file system" in err


def test_a_write_cut_short_by_a_limit(tmp_path):
    body = """
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    get(Cache(PLACE))
    """
    out, err = child(body, tmp_path)
    assert out == ["built", "compiled"]
    assert "File too large" in err
    assert leftovers(tmp_path) == [tmp_path / "locks" / f"{KEY}.lock"]
    assert Cache(tmp_path).stats().entries == 0


@pytest.mark.parametrize("call", ["write", "fsync", "close", "replace", "open"])
def test_an_error_at_every_call_of_the_write(tmp_path, call):
    body = f"""
    real = os.{call}
    opened = os.open
    ours = set()
    def remember(path, *rest, **named):
        descriptor = opened(path, *rest, **named)
        if str(path).endswith(".tmp"):
            ours.add(descriptor)
        return descriptor
    os.open = remember
    def fail(first, *rest, **named):
        if first in ours or str(first).endswith(".tmp"):
            if {call!r} == "close":
                real(first)
            ours.discard(first)
            raise OSError(28, "No space left on device")
        return real(first, *rest, **named)
    os.{call} = fail
    get(Cache(PLACE))
    """
    out, err = child(body, tmp_path)
    assert out == ["built", "compiled"]
    assert "No space left on device" in err
    assert not list(tmp_path.rglob("*.tmp"))
    assert not list(tmp_path.rglob("*.fkc"))


@pytest.mark.parametrize("home", ["/proc/none", "/dev/null", None])
def test_an_unusable_home(tmp_path, home):
    if home is None and not AS_ROOT:
        pytest.skip("only root can become a user without an entry in /etc/passwd")
    environ = {"HOME": home, "XDG_CACHE_HOME": None, "TMPDIR": "/proc/none"}
    body = ("" if home else DROP) + "entry = get(default_cache())\nget(default_cache())\n"
    body += "with materialise(entry) as path:\n    assert path.read_bytes() == IMAGE\n"
    out, err = child(body, tmp_path, env=environ, cwd="/")
    assert out == ["built", "compiled", "memory"]
    assert err.count("fkjit:") == 1
    assert "FKJIT_CACHE_DIR" in err


def test_a_working_directory_that_is_gone(tmp_path):
    body = """
    os.mkdir("gone"); os.chdir("gone"); os.rmdir("../gone")
    get(Cache(Path("v1")))
    get(Cache(PLACE))
    get(Cache(PLACE))
    """
    out, _ = child(body, tmp_path / "v1", cwd=tmp_path)
    assert out == ["built", "compiled", "built", "compiled", "disk"]


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
