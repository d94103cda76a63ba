"""Shared memory of every block of the batch, and the local memory of every thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fkjit.interp.core.lanes import Group, Layout
from fkjit.interp.core.names import source_name
from fkjit.interp.core.ptx import Instruction, Variable
from fkjit.interp.core.report import Reporter
from fkjit.interp.spaces.views import VIEWS, aligned_bytes, typed_views

SHARED_WINDOW = 1 << 44  # generic address of shared offset 0
OWN_BLOCK_BITS = 24
OWN_BLOCK = 1 << OWN_BLOCK_BITS  # offsets from here on are of other blocks (see `memory.cluster`)
FIRST_OFFSET = 1024  # offset of the first shared variable: 0 is nobody's
RED_ZONE = 64
INITIALISED = {width: np.full(width, 1, np.uint8).view(VIEWS[width])[0] for width in VIEWS}
PENDING = 2  # in `init`: a cp.async is under way
BULK_PENDING = 3  # a bulk copy (TMA), st.async or red.async is under way
MBARRIER = 4  # the bytes of an mbarrier
IN_FLIGHT = {width: np.full(width, PENDING, np.uint8).view(VIEWS[width])[0] for width in VIEWS}
BULK_IN_FLIGHT = {w: np.full(w, BULK_PENDING, np.uint8).view(VIEWS[w])[0] for w in VIEWS}
_UNREADABLE = "uninitialised shared read"
_NOT_READABLE = {
    0: "nothing was written there yet",
    PENDING: "a cp.async to it is in flight "
    "(wait_group, then a barrier, must stand before the read)",
    BULK_PENDING: "an asynchronous copy to it is in flight "
    "(a wait for its mbarrier must stand before the read)",
    MBARRIER: "an mbarrier is there, which only mbarrier instructions may access",
}


@dataclass(frozen=True)
class CarveOut:
    """One array within dynamic shared memory: bytes from its first byte on."""

    name: str
    offset: int
    size: int


class SharedMemory:
    """`index` turns shared offsets into positions in `views`; `init` has a 1 for bytes written.

    Static variables stand apart by red zones; all dynamic arrays begin at one place, as in CUDA,
    and may be divided into carve-outs.
    """

    def __init__(
        self, variables: Sequence[Variable], dynamic: int, layout: Layout, reporter: Reporter,
        checked: bool, carve_outs: Sequence[CarveOut] = (),
    ) -> None:  # fmt: skip
        self.reporter, self.checked = reporter, checked
        self.offsets: dict[str, int] = {}
        self.places: list[tuple[int, int, str]] = []  # first offset, end, name
        top = self._place_static([v for v in variables if not v.external])
        dynamic_names = [v.name for v in variables if v.external]
        top = -(-top // 1024) * 1024
        for name in dynamic_names:
            self.offsets[name] = top
        if dynamic_names and dynamic:
            whole = (CarveOut(source_name(dynamic_names[0]), 0, dynamic),)
            for part in carve_outs or whole:
                first = top + part.offset
                self.places.append((first, first + part.size, f"{part.name} (dynamic shared"))
        self.dynamic_start = top
        self.size = -(-(top + dynamic + RED_ZONE) // 256) * 256
        self.raw = aligned_bytes(layout.ctas * self.size)
        self.init = aligned_bytes(layout.ctas * self.size)
        self.views, self.init_views = typed_views(self.raw), typed_views(self.init)
        self.start = (layout.cta * self.size).astype(np.int64)  # of every lane's block
        self._last = (0, 0)

    def _place_static(self, variables: list[Variable]) -> int:
        top = FIRST_OFFSET
        for variable in variables:
            top = -(-top // variable.align) * variable.align
            self.offsets[variable.name] = top
            name = f"{source_name(variable.name)} (static shared"
            self.places.append((top, top + variable.size, name))
            top += variable.size + RED_ZONE
        return top

    def start_batch(self) -> None:
        """New blocks: nothing is initialised."""
        self.raw[:] = 0xA5
        self.init[:] = 0

    def index(
        self, offset: np.ndarray, width: int, group: Group, ins: Instruction, write: bool,
        lanes: np.ndarray | None = None, start: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Positions of `width`-byte accesses; a read must be of initialised bytes.

        `lanes`: whose access each element is (default: the group's lanes). `start`: position of
        offset 0 of the block that each accesses (default: its own).
        """
        if start is None and lanes is None:
            start = self.start if group.full else self.start[group.lanes]
        elif start is None:
            start = self.start[lanes]
        at = offset.astype(np.int64)
        position = at + start
        if not self.checked:
            return position
        low, high = int(at.min()), int(at.max()) + width
        if not (self._last[0] <= low and high <= self._last[1]):
            self._find(at, low, high, width, group, ins, write, lanes)
        if width > 1 and int(np.bitwise_or.reduce(at)) & (width - 1):
            bad = np.flatnonzero(at & (width - 1))
            detail = f"{width}-byte access at {self.describe(int(at[bad[0]]))}"
            raise self._fault("misaligned shared access", detail, ins, group, lanes, bad)
        return position

    def within(self, low: int, end: int) -> bool:
        """Whether all of the offsets low … end-1 belong to one variable."""
        if self._last[0] <= low and end <= self._last[1]:
            return True
        for first, last, _ in self.places:
            if first <= low and end <= last:
                self._last = (first, last)
                return True
        return not self.checked

    def check_initialised(
        self, position: np.ndarray, width: int, group: Group, ins: Instruction,
        lanes: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Fault unless every byte of the reads has been written (and has arrived)."""
        if not self.checked:
            return
        done = (
            self.init_views[width].take(position >> (width.bit_length() - 1)) == INITIALISED[width]
        )
        if not done.all():
            bad = np.flatnonzero(~done)
            at = int(position[bad[0]])
            state = next(int(byte) for byte in self.init[at : at + width] if byte != 1)
            detail = f"{width}-byte read at {self.describe(at % self.size)}: {_NOT_READABLE[state]}"
            kind = "plain access to an mbarrier" if state == MBARRIER else _UNREADABLE
            raise self._fault(kind, detail, ins, group, lanes, bad)

    def written(self, position: np.ndarray, width: int) -> None:
        """Note that bytes have been written."""
        if self.checked:
            self.init_views[width][position >> (width.bit_length() - 1)] = INITIALISED[width]

    def in_flight(self, position: np.ndarray, width: int) -> None:
        """Note that an asynchronous copy to these bytes has begun."""
        if self.checked:
            self.init_views[width][position >> (width.bit_length() - 1)] = IN_FLIGHT[width]

    def bulk_in_flight(self, position: np.ndarray, width: int) -> None:
        """Note that a bulk copy to these bytes has begun."""
        if self.checked:
            self.init_views[width][position >> (width.bit_length() - 1)] = BULK_IN_FLIGHT[width]

    def _find(
        self, at: np.ndarray, low: int, high: int, width: int, group: Group, ins: Instruction,
        write: bool, lanes: np.ndarray | None,
    ) -> None:  # fmt: skip
        """Remember the variable that holds all accesses, or look at each of them."""
        if self.within(low, high):
            return
        good = np.zeros(at.size, bool)
        for first, end, _ in self.places:
            good |= (at >= first) & (at + width <= end)
        if not good.all():
            bad = np.flatnonzero(~good)
            kind = f"out-of-bounds shared {'write' if write else 'read'}"
            detail = f"{width}-byte access at {self.describe(int(at[bad[0]]))}"
            raise self._fault(kind, detail, ins, group, lanes, bad)

    def describe(self, at: int) -> str:
        """Where an offset lies, in words."""
        if not self.places:
            return f"shared offset {at - FIRST_OFFSET}, and the block has no shared memory"
        first, end, name = min(self.places, key=lambda p: max(p[0] - at, at - p[1] + 1, 0))
        return f"byte {at - first:,} of {name}, {end - first:,} bytes)"

    def _fault(
        self, kind: str, detail: str, ins: Instruction, group: Group,
        lanes: np.ndarray | None, bad: np.ndarray,
    ) -> Exception:  # fmt: skip
        who = group.lanes if lanes is None else lanes
        return self.reporter.fault(kind, detail, ins, who[bad])
