"""Read-only bundles of cache entries: one `.fkb` file, or a directory of `.fkc` files.

A `.fkb` is a plain zip whose members `<key>.fkc` are stored, sorted and without times: the same
entries give the same bytes. Each member carries its own checksum and is verified when it is read.
"""

from __future__ import annotations

import os
import struct
import threading
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fkjit.cache.file import SUFFIX, Read, atomic_file, decode, read_entry, read_metadata
from fkjit.errors import CacheError

BUNDLE_SUFFIX = ".fkb"
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, name length, extra length
_ZIP_ERRORS = (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError)


def write_bundle(path: Path, entries: Iterable[tuple[str, bytes]]) -> None:
    """Write (key, entry bytes) pairs, sorted by key, as a `.fkb`: atomically, OSError if not."""
    with (
        atomic_file(path) as descriptor,
        os.fdopen(os.dup(descriptor), "wb") as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
    ):
        for key, data in entries:
            member = zipfile.ZipInfo(key + SUFFIX, (1980, 1, 1, 0, 0, 0))
            member.create_system, member.external_attr = 3, 0o644 << 16
            archive.writestr(member, data)


def _key_of(name: str) -> str | None:
    """The key in a member's or file's name; None for anything that is not an entry."""
    base = name.rsplit("/", 1)[-1]
    return base[: -len(SUFFIX)] if base.endswith(SUFFIX) and not base.startswith(".") else None


def _check_packing(path: Path, member: zipfile.ZipInfo) -> None:
    known = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    if member.flag_bits & 1 or member.compress_type not in known:
        raise CacheError(f"{path}: member {member.filename} is encrypted or oddly compressed")


def _verified(path: Path, key: str, data: bytes) -> Read:
    try:
        return decode(data, key)
    except CacheError as error:
        raise CacheError(f"{path}: entry {key[:12]} is bad: {error}") from error


class ZipBundle:
    """One `.fkb`. Its index is read once and again when the file has been replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: tuple[tuple[int, ...], dict[str, zipfile.ZipInfo]] | None = None
        self._guard = threading.Lock()

    def after_fork(self) -> None:
        """A fresh lock in the child."""
        self._guard = threading.Lock()

    def _index(self) -> dict[str, zipfile.ZipInfo]:
        status = os.stat(self.path)
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        with self._guard:
            if self._state is None or self._state[0] != version:
                with zipfile.ZipFile(self.path) as archive:
                    members = {_key_of(item.filename): item for item in archive.infolist()}
                self._state = version, {key: item for key, item in members.items() if key}
            return self._state[1]

    def keys(self) -> list[str]:
        """The keys its members' names claim. CacheError if it is no readable zip."""
        try:
            return sorted(self._index())
        except _ZIP_ERRORS as error:
            raise CacheError(f"{self.path} is not a readable bundle: {error}") from error

    def data(self, key: str) -> bytes | None:
        """The unverified bytes of one entry, None if it is not in. CacheError if unreadable."""
        try:
            member = self._index().get(key)
            return None if member is None else self._member(member)
        except FileNotFoundError:
            return None
        except _ZIP_ERRORS as error:
            raise CacheError(f"{self.path} is not a readable bundle: {error}") from error

    def _member(self, member: zipfile.ZipInfo) -> bytes:
        _check_packing(self.path, member)
        if member.compress_type != zipfile.ZIP_STORED:  # someone packed it anew
            with zipfile.ZipFile(self.path) as archive:
                return archive.read(member)
        with open(self.path, "rb") as file:  # own offset: threads and forked children read too
            file.seek(member.header_offset)
            head = file.read(_LOCAL_HEADER.size)
            if len(head) < _LOCAL_HEADER.size or head[:4] != b"PK\3\4":
                raise CacheError(f"{self.path}: member {member.filename} is not where it should be")
            _, name, extra = _LOCAL_HEADER.unpack(head)
            file.seek(name + extra, os.SEEK_CUR)
            return file.read(member.file_size)

    def read(self, key: str) -> Read | None:
        """The verified entry, None if it is not in. CacheError says what is wrong with it."""
        data = self.data(key)
        return None if data is None else _verified(self.path, key, data)

    def entry_path(self, key: str) -> Path | None:
        """No file of its own."""
        return None

    def metadata(self) -> Iterator[tuple[dict[str, Any], int, Path | None]]:
        """(metadata, image bytes, None) of every good entry."""
        for key in self.keys():
            try:
                found = self.read(key)
            except CacheError:
                continue
            if found is not None:
                yield found.meta, len(found.image), None


class FolderBundle:
    """A directory of `.fkc` files: flat, sharded as the cache is, or a cache root above `v1`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_fork(self) -> None:
        """Nothing to renew."""

    def _places(self, key: str) -> Iterator[Path]:
        for folder in (self.path, self.path / key[:2], self.path / "v1" / key[:2]):
            yield folder / (key + SUFFIX)

    def _files(self) -> dict[str, Path]:
        try:
            paths = sorted(self.path.rglob("*" + SUFFIX)) if self.path.is_dir() else []
        except OSError as error:
            raise CacheError(f"{self.path} is not a readable bundle: {error}") from error
        return {key: path for path in paths if (key := _key_of(path.name))}

    def keys(self) -> list[str]:
        """The keys its files' names claim."""
        if not self.path.is_dir():
            raise CacheError(f"{self.path} is not a readable bundle: no such file or directory")
        return sorted(self._files())

    def entry_path(self, key: str) -> Path | None:
        """The file that holds `key`."""
        return next((path for path in self._places(key) if path.exists()), None)

    def data(self, key: str) -> bytes | None:
        """The unverified bytes of one entry, wherever below the directory; None if not in."""
        path = self._files().get(key)
        try:
            return None if path is None else path.read_bytes()
        except OSError as error:
            raise CacheError(f"{path} cannot be read: {error}") from error

    def read(self, key: str) -> Read | None:
        """The verified entry, None if it is not in. CacheError says what is wrong with it."""
        for path in self._places(key):
            try:
                return read_entry(path, key)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, CacheError) as error:
                raise CacheError(f"{path} is not usable: {error}") from error
        return None

    def metadata(self) -> Iterator[tuple[dict[str, Any], int, Path | None]]:
        """(metadata, image bytes, path) of every entry, without reading the images."""
        for path in self._files().values():
            try:
                meta, size, _ = read_metadata(path)
            except (OSError, CacheError):
                continue
            yield meta, size, path


class SingleEntry(FolderBundle):
    """One `.fkc` file given by itself."""

    def _places(self, key: str) -> Iterator[Path]:
        if _key_of(self.path.name) == key:
            yield self.path

    def _files(self) -> dict[str, Path]:
        key = _key_of(self.path.name)
        return {key: self.path} if key else {}

    def keys(self) -> list[str]:
        """The key its name claims."""
        return sorted(self._files())


Bundle = ZipBundle | FolderBundle


def open_bundle(path: Path) -> Bundle:
    """The bundle at `path` by what it is; nothing is read yet, and it need not exist yet."""
    if path.suffix == SUFFIX and not path.is_dir():
        return SingleEntry(path)
    return ZipBundle(path) if path.suffix == BUNDLE_SUFFIX or path.is_file() else FolderBundle(path)
