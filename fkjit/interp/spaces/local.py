"""Local memory: every thread's stack and spilled arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fkjit.interp.core.lanes import Group, Layout
from fkjit.interp.core.ptx import Instruction, Variable
from fkjit.interp.core.report import Reporter
from fkjit.interp.spaces.shared import INITIALISED
from fkjit.interp.spaces.views import aligned_bytes, typed_views

LOCAL_WINDOW = 1 << 45


class LocalMemory:
    """Every thread's stack and spilled arrays, `size` bytes each."""

    def __init__(
        self, variables: Sequence[Variable], layout: Layout, reporter: Reporter, checked: bool
    ) -> None:
        self.reporter, self.checked = reporter, checked
        self.offsets: dict[str, int] = {}
        top = 0
        for variable in variables:
            top = -(-top // variable.align) * variable.align
            self.offsets[variable.name] = top
            top += variable.size
        self.used = top
        self.size = -(-top // 16) * 16
        self.raw = aligned_bytes(layout.lanes * self.size)
        self.views = typed_views(self.raw)
        self.init = aligned_bytes(layout.lanes * self.size if checked else 0)
        self.init_views = typed_views(self.init)  # 1 for bytes written
        self.start = np.arange(layout.lanes, dtype=np.int64) * self.size

    def start_batch(self) -> None:
        """New threads: nothing is initialised."""
        if self.checked:
            self.init[:] = 0

    def written(self, position: np.ndarray, width: int) -> None:
        """Note that bytes have been written."""
        if self.checked:
            self.init_views[width][position >> (width.bit_length() - 1)] = INITIALISED[width]

    def check_initialised(
        self, position: np.ndarray, width: int, group: Group, ins: Instruction
    ) -> None:
        """Fault when the thread has written no byte of what it reads.

        Compilers fetch a struct whole to use some of its members.
        """
        if not self.checked:
            return
        found = self.init_views[width].take(position >> (width.bit_length() - 1))
        bad = np.flatnonzero(found == 0)
        if bad.size:
            at = int(position[bad[0]]) % self.size
            detail = (
                f"{width}-byte read at byte {at:,} of {self.used:,} bytes of local memory: the "
                "thread has not written there yet"
            )
            raise self.reporter.fault("uninitialised local read", detail, ins, group.lanes[bad])

    def index(
        self, offset: np.ndarray, width: int, group: Group, ins: Instruction, write: bool
    ) -> np.ndarray:
        """Positions of accesses at local offsets; raises SanitizerError outside the stack."""
        at = offset.astype(np.int64)
        bad = (at < 0) | (at > self.used - width)
        if bad.any():
            first = int(at[bad][0])
            kind = f"out-of-bounds local {'write' if write else 'read'}"
            detail = f"{width}-byte access at byte {first:,} of {self.used:,} bytes of local memory"
            raise self.reporter.fault(kind, detail, ins, group.lanes[bad])
        if width > 1 and (at & (width - 1)).any():
            bad = (at & (width - 1)) != 0
            detail = f"{width}-byte access at local byte {int(at[bad][0])}"
            raise self.reporter.fault("misaligned local access", detail, ins, group.lanes[bad])
        return at + (self.start if group.full else self.start[group.lanes])
