"""`fkjit.rope_kv_append`: rotary embedding and append to a paged KV cache in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.errors import ParameterError
from fkjit.ops.kv.planes import planes
from fkjit.ops.kv.problem import check_append, check_size, check_tokens, is_vector
from fkjit.ops.kv.rope_append_kernels import COMPUTED, TABLED, parameters
from fkjit.ops.op.checks import (
    check_dtype,
    check_flag,
    check_output,
    check_same_dtype,
    check_shape,
    itemsize,
)
from fkjit.ops.op.node import Node, like
from fkjit.ops.op.op import Launch, Op, Output, Request
from fkjit.ops.rope.call import OPTIONS, as_option, pack_scaling, unpack_scaling
from fkjit.ops.rope.checks import check_rotary_dim, check_source
from fkjit.ops.rope.frequencies import THETA, Scaling
from fkjit.ops.rope.kernels import VECTOR_BYTES
from fkjit.runtime.interop import View
from fkjit.spec import Params
from fkjit.types import PageLayout

_CALL = "rope_kv_append"


def rope_kv_append(
    q: Any, k: Any, v: Any, cache: Any, slot_mapping: Any, positions: Any, *,
    theta: float | None = None, scaling: Scaling | None = None, table: Any = None,
    rotary_dim: int | None = None, interleaved: bool = False, layer: int = 0,
    layout: PageLayout | None = None, inplace: bool = False, out_q: Any = None,
) -> Any:  # fmt: skip
    """Turn q and k by their positions, and write k and v to their slots in a paged KV cache.

    What `rope` and then `kv_append` give, to the bit, in one launch; k itself stays as it was.

    Args:
        q: [tokens, q_heads, head_dim]; k, v: [tokens, heads, head_dim]; fp16, bf16 or fp32, alike.
            Any strides, if a head's elements are contiguous.
        cache, slot_mapping, layer, layout: as for `kv_append`; where a slot is below 0, q alone is
            turned.
        positions: [tokens] int32 or int64. One below 0, above 2^31 - 1 or behind the table's end
            makes the turned columns NaN.
        theta, scaling, table, rotary_dim, interleaved: as for `rope`.
        inplace: write into q. out_q: where the result is written; default: a new contiguous array.

    Returns:
        q turned. Without gradients.

    Raises as `kv_append` and `rope` do. Capture into CUDA graphs as for `kv_append`; positions,
    too, are read at each replay.

    Example:
        >>> cache = fkjit.PagedKVCache(
        ...     8, page_size=16, num_kv_heads=1, head_dim=8, dtype="fp32", device="cpu",
        ...     framework="numpy",
        ... )
        >>> slots = cache.extend([cache.allocate()], [3])
        >>> q, k = np.ones((3, 2, 8), np.float32), np.ones((3, 1, 8), np.float32)
        >>> positions = np.arange(3, dtype=np.int32)
        >>> fkjit.rope_kv_append(q, k, k, cache, slots, positions).shape
        (3, 2, 8)
    """
    return _OP(*_arranged(q, k, v, cache, slot_mapping, positions, theta=theta, scaling=scaling,
                          table=table, rotary_dim=rotary_dim, interleaved=interleaved, layer=layer,
                          layout=layout, inplace=inplace, out_q=out_q))  # fmt: skip


def _arranged(
    q: Any, k: Any, v: Any, cache: Any, slot_mapping: Any, positions: Any, *,
    theta: Any = None, scaling: Any = None, table: Any = None, rotary_dim: Any = None,
    interleaved: Any = False, layer: int = 0, layout: PageLayout | None = None,
    inplace: bool = False, out_q: Any = None,
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """The call's (inputs, outputs, options)."""
    held = planes(_CALL, cache, layer, layout)
    inplace = check_flag(_CALL, "inplace", inplace)
    if inplace and out_q is not None:
        raise ParameterError(f"{_CALL}: inplace=True and out_q; pass one of them")
    options = (held.storage, held.layout, theta, as_option(scaling), rotary_dim, interleaved)
    inputs = (q, k, v, slot_mapping, positions, table, *held.arrays)
    return inputs, (q if inplace else out_q,), options


def _prepare(*args: Any, **options: Any) -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    inputs, outputs, chosen = _arranged(*args, **options)
    _OP.prepare([*inputs, *outputs], chosen)


def _check(
    views: Mapping[str, View | None], storage: str, layout: str, theta: Any, scaling: Any,
    rotary_dim: Any, interleaved: Any,
) -> Request:  # fmt: skip
    seen = {name: view for name, view in views.items() if view is not None}
    dtype = check_same_dtype(_CALL, {name: seen[name] for name in ("q", "k", "v")})
    problem = check_append(_CALL, views, dtype, storage, layout)
    tokens, dim = problem["tokens"], problem["head_dim"]
    heads_q, output = _check_queries(views, tokens, dim, dtype)
    columns = check_rotary_dim(rotary_dim, views["table"], dim, _CALL)
    problem |= {
        **{"heads_q": heads_q, "rotary_dim": columns, "theta": THETA if theta is None else theta},
        "interleaved": check_flag(_CALL, "interleaved", interleaved),
        "scaling": check_source(views["table"], theta, scaling, columns, _CALL),
    }
    _check_positions(seen["positions"], tokens)
    inputs, outputs = {name: views[name] for name in _INPUTS}, {"out_q": output}
    if not tokens:
        return Request(inputs, outputs, ())
    fixed = {
        "dtype": dtype, "storage": storage, "interleaved": problem["interleaved"],
        "vector": is_vector(dtype, problem, seen, ()) and _vectors(views, columns),
    }  # fmt: skip
    params = parameters(fixed, problem)
    _check_sizes(params, problem, views)
    spec = COMPUTED if views["table"] is None else TABLED
    return Request(inputs, outputs, (Launch(spec, params, problem),))


def _check_queries(
    views: Mapping[str, View | None], tokens: int, dim: int, dtype: str
) -> tuple[int, Output]:
    """Heads of q, and what is written."""
    q, given = views["q"], views["out_q"]
    assert q is not None
    heads = q.shape[1] if len(q.shape) == 3 else 0
    check_tokens(_CALL, "q", q, heads, dim, tokens)
    if given is not None:
        check_output(_CALL, given, tuple(q.shape), dtype, "out_q")
        check_tokens(_CALL, "out_q", given, heads, dim, tokens)
    return heads, Output((tokens, heads, dim), dtype, given)


def _check_positions(view: View, tokens: int) -> None:
    check_dtype(_CALL, "positions", view, ("int32", "int64"))
    check_shape(_CALL, "positions", view, (tokens,), "[tokens], here")


def _check_sizes(params: Params, problem: Any, views: Mapping[str, View | None]) -> None:
    check_size(_CALL, params, problem)
    for name in ("q", "out_q"):
        view = views[name]
        if view is not None and max(map(abs, view.strides)) >= 2**31:
            raise ParameterError(f"{_CALL}: {name}'s strides reach 2^31 elements")
    if problem["heads_q"] + 2 * problem["heads"] > 65_535:
        raise ParameterError(f"{_CALL}: {problem['heads_q']} heads of q are more than 65,535")


def _vectors(views: Mapping[str, View | None], columns: int) -> bool:
    """Whether 16-byte accesses fit q, the table, and half of the columns that turn."""
    for name in ("q", "out_q", "table"):
        view = views[name]
        if view is None:
            continue
        size = itemsize(view)
        if name == "q" and columns // 2 * size % VECTOR_BYTES:
            return False
        steps = zip(view.shape[:-1], view.strides[:-1], strict=True)
        if view.pointer % VECTOR_BYTES or any(n > 1 and s * size % VECTOR_BYTES for n, s in steps):
            return False
    return True


def _pack(storage: str, layout: str, theta: Any, scaling: Any, *rest: Any) -> tuple[Any, ...]:
    return (storage, layout, theta, pack_scaling(scaling), *rest)


def _unpack(storage: str, layout: str, theta: Any, text: Any, *rest: Any) -> tuple[Any, ...]:
    return (storage, layout, theta, unpack_scaling(text), *rest)


_INPUTS = ("q", "k", "v", "slot_mapping", "positions", "table",
           "k_pages", "v_pages", "k_scale", "v_scale")  # fmt: skip
_OP = Op(
    _CALL,
    inputs=_INPUTS,
    outputs=("out_q",),
    check=_check,
    optional=("table", "k_scale", "v_scale"),
    written=("k_pages", "v_pages"),
    in_place=(("out_q", "q"),),
    node=Node(
        lambda q, *rest: [like(q)], f"str storage, str layout, {OPTIONS}",
        pack=_pack, unpack=_unpack,
    ),
)  # fmt: skip
rope_kv_append.prepare = _prepare  # type: ignore[attr-defined]
