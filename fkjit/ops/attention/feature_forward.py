"""Attention in all its forms: what `fkjit.attention` does with a window, a bias and the like, and
`fkjit.attention_varlen`, for packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fkjit.errors import CompileError, ParameterError
from fkjit.ops.attention import feature_nodes as operator
from fkjit.ops.attention import score_mod as score_mods
from fkjit.ops.attention.autograd import check_deterministic, wanted
from fkjit.ops.attention.backward.feature_call import PACKED
from fkjit.ops.attention.feature_autograd import Call, differentiable
from fkjit.ops.attention.feature_checks import check_dense, check_varlen
from fkjit.ops.attention.feature_problem import POINTERS
from fkjit.ops.attention.features import SLOTS
from fkjit.ops.attention.short_q import ABSENT
from fkjit.ops.op import torch_ops
from fkjit.ops.op.op import Op

FORM = ("alibi_slopes", "bias", "mask", "sinks")  # arrays of a form
_INPUTS = ("q", "k", "v", *POINTERS)
_ABSENT = (None,) * len(ABSENT)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    block: int | tuple[int, int] | None = None,
    return_lse: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    score_mod: str | None = None,
    score_args: Mapping[str, Any] | None = None,
    score_mod_grad: str | None = None,
    deterministic: bool | None = True,
) -> Any:
    """Attention over sequences of several lengths, packed one behind the other.

    Args:
        q: [total_q, Hq, D]; k: [total_k, Hkv, D]; v: [total_k, Hkv, Dv]; as `attention` takes them.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32 on the same device: 0 and the running sums of the
            lengths. Sequence i is rows cu_seqlens[i] up to cu_seqlens[i + 1]; empty ones are fine.
        max_seqlen_q, max_seqlen_k: at least the longest lengths. Rows and keys beyond are left out:
            nothing waits for the device to find out, so a CUDA graph may replay with other lengths.
        causal, window: aligned to the bottom right of each sequence.
        bias, mask: [B | 1, Hq | 1, max_seqlen_q | 1, max_seqlen_k]: a sequence's own [Sq, Sk] stand
            at the beginning of its rows and columns.
        score_mod: b is the sequence, q_idx and k_idx count its own rows.
        The others: as in `attention`.

    Returns:
        o [total_q, Hq, Dv], or (o, lse) with lse fp32 [Hq, total_q]. Rows of no sequence are not
        written. A row that sees no key gives o = 0 and lse = -inf (with a sink: the sink).

    Raises:
        ParameterError, ArgumentTypeError, DeviceError, CaptureError: as `attention`.

    Every feature goes with every other, on every GPU. With torch it has the gradients that
    `attention` has, 0 in rows of no sequence. To torch.compile the call is one operator,
    torch.ops.fkjit.attention_varlen (or …_lse).
    """
    packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    forms = (window, softcap, alibi_slopes, bias, mask, sinks, score_mod, score_args)
    shared = (causal, softmax_scale, block, return_lse)
    if torch_ops.autocasting():
        q, k, v = torch_ops.autocast(q, k, v)
    if torch_ops.compiling() or torch_ops.abstract(q, k, v):
        return operator.traced_varlen((q, k, v), packed, shared, forms, deterministic)
    return _packed((q, k, v), packed, shared, forms, score_mod_grad, deterministic)


def dense(
    q: Any, k: Any, v: Any, options: tuple[Any, ...], forms: tuple[Any, ...],
    score_mod_grad: str | None = None, deterministic: bool | None = True,
) -> Any:  # fmt: skip
    """`fkjit.attention` with a form. options: causal, softmax_scale, block, impl, return_lse,
    layout; forms: window, softcap, alibi_slopes, bias, mask, sinks, score_mod, score_args."""
    causal, scale, block, impl, return_lse, layout = options
    shared = (causal, scale, block, return_lse)
    if torch_ops.compiling() or torch_ops.abstract(q, k, v):
        return operator.traced_dense((q, k, v), (impl, layout), shared, forms, deterministic)
    if torch_ops.autocasting():
        q, k, v = torch_ops.autocast(q, k, v)
    return _dense((q, k, v), (impl, layout), shared, forms, score_mod_grad, deterministic)


def _packed(
    rows: tuple[Any, ...], packed: tuple[Any, ...], shared: tuple[Any, ...],
    forms: tuple[Any, ...], score_mod_grad: str | None = None, deterministic: Any = True,
) -> Any:  # fmt: skip
    arrays, options = _call("attention_varlen", rows, packed[:2], shared, forms)
    derivative = _derivative("attention_varlen", forms, score_mod_grad)
    if not wanted(*arrays):
        return _run(_VARLEN, arrays, (*packed[2:], *options))
    settings = _settings("attention_varlen", options, derivative, deterministic)

    def traced(inputs: tuple[Any, ...]) -> Any:
        again = _with_lse(shared), (*forms[:2], *inputs[5:9], *forms[6:])
        return operator.traced_varlen(inputs[:3], (*inputs[3:5], *packed[2:]), *again)

    made = differentiable(
        Call(
            "attention_varlen",
            lambda inputs: _run(_VARLEN, inputs, (*packed[2:], *_with_lse(options))),
            traced, PACKED, *settings, *packed[2:],
        ),
        arrays,
    )  # fmt: skip
    return made if shared[3] else made[0]


def _dense(
    rows: tuple[Any, ...], where: tuple[Any, ...], shared: tuple[Any, ...],
    forms: tuple[Any, ...], score_mod_grad: str | None = None, deterministic: Any = True,
) -> Any:  # fmt: skip
    arrays, options = _call("attention", rows, (None, None), shared, forms)
    derivative = _derivative("attention", forms, score_mod_grad)
    if not wanted(*arrays):
        return _run(_DENSE, (*arrays, *_ABSENT), (*where, *options))
    settings = _settings("attention", options, derivative, deterministic)

    def traced(inputs: tuple[Any, ...]) -> Any:
        again = _with_lse(shared), (*forms[:2], *inputs[5:9], *forms[6:])
        return operator.traced_dense(inputs[:3], where, *again)

    made = differentiable(
        Call(
            "attention",
            lambda inputs: _run(_DENSE, (*inputs, *_ABSENT), (*where, *_with_lse(options))),
            traced, where[1], *settings,
        ),
        arrays,
    )  # fmt: skip
    return made if shared[3] else made[0]


def _with_lse(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Options of a call, the fourth of which is return_lse."""
    return (*options[:3], True, *options[4:])


def _settings(
    call: str, options: tuple[Any, ...], derivative: str, deterministic: Any
) -> tuple[Any, ...]:
    """Of a `Call`, of those that an op has."""
    causal, softmax_scale, _, _, *form, names, scalars = options
    exact = check_deterministic(call, deterministic)
    return (causal, softmax_scale, *form, derivative, names, scalars, exact)


def _derivative(call: str, forms: tuple[Any, ...], score_mod_grad: str | None) -> str:
    """score_mod_grad as a ScoreFeatures has it."""
    if score_mod_grad is None:
        return ""
    if forms[6] is None:
        raise ParameterError(f"{call}: score_mod_grad is given, but no score_mod that it is of")
    return score_mods.expression(call, score_mod_grad, "score_mod_grad")


def prepare_dense(q: Any, k: Any, v: Any, options: tuple[Any, ...], forms: tuple[Any, ...]) -> None:
    """Compile and load what `dense` needs."""
    causal, scale, block, impl, return_lse, layout = options
    arrays, rest = _call(
        "attention", (q, k, v), (None, None), (causal, scale, block, return_lse), forms
    )
    explained(
        _DENSE, rest, lambda: _DENSE.prepare([*arrays, *_ABSENT, None, None], (impl, layout, *rest))
    )


def _call(
    call: str, rows: tuple[Any, ...], cu_seqlens: tuple[Any, ...], shared: tuple[Any, ...],
    forms: tuple[Any, ...],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """Arrays in the order of the op's inputs, and options."""
    arrays, options = taken_apart(call, forms)
    return (*rows, *cu_seqlens, *arrays), (*shared, *options)


def taken_apart(call: str, forms: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arrays of a form, slots for those of a score_mod among them, and its options."""
    window, softcap, *arrays, score_mod, score_args = forms
    window = tuple(window) if isinstance(window, list) else window
    slots: list[Any] = []
    names: tuple[str, ...] = ()
    scalars: tuple[Any, ...] = ()
    if score_mod is not None:
        score_mod = score_mods.expression(call, score_mod)
        given, scalars = score_mods.arguments(call, score_args)
        names, slots = tuple(given), list(given.values())
    elif score_args:
        raise ParameterError(f"{call}: score_args are given, but no score_mod to read them")
    slots += [None] * (len(SLOTS) - len(slots))
    return (*arrays, *slots), (window, softcap, score_mod or "", names, scalars)


def _run(op: Op, arrays: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    return explained(op, options, lambda: op(arrays, (None, None), options))


def explained(op: Op, options: tuple[Any, ...], call: Callable[[], Any]) -> Any:
    """What a call returns; what NVRTC has against a score_mod as a ParameterError."""
    try:
        return call()
    except CompileError as error:
        score_mod = options[-3]
        if not score_mod:
            raise
        raise ParameterError(
            f"{op.name}: score_mod={score_mod!r} does not compile: {error}"
        ) from error


_OUTPUTS = ("o", "lse")
_DENSE = Op(
    "attention", inputs=(*_INPUTS, *ABSENT), outputs=_OUTPUTS, check=check_dense,
    optional=(*POINTERS, *ABSENT),
)  # fmt: skip
_VARLEN = Op(
    "attention_varlen", inputs=_INPUTS, outputs=_OUTPUTS, check=check_varlen,
    optional=[name for name in POINTERS if not name.startswith("cu_seqlens")],
)  # fmt: skip


def _prepare_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
    max_seqlen_k: int, *, causal: bool = False, softmax_scale: float | None = None,
    block: Any = None, return_lse: bool = False, window: Any = None, softcap: Any = None,
    alibi_slopes: Any = None, bias: Any = None, mask: Any = None, sinks: Any = None,
    score_mod: Any = None, score_args: Any = None, score_mod_grad: Any = None,
    deterministic: Any = True,
) -> None:  # fmt: skip
    """Compile and load what the call with the same arguments needs, without running it."""
    forms = (window, softcap, alibi_slopes, bias, mask, sinks, score_mod, score_args)
    shared = (causal, softmax_scale, block, return_lse)
    arrays, rest = _call("attention_varlen", (q, k, v), (cu_seqlens_q, cu_seqlens_k), shared, forms)
    options = (max_seqlen_q, max_seqlen_k, *rest)
    explained(_VARLEN, rest, lambda: _VARLEN.prepare([*arrays, None, None], options))


attention_varlen.prepare = _prepare_varlen  # type: ignore[attr-defined]
operator.define(_dense, _packed)
