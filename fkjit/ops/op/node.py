"""Any `Op` as one of PyTorch's operators, so that torch.compile traces it as one node.

An `Op` that has a `Node` says with it what PyTorch cannot find out: types of its options, shapes of
its results. The operator's arguments are the op's inputs and options, in their order; arrays that
the caller gives for results have no place in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fkjit.errors import ParameterError
from fkjit.ops.op import torch_ops
from fkjit.runtime.interop import torch_dtype

if TYPE_CHECKING:
    from fkjit.ops.op.op import Op


@dataclass(frozen=True)
class Node:
    """What an op is in a graph.

    fake: (*inputs, *options) -> its results without data, as a list. options: types and names, as
    in PyTorch's schemas: "float eps, int? axis". results: how many there are; None: it depends.
    name: where it is not the op's. pack, unpack: the op's options <-> those of the schema.
    outputs: (inputs, options) -> what the results are written to; None: new arrays.
    """

    fake: Callable[..., list[Any]]
    options: str = ""
    results: int | None = 1
    name: str | None = None
    pack: Callable[..., tuple[Any, ...]] | None = None
    unpack: Callable[..., tuple[Any, ...]] | None = None
    outputs: Callable[..., tuple[Any, ...]] | None = None


def like(x: Any) -> Any:
    """A contiguous tensor of x's shape and dtype, without data where x has none."""
    return x.new_empty(x.shape)


def of_dtype(x: Any, shape: Any, dtype: str) -> Any:
    """A contiguous tensor beside x, of fkjit's name for a dtype."""
    return x.new_empty(shape, dtype=torch_dtype(dtype))


def define(op: Op, node: Node) -> str:
    """Make the op's operator known to PyTorch; its name."""
    name, inputs = node.name or op.name, len(op.inputs)

    def options_of(given: tuple[Any, ...]) -> tuple[Any, ...]:
        return node.unpack(*given) if node.unpack else given

    def listed(found: Any) -> Any:
        made = [] if found is None else list(found) if isinstance(found, tuple) else [found]
        return _as_declared(node, made)

    def run(*given: Any) -> Any:
        arrays, options = given[:inputs], options_of(given[inputs:])
        outputs = node.outputs(arrays, options) if node.outputs else (None,) * len(op.outputs)
        return listed(op(arrays, outputs, options, running=True))

    def gradients(*given: Any) -> Any:
        assert op.autograd is not None
        outputs = (None,) * len(op.outputs)
        return listed(op.autograd(given[:inputs], outputs, options_of(given[inputs:])))

    torch_ops.define(
        torch_ops.Operator(
            name, _schema(op, node), run, lambda *given: _as_declared(node, node.fake(*given)),
            gradients=None if op.autograd is None else gradients,
        )
    )  # fmt: skip
    return name


def traced(
    op: Op, node: Node, name: str,
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], options: tuple[Any, ...],
) -> Any:  # fmt: skip
    """What a call of the op is while a graph is traced: the operator's node in it."""
    for output, given in zip(op.outputs, outputs, strict=False):
        if given is not None and node.outputs is None:
            raise ParameterError(
                f"{op.name}: {output} is given; not supported under torch.compile, where results "
                "are new arrays"
            )
    packed = node.pack(*options) if node.pack else options
    found = getattr(torch_ops.known, name)(*inputs, *packed)
    if node.results == 1:
        return found
    return (found[0] if len(found) == 1 else tuple(found)) if found else None


def _as_declared(node: Node, made: list[Any]) -> Any:
    """Results as the schema has them."""
    if node.results is None:
        return made
    return None if not made else made[0] if len(made) == 1 else tuple(made)


def _schema(op: Op, node: Node) -> str:
    arguments = []
    for number, name in enumerate(op.inputs):
        written = f"(a{number}!)" if name in op.written else ""
        arguments.append(f"Tensor{written}{'?' if name in op.optional else ''} {name}")
    if node.options:
        arguments.append(node.options)
    results = {None: "Tensor[]", 0: "()", 1: "Tensor"}
    made = results.get(node.results) or f"({', '.join(['Tensor'] * (node.results or 0))})"
    return f"({', '.join(arguments)}) -> {made}"
