"""Products of sorted rows by PyTorch: its grouped product, and cuBLAS expert by expert.

Both take the rows one behind the other, without the places that no choice has.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared
from . import layer
from .peers_moe_layer import grouped_mm


def _dense(p: Problem, arrays: Arrays) -> tuple[Any, Any]:
    """(rows of choices, the places they have)."""
    places = (arrays["sorted_token_ids"] < layer.choices(p)).nonzero().flatten()
    return arrays["x"][places], places


def _at(p: Problem, places: Any) -> Callable[[Any], Any]:
    """Rows back at their places, for whoever checks them."""

    def output(rows: Any) -> Any:
        return rows.new_zeros(p["m"], p["n"]).index_copy_(0, places, rows)

    return output


def _tail(p: Problem, compiled: bool = False) -> Callable[[Any], Any]:
    if not p["gate"]:
        return lambda z: z
    torch = import_module("torch")
    return torch.compile(layer.swiglu, dynamic=False) if compiled else layer.swiglu


def _grouped(compiled: bool) -> Callable[[Problem, Arrays], Prepared]:
    """`compiled`: one kernel for SwiGLU, in place of PyTorch's two."""

    def prepare(p: Problem, arrays: Arrays) -> Prepared:
        rows, places = _dense(p, arrays)
        weight, product, tail = arrays["weight"].transpose(1, 2), grouped_mm(), _tail(p, compiled)
        ends = arrays["counts"].cumsum(0).int()
        return Prepared(lambda: tail(product(rows, weight, offs=ends)), _at(p, places))

    return prepare


def _one_by_one(p: Problem, arrays: Arrays) -> Prepared:
    """A product for each expert that has rows, of sizes that the host knows."""
    torch, (rows, places), tail = import_module("torch"), _dense(p, arrays), _tail(p)
    z = rows.new_empty(len(rows), arrays["weight"].shape[1])
    parts, begin = [], 0
    for expert, count in enumerate(arrays["counts"].tolist()):
        if count:
            run = slice(begin, begin + count)
            parts.append((rows[run], arrays["weight"][expert].t(), z[run]))
        begin += count

    def call() -> Any:
        for x, weight, out in parts:
            torch.mm(x, weight, out=out)
        return tail(z)

    return Prepared(call, _at(p, places))


def _torch(name: str, prepare: Callable[[Problem, Arrays], Prepared], **more: Any) -> Candidate:
    return Candidate(name=name, package="torch", module="torch", prepare=prepare, **more)


PEERS = (
    _torch("grouped_mm", _grouped(False)),
    _torch("grouped_mm + compiled tail", _grouped(True), slow="torch.compile takes seconds a case"),
    _torch("mm by expert", _one_by_one),
)
