"""How `quantized_attention`'s kernels are checked: float64 on the numbers that codes stand for, and
where P is e4m3 with its rounding, so that what is left are the kernel's own errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.attention import cases
from fkjit.ops.attention.kernels_sm90 import COUNTERS
from fkjit.ops.attention.problem import split_block
from fkjit.ops.attention.quantized.cases_packed import also_packed
from fkjit.ops.attention.quantized.quantize_cases import (
    decode,
    decode_keys,
    decode_values,
    encode_keys,
    encode_values,
    encoded,
)
from fkjit.ops.attention.quantized.quantize_kernels import ROWS
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_TOP = 8  # of probabilities of e4m3, in powers of two
_RAISED_SM90, _LAG = 5, 3.75  # the same of Hopper's kernel, and how far maxima may lag there
_LIMIT = 448.0  # what no probability may be above
_WARP_ROWS, _LANES = 16, 4  # rows of a warp, lanes of a row
_PEAKED, _MORE = 1.0625, 3 * np.log(2.0)  # what is peaked, and how much further it is raised


def numbers(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """q, k, v [batch, heads, rows, columns] as their codes say, in float64."""
    v = np.asarray(arrays["v"])
    if p["v_codes"]:
        v = decode_values(v, arrays["v_scales"], p["seqlen_k"], p["values"])
    else:
        v = v.transpose(p["axes"]).astype(np.float64)
    q, k = np.asarray(arrays["q"]), np.asarray(arrays["k"])
    return {
        "q": decode(q, arrays["q_scales"], p["code"]),
        "k": decode_keys(k, arrays["k_scales"], p["code"]), "v": v,
    }  # fmt: skip


def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """o and lse."""
    exact = numbers(p, arrays)
    shapes = exact["q"].shape
    o, lse = np.empty((*shapes[:3], p["head_dim_v"])), np.empty(shapes[:3])
    for b in range(shapes[0]):
        rows = (exact[name][b] for name in "qkv")
        act = attend_e4m3 if p["weights"] == "fp8" else cases.attend
        o[b], lse[b] = act({**p, "softcap": 0}, {}, b, *rows)
    if arrays.get("shift") is not None:
        lse = lse + p["softmax_scale"] * np.asarray(arrays["shift"], np.float64)
    return {"o": o.transpose(np.argsort(p["axes"])), "lse": lse}


def attend_e4m3(
    p: Problem, arrays: Any, b: int, q: Any, k: Any, v: Any
) -> tuple[np.ndarray, np.ndarray]:
    """One batch, tiles of keys from the last to the first: a probability is rounded by the maximum
    that its row has by then. Where maxima may lag (`growth`), those of a warp's rows do not."""
    import ml_dtypes

    group, width = p["heads_q"] // p["heads_kv"], p.get("tile", ROWS)
    growth, raised = p.get("growth", 0.0), p.get("raised", _TOP)
    k, v = (np.repeat(x, group, axis=0) for x in (k, v))
    scores = cases.final_scores(p, arrays, b, q @ k.swapaxes(-1, -2) * p["softmax_scale"])
    top, total = np.full(scores.shape[:2], -np.inf), np.zeros((*scores.shape[:2], _LANES))
    o = np.zeros((*scores.shape[:2], v.shape[-1]))
    second = _second_tiles(scores, p.get("rows", 0), width)
    known = np.zeros(scores.shape[:2], bool)  # all maxima of a row's warp
    for first in range((p["seqlen_k"] - 1) // width * width, -1, -width):
        tile = scores[..., first : first + width]
        higher = np.maximum(top, tile.max(-1))
        if growth:
            grew = _warps_grew(higher, top, growth)
            grew = np.where(known, _sums_grew(tile, top, raised), grew)
            higher = np.where(known & _is_peaked(tile), np.maximum(top, higher - _MORE), higher)
            known = np.where(grew, ~_any_of_warps(~np.isfinite(higher)), known)
            higher = np.where(grew, higher, top)
        base = np.where(np.isfinite(higher), higher, 0.0)
        fade = np.exp(np.where(np.isfinite(top), top, -np.inf) - base)
        weights = np.exp2((tile - base[..., None]) * np.log2(np.e) + raised)
        so_far = total * fade[..., None] + _of_lanes(weights)
        peaked = (growth > 0) & (second == first) & (so_far.max(-1) < _PEAKED * 2.0**raised)
        by = np.where(peaked & np.isfinite(higher), np.exp(_MORE), 1.0)
        fade, higher, weights = fade * by, higher - np.log(by), weights * by[..., None]
        rounded = weights.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        o = o * fade[..., None] + rounded @ v[:, first : first + width]
        total, top = so_far * by[..., None], higher
    total = total.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.log(total * 2.0**-raised) + np.where(np.isfinite(top), top, 0.0)
    return o / np.where(total == 0, 1, total)[..., None], lse


def _of_lanes(weights: np.ndarray) -> np.ndarray:
    """Sums of the lanes that share a row: each has two of eight columns."""
    padded = np.pad(weights, ((0, 0), (0, 0), (0, -weights.shape[-1] % 8)))
    return padded.reshape(*weights.shape[:2], -1, _LANES, 2).sum((2, 4))


def _is_peaked(tile: np.ndarray) -> np.ndarray:
    """Rows whose greatest probability is nearly all of its lanes' sums."""
    with np.errstate(invalid="ignore"):
        weights = np.exp(np.where(tile > -np.inf, tile - tile.max(-1, keepdims=True), -np.inf))
    return _of_lanes(weights).max(-1) < _PEAKED


def _second_tiles(scores: np.ndarray, rows: int, width: int) -> np.ndarray:
    """For each row the first key of the tile before the last one that its block of `rows` sees."""
    found = np.full(scores.shape[:2], -1)
    for row in range(0, scores.shape[1] if rows else 0, rows or 1):
        visible = np.asarray(np.isfinite(scores[:, row : row + rows]).any(1))
        for head, seen in enumerate(visible):
            if seen.any():
                found[head, row : row + rows] = (np.flatnonzero(seen)[-1] // width - 1) * width
    return found


def _warps_grew(higher: np.ndarray, top: np.ndarray, growth: float) -> np.ndarray:
    """Rows of sixteen of which one has a maximum that is more than `growth` powers of two above."""
    with np.errstate(invalid="ignore"):
        grew = (higher - top) * np.log2(np.e) > growth
    return _any_of_warps(grew)


def _sums_grew(tile: np.ndarray, top: np.ndarray, raised: int) -> np.ndarray:
    """Where maxima are raised: a lane's sum says that one may have grown, and one has, by half a
    power of two. Rows behind the last, which complete a warp, have scores of 0 alone."""
    with np.errstate(invalid="ignore"):
        weights = np.exp2(np.where(tile > -np.inf, tile - top[..., None], -np.inf) * np.log2(np.e))
    weights = np.pad(weights * 2.0**raised, ((0, 0), (0, 0), (0, -tile.shape[-1] % 8)))
    of_lanes = weights.reshape(*weights.shape[:2], -1, 8).sum(2).max(-1)
    doubt = _any_of_warps(of_lanes > _LIMIT)
    ragged = -tile.shape[1] % _WARP_ROWS
    if ragged and weights.shape[-1] // 8 * 2.0**raised > _LIMIT:
        doubt[:, ragged - _WARP_ROWS :] = True
    return doubt & _any_of_warps(weights.max(-1) > 1.4142 * 2.0**raised)


def _any_of_warps(rows: np.ndarray) -> np.ndarray:
    """For each row whether any of its warp's is true."""
    heads, count = rows.shape
    warps = np.pad(rows, ((0, 0), (0, -count % _WARP_ROWS))).reshape(heads, -1, _WARP_ROWS)
    return np.repeat(warps.any(-1), _WARP_ROWS, axis=1)[:, :count]


# ------------------------------------------------------------------ problems


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Ragged, grouped, causal, windows on both sides, narrower heads than are compiled."""
    (block_q, _), d = split_block(params["block"]), params["head_dim"]
    shapes = [
        (1, 2, 1, block_q + 3, 2 * ROWS + 5, d, d, (ROWS + 17, 0)),
        (1, 1, 1, 5, ROWS, d - 16, d - 8, None),
    ]
    if scale == "full":
        shapes = [
            (2, 4, 2, 517, 1043, d, d, None), (1, 4, 1, 1043, 517, d - 16, d - 8, (1043, 0)),
            (2, 3, 3, 300, 1000, d, d, (200, 30)), (1, 2, 2, 2048, 2048, d, d, (2048, 0)),
        ]  # fmt: skip
    names = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
    layouts = ((0, 1, 2, 3), (0, 2, 1, 3))
    found = []
    for index, (*sizes, seen) in enumerate(shapes):
        named = dict(zip(names, sizes, strict=True))
        wide = max(named["seqlen_q"], named["seqlen_k"])
        found.append({
            **named, "dtype": params["dtype"], "axes": layouts[index % 2],
            "window": seen or (wide, wide),
            "softmax_scale": (-1) ** index * named["head_dim"] ** -0.5,
            "code": params["code"], "v_codes": params["values"] != "half",
            "values": params["values"], "weights": params["weights"],
        })  # fmt: skip
    return found


def _inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    def normal(heads: str, rows: str, dim: str) -> np.ndarray:
        shape = (p["batch"], p[heads], p[rows], p[dim])
        return rng.standard_normal(shape, dtype=np.float32)

    made: Arrays = {}
    made["q"], made["q_scales"] = encoded(normal("heads_q", "seqlen_q", "head_dim"), p["code"])
    made["k"], made["k_scales"] = encode_keys(normal("heads_kv", "seqlen_k", "head_dim"), p["code"])
    v = normal("heads_kv", "seqlen_k", "head_dim_v")
    if p["v_codes"]:
        made["v"], made["v_scales"] = encode_values(v, p["values"])
    else:
        turned = v.transpose(np.argsort(p["axes"]))
        made["v"] = np.ascontiguousarray(turned).astype(numpy_dtype(p["dtype"]))
    made["shift"] = rng.standard_normal(made["q_scales"].shape, dtype=np.float32)
    return made


def _outputs(params: Params, p: Problem) -> Arrays:
    shape = (p["batch"], p["heads_q"], p["seqlen_q"], p["head_dim_v"])
    o = np.full(shape, np.nan, numpy_dtype(p["dtype"])).transpose(np.argsort(p["axes"]))
    return {"o": np.ascontiguousarray(o), "lse": np.full(shape[:3], np.nan, np.float32)}


def tolerance(params: Params) -> float:
    """As of 16 bits; where P is e4m3, one may be rounded the other way than in float64."""
    return max(cases.tolerance(params), 1.6e-2 if params["weights"] == "fp8" else 0.0)


FLASH_CODES = also_packed(Verification(
    problems=_problems, inputs=_inputs, outputs=_outputs, reference=reference,
    tolerance=tolerance,
))  # fmt: skip


# ------------------------------------------------------------------ Hopper


def _problems_sm90(params: Params, scale: str) -> list[dict[str, Any]]:
    """The same with a positive scale, and more keys, so that consumers go on after a promotion; two
    multiprocessors, so that tiles are drawn."""
    weights = "half" if params["values"] == "half" else "fp8"
    of_tiles = {"weights": weights, "tile": params["block"][1], "rows": params["block"][0],
                "growth": _LAG, "raised": _RAISED_SM90}  # fmt: skip
    wanted, small = {**params, "weights": weights}, scale == "small"
    made = [{**p, **of_tiles, "softmax_scale": abs(p["softmax_scale"])}
            for p in _problems(wanted, scale)]  # fmt: skip
    if small:
        made[0] |= {"seqlen_k": 3 * params["block"][1] + 5, "window": (4 * ROWS, 0)}
    return [{**p, "multiprocessors": 2} if small else p for p in made]


def _outputs_sm90(params: Params, p: Problem) -> Arrays:
    return {**_outputs(params, p), "counters": np.zeros(COUNTERS, np.uint32)}


def _tolerance_sm90(params: Params) -> float:
    """Scores of e4m3 have 13 bits there, so that a large weight may be rounded the other way too:
    by an eighth of itself, of one key in eleven times a value of four."""
    weights = "half" if params["values"] == "half" else "fp8"
    of_one = 0.0 if weights == "half" else 3.5e-2
    return max(tolerance({**params, "weights": weights}), of_one)


FLASH_CODES_SM90 = also_packed(Verification(
    problems=_problems_sm90, inputs=_inputs, outputs=_outputs_sm90, reference=reference,
    tolerance=_tolerance_sm90,
))  # fmt: skip
