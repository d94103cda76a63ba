"""Decoding in some of its forms: the cases, how ours is called, PyTorch beside it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.attention.decode.kernels import kernel, select
from fkjit.ops.attention.features import ScoreFeatures
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.kernels import arch_of
from ..core.op import Arrays, Candidate, Op, Prepared, Refused
from . import cases_attention_decode as usual

SOFTCAP, WINDOW = 30.0, 4096
# What a case has, and the form that this is.
FORMS: dict[str, ScoreFeatures] = {
    "window": ScoreFeatures(),
    "softcap": ScoreFeatures(softcap=True),
    "alibi": ScoreFeatures(alibi=True),
    "sinks": ScoreFeatures(sinks=True),
    "bias": ScoreFeatures(bias="bf16", bias_paired=True),
}
_SIZES = ((1, 32_768), (1, 131_072), (64, 8192))


def problem(
    form: str, batch: int, keys: int, page_size: int = 0, layout: str = "hnd", *,
    window: int = WINDOW, heads: tuple[int, int] = (32, 8), dim: int = 128,
) -> dict[str, Any]:  # fmt: skip
    """One problem, in the words of the kernel's spec; a window is `window` keys wide."""
    return {
        **usual.problem(batch, keys, page_size, layout, heads=heads, dim=dim),
        "form": form,
        "window": (window - 1 if form == "window" else keys, 0),
        "softcap": SOFTCAP if form == "softcap" else 0.0,
        "score_scalars": {},
    }


def label(p: Problem) -> str:
    """ "bf16 B1 S131072 H32/8 D128 one piece window 4096"."""
    more = f" {p['window'][0] + 1}" if p["form"] == "window" else ""
    return f"{usual.label(p)} {p['form']}{more}"


SETS: dict[str, list[dict[str, Any]]] = {
    "default": [problem(form, *size) for form in FORMS for size in _SIZES]
    + [problem("window", *size, 16, "nhd") for size in _SIZES],
    "quick": [problem(form, 1, 32_768) for form in FORMS],
}


def inputs(problem: Problem, device: Any) -> Arrays:
    """Those of decoding; and what the form reads."""
    torch, place = device.torch, getattr(device, "place", "cuda")
    arrays = dict(usual.inputs(problem, device))
    heads, keys = problem["heads_q"], problem["longest"]
    if problem["form"] in ("alibi", "sinks"):
        name = {"alibi": "alibi_slopes"}.get(problem["form"], "sinks")
        arrays[name] = torch.rand(heads, device=place)
    if problem["form"] == "bias":
        arrays["bias"] = torch.randn((1, heads, 1, keys), device=place, dtype=arrays["q"].dtype)
    return arrays


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """The first and the last head of the first and of the last sequence, in float64."""
    ends = [(0, 0), (problem["batch"] - 1, problem["heads_q"] - 1)]
    parts = [((b, h), _rows(problem, arrays, b, h)) for b, h in dict.fromkeys(ends)]
    return Expected(parts, LIMITS[problem["dtype"]])


def _rows(problem: Problem, arrays: Arrays, b: int, head: int) -> Any:
    """[1, D] of one head, the textbook way."""
    torch = import_module("torch")
    k, v = (usual.keys_of(problem, arrays, side, b, head) for side in "kv")
    scores = arrays["q"][b, head].double() @ k.T * problem["softmax_scale"]
    if problem["softcap"]:
        scores = SOFTCAP * (scores / SOFTCAP).tanh()
    added = _added(problem, arrays)
    if added is not None:
        scores = scores + added[0, head % added.shape[1]].double()
    if "sinks" in arrays:
        scores = torch.cat((scores, arrays["sinks"][head].double().view(1, 1)), -1)
    return scores.softmax(-1)[:, : len(v)] @ v


def _added(problem: Problem, arrays: Arrays) -> Any:
    """What is added to scores, [1, 1 | H, 1, Sk]; None: nothing."""
    torch, keys = import_module("torch"), problem["longest"]
    apart = torch.arange(keys - 1, -1, -1, device=arrays["q"].device)[None, None, None]
    if problem["form"] == "window":
        added = torch.zeros(apart.shape, device=apart.device, dtype=arrays["q"].dtype)
        return added.masked_fill(apart > problem["window"][0], float("-inf"))
    if problem["form"] == "alibi":
        return -arrays["alibi_slopes"][:, None, None] * apart
    return arrays.get("bias")


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public calls, with lengths on the device."""
    q, k, v, lengths = (arrays[n] for n in ("q", "k", "v", "seq_lens"))
    options = {n: arrays[n] for n in ("alibi_slopes", "sinks", "bias") if n in arrays}
    if problem["form"] == "window":
        options["window"] = problem["window"]
    if problem["softcap"]:
        options["softcap"] = problem["softcap"]
    variant = None
    if q.is_cuda:
        spec = kernel(FORMS[problem["form"]].text)
        variant = (spec, _parameters(problem, arch_of(q)))
    if problem["page_size"]:
        q, table = q.squeeze(2).contiguous(), arrays["page_table"]
        options["layout"] = problem["layout"]
        return Prepared(
            lambda: fkjit.paged_attention(q, (k, v), table, lengths, **options),
            lambda o: o.unsqueeze(2),
            variant=variant,
        )
    return Prepared(lambda: fkjit.attention_decode(q, k, v, lengths, **options), variant=variant)


def _parameters(problem: Problem, arch: Arch) -> Params:
    text = FORMS[problem["form"]].text
    return select(problem, arch, text)[1]


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What the calls would take; ParameterError where only a call compiles it."""
    params = _parameters(problem, arch)
    spec.check(params, arch)
    return params


# ------------------------------------------------------------------ peers


def _textbook(problem: Problem, arrays: Arrays) -> Callable[..., Any]:
    torch = import_module("torch")
    scale, cap, added = problem["softmax_scale"], problem["softcap"], _added(problem, arrays)
    added = added if added is None else added.to(arrays["q"].dtype)

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = torch.matmul(q, k.transpose(-1, -2)) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        return torch.matmul(torch.softmax(scores if added is None else scores + added, -1), v)

    return attention


def _rows_of(problem: Problem, arrays: Arrays) -> tuple[Any, Any, Any]:
    """q, k, v with a KV head for each query head."""
    if problem["page_size"]:
        raise Refused("takes [B, H, S, D]")
    if "sinks" in arrays:
        raise Refused("it has no sinks")
    group = problem["heads_q"] // problem["heads_kv"]
    k, v = (arrays[name].repeat_interleave(group, 1) for name in "kv")
    return arrays["q"], k, v


def _eager(problem: Problem, arrays: Arrays) -> Prepared:
    rows, call = _rows_of(problem, arrays), _textbook(problem, arrays)
    return Prepared(lambda: call(*rows))


def _compiled(problem: Problem, arrays: Arrays) -> Prepared:
    torch, rows = import_module("torch"), _rows_of(problem, arrays)
    import_module("torch._dynamo").reset()
    call = torch.compile(_textbook(problem, arrays), dynamic=False)
    return Prepared(lambda: call(*rows))


def _sdpa(problem: Problem, arrays: Arrays) -> Prepared:
    """PyTorch's own, which takes all but a soft cap and sinks as a mask."""
    if problem["softcap"]:
        raise Refused("it has no soft cap")
    if problem["page_size"] or "sinks" in arrays:
        _rows_of(problem, arrays)
    call = import_module("torch").nn.functional.scaled_dot_product_attention
    q, k, v = (arrays[name] for name in "qkv")
    mask = _added(problem, arrays)
    shape = (problem["batch"], problem["heads_q"], 1, problem["longest"])
    mask = mask if mask is None else mask.to(q.dtype).expand(shape)
    return Prepared(lambda: call(q, k, v, attn_mask=mask, enable_gqa=True))


PEERS = (
    Candidate(name="eager", package="torch", module="torch", prepare=_eager),
    Candidate(
        name="compile", package="torch", module="torch", prepare=_compiled,
        slow="torch.compile takes seconds a case",
    ),
    Candidate(name="sdpa", package="torch", module="torch", prepare=_sdpa),
)  # fmt: skip
OP = Op(
    name="decode_form",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    launch=usual.launch,
    peers=PEERS,
)
