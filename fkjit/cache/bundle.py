"""Read-only bundles of cache entries: one `.fkb` file, or a directory of `.fkc` files.

A `.fkb` is a plain zip whose members `<key>.fkc` are stored, sorted and without times: the same
entries give the same bytes. Each member carries its own checksum and is verified when it is read;
`manifest.json` has the SHA-256 of every one, and then nothing else is read. A bundle may come from
anywhere: sizes are bounded before anything is read, and what is wrong is a CacheError that names
the member.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fkjit.cache import trust
from fkjit.cache.file import SUFFIX, Read, decode, nameless_file, read_entry, read_metadata
from fkjit.cache.toolchains import Toolchain, gather
from fkjit.cache.untrusted import (
    MAX_ENTRY,
    MAX_JSON,
    bounded,
    open_regular,
    parse_json,
    read_exactly,
    read_file,
    typed,
)
from fkjit.errors import CacheError

BUNDLE_SUFFIX = ".fkb"
MANIFEST = "manifest.json"
_MANIFEST_FORMAT = 1
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, name length, extra length
_MAX_DIRECTORY = 16 << 20  # bytes of a zip's list of members: 100,000 entries
_MAX_RATIO = 100  # of a packed member; a bomb is above it, a kernel at 2 to 10
_KEY_NAME = re.compile(r"([0-9a-f]{64})\.fkc")


def write_bundle(path: Path, entries: Iterable[tuple[str, bytes]]) -> None:
    """Write (key, entry bytes) pairs, sorted by key, as a `.fkb`: atomically, OSError if not."""
    digests: dict[str, str] = {}
    metas: list[dict[str, Any]] = []
    with (
        nameless_file(path) as descriptor,
        os.fdopen(os.dup(descriptor), "wb") as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
    ):
        for key, data in entries:
            _add(archive, key + SUFFIX, data)
            digests[key + SUFFIX] = hashlib.sha256(data).hexdigest()
            metas.append(decode(data, key).meta)
        manifest = {
            "format": _MANIFEST_FORMAT,
            "toolchains": [one.to_dict() for one in gather(metas)],
            "members": digests,
        }
        _add(archive, MANIFEST, json.dumps(manifest, indent=1).encode())


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    member = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    member.create_system, member.external_attr = 3, 0o644 << 16
    archive.writestr(member, data)


def _key_of(name: str) -> str | None:
    """The key in a member's or file's name; None for anything that is not an entry."""
    found = _KEY_NAME.fullmatch(name.rsplit("/", 1)[-1])
    return found[1] if found else None


def _verified(path: Path, key: str, data: bytes) -> Read:
    try:
        return decode(data, key)
    except CacheError as error:
        raise CacheError(f"{path}: entry {key[:12]} is bad: {error}") from error


class _Bounded:
    """What zipfile reads of a bundle: never more at once than a list of members may have."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._file.read(min(size, _MAX_DIRECTORY) if size >= 0 else _MAX_DIRECTORY)


class _Index(NamedTuple):
    """The list of members of one version of a `.fkb`."""

    version: tuple[int, ...]  # of the file
    members: Mapping[str, zipfile.ZipInfo]  # by key
    digests: Mapping[str, str] | None  # by member, out of the manifest; None without one
    toolchains: list[Toolchain] | None  # out of the manifest


class ZipBundle:
    """One `.fkb`. Its index is read once and again when the file has been replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: _Index | None = None
        self._guard = threading.Lock()

    def after_fork(self) -> None:
        """A fresh lock in the child."""
        self._guard = threading.Lock()

    def _index(self) -> _Index:
        trust.require(self.path)
        status = os.stat(self.path)
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        with self._guard:
            if self._state is None or self._state.version != version:
                self._state = self._read_index(version, status.st_size)
            return self._state

    def _read_index(self, version: tuple[int, ...], size: int) -> _Index:
        with self._open() as file, zipfile.ZipFile(_Bounded(file)) as archive:  # type: ignore[arg-type]
            found = archive.infolist()
        if sum(item.compress_size for item in found) > size:
            raise CacheError("its members claim more bytes than it has")
        manifest = next((item for item in found if item.filename == MANIFEST), None)
        told = (None, None) if manifest is None else self._manifest(manifest)
        keyed = {_key_of(item.filename): item for item in found}
        return _Index(version, {key: item for key, item in keyed.items() if key}, *told)

    def _manifest(self, manifest: zipfile.ZipInfo) -> tuple[Mapping[str, str], list[Toolchain]]:
        """Digests by member, and what compiled them."""
        bounded(manifest.file_size, MAX_JSON, MANIFEST)
        with typed(f"member {MANIFEST}", "manifest"):
            read = parse_json(self._bytes(manifest))
            if read["format"] != _MANIFEST_FORMAT:
                raise CacheError(f"format {read['format']}, this fkjit reads {_MANIFEST_FORMAT}")
            toolchains = [Toolchain.from_dict(one) for one in read.get("toolchains", ())]
            return dict(read["members"]), toolchains

    def _open(self) -> BinaryIO:
        return os.fdopen(open_regular(self.path)[0], "rb")

    def keys(self) -> list[str]:
        """The keys its members' names claim. CacheError if it is no readable bundle."""
        try:
            with typed(f"{self.path}", "bundle"):
                return sorted(self._index().members)
        except FileNotFoundError as error:
            raise CacheError(f"{self.path} is not a readable bundle: no such file") from error

    def data(self, key: str) -> bytes | None:
        """The unverified bytes of one entry, None if it is not in. CacheError if unreadable."""
        try:
            with typed(f"{self.path}", "bundle"):
                index = self._index()
                member = index.members.get(key)
                return None if member is None else self._member(index, member)
        except FileNotFoundError:
            return None

    def toolchains(self) -> list[Toolchain]:
        """What compiled its entries: the manifest says, else each entry."""
        with typed(f"{self.path}", "bundle"):
            told = self._index().toolchains
        return gather(meta for meta, _, _ in self.metadata()) if told is None else told

    def _member(self, index: _Index, member: zipfile.ZipInfo) -> bytes:
        name = member.filename
        with typed(f"member {name}", "member"):
            data = self._bytes(member)
            if index.digests is not None:
                if name not in index.digests:
                    raise CacheError(f"is not in {MANIFEST}")
                if hashlib.sha256(data).hexdigest() != index.digests[name]:
                    raise CacheError(f"is not what {MANIFEST} says")
            return data

    def _bytes(self, member: zipfile.ZipInfo) -> bytes:
        """A member's bytes. Its sizes are claims, until here."""
        packed = member.compress_type != zipfile.ZIP_STORED  # someone packed it anew
        if member.flag_bits & 1 or (packed and member.compress_type != zipfile.ZIP_DEFLATED):
            raise CacheError("encrypted or oddly compressed")
        most = (_MAX_RATIO if packed else 1) * max(member.compress_size, 64)
        bounded(member.file_size, min(MAX_ENTRY, most), "it")
        with self._open() as file:  # own offset: threads and forked children read too
            if packed:
                with zipfile.ZipFile(_Bounded(file)) as archive:  # type: ignore[arg-type]
                    return archive.read(member)
            head = read_exactly(file.fileno(), _LOCAL_HEADER.size, member.header_offset)
            if len(head) < _LOCAL_HEADER.size or head[:4] != b"PK\3\4":
                raise CacheError("is not where it should be")
            _, name, extra = _LOCAL_HEADER.unpack(head)
            begin = member.header_offset + len(head) + name + extra
            return read_exactly(file.fileno(), member.file_size, begin)

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
        walk = os.walk(self.path)  # what cannot be entered is passed by
        paths = sorted(Path(folder, name) for folder, _, names in walk for name in names)
        return {key: path for path in paths if (key := _key_of(path.name))}

    def keys(self) -> list[str]:
        """The keys its files' names claim."""
        if not os.path.isdir(self.path):
            raise CacheError(f"{self.path} is not a readable bundle: no such file or directory")
        return sorted(self._files())

    def entry_path(self, key: str) -> Path | None:
        """The file that holds `key`."""
        return next((path for path in self._places(key) if os.path.exists(path)), None)

    def data(self, key: str) -> bytes | None:
        """The unverified bytes of one entry, wherever below the directory; None if not in."""
        trust.require(self.path)
        path = self._files().get(key)
        with typed(f"{path}"):
            return None if path is None else read_file(path, MAX_ENTRY)

    def read(self, key: str) -> Read | None:
        """The verified entry, None if it is not in. CacheError says what is wrong with it."""
        trust.require(self.path)
        for path in self._places(key):
            try:
                with typed(f"{path}"):
                    return read_entry(path, key)
            except FileNotFoundError:
                continue
        return None

    def metadata(self) -> Iterator[tuple[dict[str, Any], int, Path | None]]:
        """(metadata, image bytes, path) of every entry, without reading the images."""
        trust.require(self.path)
        for path in self._files().values():
            try:
                meta, size, _ = read_metadata(path)
            except (OSError, CacheError):
                continue
            yield meta, size, path

    def toolchains(self) -> list[Toolchain]:
        """What compiled its entries."""
        return gather(meta for meta, _, _ in self.metadata())


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
    if path.suffix == SUFFIX and not os.path.isdir(path):
        return SingleEntry(path)
    is_zip = path.suffix == BUNDLE_SUFFIX or os.path.isfile(path)
    return ZipBundle(path) if is_zip else FolderBundle(path)
