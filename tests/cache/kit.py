"""What the cache's tests share: a kernel's fields, builds that count, children to break."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fkjit.cache.file import cache_key, stored_fields
from fkjit.cache.lookup import Cache, Entry
from fkjit.settings import settings

ROOT = Path(__file__).resolve().parents[2]
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
    import filelock
    import fkjit.cache.file, fkjit.cache.disk
    from fkjit.cache.lookup import Cache, default_cache, materialise
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


@pytest.fixture(autouse=True)
def normal_log(monkeypatch):
    """Messages as they are without FKJIT_LOG; a test module gets it by importing it."""
    monkeypatch.delenv("FKJIT_LOG", raising=False)
    settings.cache_clear()
    yield
    settings.cache_clear()


def fields(**changed: str | bytes) -> dict[str, str | bytes]:
    """The usual fields with some changed or added."""
    return {**FIELDS, **changed}


def forbidden() -> tuple[bytes, dict[str, object]]:
    raise AssertionError("built although it is cached")


def filled(directory: Path, targets: tuple[str, ...] = ("sm_80", "sm_90a")) -> Cache:
    cache = Cache(directory)
    for target in targets:
        cache.get_or_build(fields(target=target), Build(), describe=f"norm.rms {target}")
    return cache


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
    """A build function that counts its calls."""

    def __init__(self, image: bytes = IMAGE, **meta: object) -> None:
        self.image, self.meta, self.calls = image, meta or {"target": "sm_80"}, 0

    def __call__(self) -> tuple[bytes, dict[str, object]]:
        self.calls += 1
        return self.image, dict(self.meta)


def get(cache: Cache, build: Build | None = None, fields=None) -> Entry:
    return cache.get_or_build(fields or FIELDS, build or Build(), describe="norm.rms sm_80")


def the_file(directory: Path) -> Path:
    return directory / KEY[:2] / f"{KEY}.fkc"


def leftovers(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.suffix in (".tmp", ".lock")]


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


@contextmanager
def opened(folder: Path) -> Iterator[None]:
    """pytest's folders are private, so that nothing below is in anybody's reach: not here."""
    private = [p for p in (folder, *folder.parents) if p.stat().st_mode & 0o077 == 0]
    for one in private:
        one.chmod(0o755)
    try:
        yield
    finally:
        for one in private:
            one.chmod(0o700)
