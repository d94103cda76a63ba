"""What a product is estimated to take: tiles in waves over the SMs, each as long as its products or
its loads from L2; all of it at least as long as the arrays take from memory. In cycles of an SM."""

from __future__ import annotations

from typing import NamedTuple

from fkjit.arch import Arch
from fkjit.runtime.interop import ITEMSIZE


class Shape(NamedTuple):
    """What a choice depends on. aligned: rows of x and weight are whole 16-byte pieces."""

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    x_layout: str
    weight_layout: str
    activation: str
    gate: bool
    aligned: bool
    aligned_out: bool
    sms: int


class Tile(NamedTuple):
    """What one block (or cluster) does at a time."""

    rows: int  # of x
    columns: int  # outputs of the weight: with a gate, gate's and up's
    depth: int  # of k in a step
    splits: int = 1  # blocks that share a tile's k
    cluster: int = 1  # blocks that share what they load of the weight
    overlapped: bool = False  # the epilogue runs under the next tile's products


class Rates(NamedTuple):
    """How fast a kernel is, on one SM."""

    flops: float  # a cycle, of tensor cores or FMA units, at best
    start: float  # cycles until a block's first products
    epilogue: float  # cycles for each element of a tile's out
    resident: int = 1  # blocks that an SM runs at a time, which share its rates
    step: float = 0.0  # cycles that a step takes at least
    load: float = 1.0  # of the bytes that L2 gives an SM, the part that the kernel reaches


class Machine(NamedTuple):
    """What a GPU gives its kernels."""

    memory: float  # bytes a cycle from memory, to all SMs
    l2: float  # bytes a cycle from L2, to one SM
    launch: float  # cycles of an empty kernel


# By compute capability; the newest one of the table that a GPU is not older than.
MACHINES: dict[tuple[int, int], Machine] = {
    (7, 5): Machine(memory=210, l2=32, launch=4000),
    (8, 0): Machine(memory=1200, l2=40, launch=4000),
    (8, 6): Machine(memory=500, l2=32, launch=4000),
    (8, 9): Machine(memory=420, l2=40, launch=4000),
    (9, 0): Machine(memory=2500, l2=48, launch=4000),
    (10, 0): Machine(memory=3800, l2=48, launch=4000),
    (12, 0): Machine(memory=750, l2=40, launch=4000),
}
SMS = 108  # where there is no GPU to ask
_SUM_BYTES = 4  # of a partial sum


def machine(arch: Arch) -> Machine:
    known = [capability for capability in MACHINES if capability <= arch.capability]
    return MACHINES[max(known)]


def cost(shape: Shape, tile: Tile, rates: Rates, arch: Arch) -> float:
    """Cycles of a call."""
    gpu, item = machine(arch), ITEMSIZE[shape.dtype]
    wide = shape.n * (2 if shape.gate else 1)
    tiles = -(-shape.m // tile.rows) * -(-wide // tile.columns) * tile.splits
    slots = max(shape.sms // tile.cluster, 1) * tile.cluster * rates.resident
    waves = -(-tiles // slots)
    steps = -(-shape.k // (tile.depth * tile.splits))
    busy = min(rates.resident, -(-tiles // shape.sms))  # blocks beside each other on an SM
    products = 2.0 * tile.rows * tile.columns * tile.depth * busy / rates.flops
    loads = item * tile.depth * (tile.rows + tile.columns / tile.cluster) * busy
    step = max(products, loads / (gpu.l2 * rates.load), rates.step)
    after = rates.epilogue * tile.rows * tile.columns * busy
    main = steps * step
    each = max(main, after) if tile.overlapped else main + after
    compute = rates.start + waves * each + (after if tile.overlapped else 0.0)
    return gpu.launch + max(compute, traffic(shape, tile) / gpu.memory + rates.start)


def traffic(shape: Shape, tile: Tile) -> float:
    """Bytes of x, weight and out once, and of partial sums, written and read."""
    wide = shape.n * (2 if shape.gate else 1)
    inputs = ITEMSIZE[shape.dtype] * (shape.m * shape.k + wide * shape.k)
    sums = 2 * _SUM_BYTES * shape.m * wide * tile.splits if tile.splits > 1 else 0
    return float(inputs + ITEMSIZE[shape.out_dtype] * shape.m * shape.n + sums)
