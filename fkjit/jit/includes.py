"""What a compile may read: the kernel's own headers, and files of the toolkit.

NVRTC gets every file in memory and can open none (`nvrtc.py`). The headers of ours and six of the
toolkit's are in the key. When NVRTC wants another, it stops and names it; a file of the toolkit is
given then, with what that includes, and its digest goes into the entry: a lookup compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from fkjit.errors import CompileError
from fkjit.jit.toolchain import header_dirs, toolkit_headers

# NVRTC writes the working directory into -lineinfo before a relative name, and the cubin would
# depend on it; so while it compiles, every name stands under this root.
ROOT = "/fkjit/"
_TOOLKIT = ROOT + "toolkit/"
_LARGEST = 16 << 20  # bytes of a header
_INCLUDE = re.compile(r'(?m)^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]')
_MISSING = re.compile(
    r'(?m)^(?:(?P<by>[^\n(]+)\(\d+\): )?.*(?:cannot|could not) open source file "(?P<name>[^"\n]+)"'
)
_OPERAND = re.compile(r"(?m)^[ \t]*#[ \t]*include\b[ \t]*(.*)$")
_PLAIN = re.compile(r'["<][^/\\]')
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', re.DOTALL)


class Includes:
    """The headers of one compile."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        """`headers`: the kernel's own, rooted."""
        self.given = dict(headers)
        self.read: dict[str, str] = {}  # further files of the toolkit: name in there -> digest
        self._place: dict[str, str] = {}  # name as included -> name in there
        for name, data in toolkit_headers().items():
            self.given.setdefault(name, _text(name, data))

    def add_missing(self, log: str) -> bool:
        """Give what NVRTC said it cannot open; False if there is no such file in the toolkit."""
        found = _MISSING.search(log)
        if not found or found["name"] in self.given:
            return False
        by = found["by"] or ""
        return self._add(found["name"], by[len(_TOOLKIT) :] if by.startswith(_TOOLKIT) else "")

    def _add(self, wanted: str, by: str) -> bool:
        """A file and, of the toolkit, all that it may include itself."""
        todo, first = [(wanted, by)], len(self.read)
        while todo:
            name, by = todo.pop()
            place = _find(name, by)
            if place is None or self._place.get(name) == place:
                continue
            if name in self.given:
                if name in self._place:
                    raise CompileError(
                        f"toolkit: {name!r} is {self._place[name]} in one header and {place} in "
                        f"{by}; NVRTC cannot be given both: include one of them by its full name",
                    )
                continue
            data = _read(place)
            if data is None:
                continue
            self.given[name], self._place[name] = _text(place, data), place
            self.read[place] = sha256(data).hexdigest()
            todo += [(found, place) for found in _INCLUDE.findall(self.given[name])]
        return len(self.read) > first


def unchanged(read: Mapping[str, str]) -> bool:
    """Whether this machine's toolkit has these files with these digests."""
    return all(sha256(_read(place) or b"").hexdigest() == was for place, was in read.items())


def check_plain(name: str, text: str) -> None:
    """CompileError for an #include in `text` that may reach any file, which only a process of its
    own keeps NVRTC from: an absolute path, or a name that is not written there."""
    plain = text.replace("%:", "#").replace("\\\n", "")
    for operand in _OPERAND.findall(_COMMENT.sub(lambda match: match[1] or " ", plain)):
        if not _PLAIN.match(operand):
            raise CompileError(
                f"{name}: #include {operand}: where no process can be started for NVRTC, an "
                "#include names its file in plain text, without a path"
            )


def _roots() -> Iterator[Path]:
    for folder in header_dirs():
        yield folder
        yield folder / "cccl"  # where CUDA 13 has CUB and libcu++


def _find(name: str, by: str) -> str | None:
    """The file of the toolkit that `name` is in the file `by`, by its name in there."""
    if name.startswith(("/", "\\")):
        return None
    folder = by.rpartition("/")[0]
    for candidate in (f"{folder}/{name}" if folder else name, name):
        parts: list[str] = []
        for part in candidate.split("/"):
            if part == "..":
                if not parts:
                    break
                parts.pop()
            elif part not in ("", "."):
                parts.append(part)
        else:
            if any((root / "/".join(parts)).is_file() for root in _roots()):
                return "/".join(parts)
    return None


def _read(place: str) -> bytes | None:
    for root in _roots():
        path = root / place
        try:
            if path.is_file() and path.stat().st_size <= _LARGEST:
                return path.read_bytes()
        except OSError:
            continue
    return None


def _text(place: str, data: bytes) -> str:
    return f'#line 1 "{_TOOLKIT}{place}"\n' + data.decode("utf-8", "replace")
