"""Kinds of accesses to memory, and who is told of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fkjit.interp.core.ptx import Instruction

# Strong accesses are atomic, volatile, or ordered by acquire or release.
READ, WRITE, STRONG_READ, STRONG_WRITE = "read", "write", "strong read", "strong write"
ATOMIC = "atomic"

# (kind, shared?, positions, bytes of each, lanes, instruction): threads access memory. `kind` is
# READ, WRITE or ATOMIC; positions are those of SharedMemory or of the arena.
Observer = Callable[[str, bool, np.ndarray, int, np.ndarray, Instruction], None]

# (begins?, writes?, positions in shared memory, instruction): what copies and products on their own
# (cp.async, TMA, wgmma) access, from where it is issued to where a thread has waited for it. Told
# where races are looked for.
EngineObserver = Callable[[bool, bool, np.ndarray, Instruction], None]
