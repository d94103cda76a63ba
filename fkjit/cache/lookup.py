"""Where compiled kernels are kept: memory, the user's directory, read-only bundles, else a build.

`Cache.get_or_build` is the one way in. Keys are made of texts and digests (see
`compile.key_fields`), never of paths or machines, so entries travel between machines. No I/O error
keeps a kernel from being built: the bytes are in memory before anything is written.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fkjit.cache.compatible import WORD, Compatible
from fkjit.cache.disk import DiskCache, say
from fkjit.cache.entry import (
    CacheStats,
    Entry,
    EntryInfo,
    Exported,
    Imported,
    difference,
    materialise,
)
from fkjit.cache.file import (
    Read,
    cache_key,
    decode,
    encode,
    read_entry,
    read_metadata,
    stored_fields,
)
from fkjit.errors import CacheError, NotCachedError
from fkjit.settings import settings

if TYPE_CHECKING:
    from fkjit.cache.bundle import Bundle

__all__ = [
    "Cache",
    "CacheStats",
    "Entry",
    "EntryInfo",
    "Exported",
    "Imported",
    "default_cache",
    "materialise",
]

_RESERVED = ("key", "fields", "describe", "created")
_LAYOUT = "v1"  # a new file format or directory layout gets a new folder


class Cache:
    """Layers of compiled kernels; safe for threads, processes, forks and broken file systems."""

    def __init__(
        self,
        directory: Path | None,
        bundles: Iterable[Path] = (),
        max_bytes: int = 1 << 30,
        require_cached: bool = False,
    ) -> None:
        """`directory` None: no disk layer. `max_bytes`: cap of the directory, in bytes. Among
        `bundles` the word "compatible": accept what another minor version of NVRTC made."""
        where, given = _absolute(directory), [Path(path) for path in bundles]
        self.disk = None if where is None else DiskCache(where, max_bytes)
        self.bundles: list[Bundle] = [_open_bundle(path) for path in given if path != WORD]
        self._compatible = Compatible(self.bundles if WORD in given else ())
        self.require_cached = require_cached
        self.max_bytes = max_bytes
        self._memory: dict[str, Entry] = {}
        self._unsaved: set[str] = set()  # built here, but in no file
        self._hits = {"memory": 0, "disk": 0, "bundle": 0, "compiled": 0}
        self._said: set[str] = set()
        self._guard = threading.Lock()
        self._building: dict[str, threading.RLock] = {}
        _caches.add(self)

    def _after_fork(self) -> None:
        self._guard = threading.Lock()
        self._building = {}
        for layer in (self.disk, *self.bundles):
            if layer is not None:
                layer.after_fork()

    @property
    def directory(self) -> Path | None:
        """The disk layer's directory."""
        return None if self.disk is None else self.disk.directory

    def get_or_build(
        self,
        fields: Mapping[str, str | bytes],
        build: Callable[[], tuple[bytes, dict[str, Any]]],
        *,
        describe: str,
    ) -> Entry:
        """The entry of `fields`, from the first layer that has it, else from `build()`.

        `build` returns (image, metadata that JSON can hold) and runs once per key, whatever the
        number of threads. `describe` is the kernel in messages ("attention.flash causal=1 sm_80").
        Raises what `build` raises, and NotCachedError where building is forbidden.
        """
        begin = time.perf_counter()
        stored = stored_fields(fields)
        key = cache_key(stored)
        if (found := self._memory.get(key)) is not None:
            self._hits["memory"] += 1
            return found
        with self._one_build(key):
            if (found := self._memory.get(key)) is not None:
                self._hits["memory"] += 1
                return found
            entry = self._load(key) or self._compatible.find(stored)
            entry = entry or self._build(key, stored, build, describe)
            entry = replace(entry, seconds=time.perf_counter() - begin)
            self._hits[entry.origin] += 1
            if entry.origin == "compiled" and entry.path is None:
                self._unsaved.add(key)
            self._memory[key] = replace(entry, origin="memory", seconds=0.0)
        return entry

    @contextmanager
    def _one_build(self, key: str) -> Iterator[None]:
        """The threads of this process that want `key`, one at a time."""
        with self._guard:
            lock = self._building.setdefault(key, threading.RLock())
        with lock:
            yield
        with self._guard:
            self._building.pop(key, None)  # it is in memory now

    def _load(self, key: str) -> Entry | None:
        found = None if self.disk is None else self.disk.read(key)
        if found is not None and self.disk is not None:
            return Entry(found.image, found.meta, "disk", self.disk.path(key), 0.0)
        for bundle in self.bundles:
            try:
                found = bundle.read(key)
            except CacheError as error:
                self._say_once(f"FKJIT_BUNDLE_PATH: {error}")
                continue
            if found is None and not bundle.path.exists():
                self._say_once(f"FKJIT_BUNDLE_PATH: {bundle.path} does not exist")
            elif found is not None:
                return Entry(found.image, found.meta, "bundle", bundle.entry_path(key), 0.0)
        return None

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            say(message)

    def _build(
        self,
        key: str,
        stored: dict[str, str],
        build: Callable[[], tuple[bytes, dict[str, Any]]],
        describe: str,
    ) -> Entry:
        if self.require_cached:
            self._refuse(stored, describe)
        if self.disk is None:
            return self._new_entry(key, stored, build, describe)
        with self.disk.lock(key, describe):
            return self._load(key) or self._new_entry(key, stored, build, describe)

    def _new_entry(
        self,
        key: str,
        stored: dict[str, str],
        build: Callable[[], tuple[bytes, dict[str, Any]]],
        describe: str,
    ) -> Entry:
        image, built = build()
        if taken := sorted(set(built) & set(_RESERVED)):
            raise CacheError(f"cache: metadata of {describe} uses the cache's own names {taken}")
        own = {"key": key, "fields": stored, "describe": describe, "created": round(time.time(), 3)}
        data = encode({**built, **own}, image)
        path = None if self.disk is None else self.disk.write(key, data)
        return Entry(image, decode(data).meta, "compiled", path, 0.0)

    def _refuse(self, stored: dict[str, str], describe: str) -> NoReturn:
        known = list(self.entries(bundles=True))
        paths = [path for path in (self.directory, *(b.path for b in self.bundles)) if path]
        layers = [str(path) if path.exists() else f"{path} (does not exist)" for path in paths]
        message = (
            f"FKJIT_REQUIRE_CACHED=1: {describe} is in no cache layer "
            f"(memory, {', '.join(layers) or 'no directory'}: {len(known)} entries in all)"
        )
        if known:
            message += "; " + difference(stored, describe, known)
        fix = "; unset FKJIT_REQUIRE_CACHED to compile it, or add a bundle with FKJIT_BUNDLE_PATH"
        raise NotCachedError(message + fix)

    def entries(self, bundles: bool = False) -> Iterator[EntryInfo]:
        """The user's entries, least recently used first; with `bundles` theirs too, each key once.

        Images are not read, so a listed entry may still turn out bad when it is used.
        """
        seen: set[str] = set()
        for info in self._all_entries(bundles):
            if info.key not in seen:
                seen.add(info.key)
                yield info

    def _all_entries(self, bundles: bool) -> Iterator[EntryInfo]:
        for path, _ in [] if self.disk is None else self.disk.entry_files():
            with suppress(OSError, CacheError):
                meta, size, status = read_metadata(path)
                yield EntryInfo(meta["key"], meta, size, "disk", path, status.st_mtime)
        for bundle in self.bundles if bundles else ():
            with suppress(CacheError):
                for meta, size, path in bundle.metadata():
                    yield EntryInfo(meta["key"], meta, size, "bundle", path, None)
        for key in sorted(self._unsaved):
            if (entry := self._memory.get(key)) is not None:
                yield EntryInfo(key, entry.meta, len(entry.image), "memory", None, None)

    def stats(self) -> CacheStats:
        """Counts and sizes; lists the directory, reads no entry."""
        files = [] if self.disk is None else list(self.disk.files())
        sizes = [status.st_size for path, status in files if path.suffix == ".fkc"]
        return CacheStats(
            directory=self.directory,
            max_bytes=self.max_bytes,
            entries=len(sizes),
            bytes=sum(sizes),
            quarantined_files=sum(path.suffix == ".bad" for path, _ in files),
            bundles=tuple(bundle.path for bundle in self.bundles),
            in_memory=len(self._memory),
            hits=dict(self._hits),
            quarantined=0 if self.disk is None else self.disk.quarantined,
            write_error=None if self.disk is None else self.disk.write_error,
        )

    def clear(self) -> tuple[int, int]:
        """Forget everything but the bundles: (files removed, bytes freed).

        Only files the cache made are touched. CacheError if one cannot be removed.
        """
        self._memory.clear()
        self._unsaved.clear()
        return (0, 0) if self.disk is None else self.disk.clear()

    def export(self, path: Path, keys: Iterable[str] | None = None) -> Exported:
        """Write entries (all of the user's, or those of `keys`) into one `.fkb` file.

        CacheError for a key that is in no layer and for a file that cannot be written.
        """
        from fkjit.cache.bundle import write_bundle

        path, refused = Path(path), []
        files = [] if self.disk is None else self.disk.entry_files()
        wanted = {file.stem for file, _ in files} | self._unsaved if keys is None else set(keys)

        def encoded() -> Iterator[tuple[str, bytes]]:
            for key in sorted(wanted):
                try:
                    yield key, self._encoded(key)
                except CacheError as error:
                    if keys is not None:
                        raise CacheError(f"cache export: entry {key}: {error}") from error
                    refused.append((key, str(error)))

        try:
            write_bundle(path, encoded())
            size = path.stat().st_size
        except OSError as error:
            raise CacheError(f"cache export: {path} cannot be written: {error}") from error
        return Exported(path, len(wanted) - len(refused), size, tuple(refused))

    def _encoded(self, key: str) -> bytes:
        """The bytes of a verified entry out of any layer."""
        found: Read | None = None
        if self.disk is not None:
            with suppress(OSError):
                found = read_entry(self.disk.path(key), key)
        if found is None and (entry := self._memory.get(key)) is not None:
            found = Read(entry.meta, entry.image)
        for bundle in self.bundles:
            found = found or bundle.read(key)
        if found is None:
            raise CacheError("is in no cache layer; `fkjit cache ls` shows what is")
        return encode(found.meta, found.image)

    def import_(self, path: Path) -> Imported:
        """Copy a bundle's entries (`.fkb`, directory or one `.fkc`) into the user's directory.

        Each is verified first. CacheError if the bundle cannot be read or there is no directory.
        """
        if self.disk is None:
            raise CacheError("cache import: no cache directory; set FKJIT_CACHE_DIR to one")
        try:
            bundle = _open_bundle(path)
            keys = bundle.keys()
        except CacheError as error:
            raise CacheError(f"cache import: path={str(path)!r}: {error}") from error
        imported, present, refused = 0, 0, []
        for key in keys:
            try:
                added = self._take(self.disk, bundle, key)
                imported, present = imported + added, present + (not added)
            except CacheError as error:
                refused.append((key, str(error)))
        return Imported(imported, present, tuple(refused))

    def _take(self, disk: DiskCache, bundle: Bundle, key: str) -> bool:
        """Copy one entry; False if a good one is there already, CacheError says why not."""
        data = bundle.data(key)
        if data is None:
            raise CacheError("vanished from the bundle")
        decode(data, key)
        if disk.read(key) is not None:
            return False
        if disk.write(key, data) is None:
            raise CacheError(f"cannot be written: {disk.write_error}")
        return True


def _open_bundle(path: Path) -> Bundle:
    from fkjit.cache.bundle import open_bundle  # zipfile, for the few who have bundles

    return open_bundle(Path(path))


def _absolute(directory: Path | None) -> Path | None:
    """Made absolute now: the working directory may change, or be gone already."""
    try:
        return None if directory is None else Path(os.path.abspath(directory))
    except OSError:
        return None


_caches: weakref.WeakSet[Cache] = weakref.WeakSet()


def _after_fork() -> None:
    for cache in list(_caches):
        cache._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _default_directory() -> Path | None:
    """FKJIT_CACHE_DIR or the platform's user cache directory; None without a home."""
    chosen = settings().cache_dir
    if chosen is not None:
        return chosen / _LAYOUT
    import platformdirs

    try:
        found = Path(platformdirs.user_cache_dir("fkjit"))
    except (OSError, RuntimeError, KeyError):
        found = Path("~")
    if found.is_absolute():
        return found / _LAYOUT
    say("no home directory, so kernels are kept for this process only; FKJIT_CACHE_DIR names one")
    return None


@lru_cache(maxsize=1)
def default_cache() -> Cache:
    """The cache of this process, as the FKJIT_* settings ask; `cache_clear()` makes a new one."""
    chosen = settings()
    return Cache(_default_directory(), chosen.bundle_path, chosen.cache_size, chosen.require_cached)
