"""What simple ops share: a call is checked, then runs on its GPU, or interpreted on the CPU.

An op is an `Op`, a check that turns views of the arrays into a `Request`, and a public function
that hands its arguments over (`vector_add.py` is the shortest example). Geometries seen before
skip the check: simple_plan.py. Attention has a path of the same kind of its own, for its tiles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from fkjit.cpu.run import interpret
from fkjit.jit.build import interpreter_target
from fkjit.ops.op import node as simple_operator
from fkjit.ops.op import torch_ops
from fkjit.ops.op.checks import check_alike, check_overlaps, refuse_grad, requires_grad
from fkjit.ops.op.node import Node
from fkjit.ops.op.plan import Plans
from fkjit.runtime import interop, workspace
from fkjit.runtime.device import LoadedKernel, device_target, launch_on_device, loaded
from fkjit.runtime.interop import CPU, View
from fkjit.sanitizer import refuse_gpu
from fkjit.spec import KernelSpec, Params, Problem


@dataclass(frozen=True)
class Output:
    """An array that the call writes: `given` by the caller, else allocated, contiguous.

    A kernel may want outputs that the caller does not: those are not `returned`.
    """

    shape: tuple[int, ...]
    dtype: str  # "fp32"
    given: View | None = None
    returned: bool = True


@dataclass(frozen=True)
class Launch:
    """One kernel of a call."""

    spec: KernelSpec
    params: Params
    problem: Problem


@dataclass(frozen=True)
class Request:
    """A checked call. Arrays have the names of the kernels' arguments; None is a null pointer.

    The kernels may also have arguments `workspace` (pointer to so many bytes to scribble on) and
    `counters` (pointer to so many u32, which are 0 and must be 0 again when the kernels end).
    """

    inputs: Mapping[str, View | None]
    outputs: Mapping[str, Output | None]
    launches: Sequence[Launch]  # in this order, on one stream; none: nothing to do
    workspace: int = 0
    counters: int = 0

    @property
    def like(self) -> View:
        """The array that outputs resemble: framework, device, kind."""
        return next(view for view in self.inputs.values() if view is not None)


def arch_of(view: View) -> Any:
    """The architecture that kernels on this array are compiled for."""
    return (interpreter_target() if view.device == CPU else device_target(view.device)).arch


class Op:
    """A public call. Its kernels' arguments have the names of `inputs` and `outputs`.

    Args:
        name: of the call, as errors say it.
        inputs: arrays that the caller passes, the first one never None.
        outputs: arrays that the call writes; the caller may pass some of them (`out=`).
        check: (views by name, *options) -> Request. Views of inputs and of outputs that the caller
            passed, None where he passed None; all of one framework and device. Raises whatever is
            wrong with shapes, dtypes, strides and options.
        optional: inputs that may be None.
        written: inputs that the kernels write as well.
        in_place: (written, other) pairs that may be the very same memory; any other overlap of what
            is written is refused.
        autograd: (inputs, outputs, options) -> the result, with gradients, for torch tensors that
            require them. None: refused.
        node: what the call is where torch.compile traces it. None: it cannot be traced.
    """

    def __init__(
        self,
        name: str,
        *,
        inputs: Sequence[str],
        outputs: Sequence[str] = (),
        check: Callable[..., Request],
        optional: Sequence[str] = (),
        written: Sequence[str] = (),
        in_place: Sequence[tuple[str, str]] = (),
        autograd: Callable[..., Any] | None = None,
        node: Node | None = None,
    ) -> None:
        self.name, self.check, self.autograd = name, check, autograd
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.names = self.inputs + self.outputs
        self.optional = frozenset(optional) | frozenset(outputs)
        self.written = frozenset(written) | frozenset(outputs)
        self.in_place = frozenset(in_place)
        self.plans = Plans(self.name, self.names)
        self.node = node
        self.operator = None if node is None else simple_operator.define(self, node)

    def __call__(
        self,
        inputs: tuple[Any, ...],
        outputs: tuple[Any, ...] = (),
        options: tuple[Any, ...] = (),
        *,
        running: bool = False,
    ) -> Any:
        """Run on `inputs` and `outputs`, in the declared order; None for what is not given.

        running: this is the node of a graph, whatever is being traced meanwhile.
        """
        if self.node is not None and not running and torch_ops.compiling():
            return self.traced(inputs, outputs, options)
        arrays = [*inputs, *outputs]
        found = self.plans.find(arrays, options)
        if found is not None:
            refuse_gpu(self.name)
            return found[0].run(arrays, found[1])
        if self.node is not None and torch_ops.abstract(*inputs):
            return self.traced(inputs, outputs, options)
        return self._checked(arrays, inputs, outputs, options)

    def traced(
        self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], options: tuple[Any, ...]
    ) -> Any:
        """A node of the graph that is being traced."""
        assert self.node is not None and self.operator is not None
        return simple_operator.traced(self, self.node, self.operator, inputs, outputs, options)

    def _checked(
        self, arrays: list[Any], inputs: tuple[Any, ...], outputs: Any, options: tuple[Any, ...]
    ) -> Any:
        """A call that has no plan."""
        views = self._views(arrays)
        if requires_grad(views.values()):
            if self.autograd is None:
                refuse_grad(self.name, views)
            else:
                return self.autograd(inputs, outputs, options)
        request = self._request(views, options)
        made = {n: _array(request, output) for n, output in request.outputs.items()}
        if request.like.device == CPU:
            self._on_cpu(request, made)
        elif request.launches:
            kernels = self._on_gpu(request, made)
            self.plans.remember(arrays, options, request, kernels, self._pairs(request))
        return _result(request, made)

    def preparing(self, function: Callable[..., Any]) -> Callable[..., None]:
        """The `prepare` of the op's public function: the same arguments, nothing is launched.

        The function's parameters that are no arrays are the options, in their order.
        """
        signature = inspect.signature(function)

        def prepare(*args: Any, **options: Any) -> None:
            """Compile and load what the call with the same arguments needs, without running it.

            Call it before capturing a CUDA graph, or to pay the first-call cost early. Checks and
            raises as the call does; nothing to do for CPU arrays.
            """
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            given = bound.arguments
            self.prepare(
                [given.get(name) for name in self.names],
                tuple(value for name, value in given.items() if name not in self.names),
            )

        return prepare

    def prepare(self, arrays: list[Any], options: tuple[Any, ...]) -> None:
        request = self._request(self._views(arrays), options)
        if request.like.device == CPU or not request.launches:
            return
        stream = interop.current_stream(request.like)
        kernels = [
            loaded(launch.spec, launch.params, request.like.device, stream, self.name)
            for launch in request.launches
        ]
        workspace.reserve(request.like.device, request.counters)
        self.plans.remember(arrays, options, request, kernels, self._pairs(request))

    def _views(self, arrays: Sequence[Any]) -> dict[str, View | None]:
        return {
            name: None
            if array is None and name in self.optional
            else interop.view(array, self.name, name)
            for name, array in zip(self.names, arrays, strict=True)
        }

    def _request(self, views: dict[str, View | None], options: tuple[Any, ...]) -> Request:
        check_alike(self.name, views)
        request = self.check(views, *options)
        check_overlaps(self.name, self._pairs(request), self.in_place)
        return request

    def _pairs(self, request: Request) -> list[tuple[str, View, str, View]]:
        """Each array of the caller's that is written, beside each other one of his."""
        seen = dict(request.inputs)
        seen |= {name: output and output.given for name, output in request.outputs.items()}
        return [
            (name, view, other, beside)
            for name, view in seen.items()
            if view is not None and name in self.written
            for other, beside in seen.items()
            if beside is not None and other != name
        ]

    def _on_cpu(self, request: Request, made: Mapping[str, Any]) -> None:
        views = self._written_views(request, made)
        arrays = {n: None if v is None else interop.as_numpy(v) for n, v in views.items()}
        arrays |= dict.fromkeys(workspace.ARGUMENTS)
        if request.workspace:
            arrays["workspace"] = np.full(-(-request.workspace // 4), np.nan, np.float32)
        if request.counters:
            arrays["counters"] = np.zeros(request.counters, np.uint32)
        for launch in request.launches:
            interpret(launch.spec, launch.params, launch.problem, arrays)

    def _on_gpu(self, request: Request, made: Mapping[str, Any]) -> list[LoadedKernel]:
        views = self._written_views(request, made)
        stand_ins = {name: interop.Pointer(view) for name, view in views.items()}
        stream, device = interop.current_stream(request.like), request.like.device
        with import_module("cupy.cuda").Device(device):
            *scratch, owner = workspace.find(
                request.like.array, device, stream, request.workspace, request.counters
            )
        kernels = []
        for launch in request.launches:
            named = {
                **dict(zip(workspace.ARGUMENTS, scratch, strict=True)),
                **launch.spec.arguments(launch.params, launch.problem, stand_ins),
            }
            kernels.append(
                launch_on_device(
                    launch.spec,
                    launch.params,
                    launch.problem,
                    interop.resolved(named),
                    device,
                    stream,
                    self.name,
                )
            )
        del owner  # what was enqueued comes first on this stream
        if request.like.kind == "dlpack":  # its owner may reuse the memory once we return
            interop.synchronise(request.like)
        return kernels

    def _written_views(self, request: Request, made: Mapping[str, Any]) -> dict[str, View | None]:
        views = dict(request.inputs)
        for name, output in request.outputs.items():
            given = output and output.given
            fresh = None if made[name] is None else interop.view(made[name], self.name, name)
            views[name] = given or fresh
        return views


def _array(request: Request, output: Output | None) -> Any:
    if output is None:
        return None
    if output.given is not None:
        return output.given.array
    return interop.empty(request.like, output.shape, output.dtype)


def _result(request: Request, made: Mapping[str, Any]) -> Any:
    """One array, or a tuple of several: the caller's own where he gave one."""
    results = []
    for name, output in request.outputs.items():
        if output is not None and output.returned:
            given = output.given
            if given is None:
                results.append(interop.give_back(request.like, made[name]))
            else:
                results.append(given.array if given.source is None else given.source)
    return results[0] if len(results) == 1 else tuple(results) or None
