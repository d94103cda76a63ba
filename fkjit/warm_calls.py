"""Public calls whose kernels `fkjit warm` compiles: shapes of each, by dtype and head dimension.

A kernel's tile follows from a call's sizes, so each call stands here at a few sizes, from one
sequence to many; most of them take the same few variants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import fkjit
from fkjit.errors import ParameterError

DTYPES, HEAD_DIMS = ("bf16", "fp16"), (64, 128)
HEADS, KV_HEADS, PAGE = 32, 8, 16
_SIZES = ((1, 512), (1, 4096), (8, 4096))  # sequences, their length
_HIDDEN = 4096
_WIDE = 14336
_TOKENS = (1, 16, 512, 8192)
_EXPERTS = ((8, 2), (128, 8))  # and how many of them a token takes


class Call(NamedTuple):
    """`fkjit.<op>(*args, **options)`, arrays as texts ("bf16[1, 32, 512, 128]")."""

    op: str
    args: tuple[Any, ...]
    options: dict[str, Any]


Shapes = Callable[[str, int], Iterator[tuple[Any, ...]]]


def _array(dtype: str, *shape: int) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _attention(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    for batch, length in _SIZES:
        q = _array(dtype, batch, HEADS, length, dim)
        yield q, *(_array(dtype, batch, KV_HEADS, length, dim),) * 2


def _varlen(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    for batch, length in _SIZES:
        q, kv = (_array(dtype, batch * length, heads, dim) for heads in (HEADS, KV_HEADS))
        ends = _array("int32", batch + 1)
        yield q, kv, kv, ends, ends, length, length


def _backward(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    for q, k, v in _attention(dtype, dim):
        batch, _, length, _ = map(int, q.partition("[")[2].rstrip("]").split(","))
        yield q, q, k, v, q, _array("fp32", batch, HEADS, length)


def _decode(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    for batch, length in _SIZES:
        kv = _array(dtype, batch, KV_HEADS, length, dim)
        yield _array(dtype, batch, HEADS, dim), kv, kv, _array("int32", batch)


def _pages(dtype: str, dim: int) -> tuple[str, ...]:
    return (_array(dtype, 1024, PAGE, KV_HEADS, dim),) * 2


def _paged(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    for batch, length in _SIZES:
        table = _array("int32", batch, length // PAGE)
        q, lengths = _array(dtype, batch, HEADS, dim), _array("int32", batch)
        yield q, _pages(dtype, dim), table, lengths


def _new_kv(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    for tokens in _TOKENS:
        kv = _array(dtype, tokens, KV_HEADS, dim)
        yield kv, kv, _pages(dtype, dim), _array("int32", tokens)


def _rope_kv(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    for tokens in _TOKENS:
        places = _array("int32", tokens)
        q, kv = (_array(dtype, tokens, heads, dim) for heads in (HEADS, KV_HEADS))
        yield q, kv, kv, _pages(dtype, dim), places, places


def _kv_read(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    yield _pages(dtype, dim), _array("int32", 4096)


def _rope(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    for batch, length in ((1, 1), *_SIZES):
        yield tuple(_array(dtype, batch, heads, length, dim) for heads in (HEADS, KV_HEADS))


def _merge(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    yield (_array(dtype, 8, HEADS, 1, dim), _array("fp32", 8, HEADS, 1)) * 2


def _norm(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    for rows in _TOKENS:
        yield _array(dtype, rows, _HIDDEN), _array(dtype, _HIDDEN)


def _linear(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    for n, k in ((_HIDDEN, _HIDDEN), (_WIDE, _HIDDEN), (_HIDDEN, _WIDE)):
        for m in _TOKENS:
            yield _array(dtype, m, k), _array(dtype, n, k)


def _logits(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    for tokens in _TOKENS:
        for experts, top_k in _EXPERTS:
            yield _array("fp32", tokens, experts), top_k


def _chosen(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    for tokens in _TOKENS:
        for experts, top_k in _EXPERTS:
            yield _array("int32", tokens, top_k), experts


def _permute(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    for tokens in _TOKENS:
        for experts, top_k in _EXPERTS:
            places = tokens * top_k
            lists = (places, experts, 1, (tokens, top_k), experts + 1, experts)
            shapes = (one if isinstance(one, tuple) else (one,) for one in lists)
            groups = fkjit.MoeGroups(*(_array("int32", *shape) for shape in shapes))
            yield _array(dtype, tokens, _HIDDEN), groups


def _combine(dtype: str, dim: int) -> Iterator[tuple[Any, ...]]:
    for tokens in _TOKENS:
        for _, top_k in _EXPERTS:
            weights = _array("fp32", tokens, top_k)
            inverse = _array("int32", tokens, top_k)
            yield _array(dtype, tokens * top_k, _HIDDEN), inverse, weights


_SHAPES: Mapping[str, Shapes] = {
    "attention": _attention,
    "attention_varlen": _varlen,
    "attention_decode": _decode,
    "paged_attention": _paged,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "rope": _rope,
    "kv_append": _new_kv,
    "kv_read": _kv_read,
    "rope_kv_append": _rope_kv,
    "moe_route": _logits,
    "moe_regroup": _chosen,
    "moe_route_and_regroup": _logits,
    "moe_permute": _permute,
    "moe_combine": _combine,
    "linear": _linear,
    "attention_backward": _backward,
    "merge_states": _merge,
    "gelu_linear": _linear,
}
_COMMON = tuple(_SHAPES)[: tuple(_SHAPES).index("attention_backward")]
_CAUSAL = ("attention", "attention_varlen", "attention_backward")  # both ways are as common
# Arrays that `--where alibi_slopes=true` asks for, of attention's calls: dtype and shape, by a
# call's dtype and its keys.
_FEATURES: Mapping[str, Callable[[str, int], str]] = {
    "alibi_slopes": lambda dtype, keys: _array("fp32", HEADS),
    "sinks": lambda dtype, keys: _array("fp32", HEADS),
    "bias": lambda dtype, keys: _array(dtype, 1, 1, 1, keys),
    "mask": lambda dtype, keys: _array("bool", 1, 1, 1, keys),
}


def names() -> tuple[str, ...]:
    """The ops whose calls are known here."""
    return tuple(_SHAPES)


def common() -> Iterator[Call]:
    """What inference takes by default, in bf16 and fp16, at head dimensions 64 and 128."""
    for op in _COMMON:
        yield from calls(op)


def calls(
    op: str,
    dtypes: tuple[str, ...] = DTYPES,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    where: Mapping[str, Any] | None = None,
) -> Iterator[Call]:
    """Calls of an op. `where`: options; of arrays such as `sinks`, True. ParameterError for an op
    whose shapes are not known here."""
    if op not in _SHAPES:
        known = ", ".join(_SHAPES)
        raise ParameterError(f"warm: {op!r} has no --head-dim, --dtype or --where (have: {known})")
    given = dict(where or {})
    causal = [{"causal": flag} for flag in (True, False)]
    choices = causal if op in _CAUSAL and "causal" not in given else [{}]
    for dtype in dtypes:
        for dim in head_dims:
            for args in _SHAPES[op](dtype, dim):
                for more in choices:
                    yield Call(op, args, {**more, **_arrays(given, dtype, args)})


def _arrays(given: dict[str, Any], dtype: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """Options, with arrays where True asks for them."""
    asked = [name for name, value in given.items() if value is True and name in _FEATURES]
    return {**given, **{name: _FEATURES[name](dtype, _keys(args)) for name in asked}}


def _keys(args: tuple[Any, ...]) -> int:
    """How many keys a sequence of a call of attention has at most."""
    if isinstance(args[-1], int):
        return args[-1]
    paged = isinstance(args[1], tuple)
    text: str = args[2] if paged else args[1]
    sizes = [int(size) for size in text.partition("[")[2].rstrip("]").split(",")]
    return sizes[1] * PAGE if paged else sizes[2]
