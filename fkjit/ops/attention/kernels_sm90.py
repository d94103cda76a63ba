"""flash for Hopper (sm_90a): TMA and wgmma, whose arguments are tensor maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fkjit.arch import Arch
from fkjit.ops.attention.features import PLAIN
from fkjit.ops.attention.problem import SHARED, grid, outputs, problems, scalars, split_block
from fkjit.runtime.interop import ITEMSIZE
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Arrays, Dim3, KernelSpec, Param, Params, Problem, SharedLayout, register

HEAD_DIMS = (64, 96, 128, 192, 256)  # what products are padded to; tiles have panels of 64 columns
PAIRS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
# Tiles of each padded head_dim, fastest first: registers hold O, S and P, shared memory Q and two
# or three stages of K and V.
TILES: dict[int, tuple[Any, ...]] = {
    64: ((256, 64), (192, 128), 128),
    96: (128, (192, 96), (128, 160)),
    128: (128, (192, 80), (128, 176), (128, 64), (64, 128)),
    192: ((128, 96), (128, 64)),
    256: ((128, 80), (128, 64)),
}
_FEW_QUERIES = (64, 128)  # for small problems: twice as many blocks, each half as busy
# Head dimensions whose tiles are all optimistic: exponentials limit there, not products. Of others
# some tiles are compiled either way, and which is faster depends on how many tiles a row has.
_OPTIMISTIC_DIMS = (64, 96)
_EITHER_WAY = {128: (128,)}
# How fast others are than the first tile of a head_dim, per row and where every SM is busy alike
# (bench/NOTES.md): (tile, optimistic), from so many keys on, of full rows and of causal ones.
_PACE: dict[int, dict[tuple[Any, bool], tuple[tuple[int, float, float], ...]]] = {
    64: {
        ((192, 128), True): ((0, 1.01, 1.0),),
        (128, True): ((0, 0.86, 1.02), (2048, 0.84, 0.93)),
    },
    96: {((192, 96), True): ((1024, 1.05, 1.0), (4096, 1.065, 1.015), (16384, 1.09, 1.035))},
    128: {
        (128, True): (
            (1024, 0.97, 1.013), (2048, 1.015, 1.02), (4096, 1.04, 1.03), (8192, 1.05, 1.04),
        ),
        ((192, 80), False): (
            (2048, 1.02, 0.93), (4096, 1.05, 0.98), (8192, 1.075, 1.03), (16384, 1.085, 1.06),
        ),
    },
}  # fmt: skip
_PANEL = 64  # columns
_WARP_ROWS = 16  # of a tile of queries: a warp stores its own
COUNTERS = 1
# What P and its sums may come to before a maximum is looked for, well inside the type's range.
_LIMITS = {"fp16": "16384.f", "bf16": "0x1p32f"}
_OPTIMISTIC = "exponentials are taken before anyone has looked for a tile's maximum"
MAX_SHARED = 232_448  # bytes a block may have on sm_90
_L2_BYTES = 32 << 20  # of 50 MiB
_SMS = 132  # of an H100 or H200, where a problem does not say


def _consumers(params: Params) -> int:
    return split_block(params["block"])[0] // 64


def _derive(params: Params) -> dict[str, Any]:
    consumers, block_k = _consumers(params), split_block(params["block"])[1]
    return {
        "block_k": block_k,
        "consumers": consumers,
        "k_stages": stages(params)[0],
        "v_stages": stages(params)[1],
        "optimistic": params["optimistic"],
        "most": _LIMITS[params["dtype"]],
        "q_stages": _q_stages(params),
        "producer_registers": {1: 40, 2: 40, 3: 32, 4: 32}[consumers],
        "consumer_registers": {1: 240, 2: 232, 3: 160, 4: 112}[consumers],
        **{**PLAIN, "bias": False, "mask": False, "alibi": False},
    }


def stages(params: Params) -> tuple[int, int]:
    """Tiles of K and of V in shared memory. Who is optimistic keeps a K until its scores are known
    not to be needed again, and wants another one by then."""
    if not params["optimistic"]:
        return 2, 2
    (block_q, block_k), dims = (
        split_block(params["block"]),
        (params["head_dim"], params["head_dim_v"]),
    )
    d, dv = (-(-dim // _PANEL) * _PANEL for dim in dims)
    v_stages = (MAX_SHARED - 2 * 2 * block_q * d - 2 * 3 * block_k * d - 256) // (2 * block_k * dv)
    return 3, min(v_stages, 3)


def _q_stages(params: Params) -> int:
    """Two tiles of Q where they fit: then a tile's first scores are under way before the last one's
    output is stored."""
    return 2 if sum(size for _, size in parts(params, 2)) <= MAX_SHARED else 1


def _illegal(params: Params) -> str | None:
    dims = (params["head_dim"], params["head_dim_v"])
    if dims not in PAIRS:
        return f"head_dim_v={dims[1]} is not compiled for head_dim={dims[0]}"
    if params["block"] not in TILES[dims[0]]:
        return f"is not a tile for head_dim={dims[0]}"
    if params["optimistic"] not in ways(dims[0], params["block"]):
        return f"is not compiled with optimistic={params['optimistic']}"
    return None


def ways(head_dim: int, block: Any) -> tuple[bool, ...]:
    """The values of `optimistic` that a tile is compiled for."""
    if head_dim in _OPTIMISTIC_DIMS:
        return (True,)
    return (False, True) if block in _EITHER_WAY.get(head_dim, ()) else (False,)


def parts(params: Params, q_stages: int) -> list[tuple[str, int]]:
    """Rings of Q, K and V, and the mbarriers."""
    (block_q, block_k), d, dv = (
        split_block(params["block"]),
        params["head_dim"],
        params["head_dim_v"],
    )
    k_stages, v_stages = stages(params)
    rings = [
        (f"{name} stage {stage}", 2 * rows * -(-dim // _PANEL) * _PANEL)
        for name, rows, dim, stages in (
            ("Q", block_q, d, q_stages), ("K", block_k, d, k_stages), ("V", block_k, dv, v_stages)
        )
        for stage in range(stages)
    ]  # fmt: skip
    return [*rings, ("mbarriers", 96 + 32 * max(k_stages, v_stages))]


def _shared(params: Params) -> SharedLayout:
    return parts(params, _q_stages(params))


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name; q, k, v and o as tensor maps."""
    block_q, block_k = split_block(params["block"])
    return {
        **{
            f"{name}_map": _map(arrays[name], params["dtype"], rows, writable=name == "o")
            for name, rows in (("q", block_q), ("k", block_k), ("v", block_k), ("o", _WARP_ROWS))
        },
        "lse": arrays["lse"],
        "counters": arrays["counters"],
        "batch": problem["batch"],
        "section_heads": section_heads(problem),
        **scalars(problem),
    }


def suits(arch: Arch) -> bool:
    """Whether a GPU runs every tile."""
    needs = FLASH_SM90.features({})
    return arch.features >= needs and arch.shared_per_block >= MAX_SHARED


def tile(problem: Problem, head_dim: int, block: Any = None) -> dict[str, Any]:
    """The tile of a problem, and whether it is optimistic (of a given tile, only that): the fastest
    by how many rows the busiest SM would have, or fewer queries where all would leave SMs idle."""
    first = TILES[head_dim][0]
    causal, seqlen_q = problem["causal"], problem["seqlen_q"]
    multiprocessors = problem.get("multiprocessors", _SMS)
    heads = problem["heads_q"] * problem["batch"]
    if head_dim == 128:
        works = -(-seqlen_q // split_block(first)[0]) * heads
        if block is None and works <= (multiprocessors if causal else multiprocessors // 2):
            block = _FEW_QUERIES

    def time(choice: tuple[Any, bool]) -> float:
        rows = split_block(choice[0])[0]
        busiest = -(-(-(-seqlen_q // rows) * heads) // multiprocessors) * rows
        return busiest / _pace(head_dim, choice, problem["seqlen_k"], causal)

    usual = (first, ways(head_dim, first)[0])
    if block is not None:
        choices = [(block, way) for way in ways(head_dim, block)]
    else:
        choices = [usual, *_PACE.get(head_dim, {})]
    block, optimistic = min(choices, key=time)
    return {"block": block, "optimistic": optimistic}


def _pace(head_dim: int, choice: tuple[Any, bool], keys: int, causal: bool) -> float:
    """1 for the first tile of a head_dim."""
    steps = _PACE.get(head_dim, {}).get(choice, ((0, 1.0, 1.0),))
    known = [step for step in steps if step[0] <= keys]
    return known[-1][1 + causal] if known else 0.8


def section_heads(problem: Problem) -> int:
    """Query heads whose K and V fit into L2 together, beside what passes through."""
    dims = problem["head_dim"] + problem["head_dim_v"]
    pair = max(problem["seqlen_k"] * dims * ITEMSIZE[problem["dtype"]], 1)
    group = problem["heads_q"] // problem["heads_kv"]
    return max(_L2_BYTES // pair, 1) * group


def _grid(params: Params, problem: Problem) -> Dim3:
    """One block an SM, or fewer where there is less to do."""
    return (min(grid(params, problem)[0], problem.get("multiprocessors", _SMS)), 1, 1)


def padded_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The cheapest compiled pair that holds these head dimensions."""
    return min((d for d in PAIRS if d[0] >= head_dim and d[1] >= head_dim_v), key=sum)


def _map(array: Any, dtype: str, rows: int, writable: bool) -> TensorMap:
    """[batch, head, row, column] in boxes of `rows` rows and one panel of columns."""
    shape, strides, box = array.shape[::-1], array.strides[2::-1], (_PANEL, rows, 1, 1)
    return TensorMap(array, dtype, tuple(shape), tuple(strides), box, writable=writable)


def takes(problem: Problem, views: Mapping[str, Any], order: tuple[int, ...], block: Any) -> bool:
    """Whether TMA can read these arrays and the kernel wants the problem.

    Every row of q, k, v, o starts on a 16-byte boundary (the caller has looked); no dimension is
    repeated by a stride of 0 nor empty; the scale is positive (signs could not go into Q); there
    are queries enough for a tile; and if a tile was asked for, it is one of this kernel's.
    """
    dims = padded_dims(problem["head_dim"], problem["head_dim_v"])
    size = ITEMSIZE[problem["dtype"]]
    for view in views.values():
        steps = [(view.strides[i] * size, view.shape[i]) for i in order[:3]]
        if any(extent > 1 and not 0 < stride < 2**40 for stride, extent in steps):
            return False
    return (
        (block is None or block in TILES[dims[0]])
        and min(problem["seqlen_q"], problem["seqlen_k"], problem["batch"]) > 0
        and problem["softmax_scale"] > 0
        and problem["seqlen_q"] > 32
    )


def _problems(params: Params, scale: str) -> Sequence[Problem]:
    """Those of every attention kernel; the small ones on a GPU of two SMs, so that blocks go on,
    and the last, one tile of queries, with keys for its consumers to take turns."""
    usual = problems(params, scale)
    if scale != "small":
        return usual
    *most, last = ({**problem, "multiprocessors": 2} for problem in usual)
    return [*most, {**last, "seqlen_k": 2 * last["seqlen_k"] + 3}]


def _outputs(params: Params, problem: Problem) -> Arrays:
    """o, lse and the counter that blocks draw their work from."""
    return {**outputs(params, problem), "counters": np.zeros(COUNTERS, np.uint32)}


FLASH_SM90 = register(
    KernelSpec(
        **{
            **SHARED,
            "name": "flash_sm90",
            "source": "attention/flash_sm90.cu",
            "entry": "attention_flash_sm90",
            "doc": "flash for Hopper: TMA, wgmma, a producer and consumers",
            "params": (
                Param("dtype", ("fp16", "bf16"), "element type of q, k, v and o"),
                Param("head_dim", HEAD_DIMS, "of q and k, padded to this in shared memory"),
                Param("head_dim_v", HEAD_DIMS, "of v and o, padded to this in shared memory"),
                Param(
                    "block",
                    tuple(dict.fromkeys(tile for tiles in TILES.values() for tile in tiles)),
                    "query rows and keys of a tile; one number means both",
                    tunable=True,
                ),
                Param("optimistic", (False, True), _OPTIMISTIC, tunable=True),
            ),
            "derive": _derive,
            "illegal": _illegal,
            "grid": _grid,
            "problems": _problems,
            "outputs": _outputs,
            "features": lambda params: frozenset({"wgmma"}),
            "shared_layout": _shared,
            "block": lambda params: (128 * (1 + _consumers(params)), 1, 1),
            "interpreter_flops": 1.5e9,
            "arguments": arguments,
        }
    )
)
