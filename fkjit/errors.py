"""Every exception fkjit raises on purpose: a `FkjitError`, and the built-in that it is.

Catch `FkjitError` for anything of ours, or the built-in (`ValueError`, `TypeError`, `RuntimeError`)
as with any Python library. A message names the call, the parameter, the value offered, what is
allowed, and the fix.
"""

from __future__ import annotations

from collections.abc import Iterable

from fkjit.terminal import printable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What a message says after a word that is not known: "; did you mean flash or fla?", or "".

    `known` in the order of preference: of names that are as near, the first comes first.
    """
    from difflib import SequenceMatcher  # only a message needs it

    def near(name: str) -> float:
        given, there = word.lower(), name.lower()
        same = SequenceMatcher(None, given, there).ratio()
        whole = min(len(given), len(there)) >= 3 and (there.startswith(given) or given in there)
        return max(same, 0.75 if whole else 0.0)

    names = sorted(dict.fromkeys(known), key=lambda name: -near(name))
    found = [name for name in names if near(name) >= 0.7][:3]
    return f"; did you mean {' or '.join(found)}?" if found else ""


class FkjitError(Exception):
    """Base of every error fkjit raises. Its text has no control characters, whatever names a file
    or a caller put into it: a traceback goes to a terminal."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ParameterError(FkjitError, ValueError):
    """A value that no kernel accepts: a shape, a tile, a flag, a setting."""


class ArgumentTypeError(FkjitError, TypeError):
    """An argument of the wrong kind: an integer tensor, a list, arrays of two frameworks."""


class UnknownSequenceError(ParameterError):
    """A sequence that a paged KV cache does not hold: never allocated, or freed already."""


class SequenceTooLongError(ParameterError):
    """More tokens than a sequence of a paged KV cache may have, or than were reserved for it."""


class PoolExhaustedError(FkjitError, RuntimeError):
    """Too few free pages, or no room for another sequence; the cache is as it was before.

    `needed` and `free` are counts of pages (or of sequences).
    """

    def __init__(self, message: str, needed: int, free: int) -> None:
        super().__init__(message)
        self.needed, self.free = needed, free


class RenderError(FkjitError, RuntimeError):
    """A template could not be rendered; the message names the template's own file and line, and so
    does `location`: "kernels_cu/attention/flash.cu:120", "" where there is none."""

    def __init__(self, message: str, location: str = "") -> None:
        super().__init__(message)
        self.location = location


class CompileError(FkjitError, RuntimeError):
    """NVRTC refused the source, or warned of something that makes the kernel slow (see `log`)."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class CompilerStoppedError(FkjitError, RuntimeError):
    """NVRTC did not come to an end with a kernel: its process crashed or was killed, or it took
    longer than `fkjit.compile_timeout` allows. The next call tries again."""


class ToolchainError(FkjitError, RuntimeError):
    """NVRTC, CuPy, CUDA headers and driver do not fit together; the message says what mends it."""


class CacheError(FkjitError, RuntimeError):
    """A cache operation the user asked for by name failed (ordinary cache I/O never raises)."""


class NotCachedError(CacheError):
    """`FKJIT_REQUIRE_CACHED=1` and the kernel is in no cache layer."""


class CaptureError(FkjitError, RuntimeError):
    """A compile or a module load was needed while the stream was being captured into a graph."""


class TuningError(FkjitError, RuntimeError):
    """A file of tuned values that cannot be read or written."""


class DeviceError(FkjitError, RuntimeError):
    """No usable GPU, or arrays on different devices."""


class LaunchError(FkjitError, RuntimeError):
    """The driver refused a launch."""


class InterpreterError(FkjitError, RuntimeError):
    """The CPU interpreter met PTX it does not know, or work that would take too long."""


class SanitizerError(FkjitError, RuntimeError):
    """The CPU interpreter found a memory or synchronisation fault; the message is the report.

    The same as fields, "" or None where a fault has none: `kind` ("out-of-bounds shared read",
    "race", …), `kernel` (the launch's title), `location` ("kernels_cu/attention/flash.cu:120"),
    `other` (that of a race's other access), `block` and `thread` (coordinates), `hint`, `ptx_lines`
    (where the instructions of these places stand in the PTX that ran, from 1).
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "",
        kernel: str = "",
        location: str = "",
        other: str = "",
        block: tuple[int, int, int] | None = None,
        thread: tuple[int, int, int] | None = None,
        hint: str = "",
        ptx_lines: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.kind, self.kernel, self.hint = kind, kernel, hint
        self.location, self.other = location, other
        self.block, self.thread = block, thread
        self.ptx_lines = ptx_lines
