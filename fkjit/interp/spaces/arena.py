"""Global memory: the caller's arrays copied into one arena, each with a range of addresses of its
own, so that an address past one argument can never be a valid byte of another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fkjit.interp.core.lanes import Group, distinct
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.core.report import Reporter
from fkjit.interp.spaces.tensor_map import TensorMap
from fkjit.interp.spaces.views import aligned_bytes, typed_views

GLOBAL_WINDOW = 1 << 48  # addresses below are no global memory
SPACING_BITS = 36  # every allocation is the middle of 64 GiB of addresses of its own
RED_ZONE = 256  # arena bytes between allocations


@dataclass
class Allocation:
    """One array's place: `size` bytes from `address` on, some of which may be no element's."""

    name: str
    start: int  # arena offset of address `address`
    size: int
    address: int
    writable: bool
    holes: np.ndarray | None = None  # bool a byte: True where the byte is valid
    shape: str = ""
    strides: tuple[int, ...] = ()  # of a C-contiguous array, in bytes

    def describe(self, at: int) -> str:
        """Where byte `at` (from the first byte) lies, in words."""
        what = f"byte {at:,} of {self.name} ({self.size:,} bytes{self.shape}){self._element(at)}"
        if at >= self.size:
            return f"{what}: {at - self.size:,} bytes past its end"
        return f"{what}: before its first byte" if at < 0 else what

    def _element(self, at: int) -> str:
        """The element as an index, whose first number may be beyond the shape: "= q[2, 0, 5]"."""
        index = []
        for stride in self.strides:
            number, at = divmod(at, stride)
            index.append(str(number))
        return f" = {self.name}[{', '.join(index)}]" if index else ""


@dataclass(frozen=True)
class BoundMap:
    """A tensor map of a launch: the array's place, and its first element's byte in the arena."""

    map: TensorMap
    place: Allocation
    start: int


class GlobalMemory:
    """The arena. `index` turns addresses into arena offsets and checks them."""

    def __init__(self, reporter: Reporter, checked: bool) -> None:
        self.reporter = reporter
        self.checked = checked
        self.allocations: list[Allocation] = []
        self.raw = aligned_bytes(0)
        self.views: dict[int, np.ndarray] = {}
        self.tensor_maps: list[BoundMap] = []  # of the launch, see `tensor_map.handle`
        self._parts: list[tuple[int, np.ndarray]] = []
        self._top = RED_ZONE

    def add(self, name: str, data: np.ndarray, writable: bool, misaligned: int = 0) -> Allocation:
        """A place for the bytes `data`, `misaligned` bytes after a multiple of 256."""
        start = -(-self._top // 256) * 256 + misaligned
        window = GLOBAL_WINDOW + (len(self.allocations) << SPACING_BITS)
        address = window + (1 << SPACING_BITS - 1) + misaligned
        self._parts.append((start, data))
        self._top = start + data.size + RED_ZONE
        self.allocations.append(Allocation(name, start, data.size, address, writable))
        return self.allocations[-1]

    def build(self) -> None:
        """Make the arena and copy everything in; after the last `add`."""
        self.raw = aligned_bytes(self._top, 0xA5)
        for start, data in self._parts:
            self.raw[start : start + data.size] = data
        self._parts.clear()
        self.views = typed_views(self.raw)

    def contents(self, place: Allocation) -> np.ndarray:
        """The bytes of an allocation as they are now."""
        return self.raw[place.start : place.start + place.size]

    def place_of(self, low: int, end: int, write: bool) -> Allocation | None:
        """The array that holds all addresses low … end-1, if it has no holes and permits it."""
        number = (low - GLOBAL_WINDOW) >> SPACING_BITS
        if not 0 <= number < len(self.allocations):
            return None
        place = self.allocations[number]
        inside = place.address <= low and end <= place.address + place.size
        allowed = place.holes is None and (place.writable or not write)
        return place if inside and allowed else None

    def index(
        self, address: np.ndarray, width: int, group: Group, ins: Instruction, write: bool
    ) -> np.ndarray:
        """Arena offsets of `width`-byte accesses at u64 addresses; raises SanitizerError."""
        place = self.place_of(int(address.min()), int(address.max()) + width, write)
        if place is not None:
            if width > 1 and int(np.bitwise_or.reduce(address)) & (width - 1):
                self._misaligned(address, width, group, ins)
            return (address - np.uint64(place.address - place.start)).view(np.int64)
        return self._slow_index(address, width, group, ins, write)

    def _slow_index(
        self, address: np.ndarray, width: int, group: Group, ins: Instruction, write: bool
    ) -> np.ndarray:
        """Lanes in several allocations, or something is wrong: look at each allocation's lanes."""
        numbers = (address >> np.uint64(SPACING_BITS)).view(np.int64) - (
            GLOBAL_WINDOW >> SPACING_BITS
        )
        offsets = np.zeros(address.size, np.int64)
        bad = np.zeros(address.size, bool)
        for number in distinct(numbers).tolist():
            mine = numbers == number
            if not 0 <= number < len(self.allocations):
                bad |= mine
                continue
            place = self.allocations[number]
            at = address[mine].view(np.int64) - place.address
            wrong = (at < 0) | (at > place.size - width)
            if write and not place.writable:
                wrong[:] = True
            elif place.holes is not None:
                wrong |= in_hole(place.holes, at, width)
            offsets[mine] = np.where(wrong, 0, at + place.start)
            bad[mine] = wrong
        if self.checked and bad.any():
            self._bad(address, bad, width, group, ins, write)
        if width > 1 and int(np.bitwise_or.reduce(address)) & (width - 1):
            self._misaligned(address, width, group, ins)
        return offsets & ~np.int64(width - 1)

    def _bad(
        self, address: np.ndarray, bad: np.ndarray, width: int, group: Group,
        ins: Instruction, write: bool,
    ) -> None:  # fmt: skip
        first = int(np.flatnonzero(bad)[0])
        value = int(address[first])
        lanes = group.lanes[bad] if bad.size == group.lanes.size else group.lanes[:1]
        number = (value - GLOBAL_WINDOW) >> SPACING_BITS
        access = f"{width}-byte {'write' if write else 'read'}"
        if not 0 <= number < len(self.allocations):
            detail = f"{access} at address {value:#x}, which belongs to no argument"
            raise self.reporter.fault("invalid global address", detail, ins, lanes)
        place = self.allocations[number]
        at = value - place.address
        kind = f"out-of-bounds global {'write' if write else 'read'}"
        detail = f"{access} at {place.describe(at)}"
        if 0 <= at <= place.size - width:
            if write and not place.writable:
                kind = "write to a read-only argument"
            else:
                detail += ": between the elements of the view"
        raise self.reporter.fault(kind, detail, ins, lanes)

    def _misaligned(self, address: np.ndarray, width: int, group: Group, ins: Instruction) -> None:
        if not self.checked:
            return
        bad = (address & np.uint64(width - 1)) != 0
        value = int(address[bad][0])
        number = (value - GLOBAL_WINDOW) >> SPACING_BITS
        place = self.allocations[number]
        detail = f"{width}-byte access at {place.describe(value - place.address)}"
        raise self.reporter.fault(
            "misaligned global access",
            f"{detail}: not a multiple of {width}",
            ins,
            group.lanes[bad] if bad.size == group.lanes.size else group.lanes[:1],
        )


def in_hole(valid: np.ndarray, at: np.ndarray, width: int) -> np.ndarray:
    """Whether any byte of each access is not one of the view's own."""
    safe = np.clip(at, 0, valid.size - width)
    bad = ~valid[safe]
    for byte in range(1, width):
        bad |= ~valid[safe + byte]
    return bad
