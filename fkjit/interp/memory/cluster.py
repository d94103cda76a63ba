"""Blocks of a cluster and the window shared::cluster through which they see each other's memory.

An address of the window is a shared offset with the block's rank plus one from bit 24 on; without
one (0 there) it means the block that uses it, so that every shared::cta address is one too.
"""

from __future__ import annotations

import math

import numpy as np

from fkjit.interp.core.lanes import Group, distinct
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.race.endings import Endings
from fkjit.interp.race.finder import race_of
from fkjit.interp.spaces.shared import OWN_BLOCK, OWN_BLOCK_BITS


class Cluster:
    """Turns addresses of shared::cluster into blocks of the batch and positions."""

    def __init__(self, d: Decoder) -> None:
        self.machine = d.machine
        self.layout = d.machine.layout
        self.shared = d.machine.memory.shared
        self.size = math.prod(self.layout.cluster)
        race = race_of(d)
        if self.size > 1 and race is not None:
            Endings(d.machine, race)

    def ranks(self, address: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """The rank in its cluster of the block each lane's address belongs to (int64)."""
        named = (address.astype(np.int64) >> OWN_BLOCK_BITS) - 1
        return np.where(named < 0, self.layout.rank[lanes], named)

    def blocks(self, ranks: np.ndarray, lanes: np.ndarray, ins: Instruction) -> np.ndarray:
        """The block, of the batch, of a rank of each lane's cluster; a fault if there is none."""
        self.within(ranks, lanes, ins)
        cta = self.layout.cta[lanes]
        found = cta - cta % self.size + ranks
        for block in distinct(found[found != cta]).tolist():
            if not self.living(block):
                bad = found == block
                detail = f"all threads of the cluster's block {block % self.size} have ended"
                raise self.machine.reporter.fault(
                    "access to the shared memory of an ended block", detail, ins, lanes[bad]
                )
        return found

    def within(self, ranks: np.ndarray, lanes: np.ndarray, ins: Instruction) -> None:
        """A fault unless all are ranks of the cluster."""
        outside = np.flatnonzero(ranks >= self.size)
        if outside.size:
            detail = f"rank {int(ranks[outside[0]])}; the cluster has {self.size} blocks"
            raise self.machine.reporter.fault(
                "address outside the cluster", detail, ins, lanes[outside]
            )

    def living(self, block: int) -> bool:
        """Whether a block of the batch has a thread that has not ended."""
        padded = self.layout.padded
        return bool(self.machine.alive[block * padded : (block + 1) * padded].any())

    def index(
        self, address: np.ndarray, width: int, group: Group, ins: Instruction, write: bool,
        lanes: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Positions in SharedMemory of accesses by `lanes` (default: the group's), checked."""
        who = group.lanes if lanes is None else lanes
        blocks = self.blocks(self.ranks(address, who), who, ins)
        offset = address.astype(np.int64) & (OWN_BLOCK - 1)
        return self.shared.index(offset, width, group, ins, write, who, blocks * self.shared.size)
