"""Everything that can be wrong with a call of attention that has a form, found before it runs."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.attention import checks as usual
from fkjit.ops.attention import feature_kernels_sm90 as hopper_form
from fkjit.ops.attention import select as choice
from fkjit.ops.attention import short_q
from fkjit.ops.attention.checks import LAYOUTS
from fkjit.ops.attention.feature_kernels import kernel, tile
from fkjit.ops.attention.feature_problem import PACKED_AXES, POINTERS, form_bytes
from fkjit.ops.attention.features import ARRAYS, BIAS_DTYPES, SLOTS, ScoreFeatures
from fkjit.ops.attention.kernels import FLASH, FLASH_FP32
from fkjit.ops.attention.kernels_sm90 import FLASH_SM90
from fkjit.ops.op.checks import check_dtype, check_flag, check_same_dtype, check_shape
from fkjit.ops.op.op import Launch, Output, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, ITEMSIZE, View

_IMPLEMENTATIONS = ("auto", "flash")
_LIMIT = 2**31
_UNBOUNDED = (None, -1)

Views = Mapping[str, View | None]
Sizes = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Of a call, as its plan depends on them; `score_names` are those of the arrays in its slots,
    `score_scalars` (name, "float" or "int", value)."""

    causal: Any
    softmax_scale: Any
    block: Any
    return_lse: Any
    window: Any
    softcap: Any
    score_mod: str
    score_names: tuple[str, ...]
    score_scalars: tuple[tuple[str, str, float | int], ...]


def check_dense(views: Views, impl: Any, layout: Any, *options: Any) -> Request:
    """A call of attention."""
    call = "attention"
    usual.one_of("impl", impl, _IMPLEMENTATIONS)
    usual.one_of("layout", layout, tuple(LAYOUTS))
    rows = _rows(call, views)
    sizes = usual.check_shapes(rows, layout)
    problem = {**sizes, "axes": LAYOUTS[layout]}
    by_rows = [problem[n] for n in ("batch", "heads_q", "seqlen_q", "head_dim_v")]
    shape = tuple(by_rows[axis] for axis in LAYOUTS[layout])
    outputs = (shape, tuple(by_rows[:3]))
    request = _request(call, views, problem, outputs, Options(*options))
    if request.launches and short_q.takes_form(problem, impl, options[2]):
        return short_q.form_request(views, layout, options) or request
    return request


def check_varlen(views: Views, max_seqlen_q: Any, max_seqlen_k: Any, *options: Any) -> Request:
    """A call of attention_varlen."""
    call = "attention_varlen"
    rows = _rows(call, views)
    problem = _packed_sizes(call, rows)
    problem["batch"] = _batch(call, views)
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        problem[name.removeprefix("max_")] = _length(call, name, value)
    if problem["seqlen_q"] * problem["heads_q"] * max(problem["batch"], 1) >= _LIMIT:
        raise ParameterError(
            f"{call}: max_seqlen_q={max_seqlen_q} for so many sequences is no grid"
        )
    total, heads = problem["total_q"], problem["heads_q"]
    outputs = ((total, heads, problem["head_dim_v"]), (heads, total))
    return _request(call, views, problem, outputs, Options(*options))


def _request(
    call: str, views: Views, problem: Sizes, outputs: Sequence[tuple[int, ...]], options: Options
) -> Request:
    """What both have in common."""
    seen = {name: view for name, view in views.items() if view is not None}
    problem |= {
        "dtype": seen["q"].dtype,
        "softmax_scale": usual.check_scale(options.softmax_scale, problem["head_dim"], call),
        "window": window_of(call, options, problem),
        "softcap": softcap_of(call, options.softcap),
        "score_scalars": {name: value for name, _, value in options.score_scalars},
    }
    form = form_of(call, seen, problem, options)
    problem["form_bytes"] = form_bytes(form, seen)
    lse = check_flag(call, "return_lse", options.return_lse)
    made = {"o": Output(outputs[0], problem["dtype"]), "lse": None}
    if lse:
        made["lse"] = Output(outputs[1], "fp32")
    inputs = {name: views.get(name) for name in ("q", "k", "v", *POINTERS)}
    if 0 in (*outputs[0][:-1], problem["batch"], problem["seqlen_q"]):
        return Request(inputs, made, ())
    if seen["q"].device != CPU:
        problem["multiprocessors"] = multiprocessors(seen["q"].device)
    spec, params = _variant(call, seen, problem, form, options.block)
    counters = hopper_form.counters(params, problem) if spec.name == FLASH_SM90.name else 0
    return Request(inputs, made, (Launch(spec, params, problem),), counters=counters)


def _variant(
    call: str, seen: Mapping[str, View], problem: Sizes, form: ScoreFeatures, block: Any
) -> tuple[Any, dict[str, Any]]:
    """The kernel and its parameters."""
    arch, rows = arch_of(seen["q"]), {n: seen[n] for n in ("q", "k", "v")}
    block, aligned = usual.check_block(block, call), usual.aligned_rows(rows, problem)
    takes = aligned and hopper_form.takes(problem, seen, form, block)
    base = choice.implementation("flash", problem["dtype"], arch, takes)
    if base not in (FLASH, FLASH_SM90):  # also where flash_sm75 would do: it has no forms
        base = FLASH_FP32
    text = hopper_form.text(form) if base is FLASH_SM90 else form.text
    spec = kernel(base.name, text)
    dims = choice.padded_dims(base, problem["head_dim"], problem["head_dim_v"])
    fixed = {
        "dtype": problem["dtype"], **dict(zip(("head_dim", "head_dim_v"), dims, strict=True)),
        "aligned": aligned, "form": text,
    }  # fmt: skip
    fixed = {name: fixed[name] for name in (p.name for p in spec.params) if name in fixed}
    try:
        params = {**fixed, "block": tile(spec, fixed, problem, arch) if block is None else block}
        spec.check(params, arch)
    except ParameterError as error:
        raise ParameterError(str(error).replace(f"{spec.op}:", f"{call}:", 1)) from None
    return spec, params


# ------------------------------------------------------------------ q, k, v


def _rows(call: str, views: Views) -> dict[str, View]:
    """q, k and v, of one dtype."""
    rows = {name: view for name in ("q", "k", "v") if (view := views[name]) is not None}
    check_same_dtype(call, rows)
    return rows


def _packed_sizes(call: str, rows: Mapping[str, View]) -> Sizes:
    """What the shapes of packed q, k and v say."""
    shown = ", ".join(f"{name} {tuple(view.shape)}" for name, view in rows.items())
    shapes = [tuple(view.shape) for view in rows.values()]
    if any(len(shape) != 3 for shape in shapes):
        raise ParameterError(
            f"{call}: {shown}; allowed: three dimensions, [total, heads, head_dim]"
        )
    (total_q, heads_q, dim), (total_k, heads_kv, k_dim), (v_rows, v_heads, dim_v) = shapes
    if k_dim != dim or (v_rows, v_heads) != (total_k, heads_kv):
        raise ParameterError(
            f"{call}: {shown}; allowed: q [total_q, Hq, D], k [total_k, Hkv, D], v "
            "[total_k, Hkv, Dv]"
        )
    if heads_q and (not heads_kv or heads_q % heads_kv):
        raise ParameterError(f"{call}: q has {heads_q} heads, not a multiple of k's {heads_kv}")
    for name, view in rows.items():
        if view.shape[2] > 1 and view.strides[2] != 1 and 0 not in view.shape:
            raise ParameterError(
                f"{call}: {name} has stride {view.strides[2]} in its last dimension; it must be "
                "contiguous: call .contiguous()"
            )
    usual.check_dims(dim, dim_v, call)
    return {
        "axes": PACKED_AXES, "total_q": total_q, "heads_q": heads_q, "heads_kv": heads_kv,
        "head_dim": dim, "head_dim_v": dim_v,
    }  # fmt: skip


def _batch(call: str, views: Views) -> int:
    """Sequences, of which cu_seqlens say where they begin and end."""
    lengths = []
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        view = views[name]
        assert view is not None  # the op has looked
        check_dtype(call, name, view, ("int32",))
        if (
            len(view.shape) != 1
            or not view.shape[0]
            or (view.shape[0] > 1 and view.strides[0] != 1)
        ):
            raise ParameterError(
                f"{call}: {name} has shape {tuple(view.shape)}, strides {tuple(view.strides)}; "
                "allowed: [sequences + 1], contiguous: 0 and the running sums of the lengths"
            )
        lengths.append(view.shape[0])
    if lengths[0] != lengths[1]:
        raise ParameterError(
            f"{call}: cu_seqlens_q has {lengths[0]} elements, cu_seqlens_k {lengths[1]}; allowed: "
            "one more than there are sequences, in both"
        )
    return lengths[0] - 1


def _length(call: str, name: str, value: Any) -> int:
    try:
        length = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{call}: {name}={value!r} is not a whole number") from None
    if not 0 <= length < _LIMIT:
        raise ParameterError(f"{call}: {name}={length} is not in 0 .. {_LIMIT - 1}")
    return length


# ------------------------------------------------------------------ the form


def window_of(call: str, options: Options, problem: Sizes) -> tuple[int, int]:
    """(left, right) as the kernel wants them: causal folded in, at most as wide as the scores."""
    window, causal = options.window, check_flag(call, "causal", options.causal)
    wide = max(problem["seqlen_q"], problem["seqlen_k"])
    try:
        left, right = (None, None) if window is None else window
        sides = [wide if s in _UNBOUNDED else operator.index(s) for s in (left, right)]
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{call}: window={window!r} is not a pair (left, right) of whole numbers or None"
        ) from None
    if min(sides) < 0:
        raise ParameterError(
            f"{call}: window={window!r}: a side is at least 0; None or -1 is without a bound"
        )
    return min(sides[0], wide), 0 if causal else min(sides[1], wide)


def softcap_of(call: str, softcap: Any) -> float:
    """0.0 where there is none."""
    if softcap is None:
        return 0.0
    try:
        value = float(softcap) if not isinstance(softcap, (str, bytes)) else math.nan
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if math.isnan(value):
        raise ArgumentTypeError(f"{call}: softcap={softcap!r} is not a plain number or None")
    if not (value == 0 or 1e-6 <= value <= 1e30):
        raise ParameterError(
            f"{call}: softcap={value} is not in 1e-6 .. 1e30; None or 0 is without one"
        )
    return value


def form_of(call: str, seen: Mapping[str, View], problem: Sizes, options: Options) -> ScoreFeatures:
    """What is to be compiled; every array of it is looked at on the way."""
    lengths = (problem["batch"], problem["heads_q"], problem["seqlen_q"], problem["seqlen_k"])
    heads, paired = problem["heads_q"], {}
    for name, allowed in (("bias", BIAS_DTYPES), ("mask", ("bool",))):
        if name in seen:
            check_dtype(call, name, seen[name], allowed)
            paired[name] = _broadcast(call, name, seen[name], lengths, problem["dtype"])
    if "sinks" in seen:
        check_dtype(call, "sinks", seen["sinks"], ("fp32",))
        check_shape(call, "sinks", seen["sinks"], (heads,), "[Hq],")
        _contiguous(call, "sinks", seen["sinks"])
    if "alibi_slopes" in seen:
        _alibi(call, seen["alibi_slopes"], problem)
    return ScoreFeatures(
        softcap=problem["softcap"] > 0, alibi="alibi_slopes" in seen, sinks="sinks" in seen,
        bias=seen["bias"].dtype if "bias" in seen else "", bias_paired=paired.get("bias", False),
        mask="mask" in seen, mask_paired=paired.get("mask", False),
        varlen="cu_seqlens_q" in seen, score_mod=options.score_mod,
        score_args=_score_args(call, seen, options),
    )  # fmt: skip


def _broadcast(call: str, name: str, view: View, lengths: Sequence[int], dtype: str) -> bool:
    """Checks a [B | 1, Hq | 1, Sq | 1, Sk] array; whether two neighbouring keys are one load."""
    shape, steps = tuple(view.shape), view.strides
    fits = len(shape) == 4 and shape[3] == lengths[3]
    if not fits or any(s not in (1, n) for s, n in zip(shape[:3], lengths[:3], strict=True)):
        raise ParameterError(
            f"{call}: {name} has shape {shape}; allowed: four dimensions that broadcast to "
            f"{tuple(lengths)}, the last one in full"
        )
    _contiguous(call, name, view)
    if dtype == "fp32":  # whose kernel takes keys one by one
        return False
    pair = 2 * ITEMSIZE.get(view.dtype, 1)
    apart = [step for step, n in zip(steps[:3], shape[:3], strict=True) if n > 1]
    return not (view.pointer % pair or shape[3] % 2 or any(step % 2 for step in apart))


def _contiguous(call: str, name: str, view: View) -> None:
    if view.shape[-1] > 1 and view.strides[-1] != 1 and 0 not in view.shape:
        raise ParameterError(
            f"{call}: {name} has stride {view.strides[-1]} in its last dimension; it must be "
            "contiguous: call .contiguous()"
        )


def _alibi(call: str, view: View, problem: Sizes) -> None:
    heads = problem["heads_q"]
    check_dtype(call, "alibi_slopes", view, ("fp32",))
    if tuple(view.shape) not in ((heads,), (problem["batch"], heads)):
        raise ParameterError(
            f"{call}: alibi_slopes has shape {tuple(view.shape)}; allowed: [Hq] ({heads},) or "
            f"[B, Hq] {(problem['batch'], heads)}"
        )
    _contiguous(call, "alibi_slopes", view)


def _score_args(
    call: str, seen: Mapping[str, View], options: Options
) -> tuple[tuple[str, str], ...]:
    """(name, kind) of what a score_mod reads: arrays in the order of their slots, then numbers."""
    found = []
    for name, slot in zip(options.score_names, SLOTS, strict=False):
        view = seen[slot]
        check_dtype(call, f"score_args {name}", view, tuple(ARRAYS))
        if len(view.shape) != 1:
            raise ParameterError(
                f"{call}: score_args: {name} has shape {tuple(view.shape)}; allowed: one dimension"
            )
        _contiguous(call, f"score_args {name}", view)
        found.append((name, view.dtype))
    return (*found, *((name, kind) for name, kind, _ in options.score_scalars))
