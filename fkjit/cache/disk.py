"""The user's cache directory: sharded entries, per-key locks, quarantine, size cap, sweeping.

    v1/<first 2 of key>/<key>.fkc     entries
    v1/<first 2 of key>/.*.tmp        being written (or left by a killed writer: swept)
    v1/locks/<key>.lock               held while a key is being built
    v1/quarantine/<key>.<time>.bad    entries that failed verification, the last few of them

Nothing here raises for an I/O error: a directory that does not work is a cache that never hits.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import Any

from fkjit.cache import trust
from fkjit.cache.file import SUFFIX, TEMPORARY, Read, read_entry, write_atomically
from fkjit.errors import CacheError
from fkjit.messages import say
from fkjit.settings import settings

_LAYOUT = "v1"  # a new file format or directory layout gets a new folder
LOCK_SECONDS = 60.0  # a lock held longer is taken for stuck: build without it
PATIENCE_SECONDS = 1.0  # waiting longer than this is said on stderr
TOUCH_SECONDS = 3600.0  # an entry's mtime (its last use) is renewed at most this often
LEFTOVER_SECONDS = 3600.0  # a temporary file older than this lost its writer
LOCK_FILE_SECONDS = 86400.0  # a lock file older than this is nobody's
QUARANTINE_SECONDS = 7 * 86400.0
QUARANTINE_FILES = 16
_EVICT_TO = 0.9  # of the cap, so that not every write evicts
# Never a lock that is the mere existence of a file: a killed builder would leave it held.
_SOFT = "fallback_to_soft"
_BAD = ".bad"
_LOCK = ".lock"
_OURS = re.compile(r"\.?[0-9a-f]{64}\..*(fkc|tmp|bad|lock)$")


class DiskCache:
    """One directory of entries, shared with any number of other processes."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.quarantined = 0  # bad entries this process set aside
        self.write_error: str | None = None  # the last one
        self._written: int | None = None  # bytes since the last sweep; None: never swept
        self._locks_work: bool | None = None  # None: not yet tried
        self._guard = threading.Lock()

    def after_fork(self) -> None:
        """Fresh locks in the child: another thread of the parent may have held the old ones."""
        self._guard = threading.Lock()

    def path(self, key: str) -> Path:
        """Where the entry of `key` is or would be."""
        return self.directory / key[:2] / (key + SUFFIX)

    def read(self, key: str) -> Read | None:
        """The verified entry or None; a bad one is set aside on the way."""
        path = self.path(key)
        try:
            found = read_entry(path, key)
        except OSError:
            return None
        except CacheError as error:
            self._quarantine(key, str(error))
            return None
        self._touch(path, found.status)
        return found

    def _touch(self, path: Path, status: os.stat_result | None) -> None:
        if status is not None and time.time() - status.st_mtime > TOUCH_SECONDS:
            with suppress(OSError):
                os.utime(path, follow_symlinks=False)

    def _quarantine(self, key: str, reason: str) -> None:
        """Move a bad entry out of the way, unless a good one has just replaced it."""
        path = self.path(key)
        try:
            read_entry(path, key)
            return
        except FileNotFoundError:
            return  # another process was first
        except (CacheError, OSError):
            pass
        self.quarantined += 1
        say(f"cache entry {path} is bad ({reason}); set aside, the kernel is built anew")
        aside = self.directory / "quarantine" / f"{key}.{time.time_ns()}{_BAD}"
        try:
            trust.make_folders(aside.parent)
            os.replace(path, aside)
            os.utime(aside, follow_symlinks=False)  # of a link, not what it leads to
        except OSError:
            with suppress(OSError):
                os.unlink(path)

    def write(self, key: str, data: bytes) -> Path | None:
        """Store an entry: its path, or None where that cannot be done (said once)."""
        path = self.path(key)
        try:
            write_atomically(path, data)
        except OSError as error:
            if self.write_error is None:
                say(
                    f"cache directory {self.directory} cannot be written ({error}); kernels are "
                    "kept for this process only (FKJIT_CACHE_DIR names another directory)"
                )
            self.write_error = str(error)
            return None
        self._amortise(len(data), keep=path)
        return path

    def _amortise(self, size: int, keep: Path) -> None:
        """Sweep after the first write and then each time 1/32 of the cap has been written."""
        with self._guard:
            written = None if self._written is None else self._written + size
            due = written is None or written > self.max_bytes // 32
            self._written = 0 if due else written
        if due:
            self.sweep(keep)

    @contextmanager
    def lock(self, key: str, describe: str) -> Iterator[None]:
        """Hold the lock of `key` if that can be done; at worst after LOCK_SECONDS go on without."""
        lock = self._acquire(key, describe)
        try:
            yield
        finally:
            if lock is not None:
                with suppress(OSError, RuntimeError):
                    os.unlink(lock.lock_file)  # also of a kernel that was refused
                with suppress(OSError, RuntimeError):
                    lock.release()

    def _acquire(self, key: str, describe: str) -> Any:
        import filelock  # not at the top: a warm start needs no lock, and this takes milliseconds

        path = self.directory / "locks" / (key + _LOCK)
        try:
            trust.make_folders(path.parent)
            if not self._can_lock(path.parent):
                return None
            known = signature(filelock.FileLock.__init__).parameters
            options: dict[str, Any] = {_SOFT: False} if _SOFT in known else {}
            lock = filelock.FileLock(path, mode=trust.FILE_MODE, **options)
            try:
                lock.acquire(timeout=PATIENCE_SECONDS)
            except filelock.Timeout:
                say(f"waiting for another process that is compiling {describe}")
                lock.acquire(timeout=max(0.0, LOCK_SECONDS - PATIENCE_SECONDS))
            return lock
        except filelock.Timeout:
            say(f"{path} was held for {LOCK_SECONDS:.0f} s; compiling {describe} without it")
        except (OSError, RuntimeError, NotImplementedError):
            pass  # read-only, no flock there: two processes may build the same entry
        return None

    def _can_lock(self, folder: Path) -> bool:
        """Whether files in `folder` can be locked at all, found out once on a file of our own.

        filelock takes EACCES for "held by another" and waits; where nobody else knows the file, it
        means that locks do not work here.
        """
        if self._locks_work is None:
            with suppress(ImportError), tempfile.TemporaryFile(dir=folder) as file:
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    self._locks_work = False
                    return False
            self._locks_work = True  # or Windows, which has locks of another kind
        return self._locks_work

    def files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Every file of ours in the directory, whatever its kind."""
        for folder in _scan(self.directory):
            if len(folder.name) == 2 or folder.name in ("locks", "quarantine"):
                for item in _scan(folder):
                    with suppress(OSError):
                        status = item.lstat()
                        if _OURS.match(item.name):
                            yield item, status

    def entry_files(self) -> list[tuple[Path, os.stat_result]]:
        """The entries' files, the least recently used first."""
        found = [item for item in self.files() if item[0].suffix == SUFFIX]
        return sorted(found, key=lambda item: item[1].st_mtime)

    def sweep(self, keep: Path | None = None) -> int:
        """Remove leftovers, then old entries until the cap holds; `keep` stays. Files removed."""
        now, removed, fixed, kept = time.time(), 0, 0, []
        age = {TEMPORARY: LEFTOVER_SECONDS, _LOCK: LOCK_FILE_SECONDS, _BAD: QUARANTINE_SECONDS}
        files = sorted(self.files(), key=lambda item: item[1].st_mtime)
        spare = sum(path.suffix == _BAD for path, _ in files) - QUARANTINE_FILES
        for path, status in files:
            bad = path.suffix == _BAD
            if now - status.st_mtime > age.get(path.suffix, float("inf")) or (bad and spare > 0):
                spare -= bad
                removed += _remove(path)
            elif path.suffix in (SUFFIX, _BAD):
                kept.append((not bad, status.st_mtime, path, status.st_size))
            else:
                fixed += status.st_size  # being written, or left by a writer killed just now
        return removed + self._evict(sorted(kept), fixed, keep)

    def _evict(
        self, kept: list[tuple[bool, float, Path, int]], fixed: int, keep: Path | None
    ) -> int:
        """Remove out of (is an entry, mtime, path, size), in that order, until the cap holds with
        the `fixed` bytes that stay."""
        total, removed = fixed + sum(size for *_, size in kept), 0
        if total <= self.max_bytes:
            return 0
        for _, _, path, size in kept:
            if total <= self.max_bytes * _EVICT_TO:
                break
            if path != keep and _remove(path):
                total -= size
                removed += 1
        return removed

    def clear(self) -> tuple[int, int]:
        """Remove everything of ours: (files, bytes). CacheError names the first that stays."""
        files, size, failed = 0, 0, []
        for path, status in list(self.files()):
            if _remove(path):
                files += path.suffix != _LOCK
                size += status.st_size
            elif os.path.lexists(path):
                failed.append(path)
        if failed:
            raise CacheError(
                f"cache clear: {len(failed)} of {len(failed) + files} files cannot be removed, the "
                f"first is {failed[0]}; check the permissions of {self.directory}"
            )
        return files, size


def _scan(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _remove(path: Path) -> bool:
    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            path.rmdir()
        else:
            path.unlink()
    except OSError:
        return False
    return True


def default_directory() -> Path | None:
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
