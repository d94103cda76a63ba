"""A call of `fkjit.models`: the beginning of a decode step. No part of the public API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.errors import ParameterError
from fkjit.ops.op.checks import check_dtype, check_same_dtype, check_shape
from fkjit.ops.op.op import Launch, Op, Output, Request
from fkjit.ops.op.shapes import rows_of
from fkjit.ops.step.call import Norm
from fkjit.ops.step.stream import Scaled
from fkjit.runtime.interop import ITEMSIZE, View
from fkjit.spec import KernelSpec, Param, Params, Problem, Work, register

_CALL, _THREADS, _VECTOR = "step_begin", 256, 8


def step_begin(
    tokens: Any, positions: Any, rows: Any, embedding: Any, position_embedding: Any, norm: Norm,
    cache: Any,
) -> tuple[Any, Any, Scaled]:  # fmt: skip
    """The slots of a token of each sequence, whose lengths count it, the residual stream, and what
    the product behind the first norm takes.

    Args:
        tokens: int64 [m]. positions: int32 [m]. rows: int32 [m], of the cache's tables, below 0: no
            sequence. embedding: [vocabulary, k]; position_embedding: [positions, k] or None.
        norm: the first layer's. cache: a PagedKVCache.

    Returns: slot_mapping int32 [m], the stream [m, k], `Scaled`.
    Raises ParameterError, ArgumentTypeError: shapes, strides, dtypes.
    """
    cache.flush()
    tables = (cache.page_table, cache.capacities, cache.lengths)
    arrays = (tokens, positions, rows, embedding, position_embedding, norm.weight, *tables)
    options = (cache.page_size, "rms" if norm.bias is None else "layer")
    slots, stream, scaled, moments = _OP(arrays, (), options)
    return slots, stream, Scaled(scaled, moments, norm)


def prepare(
    tokens: Any, positions: Any, rows: Any, embedding: Any, position_embedding: Any, norm: Norm,
    tables: tuple[Any, Any, Any], *, page_size: int,
) -> None:  # fmt: skip
    """Compile and load what `step_begin` with the same arguments needs. tables: the cache's page
    table, capacities and lengths."""
    arrays = (tokens, positions, rows, embedding, position_embedding, norm.weight, *tables)
    _OP.prepare(arrays, (page_size, "rms" if norm.bias is None else "layer"))


def _check(views: Mapping[str, View | None], page_size: int, norm: str) -> Request:
    seen = {name: view for name, view in views.items() if view is not None}
    floats = [n for n in ("embedding", "position_embedding", "norm_weight") if n in seen]
    dtype = check_same_dtype(_CALL, {name: seen[name] for name in floats}, ("fp16", "bf16"))
    (m,), (vocabulary, k) = seen["tokens"].shape, seen["embedding"].shape
    sequences, pages = seen["page_table"].shape
    wanted = {
        "tokens": ((m,), "int64"), "positions": ((m,), "int32"), "rows": ((m,), "int32"),
        "page_table": ((sequences, pages), "int32"), "capacities": ((sequences,), "int32"),
        "lengths": ((sequences,), "int32"), "norm_weight": ((k,), dtype),
    }  # fmt: skip
    for name, (shape, kind) in wanted.items():
        check_dtype(_CALL, name, seen[name], (kind,))
        check_shape(_CALL, name, seen[name], shape, "here")
    gaps = [n for n in floats[:-1] if rows_of(_CALL, n, seen[n])[2] != k]
    if k % _VECTOR or gaps or any(seen[name].pointer % 16 for name in floats):
        raise ParameterError(
            f"{_CALL}: embedding has shape {(vocabulary, k)}; allowed: arrays without gaps that "
            f"start on 16 bytes, a multiple of {_VECTOR} columns"
        )
    learned = "position_embedding" in seen
    problem = {
        "m": m, "k": k, "vocabulary": vocabulary, "dtype": dtype, "page_size": page_size,
        "max_positions": seen["position_embedding"].shape[0] if learned else 0,
        "max_sequences": sequences, "max_pages": pages, "norm": norm, "learned": learned,
    }  # fmt: skip
    outputs = {
        "slot_mapping": Output((m,), "int32"), "stream": Output((m, k), dtype),
        "scaled": Output((m, k), dtype),
        "moments": Output((1, m, 2) if norm == "layer" else (1, m), "fp32"),
    }  # fmt: skip
    params = {"dtype": dtype, "norm": norm, "learned": learned, "threads": _THREADS}
    return Request(views, outputs, (Launch(BEGIN, params, problem),))


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    names = ("k", "vocabulary", "max_positions", "max_sequences", "max_pages")
    named = {"position_embedding": None, **arrays, **{name: problem[name] for name in names}}
    return named | {"page_log2": problem["page_size"].bit_length() - 1}


BEGIN = register(
    KernelSpec(
        op=_CALL,
        name="rows",
        source="step/begin.cu",
        entry=_CALL,
        pdl=True,
        doc="slots of new tokens, their embedding, and what the first norm's product takes",
        params=(
            Param("dtype", ("bf16", "fp16"), "element type of weights and stream"),
            Param("norm", ("rms", "layer"), "the first layer's"),
            Param("learned", (False, True), "positions have an embedding"),
            Param("threads", (_THREADS,), "threads of a block", tunable=True),
        ),
        block=lambda params: (params["threads"], 1, 1),
        grid=lambda params, problem: (problem["m"], 1, 1),
        arguments=_arguments,
        work=Work(bytes=lambda p: 4.0 * ITEMSIZE[p["dtype"]] * p["m"] * p["k"]),
        verification="fkjit.ops.step.stream_cases:BEGIN",
    )
)
_OP = Op(
    _CALL,
    inputs=("tokens", "positions", "rows", "embedding", "position_embedding", "norm_weight",
            "page_table", "capacities", "lengths"),
    outputs=("slot_mapping", "stream", "scaled", "moments"), check=_check,
    optional=("position_embedding",), written=("lengths",),
)  # fmt: skip
