"""`fkjit.kv_append`: keys and values of new tokens into the pages of a KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.kv import problem as kv
from fkjit.ops.kv.planes import planes
from fkjit.ops.op.checks import FLOATS, check_same_dtype
from fkjit.ops.op.node import Node
from fkjit.ops.op.op import Launch, Op, Request, arch_of
from fkjit.runtime.interop import View
from fkjit.spec import KernelSpec, Param, Params, register
from fkjit.tuning import tuned

_CALL = "kv_append"


def kv_append(
    k: Any, v: Any, cache: Any, slot_mapping: Any, *, layer: int = 0, layout: str | None = None,
    k_scale: Any = None, v_scale: Any = None,
) -> None:  # fmt: skip
    """Write keys and values of new tokens to their slots in a paged KV cache.

    Args:
        k, v: [tokens, heads, head_dim], fp16, bf16 or fp32, both alike, in the dtype of the cache
            unless that keeps fp8 or int8. Any strides, if a head's elements are contiguous.
        cache: a `PagedKVCache`, or a pair of arrays (k_pages, v_pages) in the tokens' dtype,
            or fp8 or int8 with scales, of `layout`; they are written in place.
        slot_mapping: [tokens] int32 or int64: page * page_size + place in the page; -1: the token
            is not written. Two tokens of one slot: on a GPU parts of either may stay, on the CPU it
            is an error. Slots beyond the last page: skipped on a GPU, an error on the CPU.
        layer: which of the cache's layers.
        layout: "nhd" (default), pages are [page_size, heads, head_dim]; or "hnd",
            [heads, page_size, head_dim]. Only where `cache` is a pair.
        k_scale, v_scale: fp32 [heads], or one number for all heads: of a pair of fp8 (e4m3, also as
            uint8) or int8 pages.

    Raises:
        ParameterError: shapes, strides or page sizes that do not fit. ArgumentTypeError: dtypes.
        DeviceError: mixed devices. CaptureError: first call of a geometry under CUDA graph capture;
        see `fkjit.prepare`.

    fp8 and int8 caches keep round(x / scale of the head), ties to even, cut off at 448 (e4m3) or
    127; NaN is kept in fp8 and becomes -127 in int8. One launch, which neither waits nor allocates:
    it may be captured into a CUDA graph, and `slot_mapping` is read at each replay.
    """
    held = planes(_CALL, cache, layer, layout, (k_scale, v_scale))
    return _OP((k, v, slot_mapping, *held.arrays), (), (held.storage, held.layout))


def _prepare(
    k: Any, v: Any, cache: Any, slot_mapping: Any, *, layer: int = 0, layout: str | None = None,
    k_scale: Any = None, v_scale: Any = None,
) -> None:  # fmt: skip
    """Compile and load what the call with the same arguments needs, without running it."""
    held = planes(_CALL, cache, layer, layout, (k_scale, v_scale))
    _OP.prepare([k, v, slot_mapping, *held.arrays], (held.storage, held.layout))


def _check(views: Mapping[str, View | None], storage: str, layout: str) -> Request:
    seen = {name: view for name, view in views.items() if view is not None}
    dtype = check_same_dtype(_CALL, {"k": seen["k"], "v": seen["v"]}, FLOATS)
    problem = kv.check_append(_CALL, views, dtype, storage, layout)
    if not problem["tokens"]:
        return Request(views, {}, ())
    vector = kv.is_vector(dtype, problem, seen, ())
    params = default({"dtype": dtype, "storage": storage, "vector": vector})
    params = tuned(APPEND, params, problem, arch_of(seen["k"]))
    kv.check_size(_CALL, params, problem)
    return Request(views, {}, (Launch(APPEND, params, problem),))


def default(fixed: Params) -> dict[str, Any]:
    """The parameters, where none were found by `fkjit tune`."""
    return {**fixed, "threads": kv.THREADS, "unroll": _unroll(fixed["storage"])}


def _unroll(storage: str) -> int:
    """Tokens of a thread: several where one is less than a 16-byte write."""
    return 1 if storage == "same" else 4


APPEND = register(
    KernelSpec(
        op=_CALL,
        name="tokens",
        source="kv/append.cu",
        entry="kv_append",
        pdl=True,
        doc="tokens to slots of a paged KV cache, as they are or as fp8 or int8",
        params=(*kv.PARAMS, Param("unroll", (1, 2, 4), "tokens of a thread", tunable=True)),
        illegal=lambda params: kv.illegal(params, _unroll(params["storage"])),
        shape_class=kv.shape_class,
        derive=kv.derive,
        block=lambda params: (params["threads"], 1, 1),
        grid=kv.grid,
        arguments=kv.arguments,
        work=kv.WORK,
        verification="fkjit.ops.kv.cases:APPEND",
    )
)

_INPUTS = ("k", "v", "slot_mapping", "k_pages", "v_pages", "k_scale", "v_scale")
_OP = Op(
    _CALL,
    inputs=_INPUTS,
    check=_check,
    optional=("k_scale", "v_scale"),
    written=("k_pages", "v_pages"),
    node=Node(lambda *given: [], "str storage, str layout", 0),
)
kv_append.prepare = _prepare  # type: ignore[attr-defined]
