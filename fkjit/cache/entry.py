"""What the cache hands out: entries, listings, reports, and an image as a file for a loader."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fkjit.cache.file import write_all
from fkjit.errors import CacheError

_aliases = itertools.count()
_FOLDERS = (None, "/dev/shm")  # for images as files; None: what `tempfile` finds


@dataclass(frozen=True)
class Entry:
    """A compiled kernel. `meta` is what `build` returned plus key, fields, describe, created.

    `path` is the `.fkc` file (checksum, metadata and image), None if there is none: to give the
    image alone to a loader that wants a file, use `materialise`. `seconds`: this call's, waiting
    and compiling included.
    """

    image: bytes
    meta: dict[str, Any]
    origin: str  # memory | disk | bundle | compiled
    path: Path | None
    seconds: float


class EntryInfo(NamedTuple):
    """An entry as `Cache.entries()` lists it: all but the image."""

    key: str
    meta: dict[str, Any]
    image_bytes: int
    origin: str  # disk | bundle | memory (in no file)
    path: Path | None
    last_used: float | None  # seconds since the epoch, true to the hour


class CacheStats(NamedTuple):
    """What a cache holds now and what it did in this process."""

    directory: Path | None
    max_bytes: int
    entries: int  # on disk
    bytes: int  # on disk
    quarantined_files: int
    bundles: tuple[Path, ...]
    in_memory: int
    hits: Mapping[str, int]  # by origin; "compiled" counts the misses
    quarantined: int  # entries this process set aside
    write_error: str | None  # why the last write failed, None if none did
    distrust: str | None = None  # why the directory is not used, where others could write it


class Imported(NamedTuple):
    """What became of each entry of an imported bundle."""

    imported: int
    present: int  # already there, and good
    refused: tuple[tuple[str, str], ...]  # (key, reason)


class Exported(NamedTuple):
    """What went into a bundle."""

    path: Path
    entries: int
    bytes: int
    refused: tuple[tuple[str, str], ...]  # (key, reason): entries that failed verification


def refusal(
    stored: dict[str, str], describe: str, known: list[EntryInfo], paths: list[Path]
) -> str:
    """What a NotCachedError says; `paths`: of the layers, there or not."""
    missing = " (does not exist)"
    layers = [f"{path}{'' if os.path.exists(path) else missing}" for path in paths]
    message = (
        f"FKJIT_REQUIRE_CACHED=1: {describe} is in no cache layer "
        f"(memory, {', '.join(layers) or 'no directory'}: {len(known)} entries in all)"
    )
    if known:
        message += "; " + difference(stored, describe, known)
    fix = "; unset FKJIT_REQUIRE_CACHED to compile it, or add a bundle with FKJIT_BUNDLE_PATH"
    return message + fix


def difference(stored: dict[str, str], describe: str, known: Sequence[EntryInfo]) -> str:
    """Which fields tell the wanted entry from the one of `known` that is most like it."""
    ours = _flat(stored)

    def alike(info: EntryInfo) -> tuple[bool, bool, int]:
        theirs = _flat(info.meta["fields"])
        same = sum(theirs.get(name) == value for name, value in ours.items())
        kernel = stored.get("kernel") == theirs.get("kernel")
        return kernel, info.meta.get("describe") == describe, same

    nearest = max(known, key=alike)
    theirs = _flat(nearest.meta["fields"])
    names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    parts = [f"{n} ({_short(ours.get(n))} here, {_short(theirs.get(n))} there)" for n in names]
    return (
        f"the nearest, {nearest.key[:12]} ({nearest.meta.get('describe')}, {nearest.origin}), "
        f"differs in {', '.join(parts)}"
    )


def _flat(fields: Mapping[str, str]) -> dict[str, str]:
    """The fields, with one that is a JSON object taken apart: values -> values.block, …"""
    flat = {}
    for name, text in fields.items():
        value = None
        if text.startswith("{"):
            with suppress(ValueError):
                value = json.loads(text)
        if isinstance(value, dict):
            flat |= {f"{name}.{part}": json.dumps(item) for part, item in value.items()}
        else:
            flat[name] = text
    return flat


def _short(value: str | None) -> str:
    if value is None:
        return "absent"
    if value.startswith(("text:", "bytes:")):
        return value[:24] + "…"
    return repr(value if len(value) <= 80 else value[:79] + "…")


@contextmanager
def materialise(entry: Entry) -> Iterator[Path]:
    """A file that holds the image alone, for as long as the `with` lasts.

        with materialise(entry) as path:
            kernel = cupy.RawModule(path=str(path)).get_function(name)  # reads the file

    It is read for the current device only: another device needs a `with` of its own.
    In the temporary directory, else /dev/shm, else in anonymous memory: no cache needed, and a
    killed process leaves at most a file in a temporary directory. CacheError if nothing works.
    No two paths of a process are the same: CuPy takes an equal path for an equal module.
    """
    for folder in _FOLDERS:
        path = _temporary_image(entry, folder)
        if path is not None:
            try:
                yield path
            finally:
                with suppress(OSError):
                    path.unlink()
            return
    descriptor = _anonymous_image(entry)
    try:
        yield _alias(descriptor)
    finally:
        os.close(descriptor)


def _temporary_image(entry: Entry, folder: str | None) -> Path | None:
    try:
        descriptor, name = tempfile.mkstemp(".cubin", f"fkjit-{entry.meta['key'][:12]}-", folder)
    except OSError:
        return None
    try:
        try:
            write_all(descriptor, entry.image)
        finally:
            os.close(descriptor)
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        return None
    return Path(name)


def _anonymous_image(entry: Entry) -> int:
    try:
        descriptor = os.memfd_create("fkjit")
        write_all(descriptor, entry.image)
    except (OSError, AttributeError) as error:
        raise CacheError(
            f"no place for the {len(entry.image)} bytes of {entry.meta.get('describe')}: neither "
            f"the temporary directory nor /dev/shm nor memory took them ({error}); set TMPDIR"
        ) from error
    return descriptor


def _alias(descriptor: int) -> Path:
    """A name of an open file that no earlier one had, although descriptors are used again."""
    bits = f"{next(_aliases):b}"
    detours = ("../fdinfo" if bit == "1" else "../fd" for bit in bits)
    return Path("/proc/self/fd", *detours, "..", "fd", str(descriptor))
