"""Attention in some of its forms: the cases, and how ours is called and checked."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.attention import select
from fkjit.ops.attention.checks import check
from fkjit.ops.attention.feature_kernels import kernel_with
from fkjit.ops.attention.features import ScoreFeatures
from fkjit.ops.attention.kernels import FLASH, FLASH_FP32
from fkjit.ops.attention.kernels_sm90 import FLASH_SM90
from fkjit.ops.attention.options import AttentionOptions
from fkjit.runtime import interop
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.op import Arrays, Candidate, Op, Prepared, Refused
from . import cases_attention

SOFTCAP, WINDOW = 30.0, 1024
# What a case has, and the form that this is.
FORMS: dict[str, ScoreFeatures] = {
    "causal": ScoreFeatures(),
    "window": ScoreFeatures(),
    "softcap": ScoreFeatures(softcap=True),
    "alibi": ScoreFeatures(alibi=True),
    "sinks": ScoreFeatures(sinks=True),
    "bias": ScoreFeatures(bias="bf16", bias_paired=True),
    "mask": ScoreFeatures(mask=True, mask_paired=True),
}
ARRAYS = ("alibi_slopes", "bias", "mask")  # that change scores
_FULL = ("bias", "mask")  # the others are causal
_SCORES = 24 << 30  # bytes of scores that are not worth the wait


def problem(form: str, batch: int, heads: int, seqlen: int, head_dim: int) -> dict[str, Any]:
    """One problem, in the words of the kernels' specs."""
    full = form in _FULL
    return {
        **cases_attention.problem(batch, heads, seqlen, head_dim, not full),
        "form": form,
        "axes": (0, 1, 2, 3),
        "window": (WINDOW if form == "window" else seqlen, seqlen if full else 0),
        "softcap": SOFTCAP if form == "softcap" else 0.0,
        "score_scalars": {},
    }


def label(p: Problem) -> str:
    """ "bf16 D128 S4096 B2 H16 softcap causal"."""
    *most, mask = cases_attention.label(p).split()
    name = f"{p['form']} {WINDOW}" if p["form"] == "window" else p["form"]
    return " ".join([*most, name] if name == mask else [*most, name, mask])


CASES = [
    problem(form, batch, 16, seqlen, 128)
    for batch, seqlen in ((2, 4096), (1, 8192))
    for form in FORMS
]
SETS = {"default": CASES, "quick": CASES[: len(FORMS)]}


def inputs(problem: Problem, device: Any) -> Arrays:
    """q, k, v as attention's; and what the form reads."""
    torch, place = device.torch, getattr(device, "place", "cuda")
    arrays = dict(cases_attention.inputs(problem, device))
    heads, length = problem["heads_q"], problem["seqlen_k"]
    if problem["form"] == "alibi":
        arrays["alibi_slopes"] = torch.rand(heads, device=place)
    if problem["form"] == "sinks":
        arrays["sinks"] = torch.randn(heads, device=place)
    if problem["form"] == "bias":
        arrays["bias"] = torch.randn((1, heads, length, length), device=place, dtype=torch.bfloat16)
    if problem["form"] == "mask":
        arrays["mask"] = torch.rand((1, 1, length, length), device=place) < 0.8
    return arrays


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """Some rows of the first and of the last head, as attention's."""
    ends = [(0, 0), (problem["batch"] - 1, problem["heads_q"] - 1)]
    step = max(1, problem["seqlen_q"] // 64)
    rows = [*range(0, problem["seqlen_q"], step), problem["seqlen_q"] - 1]
    rows = sorted({*rows})
    parts = [((b, h, rows), _rows(problem, arrays, b, h, rows)) for b, h in dict.fromkeys(ends)]
    return Expected(parts, LIMITS[problem["dtype"]])


def _rows(problem: Problem, arrays: Arrays, batch: int, head: int, rows: list[int]) -> Any:
    """Some rows of one head in float64, the textbook way."""
    q, k, v = arrays["q"][batch, head, rows], arrays["k"][batch, head], arrays["v"][batch, head]
    scores = q.double() @ k.double().T * problem["softmax_scale"]
    if problem["softcap"]:
        scores = SOFTCAP * (scores / SOFTCAP).tanh()
    scores = scores + _added(problem, arrays, rows, head).double()
    if "sinks" in arrays:
        sink = arrays["sinks"][head].double().expand(len(rows), 1)
        scores = import_module("torch").cat((scores, sink), -1)
    return scores.softmax(-1)[:, : len(k)] @ v.double()


def _added(problem: Problem, arrays: Arrays, rows: Any = slice(None), head: Any = None) -> Any:
    """What is added to scores: all masks and biases, in fp32; [Sq, Sk], or [H, Sq, Sk]."""
    torch = import_module("torch")
    keys = torch.arange(problem["seqlen_k"], device=arrays["q"].device)
    apart = keys[rows, None] - keys
    left, right = problem["window"]
    added = torch.zeros(apart.shape, device=keys.device)
    added = added.masked_fill((apart > left) | (apart < -right), float("-inf"))
    pick = slice(None) if head is None else head
    if "alibi_slopes" in arrays:
        slopes = arrays["alibi_slopes"][pick]
        added = added - slopes[..., None, None] * apart.abs()
    if "bias" in arrays:
        added = added + arrays["bias"][0, pick][..., rows, :]
    if "mask" in arrays:
        added = added.masked_fill(~arrays["mask"][0, 0, rows], float("-inf"))
    return added


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """`fkjit.attention` as anybody calls it."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    options = {n: arrays[n] for n in (*ARRAYS, "sinks") if n in arrays}
    left, right = problem["window"]
    window = (left, None) if problem["form"] in ("window", "causal") else None
    causal, softcap = right == 0, problem["softcap"] or None

    def call() -> Any:
        return fkjit.attention(q, k, v, causal=causal, window=window, softcap=softcap, **options)

    variant = None
    if q.is_cuda:
        views = {n: interop.view(arrays[n], "attention", n) for n in ("q", "k", "v", *options)}
        said = AttentionOptions(causal=causal, window=window, softcap=softcap)
        (launch,) = check(views, said).launches
        variant = (launch.spec, launch.params)
    return Prepared(call, variant=variant)


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What `attention` would take of this kernel; ParameterError where only a call compiles it."""
    (base,) = (one for one in (FLASH, FLASH_FP32, FLASH_SM90) if one.name == spec.name)
    whole = kernel_with(base, select.form_of(base, FORMS[problem["form"]]))
    params = select.parameters(whole, problem, None, True, arch)
    spec.check(params, arch)
    return params


# ------------------------------------------------------------------ peers


def _textbook(problem: Problem, arrays: Arrays) -> Callable[..., Any]:
    torch = import_module("torch")
    pairs = problem["batch"] * problem["heads_q"] * problem["seqlen_q"] * problem["seqlen_k"]
    if 8 * pairs > _SCORES:
        raise Refused(f"its score matrices would take {8 * pairs / 2**30:.0f} GiB")
    if "sinks" in arrays:
        raise Refused("sinks are no part of a score matrix")
    added = _added(problem, arrays).to(arrays["q"].dtype)
    scale, cap = problem["softmax_scale"], problem["softcap"]

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = torch.matmul(q, k.transpose(-1, -2)) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        return torch.matmul(torch.softmax(scores + added, -1), v)

    return attention


def _eager(problem: Problem, arrays: Arrays) -> Prepared:
    call = _textbook(problem, arrays)
    return Prepared(lambda: call(*(arrays[n] for n in "qkv")))


def _compiled(problem: Problem, arrays: Arrays) -> Prepared:
    torch = import_module("torch")
    import_module("torch._dynamo").reset()
    call = torch.compile(_textbook(problem, arrays), dynamic=False)
    return Prepared(lambda: call(*(arrays[n] for n in "qkv")))


def _sdpa(problem: Problem, arrays: Arrays) -> Prepared:
    """PyTorch's own, which takes all but a soft cap and sinks as a mask."""
    if problem["softcap"] or "sinks" in arrays:
        raise Refused("it has no soft cap and no sinks")
    call = import_module("torch").nn.functional.scaled_dot_product_attention
    rows = [arrays[n] for n in "qkv"]
    if problem["form"] == "causal":
        return Prepared(lambda: call(*rows, is_causal=True))
    mask = arrays.get("mask")
    if mask is None:
        mask = arrays["bias"] if "bias" in arrays else _added(problem, arrays).to(rows[0].dtype)
    return Prepared(lambda: call(*rows, attn_mask=mask))


def _flex(problem: Problem, arrays: Arrays) -> Prepared:
    """FlexAttention, compiled: rules for scores, and the blocks of keys that queries see."""
    if "sinks" in arrays:
        raise Refused("it has no sinks")
    torch = import_module("torch")
    flex = import_module("torch.nn.attention.flex_attention")
    (left, right), cap = problem["window"], problem["softcap"]
    slopes, bias, mask = (arrays.get(name) for name in ARRAYS)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        if cap:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score - slopes[h] * (q_idx - k_idx).abs()
        return score if bias is None else score + bias[0, h, q_idx, k_idx]

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        seen = (q_idx - k_idx <= left) & (k_idx - q_idx <= right)
        return seen if mask is None else seen & mask[0, 0, q_idx, k_idx]

    import_module("torch._dynamo").reset()
    call = torch.compile(flex.flex_attention, dynamic=False)
    sizes = (None, None, problem["seqlen_q"], problem["seqlen_k"])
    blocks = flex.create_block_mask(mask_mod, *sizes, device=arrays["q"].device)
    rules = score_mod if cap or slopes is not None or bias is not None else None
    rows = [arrays[n] for n in "qkv"]
    return Prepared(lambda: call(*rows, score_mod=rules, block_mask=blocks))


PEERS = tuple(
    Candidate(name=name, package="torch", module="torch", prepare=prepare)
    for name, prepare in (
        ("eager", _eager),
        ("compile", _compiled),
        ("sdpa", _sdpa),
        ("flex", _flex),
    )
)
OP = Op(
    name="attention_form",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    peers=PEERS,
)
