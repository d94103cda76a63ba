"""The cache in places that cannot be written: no directory, read-only, full, no home."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from fkjit.cache.lookup import Cache
from fkjit.errors import CacheError
from tests.cache.kit import (
    AS_ROOT,
    FIELDS,
    NOBODY,
    Build,
    child,
    get,
    leftovers,
    normal_log,  # noqa: F401  (autouse)
    the_file,
)

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


def readable_to_all(directory: Path) -> list[Path]:
    """Its folders; what fkjit makes is private."""
    the_file(directory).chmod(0o644)
    folders = [directory, *(path for path in directory.iterdir() if path.is_dir())]
    for folder in folders:
        folder.chmod(0o755)
    return folders


DROP = f"""
if os.geteuid() == 0:  # root would be let through
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
"""


def test_a_directory_without_write_permission_is_read(open_folder):
    directory = open_folder / "v1"
    get(Cache(directory))
    os.utime(the_file(directory), (1e9, 1e9))
    folders = readable_to_all(directory)
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
    readable_to_all(directory)
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
        fkjit.cache.file.read_entry(path, path.stem)
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
    assert leftovers(tmp_path) == []
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
