"""A checked call: what an op's check makes of a caller's arrays, and all that is left to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fkjit.arch import Arch
from fkjit.jit.build import interpreter_target
from fkjit.runtime.device import device_target
from fkjit.runtime.interop import CPU, View
from fkjit.spec import KernelSpec, Params, Problem


class Output(NamedTuple):
    """An array that the call writes: `given` by the caller, else allocated, contiguous.

    A kernel may want outputs that the caller does not: those are not `returned`.
    """

    shape: tuple[int, ...]
    dtype: str  # "fp32"
    given: View | None = None
    returned: bool = True


class Launch(NamedTuple):
    """One kernel of a call."""

    spec: KernelSpec
    params: Params
    problem: Problem


class Delegate(Protocol):
    """Another op that answers the call."""

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Any], options: Any, /) -> Any:
        """The result."""

    def prepare(self, inputs: Sequence[Any], options: Any, /) -> None:
        """Compile and load what that needs."""


class Request(NamedTuple):
    """A checked call. Arrays have the names of the kernels' arguments; None is a null pointer.

    The kernels may also have arguments `workspace` (pointer to so many bytes to scribble on) and
    `counters` (pointer to so many u32, which are 0 and must be 0 again when the kernels end).
    """

    inputs: Mapping[str, View | None]
    outputs: Mapping[str, Output | None]
    launches: Sequence[Launch]  # in this order, on one stream; none: nothing to do
    workspace: int = 0
    counters: int = 0
    delegate: Delegate | None = None

    @property
    def like(self) -> View:
        """The array that outputs resemble: framework, device, kind."""
        for view in self.inputs.values():
            if view is not None:
                return view
        raise AssertionError("a call without arrays")


def arch_of(view: View) -> Arch:
    """The architecture that kernels on this array are compiled for."""
    return (interpreter_target() if view.device == CPU else device_target(view.device)).arch
