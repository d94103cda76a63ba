"""`fkjit.kv_read`: keys and values of tokens out of the pages of a KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.arguments import shown
from fkjit.errors import ArgumentTypeError
from fkjit.ops.kv import problem as kv
from fkjit.ops.kv.planes import planes
from fkjit.ops.op.checks import FLOATS, check_dtype, check_writable
from fkjit.ops.op.node import Node, of_dtype
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.runtime.interop import View
from fkjit.spec import KernelSpec, Param, Params, register
from fkjit.tuning import tuned
from fkjit.types import PageLayout

_CALL = "kv_read"
_UNROLL = 2  # tokens of a thread: one alone would wait for its slot, and then for its elements


def kv_read(
    cache: Any,
    slot_mapping: Any,
    *,
    layer: int = 0,
    dtype: str | None = None,
    layout: PageLayout | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """Keys and values of some slots of a paged KV cache, one behind the other.

    Args:
        cache, slot_mapping, layer, layout, k_scale, v_scale: as for `kv_append`; a slot may stand
            more than once, and below 0 is a token of zeros.
        dtype: "fp16", "bf16" or "fp32", of the result; only for fp8 and int8 caches, where the
            default is bf16. Others give what they hold.
        out: (k, v) to be written, [tokens, heads, head_dim] each; default: new arrays.

    Returns:
        (k, v), [tokens, heads, head_dim] each. What is kept as fp8 or int8 is multiplied by the
        scale of its head in fp32 and rounded once.

    Raises as `kv_append` does. On a GPU slots beyond the last page are tokens of zeros.

    Example:
        >>> cache = fkjit.PagedKVCache(
        ...     8, page_size=16, num_kv_heads=1, head_dim=8, dtype="fp32", device="cpu",
        ...     framework="numpy",
        ... )
        >>> a = cache.allocate()
        >>> k = v = np.ones((3, 1, 8), np.float32)
        >>> fkjit.kv_append(k, v, cache, cache.extend([a], [3]))
        >>> k, v = cache.read([a])  # kv_read of the sequences' pages
        >>> k.shape
        (3, 1, 8)
    """
    held = planes(_CALL, cache, layer, layout, (k_scale, v_scale))
    k, v = _pair(out)
    pages = held.arrays
    return _OP((pages[0], pages[1], slot_mapping, *pages[2:]), (k, v), _options(held, dtype))


def _prepare(
    cache: Any,
    slot_mapping: Any,
    *,
    layer: int = 0,
    dtype: str | None = None,
    layout: PageLayout | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out: tuple[Any, Any] | None = None,
) -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    held = planes(_CALL, cache, layer, layout, (k_scale, v_scale))
    k, v = _pair(out)
    pages = held.arrays
    _OP.prepare([pages[0], pages[1], slot_mapping, *pages[2:], k, v], _options(held, dtype))


def _pair(out: Any) -> tuple[Any, Any]:
    """`out` as (k, v)."""
    if out is None:
        return None, None
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise ArgumentTypeError(
            f"{_CALL}: out={shown(out)} is not a pair (k, v) of arrays, or None"
        )
    return out[0], out[1]


def _options(held: Any, dtype: str | None) -> tuple[Any, ...]:
    return (held.storage, held.layout, dtype)


def _check(
    views: Mapping[str, View | None], storage: str, layout: str, wanted: str | None
) -> Request:
    seen = {name: view for name, view in views.items() if view is not None}
    pages = {name: seen[name] for name in ("k_pages", "v_pages")}
    problem = kv.check_pages(_CALL, pages, layout)
    dtype = _dtype(pages, storage, wanted)
    kv.check_scales(_CALL, views, storage, problem["heads"])
    num_slots = problem["num_pages"] * problem["page_size"]
    step = kv.check_slots(_CALL, seen["slot_mapping"], num_slots, unique=False)
    tokens, heads, dim = seen["slot_mapping"].shape[0], problem["heads"], problem["head_dim"]
    made = {}
    for side in ("k", "v"):
        given = views[side]
        problem[side] = (heads * dim, dim)
        if given is not None:
            check_dtype(_CALL, side, given, (dtype,))
            problem[side] = kv.check_tokens(_CALL, side, given, heads, dim, tokens)
            check_writable(_CALL, side, given)
        made[side] = Output((tokens, heads, dim), dtype, given)
    problem |= {"dtype": dtype, "storage": storage, "tokens": tokens, "slot_step": step}
    inputs = {name: views[name] for name in _INPUTS}
    if not tokens:
        return Request(inputs, made, ())
    new = [side for side in ("k", "v") if views[side] is None]
    vector = kv.is_vector(dtype, problem, seen, new)
    params = default({"dtype": dtype, "storage": storage, "vector": vector})
    params = tuned(READ, params, problem, arch_of(seen["slot_mapping"]))
    kv.check_size(_CALL, params, problem)
    return Request(inputs, made, (Launch(READ, params, problem),))


def default(fixed: Params) -> dict[str, Any]:
    """The parameters, where none were found by `fkjit tune`."""
    return {**fixed, "threads": kv.THREADS, "unroll": _UNROLL}


def _dtype(pages: Mapping[str, View], storage: str, wanted: str | None) -> str:
    """Of the result."""
    if wanted is not None and (not isinstance(wanted, str) or wanted not in FLOATS):
        raise ArgumentTypeError(f"{_CALL}: dtype={shown(wanted)}; allowed: {', '.join(FLOATS)}")
    allowed = (kv.CODES[storage],) if storage in kv.CODES else FLOATS
    kept = pages["k_pages"].dtype
    check_dtype(_CALL, "k_pages", pages["k_pages"], allowed)
    check_dtype(_CALL, "v_pages", pages["v_pages"], (kept,))
    if storage != "same":
        return wanted or "bf16"
    if wanted not in (None, kept):
        raise ArgumentTypeError(f"{_CALL}: dtype={wanted!r}, but the cache holds {kept}")
    return kept


READ = register(
    KernelSpec(
        op=_CALL,
        name="tokens",
        source="kv/read.cu",
        entry="kv_read",
        pdl=True,
        doc="tokens out of slots of a paged KV cache, from fp8 or int8 as well",
        params=(*kv.PARAMS, Param("unroll", (1, 2, 4), "tokens of a thread", tunable=True)),
        illegal=lambda params: kv.illegal(params, _UNROLL),
        shape_class=kv.shape_class,
        derive=kv.derive,
        block=lambda params: (params["threads"], 1, 1),
        grid=kv.grid,
        arguments=kv.arguments,
        work=kv.WORK,
        verification="fkjit.ops.kv.cases:READ",
    )
)

_INPUTS = ("k_pages", "v_pages", "slot_mapping", "k_scale", "v_scale")


def _fake(
    k_pages: Any, v_pages: Any, slots: Any, k_scale: Any, v_scale: Any,
    storage: str, layout: str, dtype: str | None,
) -> list[Any]:  # fmt: skip
    heads, dim = k_pages.shape[2 if layout == "nhd" else 1], k_pages.shape[3]
    shape = (slots.shape[0], heads, dim)
    if dtype is None and storage == "same":
        return [k_pages.new_empty(shape), v_pages.new_empty(shape)]
    return [of_dtype(x, shape, dtype or "bf16") for x in (k_pages, v_pages)]


_OP = Op(
    _CALL, inputs=_INPUTS, outputs=("k", "v"), check=_check, optional=("k_scale", "v_scale"),
    node=Node(_fake, "str storage, str layout, str? dtype", 2),
)  # fmt: skip
kv_read.prepare = _prepare  # type: ignore[attr-defined]
