"""The kernels among which a product chooses: what each takes, its tiles, and how fast it is.

Another kernel is another row of `CANDIDATES`. Rates are fitted to times on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fkjit.arch import Arch
from fkjit.ops.gemm import kernels, kernels_mma, kernels_sm90, kernels_small
from fkjit.ops.gemm.cost import Rates, Shape, Tile, clusters_at_a_time
from fkjit.spec import KernelSpec, Params, Problem

Scratch = tuple[int, int]  # bytes of workspace, counters


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel.

    spec: with every variant that a call may take. refuses: why it does not take a shape, or None.
    fixed: the parameters that follow from a shape, beside those of a shape's own names. tile: what
    a block does. rates: how fast. scratch: the memory that it wants. tile_name: the parameter that
    a caller means by `block`.
    """

    spec: KernelSpec
    tile: Callable[[Params, Shape], Tile]
    rates: Callable[[Params, Shape], Rates]
    refuses: Callable[[Shape], str | None] = lambda shape: None
    fixed: Callable[[Shape, Arch], Mapping[str, Any]] = lambda shape, arch: {}
    scratch: Callable[[Params, Problem], Scratch] = lambda params, problem: (0, 0)
    tile_name: str = "block"


def _unaligned(shape: Shape) -> str | None:
    if shape.aligned:
        return None
    return "takes x and weight with rows of whole 16-byte pieces, on 16-byte boundaries"


# ------------------------------------------------------------------ wgmma

# Faster, where the weight's rows are contiguous in n.
_KN = {"cooperative": 0.95, "pingpong": 1.03, "swapped": 0.96}
_TURNS = 1.04  # of a step that another consumer's products are waited for
_L2 = 167.0  # bytes of an SM in a ns
_EPILOGUE = {"none": 0.030}  # ns for an element of a cooperative tile; with an activation more
_ACTIVATION, _TRANSPOSING = 0.08, 0.024
_STREAMING = 0.97  # of memory's speed
_SHARING = 7403  # ns: until shares of the last tiles are added up
# The same of parts; of a cluster that begins after another one; each part beyond two, if swapped.
_SPLITTING = {"pingpong": 1300, "cooperative": 1680, "swapped": 2600}
_MEETING, _LEFT = 3100, 0.1  # ns: until parts have met in memory; of an element left or read there
_WAVE_OF_PARTS, _EACH_PART = 2873, 950
_FEW_STAGES, _SHALLOW = 4, 1.1  # where a residual leaves fewer: a guess
_FEW_ROWS, _GUESS = 4, 2500  # up to so many rows are left to gemv: ns, a guess


def _wgmma_tile(params: Params, shape: Shape) -> Tile:
    (rows, columns), cluster, split = params["block"], params["cluster"], params["split"]
    if _in_memory(params):
        return Tile(rows, columns, kernels_sm90.BLOCK_K, splits=split)
    depth = kernels_sm90.BLOCK_K * split
    return Tile(cluster * rows, columns, depth, blocks=cluster * split, even=params["shares"])


def _wgmma_rates(params: Params, shape: Shape) -> Rates:
    schedule = params["schedule"]
    step = kernels_sm90.VARIANTS[kernels_sm90.variant(params)]
    step /= _KN[schedule] if shape.weight_layout == "kn" else 1.0
    step *= _SHALLOW if shape.residual and kernels_sm90.stages(params) < _FEW_STAGES else 1.0
    pingpong = schedule == "pingpong"
    step *= _TURNS if pingpong else 1.0
    epilogue = 0.0 if pingpong else _EPILOGUE.get(shape.activation, _ACTIVATION)
    epilogue += _TRANSPOSING if kernels_sm90.swapped(params) else 0.0
    epilogue += _LEFT * (1 + params["split"]) if _in_memory(params) else 0.0
    return Rates("wgmma", 1.0, start=_wgmma_start(params, shape), epilogue=epilogue, step=step,
                 overlapped=pingpong, memory=_STREAMING, l2=_L2)  # fmt: skip


def _in_memory(params: Params) -> bool:
    """Whether the parts of every tile meet in memory."""
    return params["shares"] and params["split"] > 1


def _wgmma_start(params: Params, shape: Shape) -> float:
    start = _GUESS if shape.m <= _FEW_ROWS else 0
    if params["split"] == 1:
        return start + (_SHARING if params["shares"] else 0)
    if params["shares"]:
        return start + _MEETING
    start += _SPLITTING[params["schedule"]] + _WAVE_OF_PARTS * _waves(params, shape)
    if kernels_sm90.swapped(params):
        start += _EACH_PART * (params["split"] - 2)
    return start


def _waves(params: Params, shape: Shape) -> int:
    """Clusters that an SM takes one after another, beyond the first."""
    problem = {"m": shape.m, "n": shape.n, "k": shape.k, "multiprocessors": shape.sms}
    slots = clusters_at_a_time(shape.sms, params["split"])
    return -(-kernels_sm90.tiles_of(params, problem) // slots) - 1


# ------------------------------------------------------------------ mma

# By tile: the part of the flops that mma.sync gives, and blocks beside each other.
_MMA: dict[tuple[int, int, int], tuple[float, int]] = {
    (128, 256, 64): (1.1, 1), (256, 128, 64): (1.08, 1), (128, 256, 32): (1.02, 1),
    (256, 128, 32): (1.015, 1), (128, 128, 64): (1.04, 2), (128, 128, 32): (0.965, 2),
    (64, 128, 64): (0.9, 3), (64, 64, 64): (0.68, 3), (64, 64, 32): (0.5, 3),
}  # fmt: skip


def _exact(shape: Shape) -> str | None:
    if shape.dtype != "fp32" or shape.precision == "tf32":
        return None
    return "rounds fp32 to tf32: pass precision='tf32'"


def _mma_rates(params: Params, shape: Shape) -> Rates:
    speed, resident = _MMA.get(params["block"], (0.5, 1))
    speed *= 0.5 if shape.dtype == "fp32" else 1.0
    staged = 1.0 if params["aligned"] else 0.5
    return Rates("mma", speed * staged, epilogue=0.12, resident=resident, memory=0.85)


def _portable_fixed(shape: Shape, arch: Arch) -> Mapping[str, Any]:
    """Copies are 16 bytes if rows begin with them, and so does up in rows of a [k, 2 n] weight."""
    depth = 16 if "cp_async" in arch.features else 8
    up_begins = not shape.gate or shape.weight_layout == "nk" or shape.n % 8 == 0
    return {"aligned": shape.aligned and up_begins, "mma_k": depth}


# ------------------------------------------------------------------ fma

# By tile: the part of the flops that FMAs give, and blocks beside each other. Fitted with what
# follows to 28 products of 32 to 4096 rows, all tiles and parts: 1.1 % lost to the best of them.
_FMA: dict[tuple[int, int, int], tuple[float, int]] = {
    (128, 128, 16): (0.787, 2), (256, 128, 16): (0.872, 1), (128, 256, 16): (0.898, 1),
    (128, 64, 16): (0.842, 3), (64, 64, 16): (0.676, 3),
}  # fmt: skip
_FMA_START, _FMA_EPILOGUE = 200.0, 0.03
# Where blocks share k: ns of an element that is left in L2 and read again, and of a block that has
# no other one beside it meanwhile; the least k of a part; the most bytes of all that is left.
_FMA_LEFT, _FMA_ALONE, _FMA_LEAST, _FMA_MOST = 0.171, 6900, 64, 64 << 20
_ROOM_FOR_TOTALS = 227 * 1024  # bytes of shared memory
_LONG_K = 4096  # of k: from there on sums are made of runs, where totals have room


def _fma_rates(params: Params, shape: Shape) -> Rates:
    speed, resident = _FMA.get(params["block"], (0.5, 1))
    staged = 1.0 if params["aligned"] else 0.6
    parts, start, epilogue = params["split"], _FMA_START, _FMA_EPILOGUE
    if parts > 1:
        fits = shape.k >= parts * _FMA_LEAST and _sums(shape) * parts <= _FMA_MOST
        start += (_FMA_ALONE if resident == 1 else 0) if fits else math.inf
        epilogue = epilogue / parts + _FMA_LEFT
    return Rates("fma", speed * staged, start, epilogue, resident=resident, memory=0.8)


def _sums(shape: Shape) -> int:
    """Bytes of a product in fp32."""
    return 4 * shape.m * shape.n * (2 if shape.gate else 1)


def _fma_tile(params: Params, shape: Shape) -> Tile:
    return Tile(*params["block"], splits=params["split"])


def _fma_fixed(shape: Shape, arch: Arch) -> Mapping[str, Any]:
    """Runs of a long k where cuBLAS divides k as well, and totals have room beside the ring."""
    transposed = (shape.x_layout, shape.weight_layout) == ("km", "kn")
    roomy = arch.shared_per_sm >= _ROOM_FOR_TOTALS
    return {
        **_portable_fixed(shape, arch),
        "long_k": shape.k >= _LONG_K and transposed and roomy,
    }


# ------------------------------------------------------------------ gemv and skinny


def _few_rows(most: int) -> Callable[[Shape], str | None]:
    def refuses(shape: Shape) -> str | None:
        if shape.m > most:
            return f"takes up to {most} rows of x"
        return None if shape.x_layout == "mk" else "takes x with contiguous rows"

    return refuses


# Bytes of the weight that an SM takes in a ns if memory gives them, by tile.
# That of (24, 8, 4) is (16, 8, 4)'s: not measured.
_GEMV = {
    (16, 8, 4): 70.0, (8, 16, 4): 29.0, (32, 8, 2): 62.0, (24, 8, 4): 70.0, (64, 16, 1): 60.0,
}  # fmt: skip
_GEMV_X = 0.13  # what a byte of x costs beside one of the weight: it comes from L1 or L2


def _gemv_tile(params: Params, shape: Shape) -> Tile:
    rows, warps, _ = params["tile"]
    return Tile(shape.m, rows, warps * kernels_small.gemv_span(params), loaded=rows)


def _gemv_rates(params: Params, shape: Shape) -> Rates:
    """What counts is the weight's way from memory."""
    if shape.dtype == "fp32":
        return Rates("fma", 4.0, start=510, epilogue=0.0, resident=2, memory=1.05)
    (rows, warps, _), depth = params["tile"], _gemv_tile(params, shape).depth
    step = 2 * depth * (rows + _GEMV_X * shape.m) / _GEMV[params["tile"]]
    return Rates("mma", 4.0, start=0, epilogue=0.0, resident=16 // warps, step=step, memory=0.98)


# The same of skinny, by what rows of x are padded to: the part of memory's speed; bytes of an SM by
# tile, and of any other tile.
_SKINNY: dict[int, tuple[float, dict[tuple[int, int, int], float], float]] = {
    16: (0.995, {(64, 128, 4): 69.6, (32, 256, 4): 72.2}, 47.6),
    32: (0.97, {(64, 128, 4): 56.3, (32, 256, 3): 61.1}, 43.8),
    64: (0.78, {(64, 128, 3): 38.6}, 36.5),
    128: (0.6, {}, 24.0),
}
_SKINNY_X = 0.58  # a byte of x
_SKINNY_KN = 1.42  # faster, where the weight's rows are contiguous in n
_UNEVEN = 0.25  # of memory's speed, where some SMs have two blocks and some one: to that power
_EVEN = 0.96  # of the greatest share of an SM, the mean one
_SKINNY_BLOCK = 168  # ns of a block beside its steps
# Ns to add up sums of blocks: in a cluster of two, each block more; in memory, each of the blocks.
_BY_CLUSTER, _MORE, _BY_MEMORY, _EACH = 840, 160, 616, 232
_ROOM, _NO_ROOM = 0.9, 3000  # the SMs that clusters of four and more fill; ns of any that wait


def _skinny_tile(params: Params, shape: Shape) -> Tile:
    rows, depth, _ = params["tile"]
    splits = kernels_small.split(params, {"n": shape.n, "k": shape.k, "multiprocessors": shape.sms})
    return Tile(params["tokens"], rows, depth, splits=splits)


def _skinny_rates(params: Params, shape: Shape) -> Rates:
    (rows, depth, _), tokens = params["tile"], params["tokens"]
    memory, by_tile, others = _SKINNY[tokens]
    copied = 1.0 if shape.aligned else 0.4  # else element by element
    speed = by_tile.get(params["tile"], others) * copied
    speed *= _SKINNY_KN if shape.weight_layout == "kn" else 1.0
    memory *= copied * min(_evenness(params, shape) / _EVEN, 1.0) ** _UNEVEN
    return Rates(
        "mma", 1.2 * copied, start=_adding_up(params, shape), memory=memory,
        epilogue=_SKINNY_BLOCK / (rows * tokens), resident=kernels_small.resident(params),
        step=2 * depth * (rows + _SKINNY_X * tokens) / speed,
    )  # fmt: skip


def _evenness(params: Params, shape: Shape) -> float:
    """The mean share of an SM over the greatest, where all blocks run at a time."""
    tile = _skinny_tile(params, shape)
    blocks = tile.splits * -(-shape.n * (2 if shape.gate else 1) // tile.columns)
    return blocks / shape.sms / 2 if shape.sms < blocks <= 2 * shape.sms else 1.0


def _adding_up(params: Params, shape: Shape) -> float:
    """The sums of blocks that share a tile."""
    splits, cluster = _skinny_tile(params, shape).splits, params["cluster"]
    blocks = splits * -(-shape.n * (2 if shape.gate else 1) // params["tile"][0])
    room = (_ROOM if cluster > 2 else 1.0) * shape.sms * kernels_small.resident(params)
    waits = min(-(-blocks // room) - 1, 1) * _NO_ROOM
    if cluster == 1:
        return waits + (_BY_MEMORY + _EACH * splits if splits > 1 else 0)
    return waits + _BY_CLUSTER + _MORE * (cluster - 2)


def _tokens(shape: Shape, arch: Arch) -> Mapping[str, Any]:
    padded = next((t for t in kernels_small.TOKENS if t >= shape.m), kernels_small.TOKENS[-1])
    return {"tokens": padded}


# ------------------------------------------------------------------ tiled


def _tiled_tile(params: Params, shape: Shape) -> Tile:
    block = params["block"]
    return Tile(block, block * (2 if shape.gate else 1), 16)


def _tiled_rates(params: Params, shape: Shape) -> Rates:
    return Rates("fma", 0.2 if params["block"] == 64 else 0.08, resident=2, memory=0.5)


# ------------------------------------------------------------------ the table

CANDIDATES: dict[str, Candidate] = {
    "wgmma": Candidate(
        spec=kernels_sm90.WGMMA_ALL, tile=_wgmma_tile, rates=_wgmma_rates, refuses=_unaligned,
        fixed=lambda shape, arch: {"tma_store": shape.aligned_out and shape.out_dtype != "fp32"},
        scratch=kernels_sm90.memory,
    ),
    "mma": Candidate(
        spec=kernels_mma.MMA_ALL, rates=_mma_rates, fixed=_portable_fixed, refuses=_exact,
        tile=lambda params, shape: Tile(*params["block"]),
    ),
    "fma": Candidate(
        spec=kernels_mma.FMA_ALL, rates=_fma_rates, fixed=_fma_fixed, tile=_fma_tile,
        scratch=kernels_mma.fma_scratch,
    ),
    "skinny": Candidate(
        spec=kernels_small.SKINNY, tile=_skinny_tile, rates=_skinny_rates,
        refuses=_few_rows(kernels_small.TOKENS[-1]), fixed=_tokens,
        scratch=kernels_small.skinny_scratch, tile_name="tile",
    ),
    "gemv": Candidate(
        spec=kernels_small.GEMV, tile=_gemv_tile, rates=_gemv_rates,
        refuses=lambda shape: _few_rows(kernels_small.GEMV_ROWS)(shape) or _unaligned(shape),
        tile_name="tile",
    ),
    "tiled": Candidate(spec=kernels.TILED, tile=_tiled_tile, rates=_tiled_rates),
}  # fmt: skip
