"""`with fkjit.sanitize():`: what is looked for in the kernels that run on the CPU inside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fkjit.arguments import shown
from fkjit.errors import DeviceError, ParameterError

if TYPE_CHECKING:
    from fkjit.interp import Checks
    from fkjit.interp.spaces.banks import BankLine


@dataclass
class Sanitizer:
    """What one `with fkjit.sanitize(…) as found:` looks for, and what it has counted so far."""

    mem: bool = True
    race: bool = True
    banks: bool | float = False  # a number: the most wavefronts for each ideal one
    _lines: list[BankLine] = field(default_factory=list, repr=False)
    indices: bool = False  # what is read as an index, on a GPU too
    short_sums: bool = False  # of e4m3 by wgmma

    def __post_init__(self) -> None:
        for name in ("mem", "race", "indices", "short_sums"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(
                    f"sanitize: {name}={shown(getattr(self, name))} is not True or False"
                )
        if self.race and not self.mem:
            raise ParameterError(
                "sanitize: mem=False with race=True: races are found only where memory is checked; "
                "pass race=False as well"
            )
        if not isinstance(self.banks, bool | int | float) or (self.banks and not self.banks >= 1):
            raise ParameterError(
                f"sanitize: banks={shown(self.banks)} is not True, False, or a number from 1 on "
                "(the most wavefronts for each ideal one)"
            )

    @property
    def checks(self) -> Checks:
        """The same for `interp.run`."""
        from fkjit.interp import Checks

        limit = None if isinstance(self.banks, bool) else float(self.banks) or None
        return Checks(self.mem, self.race, bool(self.banks), limit, self.short_sums)

    @property
    def reports(self) -> list[BankLine]:
        """Bank figures of the block so far, one for each kernel, template line and instruction.

        Each has `kernel`, `location`, `instruction`, `accesses` (by warps), `wavefronts`, `ideal`
        and `ratio`; the worst ratio comes first. Empty without `banks`.
        """
        merged: dict[tuple[str, str, str], BankLine] = {}
        for line in list(self._lines):
            key = (line.kernel, line.location, line.instruction)
            known = merged.get(key)
            merged[key] = (
                line
                if known is None
                else replace(
                    line,
                    accesses=known.accesses + line.accesses,
                    wavefronts=known.wavefronts + line.wavefronts,
                    ideal=known.ideal + line.ideal,
                )
            )
        return sorted(merged.values(), key=lambda line: -line.ratio)

    def note(self, lines: Iterable[BankLine]) -> None:
        """Take in the figures of a launch."""
        self._lines.extend(lines)


_active: ContextVar[Sanitizer | None] = ContextVar("fkjit.sanitize", default=None)
_OUTSIDE = Sanitizer(race=False)


def sanitize(
    *, mem: bool = True, race: bool = True, banks: bool | float = False, indices: bool = False,
    short_sums: bool = False,
) -> AbstractContextManager[Sanitizer]:  # fmt: skip
    """Choose what is checked when kernels run on the CPU, for the calls within a `with`.

    Args:
        mem: accesses out of bounds, misaligned, of uninitialised memory; barriers and warp-wide
            instructions that not all threads reach. On outside of any block, too.
        race: accesses to one byte, one of them a write, that nothing orders; missing waits.
        banks: count shared-memory wavefronts, for `.reports` of the block's value; a number makes
            more than so many times the ideal count a fault.
        indices: cu_seqlens of `fkjit.attention_varlen` are read, before each call, and have to be 0
            and rising, up to the rows there are: ParameterError. On a GPU as well, where it waits
            for the device, with mem=False, race=False.
        short_sums: products of e4m3 by wgmma (sm_90a) are added as Hopper's tensor cores add them,
            which keep 13 bits behind the leading one, to the bit; else in fp32. Ten times as slow.

    It holds for `fkjit.attention` and the like on CPU arrays, `fkjit.launch` and
    `fkjit.launch_cpu`, in this thread and in the asyncio tasks started inside; an inner block
    replaces an outer one. mem=False, race=False is the fastest way to run.

    Raises ParameterError for other values. Inside, SanitizerError at a fault (the call's arrays are
    as they were before it), DeviceError for arrays on a GPU.

    Example:
        >>> with fkjit.sanitize(banks=True) as found:
        ...     y = fkjit.reduce_sum(np.ones((4, 64), np.float32), axis=-1)
        >>> [line for line in found.reports if line.ratio > 1]
        []
    """
    return _within(Sanitizer(mem, race, banks, indices=indices, short_sums=short_sums))


@contextmanager
def _within(chosen: Sanitizer) -> Iterator[Sanitizer]:
    token = _active.set(chosen)
    try:
        yield chosen
    finally:
        _active.reset(token)


def current() -> Sanitizer | None:
    """The innermost block's, or None outside."""
    return _active.get()


def looks_at_indices() -> bool:
    """Whether the innermost block asks for it."""
    chosen = _active.get()
    return chosen is not None and chosen.indices


def in_force() -> Sanitizer:
    """The innermost block's; outside, memory checks alone."""
    return _active.get() or _OUTSIDE


def refuse_gpu(call: str) -> None:
    """DeviceError for a launch on a GPU inside a block, where nothing would be checked."""
    chosen = _active.get()
    if chosen is not None and (chosen.mem or chosen.race or chosen.banks):
        raise DeviceError(
            f"{call}: the arrays are on a GPU, where fkjit.sanitize checks nothing; pass CPU "
            "arrays of a small problem (q.cpu(), cupy.asnumpy(q)), or leave the block "
            "(compute-sanitizer checks kernels on the GPU)"
        )
