"""How the kernels of `fkjit.quantize_attention` are checked: to the bit, against NumPy in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from fkjit.ops.attention.quantized.cases_packed import also_packed
from fkjit.ops.attention.quantized.quantize_kernels import ROWS, scratch, spans, spans_scratch
from fkjit.ops.quantize import cases as codes
from fkjit.ops.quantize.schemes import Scheme
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_ROW = {"int8": Scheme("int8", "row"), "fp8": Scheme("fp8", "row")}


def signs(columns: int) -> np.ndarray:
    """What rows are multiplied by, but for the norm: [columns, columns] of 1 and -1."""
    i = np.arange(columns)
    shared = np.bitwise_count(i[:, None] & i[None, :])
    turned = np.bitwise_count(i & i >> 1)
    return (1.0 - 2 * (shared % 2)) * (1.0 - 2 * (turned % 2))[:, None]


def rotated(x: np.ndarray) -> np.ndarray:
    """Rows of fp32 whose sums are exact: rounded once, by the norm."""
    columns = x.shape[-1]
    return (x @ signs(columns)).astype(np.float32) * np.float32(columns**-0.5)


def encoded(
    x: np.ndarray, code: str, given: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rows [..., columns] of fp32, each with a scale: codes, scales."""
    flat = x.reshape(-1, x.shape[-1]) if x.size else x.reshape(0, max(x.shape[-1], 1))
    scales = codes.scales_of(flat, _ROW[code]) if given is None else given.reshape(-1)
    return (
        codes.encode(flat, scales, _ROW[code]).reshape(x.shape),
        scales.reshape(x.shape[:-1]),
    )


def encode_keys(
    k: np.ndarray, code: str, given: np.ndarray | None = None, rows: int = ROWS
) -> tuple[np.ndarray, np.ndarray]:
    """[batch, heads, keys, dim] of fp32 -> codes, and a scale for `rows` keys."""
    b, h, keys, dim = k.shape
    padded = np.pad(k, ((0, 0), (0, 0), (0, -keys % rows), (0, 0)))
    made, scales = encoded(padded.reshape(b, h, -1, rows * dim), code, given)
    return made.reshape(padded.shape)[:, :, :keys], scales


def order() -> np.ndarray:
    """Which key of sixteen each byte of V^T means."""
    j, t, i = np.meshgrid(range(2), range(4), range(2), indexing="ij")
    keys = np.empty(16, int)
    keys[(4 * t + 2 * j + i).ravel()] = (8 * j + 2 * t + i).ravel()
    return keys


def encode_values(v: np.ndarray, code: str = "fp8") -> tuple[np.ndarray, np.ndarray]:
    """[batch, heads, keys, dim] of fp32 -> codes of V^T, scales of columns, which are e4m3's."""
    b, h, keys, dim = v.shape
    scales = encoded(v.swapaxes(2, 3), "fp8")[1]
    padded = np.pad(v, ((0, 0), (0, 0), (0, -keys % ROWS), (0, 0))).swapaxes(2, 3)
    flat = padded.reshape(b * h * dim, -1)
    if code == "e5m2":
        with np.errstate(invalid="ignore"):
            scaled = flat / scales.reshape(-1, 1)
        made = scaled.astype(ml_dtypes.float8_e5m2).view(np.uint8)
    else:
        made = codes.encode(flat, scales.reshape(-1), _ROW["fp8"])
    made = made.reshape(b, h, dim, -1, 16)[..., order()]
    return made.reshape(b, h, dim, -1), scales


def decode_values(data: np.ndarray, scales: np.ndarray, keys: int, code: str = "fp8") -> np.ndarray:
    """The other way, in float64."""
    b, h, dim, _ = data.shape
    numbers = np.asarray(data).reshape(b, h, dim, -1, 16)
    made = np.empty_like(numbers)
    made[..., order()] = numbers
    made = made.reshape(b, h, dim, -1)
    if code == "e5m2":
        made = made.view(ml_dtypes.float8_e5m2).astype(np.float64) * np.asarray(scales)[..., None]
    else:
        made = decode(made, scales, "fp8")
    return made.swapaxes(2, 3)[:, :, :keys]


def decode(data: np.ndarray, scales: np.ndarray, code: str) -> np.ndarray:
    """Codes [..., columns], scales of rows -> float64."""
    flat, own = np.asarray(data).reshape(-1, data.shape[-1]), np.asarray(scales).reshape(-1)
    ones = np.ones(len(flat), np.float32)
    numbers = codes.decode(flat, ones, _ROW[code]).astype(np.float64) * own[:, None]
    return numbers.reshape(data.shape)


def decode_keys(data: np.ndarray, scales: np.ndarray, code: str) -> np.ndarray:
    """Codes [batch, heads, keys, dim], a scale for ROWS keys -> float64."""
    keys = data.shape[2]
    return decode(data, np.repeat(np.asarray(scales), ROWS, axis=2)[:, :, :keys], code)


# ------------------------------------------------------------------ problems


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Ragged last tiles, grouped heads, narrower heads than are compiled, both layouts."""
    d = params["head_dim"]
    own = ("code", "values", "smooth", "rotate", "given", "shared", "means", "mosts")
    more = {name: params[name] for name in own if name in params}
    more["v_codes"] = params.get("values", "half") != "half"
    scales = ("head", "tensor") if params.get("given", "smooth" in params) else ("block", "block")
    narrow = d if params.get("rotate") else d - 16
    shapes = [(2, 4, 2, 37, 131, d, d), (1, 2, 1, 70, 300, narrow, d - 8)]
    if scale == "full":
        shapes = [(2, 8, 2, 1000, 4133, d, d), (1, 3, 1, 517, 64, narrow, d - 8)]
    names = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
    layouts = ((0, 1, 2, 3), (0, 2, 1, 3))
    return [
        {
            **dict(zip(names, shape, strict=True)),
            "dtype": params["dtype"],
            "axes": axes,
            "scales": scales[i],
            **more,
        }
        for i, (shape, axes) in enumerate(zip(shapes, layouts, strict=True))
    ]


def _rows(p: Problem, array: Any) -> np.ndarray:
    """As [batch, heads, rows, columns] of fp32."""
    return np.asarray(array).transpose(p["axes"]).astype(np.float32)


def _numbers(p: Problem, rng: np.random.Generator) -> Arrays:
    """Multiples of 1/16 about a mean of each column, so that all sums are exact in fp32."""
    made = {}
    for name, heads, rows, dim in (
        ("q", "heads_q", "seqlen_q", "head_dim"), ("k", "heads_kv", "seqlen_k", "head_dim"),
        ("v", "heads_kv", "seqlen_k", "head_dim_v"),
    ):  # fmt: skip
        shape = (p["batch"], p[heads], p[rows], p[dim])
        x = np.rint(16 * (rng.standard_normal(shape) + 4 * rng.standard_normal(shape[3]))) / 16
        x[0, 0, -1, -1] = 9  # the greatest is the last that is read
        made[name] = np.ascontiguousarray(x.transpose(p["axes"])).astype(numpy_dtype(p["dtype"]))
    return made


def _channels_inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    size, counters = scratch(params, p)
    return {
        **_numbers(p, rng), "workspace": np.full(max(size // 4, 1), np.nan, np.float32),
        "counters": np.zeros(max(counters, 1), np.uint32),
    }  # fmt: skip


def _columns(p: Problem) -> dict[str, tuple[int, ...]]:
    heads = (p["batch"], p["heads_kv"])
    return {"k_means": (*heads, p["head_dim"]), "v_scales": (*heads, p["head_dim_v"])}


def _channels_outputs(params: Params, p: Problem) -> Arrays:
    shapes = _columns(p)
    return {
        name: np.full(shapes[name], np.nan, np.float32)
        for name, wanted in (("k_means", params["means"]), ("v_scales", params["mosts"]))
        if wanted
    }


def _channels(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    k, v = (_rows(p, arrays[name]) for name in "kv")
    made: Arrays = {"counters": np.zeros(len(arrays["counters"]))}
    if p["means"]:
        made["k_means"] = k.astype(np.float64).mean(axis=2)
    if p["mosts"]:
        made["v_scales"] = encode_values(v)[1]
    return made


def _with_means(p: Problem, rng: np.random.Generator) -> Arrays:
    made = _numbers(p, rng)
    if p["smooth"]:
        made["k_means"] = np.rint(8 * _rows(p, made["k"]).mean(axis=2)) / np.float32(8)
    return made


def _spans_inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    size, counters = spans_scratch(p)
    return {
        **_with_means(p, rng), "workspace": np.full(size // 4, 0xFFFF_FFFF, np.uint32),
        "counters": np.zeros(counters, np.uint32),
    }  # fmt: skip


def _spans_outputs(params: Params, p: Problem) -> Arrays:
    return {"span_scales": np.full(sum(spans(p).values()), np.nan, np.float32)}


def _spans(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    made = [encoded(x.reshape(spans(p)[name], -1), p["code"])[1]
            for name, x in zip("qk", _turned(p, arrays), strict=True)]  # fmt: skip
    return {"span_scales": np.concatenate(made), "counters": np.zeros(len(arrays["counters"]))}


def _codes_inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    made = _with_means(p, rng)
    if p["given"]:
        # More than the rows have, so that nothing is beyond the codes.
        count = sum(spans(p).values())
        made["span_scales"] = (2.0 ** -rng.integers(0, 3, count)).astype(np.float32)
    if p["v_codes"]:
        made["v_scales"] = encode_values(_rows(p, made["v"]))[1]
    return made


def _codes_outputs(params: Params, p: Problem) -> Arrays:
    b, hq, hkv, sq, sk, d, dv = (
        p[n] for n in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim",
                       "head_dim_v")
    )  # fmt: skip
    stored = np.int8 if p["code"] == "int8" else np.uint8
    groups = -(-sk // ROWS)
    made = {
        "q_codes": np.full((b, hq, sq, d), 0x55, stored),
        "k_codes": np.full((b, hkv, sk, d), 0x55, stored),
        "q_scales": np.full((b, hq, sq), np.nan, np.float32),
        "k_scales": np.full((b, hkv, groups), np.nan, np.float32),
    }
    if p["smooth"]:
        made["shift"] = np.full((b, hq, sq), np.nan, np.float32)
    if p["v_codes"]:
        made["v_codes"] = np.full((b, hkv, dv, ROWS * groups), 0x55, np.uint8)
    return made


def _turned(p: Problem, arrays: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """q and k as they become codes."""
    q, k = (_rows(p, arrays[name]) for name in "qk")
    if p["smooth"]:
        k = k - np.asarray(arrays["k_means"])[:, :, None]
    return (rotated(q), rotated(k)) if p["rotate"] else (q, k)


def _given_scales(p: Problem, given: np.ndarray) -> dict[str, np.ndarray]:
    """Of each row of q and 64 keys."""
    parts = dict(zip("qk", np.split(given, [spans(p)["q"]]), strict=True))
    heads = {"q": (p["heads_q"], p["seqlen_q"]), "k": (p["heads_kv"], -(-p["seqlen_k"] // ROWS))}
    made = {}
    for name, (count, rows) in heads.items():
        shape = (1, 1, 1) if p["scales"] == "tensor" else (p["batch"], count, 1)
        made[name] = np.broadcast_to(parts[name].reshape(shape), (p["batch"], count, rows)).copy()
    return made


def _shared_codes(p: Problem, q: np.ndarray, k: np.ndarray) -> Arrays:
    """Scales of so many rows, which stand once for each row of q and each ROWS keys."""
    rows, made = p["shared"], {}
    for name, x, of in (("q", q, 1), ("k", k, ROWS)):
        made[f"{name}_codes"], scales = encode_keys(x, p["code"], rows=rows)
        repeated = np.repeat(scales, rows // of, axis=2)
        made[f"{name}_scales"] = repeated[:, :, : -(-x.shape[2] // of)]
    return made


def _codes(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    made: Arrays = {}
    if p["smooth"]:
        of_heads = np.repeat(np.asarray(arrays["k_means"]), p["heads_q"] // p["heads_kv"], axis=1)
        made["shift"] = np.einsum(
            "bhsd,bhd->bhs", _rows(p, arrays["q"]).astype(np.float64), of_heads
        )
    q, k = _turned(p, arrays)
    scales = _given_scales(p, arrays["span_scales"]) if p["given"] else {}
    if p["shared"] > 1:
        made |= _shared_codes(p, q, k)
    else:
        made["q_codes"], made["q_scales"] = encoded(q, p["code"], scales.get("q"))
        made["k_codes"], made["k_scales"] = encode_keys(k, p["code"], scales.get("k"))
    if p["v_codes"]:
        made["v_codes"] = encode_values(_rows(p, arrays["v"]), p["values"])[0]
    return made


CHANNELS = also_packed(Verification(
    problems=_problems, inputs=_channels_inputs, outputs=_channels_outputs, reference=_channels,
    tolerance=lambda params: 1e-6,
))  # fmt: skip
SPANS = also_packed(Verification(
    problems=_problems, inputs=_spans_inputs, outputs=_spans_outputs, reference=_spans,
    tolerance=lambda params: 0.0,
))  # fmt: skip


def _rounded(params: Params) -> float:
    """`shift` is of turned rows and means, where 1 / sqrt(128) of each is rounded; of other head
    dimensions all sums are exact."""
    rounds = params["smooth"] and params["rotate"] and params["head_dim"] == 128
    return 1e-6 if rounds else 0.0


CODES = also_packed(Verification(
    problems=_problems, inputs=_codes_inputs, outputs=_codes_outputs, reference=_codes,
    tolerance=_rounded,
))  # fmt: skip
