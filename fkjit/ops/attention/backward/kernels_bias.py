"""Gradients that only score features have: of a bias, of sinks and of ALiBi slopes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fkjit.ops.attention.backward import kernels_fp32 as fp32
from fkjit.ops.attention.backward import problem
from fkjit.ops.attention.backward.kernels import DQ
from fkjit.ops.attention.backward.kernels_preprocess import CASES, OP_FEATURES
from fkjit.ops.attention.backward.tiles import is_tight, why_illegal
from fkjit.ops.attention.features import BIAS_DTYPES, parse
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import KernelSpec, Param, Params, Problem, SharedLayout, Work

_THREADS = 256
_HEAD_THREADS = 512

# ------------------------------------------------------------------ dbias: a block owns a tile


def _derive(params: Params) -> dict[str, Any]:
    features = parse(params["form"])
    others = features.softcap or features.score_mod or features.alibi or features.mask
    names = ("block_q", "block_k", "num_warps", "stages")
    return {
        **dict(zip(names, params["tile"], strict=True)),
        **features.values(),
        "ahead": features.bias_paired and not others and params["head_dim"] == 64,
        "step_k": 16 if features.seeded and is_tight("bias", params) else 32,
    }


def _shared(params: Params) -> SharedLayout:
    (block_q, block_k, _, count), d, dv = params["tile"], params["head_dim"], params["head_dim_v"]
    sizes = (("Q", block_q * d), ("dO", block_q * dv), ("K", block_k * d), ("V", block_k * dv))
    return [(f"{name} stage {i}", 2 * size) for i in range(count) for name, size in sizes]


def _shared_fp32(params: Params) -> SharedLayout:
    (own, other, _), d, dv = params["tile"], params["head_dim"], params["head_dim_v"]
    sizes = (("Q", own, d), ("dO", own, dv), ("K", other, d), ("V", other, dv))
    return [(name, 4 * rows * (dim + 4)) for name, rows, dim in sizes]


def _grid(params: Params, one: Problem) -> tuple[int, int, int]:
    block_q, block_k, *_ = params["tile"]
    batch, heads, rows = one["bias_shape"]
    tiles = -(-rows // block_q) * -(-one["seqlen_k"] // block_k)
    return tiles * batch * heads * one["bias_parts"], 1, 1


def _dbias(base: KernelSpec, name: str, layout: Any, derive: Callable[..., Any]) -> KernelSpec:
    """As a kernel that makes dq, over tiles of a bias; only ever with score features."""
    return replace(
        base,
        name=name,
        source=f"attention/backward_{name}.cu",
        entry=f"attention_backward_{name}",
        doc="gradient of a bias: a block owns a tile of it and walks over what shares it",
        illegal=lambda params: why_illegal(name, params),
        derive=derive,
        grid=_grid,
        shared_layout=layout,
        shared_bytes=lambda params: sum(size for _, size in layout(params)),
        verification=f"{CASES}:DBIAS",
    )


DBIAS = _dbias(DQ, "bias", _shared, _derive)
DBIAS_FP32 = _dbias(fp32.DQ_FP32, "bias_fp32", _shared_fp32, fp32.derive)


# ------------------------------------------------------------------ the same out of partial sums


def _sum_size(one: Problem) -> int:
    return one["bias_batch"] * one["heads"] * one["columns"]


def _sum_arguments(params: Params, one: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: arrays[name] for name in ("dbias_parts", "dbias")},
        **{name: one[name] for name in ("columns", "heads", "batches")},
        "size": _sum_size(one),
        "heads_summed": one["heads"] * one["shared"],
    }


DBIAS_SUM = KernelSpec(
    op=OP_FEATURES,
    name="bias_sum",
    source="attention/backward_bias_sum.cu",
    entry="attention_backward_bias_sum",
    doc="gradient of a bias out of the sums of its parts",
    params=(Param("bias_dtype", BIAS_DTYPES, "element type of the bias"),),
    derive=lambda params: {"threads": _THREADS},
    block=lambda params: (_THREADS, 1, 1),
    grid=lambda params, one: (-(-_sum_size(one) // _THREADS), 1, 1),
    arguments=_sum_arguments,
    work=Work(bytes=lambda one: 4.0 * _sum_size(one) * (one["batches"] * one["shared"] + 1)),
    verification=f"{CASES}_rows:DBIAS_SUM",
)

_MANY_BLOCKS = 2048  # of zeros, each thread of which goes on where there is more


def _zeros_grid(params: Params, one: Problem) -> tuple[int, int, int]:
    chunks = problem.bias_size(one) * ITEMSIZE[params["bias_dtype"]] // 16
    return min(-(-chunks // _THREADS), _MANY_BLOCKS), 1, 1


ZEROS = KernelSpec(
    op=OP_FEATURES,
    name="zeros",
    source="attention/backward_zeros.cu",
    entry="attention_backward_zeros",
    doc="zeros in the gradient of a bias, before others add to it",
    params=(Param("bias_dtype", ("fp16", "bf16"), "element type of the bias"),),
    derive=lambda params: {"threads": _THREADS},
    block=lambda params: (_THREADS, 1, 1),
    grid=_zeros_grid,
    arguments=lambda params, one, arrays: {
        "dbias": arrays["dbias"],
        "size": problem.bias_size(one),
    },
    work=Work(bytes=lambda one: 2.0 * problem.bias_size(one)),
    verification=f"{CASES}_rows:ZEROS",
)

# ------------------------------------------------------------------ sinks, slopes: a block a head

HEADS = KernelSpec(
    op=OP_FEATURES,
    name="heads",
    source="attention/backward_heads.cu",
    entry="attention_backward_heads",
    doc="gradients of sinks and ALiBi slopes: a block adds up the rows of a head",
    params=(Param("varlen", (True, False), "packed sequences"),),
    derive=lambda params: {"threads": _HEAD_THREADS},
    block=lambda params: (_HEAD_THREADS, 1, 1),
    grid=lambda params, one: (one["heads_q"], 1, 1),
    arguments=problem.arguments,
    verification=f"{CASES}_rows:HEADS",
)
