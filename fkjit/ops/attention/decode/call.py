"""`fkjit.attention_decode` and `fkjit.paged_attention`: a few new tokens against all keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from fkjit.errors import ArgumentTypeError, CompileError, ParameterError
from fkjit.ops.attention.decode import nodes
from fkjit.ops.attention.decode.checks import ARRAYS, Options, check_contiguous, check_paged
from fkjit.ops.attention.decode.problem import MAX_TOKENS, has_many
from fkjit.ops.attention.features import CASTS, FEATURE_ARRAYS, SLOTS
from fkjit.ops.attention.options import unpack_score_mod
from fkjit.ops.kv.planes import planes
from fkjit.ops.kv.problem import LAYOUTS
from fkjit.ops.kv.scales import for_heads
from fkjit.ops.op import torch_ops
from fkjit.ops.op.casts import casting
from fkjit.ops.op.expression import does_not_compile
from fkjit.ops.op.op import Op

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fkjit.ops.attention.typed import DecodeKeywords, PagedKeywords
    from fkjit.types import AnyArray, Array, Layout, PageLayout

_INPUTS = (*ARRAYS, *FEATURE_ARRAYS, *SLOTS)
_OF_MANY = (
    ("q", "k", "v", "cu_seqlens_q", "page_table", "seq_lens", "rows"),
    (*FEATURE_ARRAYS, "k_scale", "v_scale"),
    (
        "max_seqlen_q",
        "layout",
        "causal",
        "softmax_scale",
        "return_lse",
        "window",
        "softcap",
        "mixed",
    ),
    ("split_size", "out"),
)
_NO_SLOTS = (None,) * len(SLOTS)  # of a call without a score_mod,
_NO_SCORE_MOD = ("", (), ())  # and the last of its options


@overload
def attention_decode(
    q: AnyArray, k: Array, v: Array, seq_lens: Array | None = None,
    *, return_lse: Literal[False] = False, **options: Unpack[DecodeKeywords],
) -> AnyArray: ...  # fmt: skip
@overload
def attention_decode(
    q: AnyArray, k: Array, v: Array, seq_lens: Array | None = None,
    *, return_lse: Literal[True], **options: Unpack[DecodeKeywords],
) -> tuple[AnyArray, AnyArray]: ...  # fmt: skip
@overload
def attention_decode(
    q: AnyArray, k: Array, v: Array, seq_lens: Array | None = None,
    *, return_lse: bool, **options: Unpack[DecodeKeywords],
) -> AnyArray | tuple[AnyArray, AnyArray]: ...  # fmt: skip
def attention_decode(
    q: Any,
    k: Any,
    v: Any,
    seq_lens: Any = None,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    layout: Layout = "bhsd",
    split_size: int | None = None,
    return_lse: bool = False,
    out: Any = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    score_mod: str | None = None,
    score_args: Mapping[str, Any] | None = None,
) -> Any:
    """softmax(softmax_scale * q kᵀ + mask) v for a few new tokens of each sequence, in one launch.

    Args:
        q: [B, Hq, S, D], or [B, Hq, D] for one token; fp16 or bf16; S up to 16, D up to 256.
        k: [B, Hkv, Sk, D]; v: [B, Hkv, Sk, Dv]; Hq a multiple of Hkv. In q's dtype, or fp8 (e4m3,
            also as uint8) or int8 with scales. With layout="bshd" heads and tokens trade places.
            Rows begin on 16-byte boundaries; the last dimension is contiguous.
        seq_lens: [B] int32 (int64 is cast) on the device: keys of each sequence, new tokens
            included; default: Sk, beyond which nothing is read. Keys past a sequence's length are
            not touched.
        k_scale, v_scale: [Hkv] fp32, or one number, an array of one element as well, for all heads;
            above 0: what codes of fp8 and int8 are multiplied by.
        causal: new token i sees keys up to i + length - S, so that the last one sees all.
        softmax_scale: default 1 / sqrt(D).
        split_size: keys of a split, 128, 256 …: then a sequence's result is the same to the
            bit whatever else is in the batch. None: splits as even as the batch allows, fastest;
            the same to the bit whenever lengths and GPU are the same.
        return_lse: also return the log-sum-exp of each row's scaled scores, fp32 [B, Hq, S]
            ([B, Hq] for one token).
        out: what to write o to; default: a new array.
        window: (left, right), as in `attention`: new token i sees keys from i + length - S - left
            to i + length - S + right. Keys before the first token's are not touched, nor shared
            out: a call costs what one with so many keys does. Pages of theirs may be gone.
        softcap, alibi_slopes, sinks, score_mod, score_args: as in `attention`, with the sequence's
            length for Sk. b is the sequence, h the query head, seqlen_k the length.
        bias, mask: as in `attention`, [B | 1, Hq | 1, S | 1, Sk]; a sequence's own stand at the
            beginning of the rows. D up to 128: else there are not the registers.

    Returns:
        o, as q with Dv columns, or (o, lse). A token that sees no key has o = 0 and lse = -inf, or
        the sink.

    Raises:
        ParameterError: shapes, strides or options that no kernel accepts, and GPUs before sm_80.
        ArgumentTypeError: dtypes. DeviceError: mixed devices. CaptureError: first call of a variant
        under CUDA graph capture; see `fkjit.prepare`.

    Lengths are read when the kernel runs: a captured graph follows sequences that grow. The work is
    shared out over the GPU by what they are then. To torch.compile the call is one operator, if
    there is no `out` and no `score_mod`. torch.autocast casts q alone: keys are kept as they are.
    Every score feature goes with every other and with everything else here; what a call does not
    use is not in its kernel.

    Sources: Dao et al., "Flash-Decoding for long-context inference"; Osama et al., "Stream-K".
    """
    options = (layout, causal, softmax_scale, split_size, return_lse, _hashable(window), softcap)
    if k_scale is not None or v_scale is not None:
        k_scale, v_scale = _scales(k, (k_scale, v_scale), 2 if layout == "bshd" else 1)
    arrays = (
        q, k, v, None, seq_lens, None, k_scale, v_scale, alibi_slopes, bias, mask, sinks,
    )  # fmt: skip
    return _run(_CONTIGUOUS, arrays, out, options, score_mod, score_args)


@overload
def paged_attention(
    q: AnyArray, cache: Any, page_table: Array | None = None, seq_lens: Array | None = None,
    *, return_lse: Literal[False] = False, **options: Unpack[PagedKeywords],
) -> AnyArray: ...  # fmt: skip
@overload
def paged_attention(
    q: AnyArray, cache: Any, page_table: Array | None = None, seq_lens: Array | None = None,
    *, return_lse: Literal[True], **options: Unpack[PagedKeywords],
) -> tuple[AnyArray, AnyArray]: ...  # fmt: skip
@overload
def paged_attention(
    q: AnyArray, cache: Any, page_table: Array | None = None, seq_lens: Array | None = None,
    *, return_lse: bool, **options: Unpack[PagedKeywords],
) -> AnyArray | tuple[AnyArray, AnyArray]: ...  # fmt: skip
def paged_attention(
    q: Any,
    cache: Any,
    page_table: Any = None,
    seq_lens: Any = None,
    *,
    rows: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    mixed: bool = False,
    layer: int = 0,
    layout: PageLayout | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
    out: Any = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    score_mod: str | None = None,
    score_args: Mapping[str, Any] | None = None,
) -> Any:
    """softmax(softmax_scale * q kᵀ + mask) v for new tokens against keys in pages, in one launch.

    Args:
        q: [B, Hq, D], one token of each sequence, or [B, S, Hq, D] for S new tokens of each; or,
            with cu_seqlens_q, [total_q, Hq, D], any number of each: chunks of prompts, mixed with
            sequences of one new token; fp16 or bf16.
        cache: a `PagedKVCache`, or a pair of arrays (k_pages, v_pages) in `layout`, in q's dtype or
            fp8 (e4m3, also as uint8) or int8; pages of 1, 2, 4 … 256 tokens.
        page_table, seq_lens: [sequences, pages] and [sequences] int32 (int64 is cast) on the
            device, only where `cache` is a pair: the pages of each sequence, and how many keys it
            has, new tokens included. What lies beyond is not touched; page numbers that there are
            not are zeros.
        rows: [B] int32 on the device: the row of each sequence in the tables; below 0: none, its
            output is 0. Of a `PagedKVCache`: `cache.rows(...)`. Default: row i for sequence i.
        cu_seqlens_q: [B + 1] int32 on the device: 0 and the running sums of the numbers of new
            tokens; sequence i has rows cu_seqlens_q[i] up to cu_seqlens_q[i + 1] of q.
        max_seqlen_q: at least the most new tokens of a sequence, with cu_seqlens_q. Rows beyond
            are not written: nothing waits for the device to find out.
        mixed: with cu_seqlens_q, that many sequences have one new token: these are decoded, their
            keys shared out over the GPU, beside the others. Which they are is found out on the
            device; False is right as well, only slower. (max_seqlen_q=1 takes decoding's kernel
            alone.)
        layer: which of the cache's layers.
        layout: "nhd" (default), pages are [page_size, heads, D]; or "hnd", [heads, page_size, D].
            Only where `cache` is a pair.
        k_scale, v_scale: as for `attention_decode`, only where `cache` is a pair.
        causal, softmax_scale, split_size, return_lse, out: as for `attention_decode`. The lse is
            [B, Hq, S], or [B, Hq] for one token, or [Hq, total_q].
        window, softcap, alibi_slopes, bias, mask, sinks, score_mod, score_args: as for
            `attention_decode`. Sk of a bias and a mask is what fills the pages of a table's row.

    Returns and raises as `attention_decode`. More than 16 new tokens of a sequence, and packed
    queries, take the kernels of `attention_varlen` (TMA brings pages of 8 tokens and more on
    Hopper; fp8 and int8 are read by the portable kernel, from sm_80 on): there is no split_size and
    no `out` then. Tables and lengths are read when the kernel runs: a captured graph of `kv_append`
    and this call follows sequences that grow. To torch.compile the call is one operator, if `cache`
    is a pair and there is no `out` and no `score_mod`.
    """
    k, v, page_table, seq_lens, k_scale, v_scale, layout = _pages(
        cache, layer, layout, rows, (page_table, seq_lens, k_scale, v_scale)
    )
    if cu_seqlens_q is not None or max_seqlen_q is not None or has_many(q):
        return _prefill(
            (q, k, v, cu_seqlens_q, page_table, seq_lens, rows),
            (alibi_slopes, bias, mask, sinks, k_scale, v_scale),
            (
                max_seqlen_q, layout, causal, softmax_scale, return_lse, _hashable(window), softcap,
                mixed,
            ),
            {"split_size": split_size, "out": out}, score_mod, score_args,
        )  # fmt: skip
    options = (layout, causal, softmax_scale, split_size, return_lse, _hashable(window), softcap)
    arrays = (
        q, k, v, page_table, seq_lens, rows, k_scale, v_scale, alibi_slopes, bias, mask, sinks,
    )  # fmt: skip
    return _run(_PAGED, arrays, out, options, score_mod, score_args)


class _Preparing:
    """An op's `prepare` where the op is called."""

    def __init__(self, op: Op) -> None:
        self.name, self.op = op.name, op

    def __call__(self, arrays: Any, outputs: Any, options: Any) -> None:
        self.op.prepare(arrays, options)


def _prefill(
    arrays: tuple[Any, ...], features: tuple[Any, ...], options: tuple[Any, ...],
    none: Mapping[str, Any], score_mod: Any, score_args: Any, prepares: bool = False,
) -> Any:  # fmt: skip
    """`paged_attention` for packed queries or more than 16 tokens, or only what prepares it. none:
    what such a call may not have."""
    q, k, v, ends, *tables = arrays
    (most, *rest), packed, shape = options, ends is not None, q.shape
    if packed == (most is None):
        raise ParameterError(
            f"{_PAGED.name}: max_seqlen_q is {most}, cu_seqlens_q {'given' if packed else None}; "
            "allowed: both or neither"
        )
    for name, value in none.items():
        if value is not None:
            shown = "an array" if hasattr(value, "shape") else repr(value)
            raise ParameterError(
                f"{_PAGED.name}: {name} is {shown}; allowed: None, where queries are packed or "
                f"more than {MAX_TOKENS} of a sequence"
            )
    from fkjit.ops.attention import paged  # decoding alone needs none of it

    if not packed:
        ends, q, most = paged.uniform_ends(q, *shape[:2]), q.reshape(-1, *shape[2:]), shape[1]
    layout, causal, scale, return_lse, *more = rest
    said = (most, layout, causal, scale, None, return_lse, *more)
    op = _Preparing(paged.attend_pages) if prepares else paged.attend_pages
    given = (q, k, v, ends, None, *tables, *features)
    made = _run(op, given, None, said, score_mod, score_args)
    if packed or prepares:
        return made
    o, lse = made if return_lse else (made, None)
    o = o.reshape(*shape[:3], o.shape[-1])
    return o if lse is None else (o, lse.reshape(shape[2], *shape[:2]).swapaxes(0, 1))


def _pages(
    cache: Any, layer: Any, layout: Any, rows: Any, given: tuple[Any, ...]
) -> tuple[Any, ...]:
    """k_pages, v_pages, page_table, seq_lens, k_scale, v_scale and the layout. given: the tables
    and scales that the caller passed."""
    if type(cache) is tuple and len(cache) == 2 and layer == 0:
        layout = LAYOUTS[0] if layout is None else layout
        if given[2] is given[3] is None:
            return *cache, *given, layout
        scales = _scales(cache[0], given[2:], 2 if layout == LAYOUTS[0] else 1)
        return *cache, *given[:2], *scales, layout
    if isinstance(cache, tuple | list):
        held = planes(_PAGED.name, cache, layer, layout)
        return _pages(tuple(held.arrays[:2]), 0, held.layout, rows, given)
    held = planes(_PAGED.name, cache, layer, layout)
    if any(x is not None for x in given):
        raise ParameterError(
            f"{_PAGED.name}: page_table, seq_lens, k_scale and v_scale are the cache's own: "
            "leave them, and pass rows"
        )
    if rows is None:
        raise ArgumentTypeError(f"{_PAGED.name}: rows is None; pass cache.rows(sequences)")
    cache.flush()
    k, v, k_scale, v_scale = held.arrays
    return k, v, cache.page_table, cache.lengths, k_scale, v_scale, held.layout


def _scales(pages: Any, scales: tuple[Any, ...], heads_at: int) -> tuple[Any, ...]:
    """One for each head, of numbers as well."""
    shape = getattr(pages, "shape", ())
    heads = shape[heads_at] if len(shape) == 4 else 1
    return tuple(for_heads(scale, pages, heads) for scale in scales)


def _hashable(option: Any) -> Any:
    """A window may be a list: PyTorch's operators give one."""
    return tuple(option) if type(option) is list else option


def _run(
    op: Op | _Preparing, arrays: tuple[Any, ...], out: Any, options: tuple[Any, ...],
    score_mod: Any, score_args: Any,
) -> Any:  # fmt: skip
    """The op's result. arrays, options: without what a score_mod has."""
    if score_mod is None and score_args is None:
        if out is None:
            return op(arrays, (), options + _NO_SCORE_MOD)
        return op(arrays + _NO_SLOTS, (out,), options + _NO_SCORE_MOD)
    if torch_ops.compiling():
        raise nodes.refused(op.name, "score_mod")
    slots, (*more, _) = unpack_score_mod(op.name, score_mod, score_args)
    try:
        return op(arrays + slots, (out,), (*options, *more))
    except CompileError as error:
        raise does_not_compile(op.name, "score_mod", score_mod, error) from error


def _preparing(op: Op, call: Callable[..., Any]) -> Callable[..., None]:
    signature = inspect.signature(call)

    def prepare(*args: Any, **options: Any) -> None:
        """Compile and load what the call with the same arguments needs, without running it."""
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        given = bound.arguments
        if "cache" in given:
            names = ("page_table", "seq_lens", "k_scale", "v_scale")
            own = tuple(given[name] for name in names)
            found = _pages(given["cache"], given["layer"], given["layout"], given["rows"], own)
            given |= dict(zip(("k", "v", *names, "layout"), found, strict=True))
            q, ends, most = (given[name] for name in ("q", "cu_seqlens_q", "max_seqlen_q"))
            if ends is not None or most is not None or has_many(q):
                arrays, features, options, none = (
                    {name: given[name] for name in group} for group in _OF_MANY
                )
                options["window"] = _hashable(options["window"])
                mod = (given["score_mod"], given["score_args"])
                groups = (tuple(arrays.values()), tuple(features.values()))
                _prefill(*groups, tuple(options.values()), none, *mod, prepares=True)
                return
        elif given["k_scale"] is not None or given["v_scale"] is not None:
            scales, at = (given["k_scale"], given["v_scale"]), 2 if given["layout"] == "bshd" else 1
            given["k_scale"], given["v_scale"] = _scales(given["k"], scales, at)
        arrays = [given.get(name) for name in (*ARRAYS, *FEATURE_ARRAYS)]
        named = [_hashable(given[name]) for name in Options._fields[: -len(_NO_SCORE_MOD)]]
        slots, (*more, _) = unpack_score_mod(op.name, given["score_mod"], given["score_args"])
        try:
            op.prepare([*arrays, *slots, given["out"], None], (*named, *more))
        except CompileError as error:
            if given["score_mod"] is None:
                raise
            raise does_not_compile(op.name, "score_mod", given["score_mod"], error) from error

    return prepare


def _op(name: str, check: Callable[..., Any], needed: tuple[str, ...]) -> Op:
    op = Op(
        name, inputs=_INPUTS, outputs=("o", "lse"), options=Options,
        check=casting(lambda: op, check, CASTS),
        optional=[array for array in _INPUTS if array not in needed],
        traced=partial(nodes.traced, name), autocast=1,
    )  # fmt: skip
    return op


_CONTIGUOUS = _op("attention_decode", check_contiguous, ("q", "k", "v"))
_PAGED = _op("paged_attention", check_paged, ("q", "k", "v", "page_table", "seq_lens"))
attention_decode.prepare = _preparing(_CONTIGUOUS, attention_decode)  # type: ignore[attr-defined]
paged_attention.prepare = _preparing(_PAGED, paged_attention)  # type: ignore[attr-defined]
nodes.define(attention_decode, paged_attention)
