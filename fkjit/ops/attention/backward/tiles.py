"""Tiles of the backward's kernels by head dimension and score features, and what registers these
leave."""

from __future__ import annotations

from typing import Any

from fkjit.ops.attention.features import ScoreFeatures, parse
from fkjit.spec import Params

PAIRS = ((64, 64), (128, 128), (192, 128), (256, 256))  # (head_dim, head_dim_v) on tensor cores
PAIRS_FP32 = ((64, 64), (128, 128), (256, 256))
BLOCK_Q_SM90 = {64: 128, 96: 64, 128: 64, 192: 64, 256: 64}  # S^T and dK in registers together
BLOCK_K_SM90 = {64: 128, 96: 128, 128: 128, 192: 64, 256: 64}
# Those whose keys two warpgroups share: queries of a tile by head dimensions, the second of v.
WIDE_SM90 = {(192, 128): 128, (192, 192): 64, (256, 256): 64}
PAIRED_SM90 = [(192, 128)]  # of these thread blocks come in pairs, in order


def is_paired(params: Params) -> bool:
    """Whether two thread blocks of a cluster have neighbouring keys, and add dq up together."""
    dims: tuple[Any, Any] = params["head_dim"], params.get("head_dim_v")
    return params["deterministic"] and dims in PAIRED_SM90


def block_q_sm90(params: Params) -> int:
    """Queries of a tile."""
    dims: tuple[Any, Any] = params["head_dim"], params.get("head_dim_v")
    return WIDE_SM90.get(dims) or BLOCK_Q_SM90[dims[0]]


Table = dict[int, tuple[Any, ...]]  # of a head dimension, the fastest first

# (rows of a block, rows of a tile of the others, warps); the last one fits on sm_75
_FP32: Table = {
    64: ((64, 32, 4), (32, 32, 2)),
    128: ((32, 32, 2), (16, 16, 1)),
    256: ((16, 16, 2), (8, 16, 1)),
}
# Of many score features a thread has half as many rows.
_FP32_FEATURES: Table = {
    dim: (*tiles, *((own, other, 2 * warps) for own, other, warps in tiles))
    for dim, tiles in _FP32.items()
}
# keys, sums: keys of a block, queries of a tile, warps along the keys, warps that share the same
# keys, stages. queries: queries of a block, keys of a tile, warps, stages. bias: rows and keys of a
# block, warps, stages.
_PLAIN: dict[str, Table] = {
    "keys": {
        64: ((128, 128, 4, 1, 2), (64, 64, 4, 1, 2)),
        128: ((64, 64, 2, 2, 2), (64, 32, 2, 2, 2)),
        192: ((64, 32, 2, 2, 2),),
        256: ((32, 32, 2, 2, 2), (32, 32, 2, 2, 1)),
    },
    "sums": {
        64: ((128, 64, 4, 1, 2),),
        128: ((128, 64, 4, 2, 2), (64, 32, 2, 2, 2)),
        256: ((32, 32, 2, 2, 2), (32, 32, 2, 2, 1)),
    },
    "queries": {
        64: ((128, 128, 4, 2),),
        128: ((128, 32, 4, 2),),
        192: ((64, 32, 4, 2),),
        256: ((32, 32, 2, 2),),
    },
    "bias": {
        64: ((128, 64, 4, 2),),
        128: ((128, 64, 4, 1),),
        192: ((64, 64, 4, 1),),
        256: ((64, 32, 4, 1),),
    },
    **dict.fromkeys(("keys_fp32", "queries_fp32"), _FP32),
}
_PLAIN["ordered"] = {128: _PLAIN["sums"][128]}  # of 64 columns two kernels are faster
# A warp has 16 rows: rules and band take the registers of another 16.
_FEATURES: dict[str, Table] = {
    "keys": {
        64: ((64, 64, 4, 1, 2),),
        **dict.fromkeys((128, 192), ((64, 32, 4, 2, 2), (32, 32, 2, 2, 2))),
        256: ((32, 32, 2, 2, 2), (32, 32, 2, 2, 1)),
    },
    "sums": {64: ((64, 64, 4, 1, 2),), 128: ((64, 64, 4, 2, 2), (32, 64, 2, 2, 1))},
    "queries": {
        64: ((64, 64, 4, 2),),
        **dict.fromkeys((128, 192), ((64, 32, 4, 2),)),
        256: ((32, 32, 2, 2),),
    },
    "bias": {
        64: ((64, 64, 4, 2),),
        128: ((64, 64, 4, 2), (64, 64, 4, 1)),
        192: ((64, 64, 4, 1),),
        256: ((64, 32, 4, 1),),
    },
    **dict.fromkeys(("keys_fp32", "queries_fp32"), _FP32_FEATURES),
    "bias_fp32": _FP32,
}
# Those of _PLAIN whose warps have two blocks of rows and no registers to spare.
_TALL = ((128, 128, 4, 1, 2), (128, 64, 4, 1, 2), (128, 32, 4, 2))


def tiles(name: str, head_dim: int, text: str = "") -> tuple[Any, ...]:
    """Of a kernel with score features, "" for none; the first is the fastest."""
    return _table(name, head_dim, text).get(head_dim, ())


def every_tile(name: str, text: str = "") -> tuple[Any, ...]:
    """Those of all head dimensions."""
    dims = (dim for dim, _ in PAIRS)
    return tuple(dict.fromkeys(tile for dim in dims for tile in tiles(name, dim, text)))


def _table(name: str, head_dim: int, text: str) -> Table:
    if not text:
        return _PLAIN[name]
    if name.endswith("_fp32"):
        return _FEATURES[name]
    features = parse(text)
    band = not (
        features.softcap or features.score_mod or features.alibi or features.bias or features.mask
    )
    # Accumulators that start from one array are hardly more than a band, but for those of dq.
    one = _starts_from_one(features) and head_dim <= (64 if name == "sums" else 128)
    return (_PLAIN if band or one else _FEATURES)[name]


def _starts_from_one(features: ScoreFeatures) -> bool:
    one = bool(features.bias) + features.mask == 1
    return features.seeded and not features.varlen and one


def is_tight(name: str, params: Params) -> bool:
    """Whether registers hold no more than 16 columns of scores at a time."""
    features, dim = parse(params["form"]), params["head_dim"]
    if not features.seeded:
        return params["tile"] in _TALL
    if not _starts_from_one(features) or features.bias == "fp32" or dim > 128:
        return True
    if name == "queries":
        return dim == 64 or not features.bias
    return name != "bias" and (dim == 64 or features.dbias or name == "sums")


def is_heavy(params: Params) -> bool:
    """Whether score features and their numbers take many registers."""
    one = parse(params["form"])
    rules = (one.softcap, one.score_mod, one.alibi, one.bias, one.mask, one.varlen)
    return one.dalibi or sum(map(bool, rules)) > 2


def why_illegal(name: str, params: Params) -> str | None:
    """Why a tile, or a pair of head dimensions, has no kernel."""
    dims, text = (params["head_dim"], params["head_dim_v"]), params.get("form", "")
    fp32, known = name.endswith("_fp32"), tiles(name, params["head_dim"], text)
    if dims not in (PAIRS_FP32 if fp32 else PAIRS):
        return f"head_dim_v={dims[1]} is not compiled for head_dim={dims[0]}"
    if params["tile"] not in known:
        return f"is not a tile for head_dim={dims[0]}"
    ragged = not text and not params.get("aligned", True)
    if ragged and (dims[0] == 192 or params["tile"] != known[-1]):
        return "copies whole 16-byte chunks, and these rows do not start on 16-byte boundaries"
    if fp32 and params["aligned"] and params["dtype"] != "fp32":
        return "is not compiled for 16 bits: aligned or not, they are fetched one by one"
    if text and name in ("keys_fp32", "queries_fp32"):
        few_rows = params["tile"] not in _FP32[dims[0]]
        if is_heavy(params) != few_rows:
            return "has more rows a thread, or fewer, than these features have registers for"
    return None
