"""Gradients of a whole mixture of experts, of what a forward saved: x, logits, both weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import fkjit
from fkjit.spec import Problem

from ..core.accuracy import LIMITS, Accuracy, Expected
from ..core.op import Arrays, Candidate, Prepared
from . import layer
from .cases_moe_layer import Layers, choose
from .layer import SHORT, WIDE, problem
from .peers_moe_layer import given, torch_layer, transformers_experts, transformers_layer

_NAMES = ("x", "logits", "w_gate_up", "w_down")
_SLICE, _EXPERTS = 64, 2  # rows checked of a weight's gradient, of the experts with the most
_TOKENS = 2

SETS: dict[str, list[dict[str, Any]]] = {
    "default": [problem(4096, *WIDE), problem(32_768, *SHORT), problem(4096, 128, 8, 2048, 768)],
    "quick": [problem(4096, 128, 8, 2048, 768)],
    "skew": [problem(4096, *WIDE, skew=skew) for skew in (0.0, 1.0)],
}


def inputs(p: Problem, device: Any) -> Arrays:
    """Those of the forward, and dout, N(0, 1)."""
    made = layer.inputs(p, device)
    return {**made, "dout": layer.normal(device, p["dtype"], p["tokens"], p["hidden"])}


# ------------------------------------------------------------------ what is right


class _Apart(Expected):
    """Judges each part by its own norm: a gradient that is small is not hidden by a large one."""

    def judge(self, output: Any) -> Accuracy:
        found = [Expected([part], self.limit).judge(output) for part in self.parts]
        return max(found, key=lambda one: math.inf if math.isnan(one.worst) else one.worst)


def _checked(p: Problem, gradients: Any) -> Any:
    """One row of numbers: what is checked of each gradient."""
    torch, (dx, dlogits, *weights) = import_module("torch"), gradients
    rows, experts = layer.some_tokens(p, dx), _busiest(p)
    parts = [dx[rows], dlogits[rows], *(_spread(x[experts], 1) for x in weights)]
    return torch.cat([part.double().flatten() for part in parts])


def _spread(array: Any, axis: int) -> Any:
    """Some of an axis."""
    step = max(array.shape[axis] // _SLICE, 1)
    return array[(slice(None),) * axis + (slice(None, None, step),)]


def _busiest(p: Problem) -> list[int]:
    return [int(expert) for expert in (-layer.counts(p)).argsort(kind="stable")[:_EXPERTS]]


def expected(p: Problem, arrays: Arrays) -> Expected:
    """In float64: of some tokens dx and dlogits, of some experts rows of the weights' gradients."""
    torch = import_module("torch")
    rows = layer.some_tokens(p, arrays["x"])
    few = [_of_tokens(p, arrays, part) for part in rows.split(_TOKENS)]
    parts = [torch.cat(made) for made in zip(*few, strict=True)]
    found = [_of_expert(p, arrays, expert) for expert in _busiest(p)]
    parts += [torch.stack([_spread(pair[which], 0) for pair in found]) for which in (0, 1)]
    limit, begin, wanted = LIMITS[p["dtype"]], 0, []
    for part in parts:
        wanted.append((slice(begin, begin + part.numel()), part.flatten()))
        begin += part.numel()
    return _Apart(wanted, limit)


def _of_tokens(p: Problem, arrays: Arrays, rows: Any) -> tuple[Any, Any]:
    """dx and dlogits of a few tokens: the weights of all their experts are kept in float64."""
    torch = import_module("torch")
    x, logits = (arrays[name][rows].double().requires_grad_() for name in ("x", "logits"))
    out = layer.in_float64(p, x, logits, arrays)
    return torch.autograd.grad(out, (x, logits), arrays["dout"][rows].double())


def _of_expert(p: Problem, arrays: Arrays, expert: int) -> tuple[Any, Any]:
    """Gradients of one expert's weights, by the rows of all tokens that go to it."""
    torch = import_module("torch")
    best = torch.softmax(arrays["logits"].double(), -1).topk(p["top_k"])
    token, choice = (best.indices == expert).nonzero(as_tuple=True)
    up, down = (arrays[n][expert].double().requires_grad_() for n in ("w_gate_up", "w_down"))
    rows = layer.swiglu(arrays["x"][token].double() @ up.t()) @ down.t()
    weighted = rows * best.values[token, choice, None]
    return torch.autograd.grad(weighted, (up, down), arrays["dout"][token].double())


# ------------------------------------------------------------------ who makes them


def _gradients(p: Problem, arrays: Arrays, leaves: Arrays, out: Any) -> Prepared:
    """autograd of a forward that has run."""
    torch, dout = import_module("torch"), arrays["dout"]
    wanted = [leaves[name] for name in _NAMES]
    return Prepared(
        lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True),
        lambda made: _checked(p, made),
        capturable=False,
    )


def _of(layer_of: Callable[[Problem], Callable[..., Any]]) -> Callable[[Problem, Arrays], Prepared]:
    """`layer_of`: of a problem, a function of x, logits, w_gate_up and w_down."""

    def prepare(p: Problem, arrays: Arrays) -> Prepared:
        leaves = {name: arrays[name].detach().requires_grad_() for name in _NAMES}
        return _gradients(p, arrays, leaves, layer_of(p)(*given(leaves)))

    return prepare


def _ours(save: bool) -> Callable[[Problem, Arrays], Prepared]:
    """`save`: keep what the activation is of, or compute it again."""
    return _of(lambda p: partial(fkjit.moe_layer, top_k=p["top_k"], save_pre_activation=save))


def _transformers(p: Problem, arrays: Arrays) -> Prepared:
    """The weights' leaves are a module's parameters."""
    experts = transformers_experts(p, arrays, "grouped_mm")
    made = transformers_layer(p, experts)
    leaves = {name: arrays[name].detach().requires_grad_() for name in _NAMES[:2]}
    leaves |= {"w_gate_up": experts.gate_up_proj, "w_down": experts.down_proj}
    return _gradients(p, arrays, leaves, made(leaves["x"], leaves["logits"]))


@dataclass(frozen=True, kw_only=True)
class _Gradients(Layers):
    """A product of the forward is two of the backward; weights are read, and their gradients
    written."""

    def flops(self, problem: Problem) -> float:
        return 2 * layer.flops(problem)

    def bytes(self, problem: Problem) -> float:
        experts = layer.weight_bytes(problem, problem["experts"])
        return layer.traffic(problem) + float(experts)


OP = _Gradients(
    name="moe_layer_backward",
    sets=SETS,
    label=layer.label,
    inputs=inputs,
    expected=expected,
    ours=_ours(True),
    choose=choose,
    peers=(
        Candidate(name="fkjit recomputed", kind="ours", prepare=_ours(False)),
        Candidate(name="grouped_mm", package="torch", module="torch", prepare=_of(torch_layer)),
        Candidate(
            name="transformers grouped_mm", package="transformers", module="transformers",
            prepare=_transformers,
        ),
    ),
)  # fmt: skip
