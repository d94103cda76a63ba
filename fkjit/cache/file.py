"""One cache entry as bytes: the key, the `.fkc` format, its verification and its atomic write.

    offset  size  what
         0     6  magic "FKJIT\\0"
         6     2  format version, little endian
         8    32  SHA-256 of everything that follows
        40     4  length of the metadata in bytes
        44     8  length of the image in bytes
        52        metadata (JSON, UTF-8), then the image (cubin or PTX)

The metadata holds the key and the fields it was made of, so an entry under another's name shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fkjit.cache import trust
from fkjit.cache.untrusted import (
    MAX_ENTRY,
    MAX_JSON,
    bounded,
    open_regular,
    parse_json,
    read_exactly,
)
from fkjit.errors import CacheError, ParameterError

MAGIC = b"FKJIT\0"
VERSION = 1
SUFFIX = ".fkc"
TEMPORARY = ".tmp"
_HEAD = struct.Struct("<6sH32sIQ")
_SUMMED_FROM = 40
_SHORT = 2000  # characters; a longer text field is stored as its digest
_DIGESTS = ("text:", "bytes:")
_KINDS: dict[
    str, type | tuple[type, ...]
] = {  # of what listings and loaders look at, where it is there
    **dict.fromkeys(("describe", "kernel", "label", "target", "kind", "entry", "nvrtc"), str),
    **dict.fromkeys(("arguments", "problems"), list),
    "params": dict,
    "resources": (dict, type(None)),
    "created": (int, float),
}
_LATEST = 1e11  # seconds since the epoch


class Read(NamedTuple):
    """A verified entry: metadata, image, and what the file system says of its file."""

    meta: dict[str, Any]
    image: bytes
    status: os.stat_result | None = None


def stored_fields(fields: Mapping[str, str | bytes]) -> dict[str, str]:
    """The fields as an entry keeps them: short texts as they are, the rest as SHA-256 digests."""
    stored = {}
    for name, value in sorted(fields.items()):
        if not isinstance(value, str | bytes):
            kind = type(value).__name__
            raise ParameterError(f"cache key: field {name}={value!r} is {kind}, not str or bytes")
        if isinstance(value, str) and len(value) <= _SHORT and not value.startswith(_DIGESTS):
            stored[name] = value
            continue
        data = value.encode() if isinstance(value, str) else value
        kind = "text" if isinstance(value, str) else "bytes"
        stored[name] = f"{kind}:{hashlib.sha256(data).hexdigest()}:{len(data)}"
    return stored


def cache_key(stored: Mapping[str, str]) -> str:
    """64 hex digits: SHA-256 over the length-prefixed names and values of `stored_fields()`."""
    digest = hashlib.sha256()
    for name in sorted(stored):
        for part in (name.encode(), stored[name].encode()):
            digest.update(struct.pack("<Q", len(part)))
            digest.update(part)
    return digest.hexdigest()


def encode(meta: Mapping[str, Any], image: bytes) -> bytes:
    """The bytes of an entry; `meta` must hold "key" and "fields" (see `stored_fields`)."""
    try:
        text = json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise CacheError(
            f"cache: metadata of {meta.get('describe')} is not JSON: {error}"
        ) from error
    head = _HEAD.pack(MAGIC, VERSION, bytes(32), len(text), len(image))
    summed = head[_SUMMED_FROM:] + text + image
    return head[:8] + hashlib.sha256(summed).digest() + summed


def _lengths(head: bytes, size: int) -> tuple[int, int, bytes]:
    """Metadata length, image length and checksum out of the first 52 bytes of `size` in all."""
    if len(head) < _HEAD.size:
        raise CacheError(f"truncated: {size} bytes, the header alone has {_HEAD.size}")
    magic, version, checksum, meta_length, image_length = _HEAD.unpack(head[: _HEAD.size])
    if magic != MAGIC:
        raise CacheError(f"not a cache entry: magic {magic!r}")
    if version != VERSION:
        raise CacheError(f"format version {version}, this fkjit reads {VERSION}")
    bounded(size, MAX_ENTRY, "the entry")
    bounded(meta_length, MAX_JSON, "its metadata")
    expected = _HEAD.size + meta_length + image_length
    if expected != size:
        raise CacheError(f"{size} bytes where its header says {expected}")
    return meta_length, image_length, checksum


def _metadata(text: bytes) -> dict[str, Any]:
    try:
        meta = parse_json(text)
        if cache_key(meta["fields"]) != meta["key"]:
            raise CacheError("its key is not that of its fields")
        for name, kind in _KINDS.items():
            if name in meta and not isinstance(meta[name], kind):
                raise CacheError(f"its {name} is a {type(meta[name]).__name__}")
        if not abs(meta.get("created", 0)) < _LATEST:
            raise CacheError(f"created at {meta['created']}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"unreadable metadata ({type(error).__name__}: {error})") from error
    return meta


def decode(data: bytes, key: str | None = None) -> Read:
    """Verify and split an entry; CacheError says what is wrong. `key`: the entry it has to be."""
    meta_length, _, checksum = _lengths(data[: _HEAD.size], len(data))
    if hashlib.sha256(memoryview(data)[_SUMMED_FROM:]).digest() != checksum:
        raise CacheError("checksum mismatch")
    meta = _metadata(data[_HEAD.size : _HEAD.size + meta_length])
    if key is not None and meta["key"] != key:
        raise CacheError(f"holds entry {meta['key'][:12]}, not {key[:12]}")
    return Read(meta, data[_HEAD.size + meta_length :])


def read_entry(path: Path, key: str | None = None) -> Read:
    """Read and verify one file: OSError if it cannot be read, CacheError if it is no such entry,
    or if others than its reader and root can write it."""
    descriptor, status = open_regular(path)
    try:
        head = read_exactly(descriptor, _HEAD.size)
        _lengths(head, status.st_size)  # before reading gigabytes of something else
        data = read_exactly(descriptor, status.st_size)
    finally:
        os.close(descriptor)
    return decode(data, key)._replace(status=status)


def read_metadata(path: Path) -> tuple[dict[str, Any], int, os.stat_result]:
    """(metadata, image bytes, status) without reading the image, so without its checksum."""
    descriptor, status = open_regular(path)
    try:
        head = read_exactly(descriptor, _HEAD.size)
        meta_length, image_length, _ = _lengths(head, status.st_size)
        meta = _metadata(read_exactly(descriptor, meta_length, _HEAD.size))
        return meta, image_length, status
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """`os.write` until everything is out: a short write is not an error by itself."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@contextmanager
def atomic_file(path: Path, mode: int | None = trust.FILE_MODE) -> Iterator[int]:
    """A descriptor to write to: a file beside `path`, fsynced and renamed over it at the end.

    A reader sees the old file or all of the new. OSError leaves `path` as it was. A killed writer
    leaves a `.tmp` file, which is swept later. The file is 0600 whatever the umask; with `mode`
    None it is what the umask leaves of 0644, for a file to hand on.
    """
    trust.make_folders(path.parent)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode or 0o644)
        try:
            if mode is not None:
                os.chmod(temporary, mode)
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    with suppress(OSError):  # the rename itself; not every file system can
        _sync_folder(path.parent)


@contextmanager
def nameless_file(path: Path) -> Iterator[int]:
    """As `atomic_file`, for a file to hand on, in a folder that nobody sweeps: what a killed writer
    leaves has no name and takes no room, where the system can do that."""
    trust.make_folders(path.parent)
    try:
        descriptor = os.open(path.parent, os.O_RDWR | os.O_TMPFILE, 0o644)
    except (OSError, AttributeError):
        with atomic_file(path, None) as descriptor:
            yield descriptor
        return
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        yield descriptor
        os.fsync(descriptor)
        source = (
            f"/proc/self/fd/{descriptor}"  # a link to follow, which `src_dir_fd` makes linkat do
        )
        os.link(source, temporary, src_dir_fd=descriptor, follow_symlinks=True)
        os.replace(temporary, path)
    finally:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(temporary)


def write_atomically(path: Path, data: bytes) -> None:
    """The whole of a file at once, see `atomic_file`."""
    with atomic_file(path) as descriptor:
        write_all(descriptor, data)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
