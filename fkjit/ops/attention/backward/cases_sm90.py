"""How attention's backward for Hopper is checked, and the kernel that turns a mask into bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fkjit.ops.attention.backward import cases
from fkjit.ops.attention.backward import problem as backward
from fkjit.ops.attention.backward.kernels_sm90 import width
from fkjit.ops.attention.backward.tiles import BLOCK_K_SM90, block_q_sm90
from fkjit.ops.attention.features import parse
from fkjit.ops.attention.shapes import PACKED_AXES
from fkjit.spec import Arrays, Params, Problem, Verification


def _problems(params: Params, scale: str) -> Sequence[Problem]:
    """The small ones on GPUs of two and of many SMs."""
    made = _plain_problems if "form" not in params else _feature_problems
    sums = {"sum_columns": width(params["head_dim"]), "deterministic": params["deterministic"]}
    return [{**one, **sums} for one in made(params, scale)]


def _plain_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    block_q, block_k = block_q_sm90(params), BLOCK_K_SM90[params["head_dim"]]
    square = {"head_dim_v": params["head_dim"], **params}
    found = cases.plain_problems(block_q, block_k, square, scale)
    if scale == "small":
        found[0] |= {"multiprocessors": 2}
        found[1] |= {"seqlen_q": 2 * block_q - 3, "seqlen_k": 2 * block_k + 1}
    return found


def _feature_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Windows, keys that nobody sees, rows that see none; packed with an empty sequence. Rows of a
    bias in whole 16 bytes."""
    block_q, block_k = block_q_sm90(params), BLOCK_K_SM90[params["head_dim"]]
    features = parse(params["form"])
    few, many = (1, 2) if scale == "small" else (5, 17)
    base = {
        "dtype": params["dtype"], "head_dim": params["head_dim"],
        "head_dim_v": params.get("head_dim_v", params["head_dim"]),
        "heads_q": 2, "heads_kv": 1, "causal": False, "score_scalars": {},
        "softcap": 2.0 * features.softcap, "softmax_scale": params["head_dim"] ** -0.5,
        "multiprocessors": 2 if scale == "small" else 132,
    }  # fmt: skip
    long, short = many * block_q - 3, few * block_k + (8 if features.bias else 5)
    if features.varlen:
        lengths = ((5, 0, long, 9), (40, block_k + 2, short, 0))
        total_q, total_k = (sum(of) + 3 for of in lengths)  # rows behind the last sequence
        more = {
            "batch": 4, "lengths": lengths, "total_q": total_q, "total_k": total_k,
            "axes": PACKED_AXES, "seqlen_q": long, "seqlen_k": short, "mask_shape": (4, 1, long),
        }  # fmt: skip
        return [{**base, **more, "window": (long, 0)}]
    more = {"batch": 1, "axes": (0, 1, 2, 3), "more": _bias_gradients(params)}
    if features.dbias and not features.dbias_sums:  # two batches share it; all of it is stored
        whole = (2 * short, 2 * short)
        return [
            _with_shapes({**base, **more}, 40, 2 * short, whole),
            _with_shapes({**base, **more, "batch": 2}, 2 * block_q - 3, short, (70, 0)),
        ]
    bands = ((long, short, (70, 0)), (40, 2 * short, (50, 6)))
    return [_with_shapes({**base, **more}, *band) for band in bands]


def _with_shapes(base: Problem, sq: int, sk: int, band: tuple[int, int]) -> dict[str, Any]:
    shapes = {"mask_shape": (1, 1, sq), "bias_shape": (1, base["heads_q"], sq)}
    return {**base, **shapes, "seqlen_q": sq, "seqlen_k": sk, "window": band}


def _bias_gradients(params: Params) -> tuple[str, ...]:
    features = parse(params.get("form", "window"))
    return (("dbias_parts",) if features.dbias_sums else ("dbias",)) * features.dbias


def _inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """NaN behind the last sequence, and in rows that nobody may look at; bits of a mask."""
    made = cases.inputs(params, problem, rng)
    if "mask" in made:
        block_q = block_q_sm90(params)
        made["mask_bits"] = bits(block_q, problem, made["mask"])
    if "total_q" in problem:
        for side, names in zip("qk", (("q", "dout"), ("k", "v")), strict=True):
            for name in names:
                made[name][made[f"cu_seqlens_{side}"][-1] :] = np.nan
    return made


def _order(problem: Problem) -> np.ndarray:
    """Counts of the blocks that have added to dq, as the preprocess leaves them: something where
    there is no row of a sequence."""
    found = cases.padded(problem, 7.0 * ("total_q" in problem))
    lengths = problem["lengths"][0] if "lengths" in problem else ()
    ends = {"cu_seqlens_q": np.cumsum((0, *lengths))}
    for b, length in enumerate(lengths):
        none = np.zeros((problem["heads_q"], length))
        cases.store_rows(problem, ends, found, b, none, 0.0)
    return found[..., :: backward.ORDER_ROWS]


def _outputs(params: Params, problem: Problem) -> Arrays:
    """Of packed arrays zeros, as rows of no sequence, or of one without the other's, are left; of
    sums poison where the first block stores, but for rows of no tile."""
    packed, ordered = "total_q" in problem, params["deterministic"]
    made = cases.outputs(params, problem, ("dk", "dv", *problem.get("more", ())))
    found = {n: np.full_like(x, 0 if packed else np.nan) for n, x in made.items()}
    found["counters"] = np.zeros(1, np.uint32)
    if "dbias" in made and problem["batch"] > 1:
        found["dbias"] = np.zeros_like(made["dbias"])
    if ordered:
        found["turns"] = _order(problem).astype(np.uint32)
    start = np.nan if ordered and not packed else 0
    sums = np.full(backward.sums_shape(problem), start, np.float32)
    block_q = block_q_sm90(params)
    sums[..., -(-problem["seqlen_q"] // block_q) * block_q :, :] = 0
    return found | {"dq_sum": sums}


def _reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    found = cases.reference(problem, arrays)
    made = {name: found[name] for name in ("dk", "dv", *problem.get("more", ()))}
    if problem["deterministic"]:
        made["turns"] = _order(problem)
    return made | {"dq_sum": cases.dq_sum(problem, arrays, found["dq"])}


FLASH_SM90 = FLASH_WIDE_SM90 = Verification(
    problems=_problems,
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    tolerance=cases.tolerance,
)

# ------------------------------------------------------------------ gradients of slopes


def _slope_problems(params: Params, scale: str) -> Sequence[Problem]:
    """Two batches, each with slopes of its own."""
    found = _feature_problems(params, scale)
    return [{**one, "alibi_batches": one["batch"]} for one in found]


SLOPES_SM90 = Verification(
    problems=_slope_problems,
    inputs=_inputs,
    outputs=lambda params, problem: cases.outputs(params, problem, ("dalibi_rows",)),
    reference=lambda problem, arrays: {
        "dalibi_rows": cases.reference(problem, arrays)["dalibi_rows"]
    },
    tolerance=cases.tolerance,
)

# ------------------------------------------------------------------ a mask as bits


def bits(block_q: int, problem: Problem, mask: np.ndarray) -> np.ndarray:
    """Those of a mask."""
    batch, heads, tiles, keys, words = backward.bits_shape(block_q, problem)
    found = np.zeros((batch, heads, tiles * block_q, keys), bool)
    rows = problem["mask_shape"][2]
    own = mask[:batch, :heads, :rows] != 0
    found[:, :, :rows, : mask.shape[3]] = own
    found[:, :, rows:, : mask.shape[3]] = own[:, :, -1:]
    turned = found.reshape(batch, heads, tiles, words, 32, keys).transpose(0, 1, 2, 5, 3, 4)
    packed = (turned.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1)
    return np.ascontiguousarray(packed, np.uint32)


def _mask_problems(params: Params, scale: str) -> Sequence[Problem]:
    long = 70 if scale == "small" else 1000
    sizes = (((2, 1, long), 132), ((1, 3, 1), 71))
    return [
        {"mask_shape": shape, "seqlen_k": keys, "block_q": params["block_q"]}
        for shape, keys in sizes
    ]


def _mask_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    size = (*problem["mask_shape"], problem["seqlen_k"])
    return {
        "mask": (rng.random(size) < 0.5).astype(np.uint8) * rng.integers(1, 255, size, np.uint8)
    }


def _mask_reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    return {"mask_bits": bits(problem["block_q"], problem, arrays["mask"]).astype(np.float64)}


MASK = Verification(
    problems=_mask_problems,
    inputs=_mask_inputs,
    outputs=lambda params, problem: {
        "mask_bits": np.full(backward.bits_shape(params["block_q"], problem), 0xA5A5A5A5, np.uint32)
    },
    reference=_mask_reference,
)
