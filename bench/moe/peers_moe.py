"""Routing to experts in PyTorch, eager and compiled: softmax and topk, stable sorts, gathers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared

_SLOW = "torch.compile takes seconds a case"


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import_module("torch._dynamo").reset()  # a fresh compilation, no dynamic shapes
    return import_module("torch").compile(function, dynamic=False)


def _route(logits: Any, top_k: int) -> Any:
    return logits.float().softmax(-1).topk(top_k)


def _sorted(ids: Any, experts: int) -> Any:
    from .cases_moe import sort

    return sort(ids, experts)


def _prepare_route(compiled: bool) -> Callable[[Problem, Arrays], Prepared]:
    def prepare(p: Problem, arrays: Arrays) -> Prepared:
        from .cases_moe import routed

        logits, top_k = arrays["logits"], p["top_k"]
        route: Callable[..., Any] = _compiled(_route) if compiled else _route
        return Prepared(
            lambda: route(logits, top_k), lambda made: routed(made[0], made[1], p["experts"])
        )

    return prepare


def _places(p: Problem) -> Callable[[Any], Any]:
    from .cases_moe import padded

    return lambda made: padded(*made, p)


def _prepare_regroup(p: Problem, arrays: Arrays) -> Prepared:
    """Without the tiles: what models that gather rows by index need."""
    ids, experts = arrays["topk_ids"], p["experts"]
    return Prepared(lambda: _sorted(ids, experts), _places(p))


def _prepare_both(compiled: bool) -> Callable[[Problem, Arrays], Prepared]:
    def prepare(p: Problem, arrays: Arrays) -> Prepared:
        logits, top_k, experts = arrays["logits"], p["top_k"], p["experts"]

        def both(logits: Any) -> Any:
            return _sorted(_route(logits, top_k)[1], experts)

        call = _compiled(both) if compiled else both
        return Prepared(lambda: call(logits), _places(p))

    return prepare


def _permute(p: Problem, arrays: Arrays) -> Prepared:
    """By the tokens of the places, made beforehand."""
    torch, x, out = import_module("torch"), arrays["x"], arrays["y"].clone()
    tokens = arrays["sorted_token_ids"].long() // p["top_k"]
    return Prepared(lambda: torch.index_select(x, 0, tokens, out=out))


def _combine(y: Any, inverse: Any, weights: Any) -> Any:
    return (y[inverse].float() * weights[..., None]).sum(1).to(y.dtype)


def _prepare_combine(compiled: bool) -> Callable[[Problem, Arrays], Prepared]:
    def prepare(p: Problem, arrays: Arrays) -> Prepared:
        y, weights, inverse = arrays["y"], arrays["weights"], arrays["inverse"].long()
        combine = _compiled(_combine) if compiled else _combine
        return Prepared(lambda: combine(y, inverse, weights))

    return prepare


def _torch(name: str, prepare: Any, slow: str | None = None) -> Candidate:
    return Candidate(name=name, package="torch", module="torch", prepare=prepare, slow=slow)


ROUTE = (
    _torch("torch", _prepare_route(False)),
    _torch("compile", _prepare_route(True), _SLOW),
)
REGROUP = (_torch("torch", _prepare_regroup),)
BOTH = (_torch("torch", _prepare_both(False)), _torch("compile", _prepare_both(True), _SLOW))
PERMUTE = (_torch("torch", _permute),)
COMBINE = (
    _torch("torch", _prepare_combine(False)),
    _torch("compile", _prepare_combine(True), _SLOW),
)
