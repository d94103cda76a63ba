"""How many blocks of a kernel an SM holds, of its registers, shared memory and threads.

Source: CUDA C++ Programming Guide, "Compute Capabilities", for the limits; registers are given to a
warp in units of 256, shared memory in units of 128 bytes with 1 KiB a block for the driver.
"""

from __future__ import annotations

from dataclasses import dataclass

from fkjit.arch import Arch, Capability

_BLOCKS: dict[Capability, int] = {
    (7, 5): 16, (8, 0): 32, (8, 6): 16, (8, 7): 16, (8, 9): 24, (9, 0): 32,
    (10, 0): 32, (10, 3): 32, (11, 0): 24, (12, 0): 24, (12, 1): 24,
}  # fmt: skip
_WARP = 32


@dataclass(frozen=True)
class Occupancy:
    """`share` of the warps that an SM can hold; `limit`: what keeps it from more."""

    blocks: int
    share: float
    limit: str


def occupancy(arch: Arch, registers: int, shared: int, threads: int) -> Occupancy:
    """Of a kernel: registers a thread, bytes of shared memory and threads a block."""
    warps = -(-threads // _WARP)
    fits = {
        "threads": arch.max_threads_per_sm // (warps * _WARP),
        "blocks": _BLOCKS.get(arch.capability, 16),
    }
    each = _round(max(registers, 1) * _WARP, 256)
    fits["registers"] = arch.registers_per_sm // each // warps
    reserved = 1024 if arch.capability >= (8, 0) else 0
    block = _round(shared + reserved, 128 if reserved else 256)
    if block:
        fits["shared memory"] = arch.shared_per_sm // block
    limit = min(fits, key=lambda name: fits[name])
    blocks = fits[limit]
    return Occupancy(blocks, blocks * warps * _WARP / arch.max_threads_per_sm, limit)


def _round(value: int, unit: int) -> int:
    return -(-value // unit) * unit
