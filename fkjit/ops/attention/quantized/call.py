"""`fkjit.quantized_attention`: attention's forward on codes of int8 and fp8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fkjit.arguments import one_of, shown
from fkjit.errors import ParameterError
from fkjit.ops.attention.checks import check_grid, length, look_at_ends, sequences
from fkjit.ops.attention.feature_checks import window_of
from fkjit.ops.attention.quantized.kernels_sm90 import FLASH_CODES_SM90, counters
from fkjit.ops.attention.quantized.quantize import (
    ATTENTION_SCHEMES,
    AttentionCodes,
    codes_parts,
    prepared_codes,
    quantize_attention,
)
from fkjit.ops.attention.quantized.quantize_kernels import ROWS, is_packed, key_places
from fkjit.ops.attention.quantized.select import INTERVALS, variant
from fkjit.ops.attention.shapes import (
    LAYOUTS,
    PACKED_AXES,
    check_block,
    check_heads,
    check_scale,
)
from fkjit.ops.op.checks import check_dtype, check_flag, check_shape
from fkjit.ops.op.node import Node, of_dtype
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View, contiguous

_CALL = "quantized_attention"
_CODES = ("q", "k", "v", "q_scales", "k_scales", "v_scales", "shift")
_ENDS = ("cu_seqlens_q", "cu_seqlens_k")
_LONGEST = ("max_seqlen_q", "max_seqlen_k")
_INPUTS = (*_CODES, *_ENDS)


class QuantizedOptions(NamedTuple):
    """What a call says besides its arrays."""

    scheme: str
    layout: str
    dtype: str
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    causal: Any = False
    softmax_scale: Any = None
    window: Any = None
    return_lse: Any = False
    promote: Any = None
    block: Any = None


def quantized_attention(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    scheme: str | None = None,
    smooth_k: bool = True,
    rotate: bool = False,
    scales: str = "block",
    layout: str = "bhsd",
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    return_lse: bool = False,
    promote: int | None = None,
    block: tuple[int, int] | None = None,
) -> Any:
    """`fkjit.attention` with products of int8 or fp8 codes in place of 16-bit numbers.

    Args:
        q, k, v: as `fkjit.quantize_attention` takes them: the call quantizes them first, by scheme
            (None: "int8"), smooth_k, rotate, scales and layout. Or q alone, AttentionCodes, which
            know these.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: of packed sequences, as
            `fkjit.attention_varlen` takes them (int32). q is [total_q, Hq, D] then, k and v alike.
        causal, softmax_scale, window, return_lse: as in `fkjit.attention`. Hq may be a multiple of
            Hkv (GQA).
        promote: with v of e4m3, keys whose sum leaves the tensor core, which adds with fewer bits
            than fp32 has, and is added up in fp32; 0: never, None: what the kernel has registers
            for. 256, 512, 1024 on Hopper; 32, 64 with mma.sync, of which GPUs of compute
            capability 9.0 to 11.0 multiply V as fp16, so that it has no effect there.
        block: tile, (query rows, keys); default: the spec's choice.

    Returns:
        o [B, Hq, Sq, Dv] (layout as q) in q's dtype, or (o, lse), lse fp32 [B, Hq, Sq]: of the keys
        as they were given, smooth or not. Of packed sequences o [total_q, Hq, Dv] and lse [Hq,
        total_q]; rows of no sequence are not written.

    Raises:
        ParameterError: shapes, flags or a tile that no kernel accepts; a scheme that this GPU has
            no products for (int8 from sm_80, e4m3 from sm_89 on); an input that requires grad:
            there is no backward. ArgumentTypeError: no arrays, other dtypes. CaptureError: as
            `attention`.

    Source: Zhang et al., "SageAttention2" (2024); Shah et al., "FlashAttention-3" (2024).

    Example:
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 64, 64)).astype(np.float16)
        >>> o = fkjit.quantized_attention(q, k, v, causal=True)
        >>> bool(np.abs(o - fkjit.attention(q, k, v, causal=True)).max() < 0.1)
        True
    """
    how = {"scheme": scheme, "smooth_k": smooth_k, "rotate": rotate, "scales": scales,
           "layout": layout, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
           "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}  # fmt: skip
    given = _given(q, k, v, how, quantize_attention)
    options = (causal, softmax_scale, window, return_lse, promote, block)
    return _OP(*_op_call(given, options))


_HOW = {"scheme": None, "smooth_k": True, "rotate": False, "scales": "block", "layout": "bhsd",
        **dict.fromkeys((*_ENDS, *_LONGEST))}  # fmt: skip


def _given(
    q: Any, k: Any, v: Any, how: Mapping[str, Any], make: Callable[..., AttentionCodes]
) -> AttentionCodes:
    """The codes, made here where they are not given."""
    if not isinstance(q, AttentionCodes):
        if k is None or v is None:
            return codes_parts(_CALL, q)  # which says what is wrong
        named = {**how, "scheme": how["scheme"] if how["scheme"] is not None else "int8"}
        return codes_parts(_CALL, make(q, k, v, **named))
    if how["scheme"] not in (None, q.scheme):
        raise ParameterError(
            f"{_CALL}: scheme={shown(how['scheme'])} with AttentionCodes of scheme {q.scheme!r}; "
            "allowed: theirs, or none"
        )
    said = [name for name, value in {"k": k, "v": v}.items() if value is not None]
    said += [name for name, value in how.items()
             if not (value is getattr(q, name, None) or _is_usual(name, value, q))]  # fmt: skip
    if said:
        raise ParameterError(
            f"{_CALL}: {said[0]} is given beside AttentionCodes; allowed: to "
            "fkjit.quantize_attention, which makes them"
        )
    return codes_parts(_CALL, q)


def _is_usual(name: str, value: Any, codes: AttentionCodes) -> bool:
    if name in _ENDS:
        return value is None
    return value in (_HOW[name], getattr(codes, name, None))


def _op_call(
    given: AttentionCodes, options: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Inputs, outputs and options of the op."""
    causal, scale, window, *rest = options
    window = tuple(window) if isinstance(window, list) else window
    block = tuple(rest[-1]) if isinstance(rest[-1], list) else rest[-1]
    longest = (given.max_seqlen_q, given.max_seqlen_k)
    said = (given.scheme, given.layout, given.dtype, *longest, causal, scale, window, *rest[:-1],
            block)  # fmt: skip
    arrays = (*given[: len(_CODES)], *(getattr(given, name) for name in _ENDS))
    return arrays, (), said


# ------------------------------------------------------------------ the op


def _check(views: Mapping[str, View | None], options: QuantizedOptions) -> Request:
    one_of(_CALL, "scheme", options.scheme, tuple(ATTENTION_SCHEMES))
    one_of(_CALL, "layout", options.layout, tuple(LAYOUTS))
    one_of(_CALL, "dtype", options.dtype, ("bf16", "fp16"))
    seen = {name: view for name, view in views.items() if view is not None}
    problem = _problem(seen, options)
    packed = is_packed(problem)
    problem["softmax_scale"] = check_scale(_CALL, options.softmax_scale, problem["head_dim"])
    causal = check_flag(_CALL, "causal", options.causal)
    problem["window"] = window_of(_CALL, options.window, causal, problem)
    promote = _promote(options.promote, problem["v_codes"])
    block = check_block(_CALL, options.block)
    b, h, s, dv = (problem[n] for n in ("batch", "heads_q", "seqlen_q", "head_dim_v"))
    shape, of_lse = (b, h, s, dv) if options.layout == "bhsd" else (b, s, h, dv), (b, h, s)
    if packed:
        shape, of_lse = (problem["total_q"], h, dv), (h, problem["total_q"])
    lse = Output(of_lse, "fp32") if check_flag(_CALL, "return_lse", options.return_lse) else None
    outputs = {"o": Output(shape, options.dtype), "lse": lse}
    inputs = {name: views[name] for name in _INPUTS if name not in _ENDS or packed}
    if 0 in (*shape, b, s):
        return Request(inputs, outputs, ())
    arch = arch_of(seen["q"])
    if seen["q"].device != CPU:
        problem["multiprocessors"] = multiprocessors(seen["q"].device)
    spec, params = variant(problem, seen["v"], promote, block, arch)
    drawn = counters(params, problem) if spec is FLASH_CODES_SM90 else 0
    return Request(inputs, outputs, (Launch(spec, params, problem),), counters=drawn)


def _promote(promote: Any, v_codes: bool) -> int | None:
    allowed = (None, 0, *INTERVALS) if v_codes else (None, 0)
    if isinstance(promote, bool) or promote not in allowed:
        named = ", ".join(map(str, (0, *INTERVALS)))
        raise ParameterError(
            f"{_CALL}: promote={promote!r}; allowed: "
            + (f"{named} or None" if v_codes else "0 or None with a v that is no codes")
        )
    return promote if v_codes else 0


def _problem(seen: Mapping[str, View], options: QuantizedOptions) -> dict[str, Any]:
    """Sizes of codes, all of whose shapes fit each other."""
    how = ATTENTION_SCHEMES[options.scheme]
    q, k, v = (seen[name] for name in "qkv")
    stored = "int8" if how.code == "int8" else "uint8"
    for name, view in (("q", q), ("k", k)):
        check_dtype(_CALL, name, view, (stored,))
    check_dtype(_CALL, "v", v, ("uint8",) if how.v_codes else (options.dtype,))
    packed = "cu_seqlens_q" in seen
    for name, view in (("q", q), ("k", k), ("v", v)):
        allowed = 3 if packed and name == "v" and not how.v_codes else 4
        if len(view.shape) != allowed:
            raise ParameterError(
                f"{_CALL}: {name} has shape {tuple(view.shape)}; allowed: {allowed} dimensions"
            )
    (batch, heads_q, seqlen_q, dim), (_, heads_kv, seqlen_k, _) = tuple(q.shape), tuple(k.shape)
    axes = LAYOUTS[options.layout]
    problem = {
        "axes": axes, "batch": batch, "heads_q": heads_q, "heads_kv": heads_kv,
        "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": dim,
        "head_dim_v": v.shape[2 if how.v_codes else -1], "dtype": options.dtype,
        "code": how.code, "v_codes": how.v_codes, "values": how.values,
    }  # fmt: skip
    if packed:
        problem |= {"axes": PACKED_AXES, "batch": sequences(_CALL, seen), "total_q": seqlen_q,
                    "total_k": seqlen_k}  # fmt: skip
        for name in _LONGEST:
            problem[name.removeprefix("max_")] = length(_CALL, name, getattr(options, name))
        check_grid(_CALL, problem)
    check_heads(_CALL, {"q": q, "k": k}, heads_q, heads_kv)
    _check_shapes(seen, problem)
    return problem


def _check_shapes(seen: Mapping[str, View], p: Mapping[str, Any]) -> None:
    """Of all arrays, as `quantize_attention` makes them."""
    batch = 1 if is_packed(p) else p["batch"]
    queries, keys = (batch, p["heads_q"]), (batch, p["heads_kv"])
    rows_q, rows_k = (p.get(f"total_{name}", p[f"seqlen_{name}"]) for name in "qk")
    places = key_places(p)
    wanted = {
        "q": (*queries, rows_q, p["head_dim"]), "k": (*keys, rows_k, p["head_dim"]),
        "q_scales": (*queries, rows_q), "shift": (*queries, rows_q),
        "k_scales": (*keys, places // ROWS), "v_scales": (p["batch"], *keys[1:], p["head_dim_v"]),
    }  # fmt: skip
    of_v = (*keys, rows_k, p["head_dim_v"])
    wanted["v"] = of_v[2:3] + of_v[1:2] + of_v[3:]
    if not is_packed(p):
        wanted["v"] = tuple(of_v[axis] for axis in p["axes"])
    if p["v_codes"]:
        wanted["v"] = (*keys, p["head_dim_v"], places)
    for name, view in seen.items():
        if name in wanted:
            check_shape(_CALL, name, view, wanted[name], "quantize_attention's")
        if name in _ENDS:
            continue
        if name not in "qkv":
            check_dtype(_CALL, name, view, ("fp32",))
        whole = 0 in view.shape or (name == "v" and not p["v_codes"])
        if not whole and tuple(view.strides) != contiguous(tuple(view.shape)):
            raise ParameterError(
                f"{_CALL}: {name} is not contiguous, as quantize_attention made it"
            )


def _fake(q: Any, k: Any, v: Any, *rest: Any) -> list[Any]:
    said = QuantizedOptions(*_unpacked(*rest[len(_INPUTS) - 3 :]))
    batch, heads, rows = q.shape[:3]
    dim = v.shape[2 if ATTENTION_SCHEMES[said.scheme].v_codes else -1]
    shape = (batch, heads, rows, dim) if said.layout == "bhsd" else (batch, rows, heads, dim)
    of_lse = (batch, heads, rows)
    if rest[len(_CODES) - 3] is not None:
        shape, of_lse = (rows, heads, dim), (heads, rows)
    made = [of_dtype(q, shape, said.dtype)]
    return [*made, of_dtype(q, of_lse, "fp32")] if said.return_lse else made


_WINDOW, _BLOCK = QuantizedOptions._fields.index("window"), QuantizedOptions._fields.index("block")


def _packed(*options: Any) -> tuple[Any, ...]:
    said = QuantizedOptions(*options)
    window = None if said.window is None else [-1 if x is None else x for x in said.window]
    block = said.block
    block = [block] if isinstance(block, int) else None if block is None else list(block)
    return tuple(said._replace(window=window, block=block))


def _unpacked(*options: Any) -> tuple[Any, ...]:
    said = QuantizedOptions(*options)
    window = None if said.window is None else tuple(said.window)
    block = None if said.block is None else tuple(said.block)
    return tuple(said._replace(window=window, block=block))


def _look(inputs: tuple[Any, ...]) -> None:
    ends = inputs[len(_CODES) :]
    if ends and ends[0] is not None:
        look_at_ends((*inputs[:3], *ends), _CALL, axis=2)


_OP = Op(
    _CALL, inputs=_INPUTS, outputs=("o", "lse"), check=_check, options=QuantizedOptions,
    optional=("v_scales", "shift", *_ENDS), guard=_look,
    node=Node(
        _fake,
        "str scheme, str layout, str dtype, int? max_seqlen_q, int? max_seqlen_k, bool causal, "
        "float? softmax_scale, int[]? window, bool return_lse, int? promote, int[]? block",
        None, None, _packed, _unpacked,
    ),
)  # fmt: skip


def _prepare(q: Any, k: Any = None, v: Any = None, **named: Any) -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    how = {name: named.pop(name, usual) for name, usual in _HOW.items()}
    given = _given(q, k, v, how, prepared_codes)
    usual = QuantizedOptions(given.scheme, given.layout, given.dtype)._asdict()
    first = QuantizedOptions._fields.index("causal")
    options = tuple(named.get(name, usual[name]) for name in QuantizedOptions._fields[first:])
    inputs, _, said = _op_call(given, options)
    _OP.prepare(list(inputs), said)


quantized_attention.prepare = _prepare  # type: ignore[attr-defined]
