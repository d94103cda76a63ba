"""Products by quack (package quack-kernels), written in CuTe DSL: with its default tile, and tuned.

It takes gate and up in turns, an output of each: the weight is packed so beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused
from ..core.patience import within
from .products import label, operands

_MODULE = "quack.gemm_interface"
_COMPILING = 60.0  # seconds, of a case
_ACTIVATIONS = {"relu": "relu", "silu": "silu", "gelu_tanh": "gelu_tanh_approx"}
_GATED = {"relu": "reglu", "silu": "swiglu", "gelu_tanh": "geglu"}


def _prepare(problem: Problem, arrays: Arrays, *, tuned: bool) -> Prepared:
    if problem["dtype"] == "fp32":
        raise Refused("takes fp16 and bf16")
    quack = import_module(_MODULE)
    made = _made(quack, problem, arrays, tuned)
    with within(_COMPILING, f"quack of {label(problem)}"):
        made.call()
    return made


def _made(quack: Any, problem: Problem, arrays: Arrays, tuned: bool) -> Prepared:
    if problem["activation"] != "none" or problem["gate"]:
        return _activated(quack, problem, arrays, tuned)
    (x, weight), bias = operands(problem, arrays), arrays.get("bias")
    columns, residual = weight.t(), arrays.get("residual")
    if residual is None:
        return Prepared(lambda: quack.gemm(x, columns, bias=bias, tuned=tuned))
    return Prepared(lambda: quack.gemm_add(x, columns, residual, bias=bias, tuned=tuned))


def _activated(quack: Any, problem: Problem, arrays: Arrays, tuned: bool) -> Prepared:
    named = (_GATED if problem["gate"] else _ACTIVATIONS).get(problem["activation"])
    if named is None or problem["residual"]:
        raise Refused("takes gelu_tanh, relu and silu, without a residual behind them")
    (x, weight), bias = operands(problem, arrays), arrays.get("bias")
    if problem["gate"]:
        weight, bias = _in_turns(weight), None if bias is None else _in_turns(bias)
    columns = weight.t()

    def call() -> Any:
        return quack.gemm_act(
            x, columns, bias=bias, activation=named, store_preact=False, tuned=tuned
        )

    return Prepared(call, lambda returned: returned[1])


def _in_turns(halves: Any) -> Any:
    """[gate ..., up ...] -> [gate 0, up 0, gate 1, ...], along the first dimension."""
    return halves.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def _peers() -> tuple[Candidate, ...]:
    def peer(name: str, prepare: Callable[..., Prepared], slow: str | None) -> Candidate:
        return Candidate(
            name=name, package="quack-kernels", module=_MODULE, prepare=prepare, slow=slow
        )

    return (
        peer("quack", partial(_prepare, tuned=False), None),
        peer("quack tuned", partial(_prepare, tuned=True), "compiles some fifty kernels a case"),
    )


PEERS = GRADIENTS = _peers()
