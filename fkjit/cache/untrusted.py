"""Bytes that may be anything: only regular files are opened, sizes are bounded before reading.

What is wrong with them is a CacheError, whatever a parser raises. OSError is left to callers: a
file that cannot be read is not a bad one.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fkjit.cache import trust
from fkjit.errors import CacheError

MAX_ENTRY = 256 << 20  # bytes of an entry; kernels are a thousandth of it
MAX_JSON = 16 << 20  # bytes of metadata, of a manifest, of a file of tuned values
_MAX_DEPTH = 16  # of JSON within JSON


def open_regular(path: Path, judged: bool = True) -> tuple[int, os.stat_result]:
    """Open for reading: (descriptor, status). Never blocks on a pipe or a device.

    CacheError if it is no regular file, or (`judged`) if it is a file that others can write.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CacheError("not a regular file")
        if judged:
            trust.require_file(path, status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status


def read_exactly(descriptor: int, size: int, offset: int = 0) -> bytes:
    """So many bytes from there, fewer at the end of the file. The size has been checked."""
    data = os.pread(descriptor, size, offset)
    while len(data) < size and (
        piece := os.pread(descriptor, size - len(data), offset + len(data))
    ):
        data += piece
    return data


def bounded(size: int, limit: int, what: str) -> int:
    """The size, or a CacheError."""
    if not 0 <= size <= limit:
        raise CacheError(f"{what} claims {size} bytes; at most {limit} are read")
    return size


def read_file(path: Path, limit: int, judged: bool = True) -> bytes:
    """A whole file. OSError if it cannot be read, CacheError if it should not be."""
    descriptor, status = open_regular(path, judged)
    try:
        return read_exactly(descriptor, bounded(status.st_size, limit, "the file"))
    finally:
        os.close(descriptor)


def parse_json(text: bytes) -> Any:
    """JSON of bounded size and depth. CacheError for anything else."""
    bounded(len(text), MAX_JSON, "JSON")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CacheError(f"no JSON ({type(error).__name__}: {error})") from error
    _check_depth(value, _MAX_DEPTH)
    return value


def _check_depth(value: Any, left: int) -> None:
    if isinstance(value, (dict, list)):
        if not left:
            raise CacheError(f"JSON is nested deeper than {_MAX_DEPTH}")
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, left - 1)


@contextmanager
def typed(what: str, kind: str = "file") -> Iterator[None]:
    """Whatever parsing hostile bytes raises as one CacheError that begins with `what`.

    FileNotFoundError and NotADirectoryError pass, as the former: a file that is not there is not a
    bad one.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(*error.args) from error
    except CacheError as error:
        raise CacheError(f"{what}: {error}") from error
    except Exception as error:  # zlib.error, MemoryError, OverflowError, struct.error, BadZipFile …
        reason = str(error) or type(error).__name__
        raise CacheError(f"{what} is not a readable {kind}: {reason}") from error
