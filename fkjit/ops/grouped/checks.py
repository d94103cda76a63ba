"""Checks that all grouped products share: options, sizes, bias, and how experts' rows are told."""

from __future__ import annotations

import math
from typing import Any, Protocol

from fkjit.errors import ParameterError
from fkjit.ops.gemm.epilogue import ACTIVATIONS
from fkjit.ops.grouped.kernels import LEAST_BLOCK
from fkjit.ops.grouped.options import CALL
from fkjit.ops.moe.checks import check_dense
from fkjit.ops.op.checks import check_dtype, check_flag, check_shape
from fkjit.ops.op.shapes import rows_of
from fkjit.runtime.interop import ITEMSIZE, View

WEIGHT_LAYOUTS = ("nk", "kn")


class Said(Protocol):
    """What all calls say."""

    @property
    def activation(self) -> Any: ...
    @property
    def gate(self) -> Any: ...
    @property
    def weight_layout(self) -> Any: ...


def check_options(said: Said) -> None:
    if said.activation is not None and said.activation not in ACTIVATIONS:
        raise ParameterError(
            f"{CALL}: activation={said.activation!r} is not None or one of {', '.join(ACTIVATIONS)}"
        )
    check_flag(CALL, "gate", said.gate)
    if said.weight_layout not in WEIGHT_LAYOUTS:
        raise ParameterError(
            f"{CALL}: weight_layout={said.weight_layout!r} is not one of "
            f"{', '.join(WEIGHT_LAYOUTS)}"
        )


def sizes_of(x: View, weight: View, said: Said) -> dict[str, int]:
    named = "[experts, N, K]" if said.weight_layout == "nk" else "[experts, K, N]"
    if len(x.shape) not in (2, 3) or len(weight.shape) != 3 or 0 in weight.shape:
        raise ParameterError(
            f"{CALL}: x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}; allowed: x "
            f"[places, K], weight {named}"
        )
    experts, wide, k = weight.shape
    wide, k = (wide, k) if said.weight_layout == "nk" else (k, wide)
    if x.shape[-1] != k:
        raise ParameterError(
            f"{CALL}: x has {x.shape[-1]} columns, weight {tuple(weight.shape)} is of {k}; "
            f"allowed: weight {named} (weight_layout={said.weight_layout!r})"
        )
    if said.gate and wide % 2:
        raise ParameterError(
            f"{CALL}: gate=True, but weight {tuple(weight.shape)} has {wide} outputs; allowed: an "
            "even number, gate first, then up"
        )
    _, rows, columns = weight.shape
    if tuple(weight.strides) != (rows * columns, columns, 1):
        raise ParameterError(
            f"{CALL}: weight has strides {tuple(weight.strides)}; pass a contiguous weight"
        )
    n = wide // 2 if said.gate else wide
    return {"m": math.prod(x.shape[:-1]), "n": n, "k": k, "experts": experts}


def check_bias(bias: View | None, experts: int, wide: int) -> None:
    if bias is not None:
        check_shape(CALL, "bias", bias, (experts, wide), "[experts, N], here")
        check_dense(CALL, "bias", bias)


def check_groups(
    offsets: View | None, places: int, experts: int, block: int, least: int = LEAST_BLOCK
) -> None:
    assert offsets is not None
    check_dtype(CALL, "groups.offsets", offsets, ("int32",))
    if offsets.shape[0] != experts + 1:
        raise ParameterError(
            f"{CALL}: groups are of {offsets.shape[0] - 1} experts, weight is of {experts}"
        )
    if block % least or (block and places % block):
        raise ParameterError(
            f"{CALL}: x has {places} rows, groups a block_size of {block}; allowed: a row for each "
            f"place, and groups made with a block_size that is a multiple of {least}"
        )


def check_counts(x: View, counts: View | None, experts: int) -> None:
    assert counts is not None
    check_dtype(CALL, "groups", counts, ("int32",))
    check_shape(CALL, "groups", counts, (experts,), "[experts], here")
    check_dense(CALL, "groups", counts)
    check_dense(CALL, "x", x)
    if x.shape[0] != experts or x.shape[1] % LEAST_BLOCK:
        raise ParameterError(
            f"{CALL}: x has shape {tuple(x.shape)}; allowed: [experts, capacity, K] of {experts} "
            f"experts, with a capacity that is a multiple of {LEAST_BLOCK}"
        )


def problem_of(
    x: View, weight: View, bias: View | None, said: Said, sizes: dict[str, int]
) -> dict[str, Any]:
    """What a problem has of linear's, whoever its rows belong to."""
    n, k, wide = sizes["n"], sizes["k"], sizes["n"] * (2 if said.gate else 1)
    by_k, x_stride = said.weight_layout == "nk", rows_of(CALL, "x", x)[2]
    return {
        **sizes, "dtype": x.dtype, "out_dtype": x.dtype, "activation": said.activation or "none",
        "gate": said.gate, "scale": 1.0, "x_layout": "mk", "weight_layout": said.weight_layout,
        "residual": False, "bias": bias is not None, "x_stride": x_stride,
        "weight_stride": k if by_k else wide, "out_stride": n, "residual_stride": n,
        "aligned": is_aligned(x, weight, sizes, x_stride, by_k),
        "aligned_out": n % (16 // ITEMSIZE[x.dtype]) == 0,
    }  # fmt: skip


def is_aligned(x: View, weight: View, sizes: dict[str, int], x_stride: int, by_k: bool) -> bool:
    """Whether rows of both, and those of up, begin on 16-byte boundaries."""
    chunk = 16 // ITEMSIZE[x.dtype]
    inner = sizes["k"] if by_k else weight.shape[2]
    strides = (x_stride, sizes["k"], inner, 0 if by_k else sizes["n"])
    return not any(stride % chunk for stride in strides) and not (
        x.pointer % 16 or weight.pointer % 16
    )
