"""What a product is estimated to take, in nanoseconds.

An SM takes its share of the tiles one after another, `resident` of them beside each other. A tile
takes a step for each piece of k, as long as was measured, or else as its products or its loads from
L2 take, and an epilogue. What all SMs load takes its time, and more where it comes from memory; all
of it takes at least as long as the arrays take from memory.
"""

from __future__ import annotations

from typing import NamedTuple

from fkjit.arch import Arch
from fkjit.runtime.interop import ITEMSIZE


class Shape(NamedTuple):
    """What a choice depends on. aligned: rows of x and weight are whole 16-byte pieces on their
    boundaries; aligned_out: those of out and residual."""

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
    residual: bool
    pre: bool
    sms: int
    precision: str = "ieee"  # of fp32: or "tf32"


class Tile(NamedTuple):
    """What a block (or cluster) does at a time."""

    rows: int  # of x
    columns: int  # outputs of the weight: with a gate, gate's and up's
    depth: int  # of k in a step
    splits: int = 1  # blocks that share a tile's k
    even: bool = False  # blocks share the k of the last tiles, so that all are done together
    blocks: int = 1  # of a cluster that shares a tile
    loaded: int = 0  # rows and columns that a block loads in a step; 0: all


class Rates(NamedTuple):
    """How fast a kernel is on one SM. Times are in ns."""

    unit: str  # what multiplies: a field of Machine
    speed: float  # the part of that unit's flops that it reaches
    start: float = 1500  # until a block's first products
    epilogue: float = 0.08  # for each element of a tile
    overlapped: bool = False  # the epilogue runs under the next tile's products
    resident: int = 1  # blocks that an SM runs at a time; one of two alone is slower than half
    step: float = 0.0  # what a step was measured to take; 0: as long as its products, or loads
    memory: float = 1.0  # the part of memory's bandwidth that it reaches
    l2: float = (
        0.0  # bytes that an SM takes from L2 in a ns, if memory need not give them; 0: ignored
    )


class Machine(NamedTuple):
    """What a GPU gives: flops of an SM in a ns by unit, bytes in a ns."""

    wgmma: float
    mma: float
    fma: float
    memory: float  # from memory, to all SMs
    l2: float  # from L2, to one SM
    launch: float = 2000  # ns of an empty kernel


# By compute capability; of one that is not here, the newest before it. Of 9.0 it is measured, of
# the others read in NVIDIA's tables.
MACHINES: dict[tuple[int, int], Machine] = {
    (7, 5): Machine(wgmma=0, mma=1500, fma=190, memory=300, l2=50),
    (8, 0): Machine(wgmma=0, mma=2600, fma=170, memory=1700, l2=60),
    (8, 6): Machine(wgmma=0, mma=850, fma=400, memory=800, l2=60),
    (8, 9): Machine(wgmma=0, mma=2000, fma=500, memory=900, l2=80),
    (9, 0): Machine(wgmma=7200, mma=3050, fma=400, memory=4000, l2=106),
    (10, 0): Machine(wgmma=0, mma=3000, fma=450, memory=7000, l2=106),
    (12, 0): Machine(wgmma=0, mma=2200, fma=550, memory=1600, l2=90),
}
SMS = 108  # where there is no GPU to ask
_SHARPNESS = 8  # how little the lesser of computing and streaming adds to the other
_DULLNESS = 2.6  # the same of computing and loading
_FILLING = 11_600  # bytes in a ns: how much longer loads of what memory has to give take
_SHARED_OF_A_BLOCK = 1024  # bytes that each takes beside its own
_PARTS_OF_GPCS = 0.9  # of the SMs, those that clusters of three and more fill
_ALONE = 0.8  # one of n resident blocks runs at (1 / n) ** _ALONE of the SM's rate


def machine(arch: Arch) -> Machine:
    return MACHINES[max(known for known in MACHINES if known <= arch.capability)]


def beside(rates: Rates, shared: int, arch: Arch) -> Rates:
    """The rates of blocks of `shared` bytes, where an SM has room for fewer of them."""
    room = max(arch.shared_per_sm // (shared + _SHARED_OF_A_BLOCK), 1)
    if room >= rates.resident:
        return rates
    return rates._replace(resident=room, speed=rates.speed * (room / rates.resident) ** _ALONE)


def cost(shape: Shape, tile: Tile, rates: Rates, arch: Arch) -> float:
    """Of a call."""
    gpu = machine(arch)
    wide = shape.n * (2 if shape.gate else 1)
    tiles = -(-shape.m // tile.rows) * -(-wide // tile.columns) * tile.splits
    slots = clusters_at_a_time(shape.sms, tile.blocks)
    step = _step(shape, tile, rates, gpu) * -(-shape.k // (tile.depth * tile.splits))
    after = rates.epilogue * tile.rows * tile.columns / tile.blocks
    rounds, alone = divmod(-(-tiles // slots), rates.resident)  # of the tiles of an SM
    if tile.even:
        rounds, alone = tiles / slots, 0
    each = max(step, after) if rates.overlapped else step + after
    compute = rounds * rates.resident * each
    if alone:
        compute += alone * each * (rates.resident / alone) ** _ALONE
    compute += after if rates.overlapped else 0.0
    if rates.l2:
        loads = _loads(shape, tile, tiles, slots) / rates.l2 + _inputs(shape) / _FILLING
        compute = (compute**_DULLNESS + loads**_DULLNESS) ** (1 / _DULLNESS)
    streamed = traffic(shape) / (gpu.memory * rates.memory)
    both = (compute**_SHARPNESS + streamed**_SHARPNESS) ** (1 / _SHARPNESS)
    return gpu.launch + rates.start + both


def _loads(shape: Shape, tile: Tile, tiles: int, slots: int) -> float:
    """Bytes of an SM that is never without a block: of tiles as full as they are on the mean."""
    turns = tiles / slots if tile.even else -(-tiles // slots)
    wide = shape.n * (2 if shape.gate else 1)
    rows = shape.m / -(-shape.m // tile.rows) + wide / -(-wide // tile.columns)
    steps = -(-shape.k // (tile.depth * tile.splits))
    return ITEMSIZE[shape.dtype] * tile.depth * rows * steps * turns / tile.blocks


def clusters_at_a_time(sms: int, blocks: int) -> int:
    """Of so many blocks each: those of three and more leave SMs of a GPC idle."""
    room = sms if blocks <= 2 else int(_PARTS_OF_GPCS * sms)
    return max(room // blocks, 1)


def _step(shape: Shape, tile: Tile, rates: Rates, gpu: Machine) -> float:
    """Of a block; where a tile has rows that x has not, these cost as much."""
    flops = 2.0 * tile.rows * tile.columns * tile.depth / tile.blocks
    loaded = ITEMSIZE[shape.dtype] * tile.depth * (tile.loaded or tile.rows + tile.columns)
    products, loads = flops / (getattr(gpu, rates.unit) * rates.speed), loaded / gpu.l2
    return rates.step or max(products, loads)


def traffic(shape: Shape) -> float:
    """Bytes of x, weight and out once."""
    return float(_inputs(shape) + ITEMSIZE[shape.out_dtype] * shape.m * shape.n)


def _inputs(shape: Shape) -> int:
    """Bytes of x and weight once."""
    wide = shape.n * (2 if shape.gate else 1)
    return ITEMSIZE[shape.dtype] * (shape.m + wide) * shape.k
