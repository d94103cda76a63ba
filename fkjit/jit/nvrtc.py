"""NVRTC through ctypes, and the process that runs it: `python -I -S nvrtc.py LIBRARY`.

This file runs by itself and imports the standard library alone: the process is there in 20 ms. It
takes programs from stdin and writes what became of them to stdout, each as its length and `marshal`
of a tuple, until stdin ends. While it compiles it cannot open a file, so a compile has read what it
was given, or it has failed and says which file it wanted.
"""

from __future__ import annotations

import _thread
import ctypes
import marshal
import os
import select
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from glob import escape, glob
from typing import Any, NamedTuple

READY = b"fkjit nvrtc\n"  # the first a process writes: the library is loaded
IDLE_SECONDS = 30  # then the process gives the compiler's memory back
_OPEN = 3  # descriptors of the process: stdin, stdout, stderr


class Program(NamedTuple):
    """What NVRTC is given."""

    source: str
    name: str
    headers: dict[str, str]  # by the name in `#include`
    options: tuple[str, ...]
    images: tuple[str, ...]  # "cubin", "ptx": what is wanted of it


class Made(NamedTuple):
    """What became of a program; `images` is empty when NVRTC refused it."""

    log: str
    images: dict[str, bytes]
    seconds: float


class Nvrtc:
    """One loaded library."""

    def __init__(self, library: str) -> None:
        """OSError if it cannot be loaded."""
        for builtins in glob(os.path.join(escape(os.path.dirname(library)), "*nvrtc-builtins.so*")):
            with suppress(OSError):  # which NVRTC looks for by name, wherever it may be
                ctypes.CDLL(builtins)
        self._library = ctypes.CDLL(library)

    def compile(self, program: Program) -> Made:
        """Compile one program. RuntimeError if NVRTC cannot even begin."""
        handle = ctypes.c_void_p()
        names, texts = _strings(program.headers), _strings(program.headers.values())
        self._call(
            "CreateProgram",
            ctypes.byref(handle),
            program.source.encode(),
            program.name.encode(),
            len(program.headers),
            texts,
            names,
        )
        try:
            begin = time.perf_counter()
            options = _strings(program.options)
            status = self._library.nvrtcCompileProgram(handle, len(program.options), options)
            seconds = time.perf_counter() - begin
            log = self._bytes(handle, "ProgramLog").rstrip(b"\0").decode("utf-8", "replace")
            if status:
                return Made(log or f"NVRTC error {status}", {}, seconds)
            images = {kind: self._bytes(handle, kind.upper()) for kind in program.images}
            return Made(log, images, seconds)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(handle))

    def _bytes(self, handle: Any, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", handle, ctypes.byref(size))
        room = ctypes.create_string_buffer(max(size.value, 1))
        self._call(f"Get{what}", handle, room)
        return room.raw[: size.value]

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, "nvrtc" + name)(*arguments)
        if status:
            raise RuntimeError(f"nvrtc{name}: error {status}")


def _strings(texts: Iterable[str]) -> Any:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * max(len(encoded), 1))(*encoded)


def _at_once(descriptor: int, event: int) -> None:
    """Reading and writing wait by themselves."""


Wait = Callable[[int, int], None]  # returns when the descriptor is ready for POLLIN or POLLOUT


def send(descriptor: int, message: tuple[Any, ...], wait: Wait = _at_once) -> None:
    """One message, whole. OSError when nobody reads."""
    data = marshal.dumps(message)
    view = memoryview(len(data).to_bytes(8, "little") + data)
    while view:
        wait(descriptor, select.POLLOUT)
        view = view[os.write(descriptor, view) :]


def receive(descriptor: int, wait: Wait = _at_once) -> tuple[Any, ...]:
    """The next message; EOFError when the other side has ended."""
    size = int.from_bytes(take(descriptor, 8, wait), "little")
    return marshal.loads(take(descriptor, size, wait))


def take(descriptor: int, size: int, wait: Wait = _at_once) -> bytes:
    """So many bytes; EOFError if they do not come."""
    data = bytearray()
    while len(data) < size:
        wait(descriptor, select.POLLIN)
        piece = os.read(descriptor, min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _serve(nvrtc: Nvrtc | None, library: str) -> None:
    """Programs in, results out; returns when none has come for a while. EOFError: stdin ended."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    while waiting.poll(IDLE_SECONDS * 1000 if nvrtc else None):
        program = Program(*receive(0))
        nvrtc = nvrtc or Nvrtc(library)
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN, hard))
        made = nvrtc.compile(program)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        send(1, tuple(made))


def _end_with_parent() -> None:
    """Even in the middle of a compile."""
    hangup = select.poll()
    hangup.register(0, 0)
    hangup.poll()
    os._exit(0)


def main() -> None:
    """The process. `again` as a second argument: it is there already, only its memory is new."""
    library, again = sys.argv[1], sys.argv[2:]
    _thread.start_new_thread(_end_with_parent, ())
    nvrtc = None if again else Nvrtc(library)
    if not again:
        os.write(1, READY)
    try:
        _serve(nvrtc, library)
    except (EOFError, BrokenPipeError):
        os._exit(0)
    os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, library, "again"])


if __name__ == "__main__":
    main()
