"""flash for Hopper (sm_90a): TMA and wgmma, whose arguments are tensor maps; with and without score
features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fkjit.ops.attention import problem as shared
from fkjit.ops.attention.features import PLAIN, ScoreFeatures, parse
from fkjit.ops.attention.problem import CONTRACT, split_block
from fkjit.ops.attention.shapes import padded_pair
from fkjit.runtime.interop import ITEMSIZE
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, SharedLayout, register
from fkjit.symbolic import decision

HEAD_DIMS = (64, 96, 128, 192, 256)  # what products are padded to; tiles have panels of 64 columns
PAIRS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
# Tiles of each padded head_dim, fastest first: registers hold O, S and P, shared memory Q and two
# or three stages of K and V.
TILES: dict[int, tuple[Any, ...]] = {
    64: ((256, 64), (192, 128), 128, (192, 80), (128, 80), (64, 128), 64),
    96: (128, (192, 96), (128, 160)),
    128: (128, (192, 80), (128, 176), (128, 64), (64, 128), 64),
    192: (128, (128, 96), (128, 64)),  # the first where head_dim_v is 128
    256: ((128, 80), (128, 64), (64, 80)),
}
# Those that leave registers for the rules of score features.
FEATURE_TILES: dict[int, tuple[Any, ...]] = {
    64: ((256, 64), (192, 128), 128, (64, 128)),
    96: (128,),
    128: (128, (192, 80), (64, 128), (128, 64)),
    192: ((128, 96), (128, 64)),
    256: ((128, 80), (128, 64)),
}
# Tiles beside which those of a bias or a mask have room, in whole panels.
_ARRAY_TILES: dict[int, tuple[Any, ...]] = {
    **dict.fromkeys((64, 96, 128), (128, (64, 128))), **dict.fromkeys((192, 256), ((128, 64),)),
}  # fmt: skip
_MOD_ROWS = 128  # at most, beside what a score_mod, or who asks for pages, holds in registers
_MOD_HEAD_DIM = 192  # at most, beside a bias or a mask as well
# Head dimensions whose tiles are all optimistic: exponentials limit there, not products. Of others
# some tiles are compiled either way, and which is faster depends on how many tiles a row has.
_OPTIMISTIC_DIMS = (64, 96)
_EITHER_WAY = {128: (128, (64, 128))}
_PANEL, _ROW_BYTES = 64, 128  # columns of a row in shared memory, and bytes
_WARP_ROWS = 16  # of a tile of queries: a warp stores its own
_STAGES = ((2, 2), (1, 2), (1, 1))  # of Q, and of bias and mask
_MORE_BARRIERS = 16 + 16 * 2  # bytes: of tiles that are cut, of bias and mask
COUNTERS = 1
_CODE_GROUPS = 1  # warpgroups that widen codes and do nothing else
_CODE_GROUP_DIM = 128  # at most: wider accumulators need more registers than a block starts with
_CODES_AT_ONCE = 2  # chunks that a thread has under way: more spill
CODE_STAGES = 2  # tiles of codes in shared memory, which become K or V
# What P and its sums may come to before a maximum is looked for, well inside the type's range.
_LIMITS = {"fp16": "16384.f", "bf16": "0x1p32f"}
_NO_ROOM = "has no shared memory left for a bias or a mask"
_OPTIMISTIC = "exponentials are taken before anyone has looked for a tile's maximum"
MAX_SHARED = 232_448  # bytes a block may have on sm_90
_L2_BYTES = 32 << 20  # of 50 MiB
_FEW_BLOCKS = 2  # tiles of a head's queries
SMS = 132  # of an H100 or H200, where a problem does not say


_SPANS = {False: "FormSpan<BLOCK_Q, BLOCK_K, VARLEN>", True: "PagedSpan<BLOCK_Q, BLOCK_K>"}
_PLAIN_SPANS = {False: "CausalSpan<ROWS, BLOCK_K>", True: "PartSpan<ROWS, BLOCK_K>"}
LEAST_PAGE = 8  # tokens that a box has at least: the rows after which the swizzle repeats


def _features(params: Params) -> ScoreFeatures | None:
    return parse(params["form"]) if "form" in params else None


def _consumers(params: Params) -> int:
    return split_block(params["block"])[0] // 64


def _derive(params: Params) -> dict[str, Any]:
    consumers, block_k = _consumers(params), split_block(params["block"])[1]
    features, (q_stages, score_stages) = _features(params), _stages(params) or (1, 1)
    paged, parts = features is not None and features.paged, params.get("parts", False)
    return {
        "block_k": block_k,
        "consumers": consumers,
        "k_stages": stages(params)[0],
        "v_stages": stages(params)[1],
        "optimistic": _is_optimistic(params),
        "most": _LIMITS[params["dtype"]],
        "q_stages": q_stages,
        "staged": q_stages > 1,  # the output, where its Q was
        "span": _PLAIN_SPANS[parts] if features is None else _SPANS[paged],
        "heads": params.get("heads", 1),
        "parts": "parts" if parts else "",
        "o_scalars": _o_scalars(parts, features is not None or q_stages == 1),
        "lse": "lse_parts" if parts else "lse",  # arguments have their arrays' names
        "comma_parts": ", parts" if parts else "",
        "lse_length": "VARLEN ? form.total_q : max_seqlen_q" if features else "seqlen_q",
        **_registers(consumers, paged, code_groups(params)),
        **_codes(features),
        **({**PLAIN, "bias": False, "mask": False, "alibi": False} if features is None else
           {**features.values(), "score_stages": score_stages, "score_maps": _score_maps(features),
            **_page_boxes(features)}),
    }  # fmt: skip


def _registers(consumers: int, paged: bool, more: int) -> dict[str, int]:
    """Of a thread. `more`: warpgroups that widen codes, which are producers too."""
    if more:
        own, left = 48, 208
    elif paged:
        own, left = 56, 224
    else:
        own = {1: 40, 2: 40, 3: 32, 4: 32}[consumers]
        left = {1: 240, 2: 232, 3: 160, 4: 112}[consumers]
    return {"producer_registers": own, "consumer_registers": left, "code_groups": more}


def code_groups(params: Params) -> int:
    """Warpgroups that make numbers of codes beside the producer's warps."""
    features = _features(params)
    codes = features is not None and features.codes and params["head_dim"] <= _CODE_GROUP_DIM
    return _CODE_GROUPS if codes else 0


def _o_scalars(parts: bool, stored: bool) -> str:
    """What says where o lies, unless TMA alone stores it."""
    if parts:
        return ", const int parts"
    return ", const Strides o_strides, const int head_dim_v" if stored else ""


def _score_maps(features: ScoreFeatures) -> str:
    """Those of a bias and a mask."""
    named = {"&bias_map": features.bias, "&mask_map": features.mask}
    return ", ".join(name if there else "nullptr" for name, there in named.items())


def _codes(features: ScoreFeatures | None) -> dict[str, Any]:
    """What makes K and V of codes, and the scales of a head."""
    if features is None or not features.codes:
        return {"codes_type": "NoCodes", "code_stages": 0, "key_scale": "1.f", "value_scale": "1.f"}
    kept, at = features.values()["kept_keys"], "[place.head / group_size]"
    scales = {"key_scale": f"k_scale{at}", "value_scale": f"v_scale{at}"}
    codes = f"PageCodes<Rings, elem_t, {kept}, PRODUCERS - 1, {_CODES_AT_ONCE}>"
    return {"codes_type": codes, "code_stages": CODE_STAGES, **scales}


def _page_boxes(features: ScoreFeatures) -> dict[str, Any]:
    """TMA brings a tile in boxes, each in one page."""
    if not features.paged:
        return {}
    return {"page_numbers": features.values()["page_numbers"] + ", const int box_log2"}


def _is_optimistic(params: Params) -> bool:
    """What the parameter says. With score features it follows: scores to which rules were applied
    could not be multiplied again as they were."""
    features = _features(params)
    if features is None:
        return params["optimistic"]
    ruled = features.softcap or features.alibi or features.score_mod
    ruled = ruled or features.bias or features.mask or features.codes
    return ways(params["head_dim"], params["block"])[0] and not ruled


def stages(params: Params) -> tuple[int, int]:
    """Tiles of K and of V in shared memory. Who is optimistic keeps a K until its scores are known
    not to be needed again, and wants another one by then."""
    if not _is_optimistic(params):
        return 2, 2
    (block_q, block_k), dims = (
        split_block(params["block"]),
        (params["head_dim"], params["head_dim_v"]),
    )
    d, dv = (-(-dim // _PANEL) * _PANEL for dim in dims)
    v_stages = (MAX_SHARED - 2 * 2 * block_q * d - 2 * 3 * block_k * d - 256) // (2 * block_k * dv)
    return 3, min(v_stages, 3)


def _stages(params: Params) -> tuple[int, int] | None:
    """How many tiles of Q, and of bias and mask, have room; None where not even one has. With two
    of Q a tile's first scores are under way before the last one's output is stored."""
    fitting = (s for s in _STAGES if sum(n for _, n in _parts(params, *s)) <= MAX_SHARED)
    return next(fitting, None)


def _illegal(params: Params) -> str | None:
    dims, features = (params["head_dim"], params["head_dim_v"]), _features(params)
    if dims not in PAIRS:
        return f"head_dim_v={dims[1]} is not compiled for head_dim={dims[0]}"
    if params["block"] not in tiles(features, dims[0]):
        return f"is not a tile for head_dim={dims[0]}"
    if features is None and params["optimistic"] not in ways(dims[0], params["block"]):
        return f"is not compiled with optimistic={params['optimistic']}"
    if _stages(params) is None:
        return "has no room in shared memory" if features is None else _NO_ROOM
    return None


@decision(64)
def plain_tiles(head_dim: int, head_dim_v: int) -> tuple[Any, ...]:
    """Those without score features, fastest first."""
    fixed = {"head_dim": head_dim, "head_dim_v": head_dim_v, "dtype": "bf16"}
    return tuple(
        tile for tile in TILES[head_dim]
        if _illegal({**fixed, "block": tile, "optimistic": ways(head_dim, tile)[0]}) is None
    )  # fmt: skip


def tiles(features: ScoreFeatures | None, head_dim: int) -> tuple[Any, ...]:
    """The tiles that are compiled, fastest first."""
    if features is None:
        return TILES[head_dim]
    if features.bias or features.mask:
        crowded = features.varlen and features.arrays  # addresses of all these have no registers
        wide = features.score_mod and head_dim > _MOD_HEAD_DIM
        return () if crowded or wide else _ARRAY_TILES.get(head_dim, ())
    most = _MOD_ROWS if features.score_mod or features.paged else 256
    return tuple(tile for tile in FEATURE_TILES[head_dim] if split_block(tile)[0] <= most)


def ways(head_dim: int, block: Any) -> tuple[bool, ...]:
    """The values of `optimistic` that a tile is compiled for."""
    if head_dim in _OPTIMISTIC_DIMS:
        return (True,)
    return (False, True) if block in _EITHER_WAY.get(head_dim, ()) else (False,)


def _parts(params: Params, q_stages: int, score_stages: int) -> list[tuple[str, int]]:
    """Rings of Q, K, V, bias and mask, and the mbarriers."""
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
    barriers, features = 96 + 32 * max(k_stages, v_stages), _features(params)
    if features is None:
        return [*rings, ("mbarriers", barriers)]
    score = block_q * block_k * (ITEMSIZE.get(features.bias, 0) + features.mask)
    scores = [(f"scores stage {stage}", score) for stage in range(score_stages) if score]
    if features.codes:
        bytes_of = block_k * -(-d // _PANEL) * _PANEL
        scores = [(f"codes stage {stage}", bytes_of) for stage in range(CODE_STAGES)]
    return [*rings, *scores, ("mbarriers", barriers + _MORE_BARRIERS)]


def _shared(params: Params) -> SharedLayout:
    return _parts(params, *(_stages(params) or (1, 1)))


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name: q, k, v and o as tensor maps, a bias and a mask too; and, with
    score features, o as it is for ragged ends."""
    (block_q, block_k), places = split_block(params["block"]), shared.axes(problem)
    dtype, keys, box = problem["dtype"], shared.key_axes(problem), block_k
    if "page_size" in problem:
        box = math.gcd(block_k, problem["page_size"])
    named = {
        **shared.arguments(params, problem, arrays),
        "q_map": _map(dtype, places, arrays["q"], block_q // params.get("heads", 1)),
        "k_map": _map_of_keys(dtype, keys, arrays["k"], box),
        "v_map": _map_of_keys(dtype, keys, arrays["v"], box),
        "o_map": _map(dtype, places, arrays["o"], _WARP_ROWS, writable=True),
        "box_log2": box.bit_length() - 1,
        "counters": arrays.get("counters"),
        "batch": problem["batch"],
        "section_heads": section_heads(params, problem),
    }
    features = _features(params)
    if features is not None and features.together:
        named |= {"workspace": arrays.get("workspace"), **problem["together"]}
    if features is not None and features.bias:
        bias = arrays["bias"]
        named["bias_map"] = _score_map(problem, bias, features.bias, (block_q, block_k))
    if features is not None and features.mask:
        named["mask_map"] = _score_map(problem, arrays["mask"], "u8", (block_q, block_k))
    return named


def _map_of_keys(dtype: str, places: shared.Axes, array: Any, rows: int) -> TensorMap:
    """The same; of codes in boxes of 128 columns, or of all of another width, as they lie."""
    if array.itemsize > 1:
        return _map(dtype, places, array, rows)
    array = array.view(np.uint8) if isinstance(array, np.ndarray) else array
    usual = _map("u8", places, array, rows)
    columns = -(-array.shape[-1] // _PANEL) * _PANEL
    swizzled = columns % _ROW_BYTES == 0
    box = (_ROW_BYTES if swizzled else columns, rows, 1, 1)
    return replace(usual, box=box, swizzle="128B" if swizzled else "none")


def _map(
    dtype: str, places: shared.Axes, array: Any, rows: int, writable: bool = False
) -> TensorMap:
    """[batch, head, row, column] in boxes of `rows` rows and one panel of columns; packed arrays
    are one batch, pages stand in place of batches."""
    batch, head, row = places
    sizes, steps = array.shape, array.strides
    dims = sizes[-1], sizes[row], sizes[head], 1 if batch is None else sizes[batch]
    strides = steps[row], steps[head], 0 if batch is None else steps[batch]
    return TensorMap(array, dtype, dims, strides, (_PANEL, rows, 1, 1), writable=writable)


def _score_map(problem: Problem, array: Any, dtype: str, block: tuple[int, int]) -> TensorMap:
    """[batch, head, row, key] of a bias or a mask, in boxes of a tile's rows and up to 128 bytes of
    keys; a dimension that is broadcast has a stride of 0."""
    if dtype == "u8" and isinstance(array, np.ndarray):
        array = array.view(np.uint8)  # of bools
    rows, keys = block
    size = ITEMSIZE.get(dtype, 1)
    row_bytes = min(keys * size, _ROW_BYTES)
    sizes = [problem[name] for name in ("batch", "heads_q", "seqlen_q", "seqlen_k")]
    steps = [step if n > 1 else 0 for step, n in zip(array.strides, array.shape[:3], strict=False)]
    return TensorMap(
        array, dtype, tuple(sizes[::-1]), tuple(steps[::-1]), (row_bytes // size, rows, 1, 1),
        swizzle=f"{row_bytes}B",
    )  # fmt: skip


def section_heads(params: Params, problem: Problem) -> int:
    """Query heads whose tiles are taken together. Where all tiles see as many keys, or a head has
    few, those that share K and V: device memory is then read all the time, not by all heads at
    once. Else, the longest tiles first, as many as fit into L2 beside what passes through."""
    group = problem["heads_q"] // problem["heads_kv"]
    blocks_q = -(-problem["seqlen_q"] // split_block(params["block"])[0])
    alike = "total_q" not in problem and shared.window(problem)[1] >= problem["seqlen_k"]
    if alike or blocks_q <= _FEW_BLOCKS:
        return group
    dims = problem["head_dim"] + problem["head_dim_v"]
    pair = max(problem["seqlen_k"] * dims * ITEMSIZE[problem["dtype"]], 1)
    return max(_L2_BYTES // pair, 1) * group


def _grid(params: Params, problem: Problem) -> Dim3:
    """One block an SM, or fewer where there is less to do."""
    if "together" in problem:
        return (problem["blocks"], 1, 1)
    return (min(shared.grid(params, problem)[0], problem.get("multiprocessors", SMS)), 1, 1)


def counters(params: Params, problem: Problem) -> int:
    """How many a launch needs: none where each tile has a block of its own."""
    tiles = shared.grid(params, problem)[0]
    return COUNTERS if tiles > problem.get("multiprocessors", SMS) else 0


@decision(1024)
def padded_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The cheapest compiled pair that holds these head dimensions."""
    return padded_pair(PAIRS, head_dim, head_dim_v)


FLASH_SM90 = register(
    KernelSpec(
        **{
            **CONTRACT,
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
            "verification": "fkjit.ops.attention.cases:PLAIN_SM90",
            "features": lambda params: frozenset({"wgmma"}),
            "shared_layout": _shared,
            "block": lambda params: (128 * (1 + _consumers(params) + code_groups(params)), 1, 1),
            "interpreter_flops": 1.5e9,
            "arguments": _arguments,
            "pdl": True,
        }
    )
)
