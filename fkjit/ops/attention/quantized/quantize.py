"""`fkjit.quantize_attention`: codes of q, k and v, and `AttentionCodes`, which are all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fkjit.arguments import one_of
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.attention.checks import check_grid, length, look_at_ends, sequences
from fkjit.ops.attention.quantized.quantize_kernels import (
    BLOCKS,
    CHANNELS,
    CODES,
    ROWS,
    SCALES,
    SPANS,
    is_packed,
    key_places,
    padded,
    scratch,
    spans,
    spans_scratch,
)
from fkjit.ops.attention.shapes import (
    LAYOUTS,
    MAX_HEAD_DIM,
    are_rows_aligned,
    dense_sizes,
    packed_sizes,
)
from fkjit.ops.kv.scales import as_codes, dtype_name
from fkjit.ops.op.checks import check_flag, check_same_dtype
from fkjit.ops.op.node import Node, of_dtype
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.ops.quantize.schemes import FP8_TYPES, as_fp8
from fkjit.runtime.interop import View, empty, view

CALL = "quantize_attention"


class AttentionScheme(NamedTuple):
    """What codes are of: q and k, and v where it has any."""

    code: str
    values: str

    @property
    def v_codes(self) -> bool:
        return self.values != "half"


ATTENTION_SCHEMES = {
    "int8": AttentionScheme("int8", "half"),
    "int8_fp8": AttentionScheme("int8", "fp8"),
    "fp8": AttentionScheme("fp8", "fp8"),
    "fp8_e5m2": AttentionScheme("fp8", "e5m2"),
}


class AttentionCodes(NamedTuple):
    """What `fkjit.quantize_attention` makes and `fkjit.quantized_attention` takes.

    q: [B, Hq, Sq, D], k: [B, Hkv, Sk, D] codes, int8 or e4m3. v: as it was given, or e4m3 or e5m2
        [B, Hkv, Dv, Sk rounded up to 64], transposed, keys in the order that products want.
    q_scales: fp32 [B, Hq, Sq]; k_scales: fp32 [B, Hkv, Sk / 64, rounded up]; v_scales: fp32
        [B, Hkv, Dv], or None. A number is code * scale; those of v lie in 64 keys of a column.
    shift: fp32 [B, Hq, Sq], q . (mean of k), which the scores of smooth keys lack; or None.
    scheme, layout: as they were asked for; layout is that of the output, and of a v that is no
        codes. dtype: "bf16" or "fp16", of the output.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: of packed sequences, or None. Then q, k,
        q_scales and shift are [1, heads, total, ...]; v_scales [sequences, Hkv, Dv]; of keys each
        sequence has its own places in k_scales and in codes of v, at multiples of 64
        (`templates/attention/packed_codes.cuh`).
    """

    q: Any
    k: Any
    v: Any
    q_scales: Any
    k_scales: Any
    v_scales: Any
    shift: Any
    scheme: str
    layout: str
    dtype: str
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None

    def __repr__(self) -> str:
        q, k = (list(getattr(x, "shape", ())) for x in (self.q, self.k))
        return f"AttentionCodes(q={q}, k={k}, scheme={self.scheme!r}, dtype={self.dtype!r})"


def quantize_attention(
    q: Any, k: Any, v: Any, scheme: str = "int8", *, smooth_k: bool = True, rotate: bool = False,
    scales: str = "block", layout: str = "bhsd", cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
) -> AttentionCodes:  # fmt: skip
    """Codes of attention's inputs, made on the device, for `fkjit.quantized_attention`.

    Args:
        q: [B, Hq, Sq, D]; k: [B, Hkv, Sk, D]; v: [B, Hkv, Sk, Dv]; fp16 or bf16, all alike, rows
            on 16-byte boundaries; D a multiple of 16, Dv of 8, both up to 256. With layout="bshd"
            heads and rows trade places. torch, CuPy, NumPy or any DLPack arrays.
        scheme: "int8" (q and k; v stays as it is), "int8_fp8" (v is e4m3 as well), "fp8" (all
            e4m3), "fp8_e5m2" (v is e5m2, which has a bit less of fraction and reaches further
            down). With 8 bits a column of v has a scale, by which 448 is the greatest code.
        smooth_k: the mean of all keys is taken from each first. It changes no probability, and
            leaves less to round; the lse gets it back.
        rotate: rows of q and k are multiplied by an orthogonal matrix (Hadamard's), which spreads
            outliers and changes no score; D is 64, 128 or 256 then, and Dv no more than D.
        scales: of q and k: "block" (a row of q, 64 keys), "block64" or "block128" (so many rows of
            q, as many keys), or one for all rows of a "head" or of the "tensor", which cost a pass
            more and are less exact. The fewer share one, the more exact.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: of packed sequences, as
            `fkjit.attention_varlen` takes them (int32, on the same device). q is [total_q, Hq, D]
            then, k and v alike; means and scales are a sequence's own.

    Returns:
        AttentionCodes. Sums are made in a fixed order: the same bits each time. A NaN or an
        infinity makes all that shares its scale NaN; in k with smooth_k, its head.

    Raises:
        ParameterError: no such scheme or layout, shapes that are not as above, a GPU before sm_80,
            a tensor that requires grad (quantization has no gradient). ArgumentTypeError: no
            arrays, other dtypes.

    Source: Zhang et al., "SageAttention" (2024), for smooth keys.

    Example:
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 80, 64)).astype(np.float16)
        >>> codes = fkjit.quantize_attention(q, k, v, "int8")
        >>> str(codes.q.dtype), codes.q.shape, codes.q_scales.shape
        ('int8', (1, 2, 80, 64), (1, 2, 80))
    """
    given = _whole(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    said = (scheme, smooth_k, rotate, scales, layout, max_seqlen_q, max_seqlen_k)
    made = list(_OP((q, k, v, *given[:2]), (), said))
    return _named(q, v, made, scheme, layout, given)


Ends = tuple[Any, Any, Any, Any]  # cu_seqlens_q and …_k, max_seqlen_q and …_k
_ENDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def _whole(*ends: Any) -> Ends:
    """All of what packed sequences have, or nothing of it."""
    missing = [name for name, x in zip(_ENDS, ends, strict=True) if x is None]
    if 0 < len(missing) < len(_ENDS):
        raise ParameterError(
            f"{CALL}: {missing[0]}=None with packed sequences; allowed: all of {', '.join(_ENDS)}, "
            "or none"
        )
    return ends  # type: ignore[return-value]


def prepared_codes(
    q: Any, k: Any, v: Any, scheme: str, smooth_k: bool, rotate: bool, scales: str, layout: str,
    **ends: Any,
) -> AttentionCodes:  # fmt: skip
    """What `quantize_attention` would return, after its `prepare`; numbers are whatever memory
    held."""
    given = _whole(*(ends.get(name) for name in _ENDS))
    said = (scheme, smooth_k, rotate, scales, layout, *given[2:])
    arrays = dict(zip(_INPUTS, (q, k, v, *given[:2]), strict=True))
    _OP.prepare(list(arrays.values()), said)
    views = {name: None if x is None else view(x, CALL, name) for name, x in arrays.items()}
    outputs = _check(views, *said).outputs.values()
    like = view(q, CALL, "q")
    made = [empty(like, o.shape, o.dtype) for o in outputs if o and o.returned]
    return _named(q, v, made, scheme, layout, given)


def _named(q: Any, v: Any, made: list[Any], scheme: str, layout: str, ends: Ends) -> AttentionCodes:
    """The op's results, in their places."""
    how = ATTENTION_SCHEMES[scheme]
    codes = {name: made.pop(0) for name in _names(how, len(made))}
    found = {name: codes.get(f"{name}_codes", v) for name in "qkv"}
    for name in _fp8(how):
        found[name] = as_fp8(found[name], "e5m2" if (name, how.values) == ("v", "e5m2") else "fp8")
    others = {name: codes.get(name) for name in ("q_scales", "k_scales", "v_scales", "shift")}
    return AttentionCodes(
        **found, **others, scheme=scheme, layout=layout, dtype=_SHORT[dtype_name(q)],
        **dict(zip(_ENDS, ends, strict=True)),
    )  # fmt: skip


_SHORT = {"bfloat16": "bf16", "float16": "fp16"}


def _names(how: AttentionScheme, count: int) -> list[str]:
    """Of the op's results, of which there are so many."""
    names = ["q_codes", "k_codes", "q_scales", "k_scales"]
    names += ["v_codes", "v_scales"] * how.v_codes
    return names + ["shift"] * (count - len(names))


def _fp8(how: AttentionScheme) -> str:
    return "qkv" if how.code == "fp8" else "v" * how.v_codes


def codes_parts(call: str, given: Any) -> AttentionCodes:
    """AttentionCodes with e4m3 as bytes; ArgumentTypeError for anything else."""
    if not isinstance(given, AttentionCodes):
        raise ArgumentTypeError(
            f"{call}: q is a {type(given).__name__}; allowed without k and v: AttentionCodes, as "
            "fkjit.quantize_attention returns them"
        )
    e5m2 = getattr(ATTENTION_SCHEMES.get(given.scheme), "values", None) == "e5m2"
    v = as_codes(given.v, FP8_TYPES["e5m2" if e5m2 else "fp8"])
    return given._replace(q=as_codes(given.q), k=as_codes(given.k), v=v)


# ------------------------------------------------------------------ the op


def _check(
    views: Mapping[str, View | None], scheme: Any, smooth_k: Any, rotate: Any, scales: Any,
    layout: Any, max_seqlen_q: Any, max_seqlen_k: Any,
) -> Request:  # fmt: skip
    one_of(CALL, "scheme", scheme, tuple(ATTENTION_SCHEMES))
    one_of(CALL, "scales", scales, SCALES)
    one_of(CALL, "layout", layout, tuple(LAYOUTS))
    rows = {name: view for name, view in views.items() if view is not None and name in "qkv"}
    dtype = check_same_dtype(CALL, rows, ("bf16", "fp16"))
    arch = arch_of(rows["q"])
    if arch.capability < (8, 0):
        raise ParameterError(f"{CALL}: on {arch.name}; allowed: GPUs from sm_80")
    sizes = _sizes(views, rows, layout, (max_seqlen_q, max_seqlen_k))
    problem = {**sizes, "dtype": dtype, "scales": scales}
    seen = {name: x for name, x in views.items() if x is not None}
    how = ATTENTION_SCHEMES[scheme]
    # The mean of no keys is none.
    smooth = check_flag(CALL, "smooth_k", smooth_k) and problem["seqlen_k"] > 0
    turned = check_flag(CALL, "rotate", rotate)
    if turned and padded(problem) != problem["head_dim"]:
        raise ParameterError(
            f"{CALL}: rotate=True with head_dim={problem['head_dim']}, "
            f"head_dim_v={problem['head_dim_v']}; allowed: head_dim 64, 128 or 256, head_dim_v no "
            "more than that"
        )
    outputs = _outputs(how, smooth, problem)
    problem |= {
        "given": scales not in BLOCKS,
        "shared": BLOCKS.get(scales, 1),
        "code": how.code,
        "v_codes": how.v_codes,
        "values": how.values,
        "smooth": smooth,
        "rotate": turned,
    }
    return _launches(seen, outputs, problem)


def _sizes(
    views: Mapping[str, View | None], rows: Mapping[str, View], layout: str, longest: Sequence[Any]
) -> dict[str, Any]:
    if views.get("cu_seqlens_q") is None:
        problem = dense_sizes(CALL, rows, layout)
    else:
        total_k = rows["k"].shape[0]
        problem = {**packed_sizes(CALL, rows), "batch": sequences(CALL, views), "total_k": total_k}
        for name, most in zip(_ENDS[2:], longest, strict=True):
            problem[name.removeprefix("max_")] = length(CALL, name, most)
        check_grid(CALL, problem)
    for name, step in (("head_dim", 16), ("head_dim_v", 8)):
        if problem[name] % step or problem[name] > MAX_HEAD_DIM:
            raise ParameterError(
                f"{CALL}: {name}={problem[name]}; allowed: multiples of {step} up to "
                f"{MAX_HEAD_DIM}; pad with zeros"
            )
    if not are_rows_aligned(rows.values()):
        raise ParameterError(
            f"{CALL}: rows of q, k or v do not start on 16-byte boundaries; pass contiguous copies"
        )
    return problem


def _launches(seen: Mapping[str, View], outputs: dict[str, Output], problem: Any) -> Request:
    if 0 in (problem["batch"], problem["heads_q"]):
        return Request(seen, outputs, ())
    common = {"dtype": problem["dtype"], "head_dim": padded(problem), "packed": is_packed(problem)}
    rows_as = {name: problem[name] for name in ("code", "smooth", "rotate")}
    launches, memory = [], [(0, 0)]
    if problem["seqlen_k"] and (problem["smooth"] or problem["v_codes"]):
        looked = {**common, "means": problem["smooth"], "mosts": problem["v_codes"]}
        launches.append(Launch(CHANNELS, looked, problem))
        memory.append(scratch(looked, problem))
    if problem["given"] and any(spans(problem).values()):
        launches.append(Launch(SPANS, {**common, **rows_as}, problem))
        memory.append(spans_scratch(problem))
    if problem["seqlen_q"] or problem["seqlen_k"]:
        more = {name: problem[name] for name in ("values", "given", "shared")}
        launches.append(Launch(CODES, {**common, **rows_as, **more}, problem))
    size, counters = (max(sizes) for sizes in zip(*memory, strict=True))
    return Request(seen, outputs, tuple(launches), size, counters)


def _outputs(how: AttentionScheme, smooth: bool, p: Mapping[str, Any]) -> dict[str, Output]:
    batch = 1 if is_packed(p) else p["batch"]
    of_q, of_k = ((batch, p[f"heads_{name}"]) for name in ("q", "kv"))
    rows_q, rows_k = (p.get(f"total_{name}", p[f"seqlen_{name}"]) for name in "qk")
    places, of_columns = key_places(p), (p["batch"], p["heads_kv"])
    stored = "int8" if how.code == "int8" else "uint8"
    made = {
        "q_codes": Output((*of_q, rows_q, p["head_dim"]), stored),
        "k_codes": Output((*of_k, rows_k, p["head_dim"]), stored),
        "q_scales": Output((*of_q, rows_q), "fp32"),
        "k_scales": Output((*of_k, places // ROWS), "fp32"),
    }
    if how.v_codes:
        made["v_codes"] = Output((*of_k, p["head_dim_v"], places), "uint8")
        made["v_scales"] = Output((*of_columns, p["head_dim_v"]), "fp32")
    if smooth:
        made["shift"] = Output((*of_q, rows_q), "fp32")
        made["k_means"] = Output((*of_columns, p["head_dim"]), "fp32", returned=False)
    if p["scales"] not in BLOCKS:
        made["span_scales"] = Output((sum(spans(p).values()),), "fp32", returned=False)
    return made


def _fake(
    q: Any, k: Any, v: Any, ends: Any, _: Any, scheme: str, smooth_k: bool, rotate: bool, *rest: Any
) -> Any:
    (scales, layout, *longest), how = rest, ATTENTION_SCHEMES[scheme]
    batch, head, row, _ = LAYOUTS[layout] if ends is None else (None, 1, 0, 2)
    sizes_of = {
        "batch": q.shape[batch] if ends is None else ends.shape[0] - 1, "heads_q": q.shape[head],
        "heads_kv": k.shape[head], "seqlen_q": q.shape[row], "seqlen_k": k.shape[row],
        "head_dim": q.shape[-1], "head_dim_v": v.shape[-1], "scales": scales,
    }  # fmt: skip
    if batch is None:
        sizes_of |= {"total_q": q.shape[0], "total_k": k.shape[0]}
        sizes_of |= dict(zip(("seqlen_q", "seqlen_k"), longest, strict=True))
    made = _outputs(how, smooth_k, sizes_of).values()
    return [of_dtype(q, output.shape, output.dtype) for output in made if output.returned]


def _look(inputs: Sequence[Any]) -> None:
    if len(inputs) > len("qkv") and inputs[3] is not None:
        look_at_ends(inputs, CALL)


_INPUTS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
_OP = Op(
    CALL, inputs=_INPUTS, optional=_INPUTS[3:], guard=_look,
    outputs=("q_codes", "k_codes", "q_scales", "k_scales", "v_codes", "v_scales", "shift",
             "k_means", "span_scales"),
    check=_check,
    node=Node(_fake, "str scheme, bool smooth_k, bool rotate, str scales, str layout, "
              "int? max_seqlen_q, int? max_seqlen_k", None),
)  # fmt: skip
quantize_attention.prepare = _OP.preparing(quantize_attention)  # type: ignore[attr-defined]
