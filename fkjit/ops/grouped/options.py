"""What grouped products' calls say besides their arrays, and the launch of one that is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fkjit.ops.grouped import select
from fkjit.ops.op.op import Launch, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View

CALL = "grouped_linear"
Views = Mapping[str, View | None]
# What the kernels have pointers to: none may be missing between others.
INPUTS = ("x", "weight", "bias", "residual", "offsets")


class GroupedOptions(NamedTuple):
    """What a call says besides its arrays. block_size: of the groups."""

    block_size: int
    activation: Any = None
    gate: Any = False
    block: Any = None
    impl: Any = "auto"
    weight_layout: Any = "nk"
    save_pre_activation: Any = True


class RoutedOptions(NamedTuple):
    """What a call says whose kernel reads the lists of `MoeGroups`."""

    activation: Any = None
    gate: Any = False
    block: Any = None
    impl: Any = "stream"
    weight_layout: Any = "nk"
    gather: Any = False


class DepthOptions(NamedTuple):
    """block_size: of the groups."""

    block_size: int
    block: Any = None
    impl: Any = "auto"


def request(
    inputs: Views, outputs: dict[str, Any], problem: dict[str, Any], said: GroupedOptions
) -> Request:
    x = inputs["x"]
    assert x is not None
    if not problem["m"] * problem["n"] * problem["k"] * problem["experts"]:
        return Request(inputs, outputs, ())
    if x.device != CPU:
        problem["multiprocessors"] = multiprocessors(x.device)
    chosen = select.choose(problem, said.impl, said.block, arch_of(x))
    return Request(inputs, outputs, (Launch(chosen.spec, chosen.params, problem),))
