"""Lanes: one per thread of a batch of blocks, padded to whole warps; and groups of lanes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

WARP = 32


def distinct(values: np.ndarray) -> np.ndarray:
    """np.unique, several times as fast for arrays of a few thousand."""
    ordered = np.sort(values, axis=None)
    new = np.ones(ordered.size, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    return ordered[new]


@dataclass
class Layout:
    """Which lane is which thread. Lane = cta * padded threads of a block + thread number."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    ctas: int  # blocks that run together
    cluster: tuple[int, int, int] = (1, 1, 1)  # blocks of a cluster
    first_cta: int = 0
    threads: int = field(init=False)  # of a block
    padded: int = field(init=False)  # threads of a block, up to whole warps
    lanes: int = field(init=False)
    cta: np.ndarray = field(init=False)  # block within the batch, of every lane
    thread: np.ndarray = field(init=False)  # linear thread number, of every lane

    def __post_init__(self) -> None:
        self.threads = self.block[0] * self.block[1] * self.block[2]
        self.padded = -(-self.threads // WARP) * WARP
        self.lanes = self.ctas * self.padded
        number = np.arange(self.lanes)
        self.cta, self.thread = number // self.padded, number % self.padded

    def fits(self, ctas: int) -> bool:
        """Whether a machine of this layout does well where `ctas` blocks a batch are best."""
        return ctas <= 2 * self.ctas and self.ctas <= 4 * ctas

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def live(self) -> np.ndarray:
        """The lanes that stand for a thread of a block of the grid."""
        return (self.thread < self.threads) & (self.cta + self.first_cta < self.blocks)

    @property
    def rank(self) -> np.ndarray:
        """The rank in its cluster of every lane's block."""
        return self.cta % math.prod(self.cluster)

    def coordinates(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """blockIdx of blocks by number: those of a cluster follow each other."""
        together = math.prod(self.cluster)
        clusters = tuple(g // c for g, c in zip(self.grid, self.cluster, strict=True))
        outer, inner = (
            _unravel(number // together, clusters),
            _unravel(number % together, self.cluster),
        )
        x, y, z = (o * c + i for o, c, i in zip(outer, self.cluster, inner, strict=True))
        return x, y, z

    def block_of(self, lane: int) -> tuple[int, int, int]:
        """blockIdx of a lane."""
        x, y, z = self.coordinates(self.cta[lane : lane + 1] + self.first_cta)
        return int(x[0]), int(y[0]), int(z[0])

    def thread_of(self, lane: int) -> tuple[int, int, int]:
        """threadIdx of a lane."""
        x, y, z = _unravel(self.thread[lane : lane + 1], self.block)
        return int(x[0]), int(y[0]), int(z[0])


def _unravel(
    number: np.ndarray, extent: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, y, _ = extent
    return number % x, number // x % y, number // (x * y)


class Group:
    """The lanes that execute an instruction together.

    `mask` is exact. `write` is the mask arithmetic must obey, or None when every other lane is dead
    and may hold anything. `full` says that every lane there is takes part.
    """

    __slots__ = ("_lanes", "full", "mask", "write")

    def __init__(self, mask: np.ndarray, alive: int) -> None:
        count = int(np.count_nonzero(mask))
        self.mask = mask
        self.full = count == mask.size
        self.write = None if count == alive else mask
        self._lanes: np.ndarray | None = None

    @property
    def lanes(self) -> np.ndarray:
        """The numbers of the lanes, ascending."""
        if self._lanes is None:
            self._lanes = np.flatnonzero(self.mask)
        return self._lanes

    def guarded(self, predicate: np.ndarray) -> Group | None:
        """The lanes whose predicate holds, or None if there are none."""
        if predicate.size == 1:
            return self if predicate[0] else None
        mask = self.mask & predicate
        count = int(np.count_nonzero(mask))
        if count == 0:
            return None
        if self.full and count == mask.size:
            return self
        group = Group(mask, -1)
        return group

    def pick(self, values: np.ndarray) -> np.ndarray:
        """The values of the group's lanes; a constant (one element) is repeated."""
        if values.size == 1:
            return np.broadcast_to(values, (self.mask.size if self.full else self.lanes.size,))
        return values if self.full else values[self.lanes]

    def put(self, register: np.ndarray, values: np.ndarray) -> None:
        """Store one value a lane, in the order of `lanes`."""
        if self.full:
            register[...] = values
        else:
            register[self.lanes] = values
