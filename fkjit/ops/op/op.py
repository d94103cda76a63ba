"""`Op`: the way of every public call, from its arguments to a launch on the caller's stream.

An op is an `Op`, a check that turns views of the arrays into a `Request`, and a public function
that hands its arguments over (`elementwise/vector_add.py` is the shortest example). A geometry seen
before skips the check: plan.py. CPU arrays run the same kernels in the interpreter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from fkjit.arguments import bind, blame
from fkjit.cpu.run import interpret
from fkjit.ops.op import jax_node, results, torch_ops
from fkjit.ops.op import node as nodes
from fkjit.ops.op.checks import Pair, check_alike, check_overlaps, refuse_grad, requires_grad
from fkjit.ops.op.dynamic_plan import traced
from fkjit.ops.op.node import Node
from fkjit.ops.op.plan import MISSED, Geometry, Plans
from fkjit.ops.op.request import Launch, Output, Request, arch_of
from fkjit.runtime import interop, workspace
from fkjit.runtime.abstract import compile_for
from fkjit.runtime.device import LoadedKernel, is_capturing, launch_on_device, load_all
from fkjit.runtime.interop import CPU, View
from fkjit.sanitizer import looks_at_indices

__all__ = ["Launch", "Op", "Output", "Request", "arch_of"]

Arrays = tuple[Any, ...]


class Op:
    """A public call. Its kernels' arguments have the names of `inputs` and `outputs`.

    Args:
        name: of the call, as errors say it.
        inputs: arrays that the caller passes, the first one never None.
        outputs: arrays that the call writes; the caller may pass some of them (`out=`).
        check: (views by name, *options) -> Request. Views of inputs and of outputs that the caller
            passed, None where he passed None; all of one framework and device. Raises whatever is
            wrong with shapes, dtypes, strides and options.
        options: a NamedTuple: then `check` gets one, (views, options). Equal options mean equal
            calls: bool, int, float, str, None and tuples of these.
        optional: inputs that may be None.
        written: inputs that the kernels write as well.
        in_place: (written, other) pairs that may be the very same memory; any other overlap of what
            is written is refused.
        autograd: (inputs, outputs, options) -> the result, with gradients, for torch tensors that
            require them. None: refused.
        node: what the call is where torch.compile traces it. None: it cannot be traced, unless
            `traced` says how.
        traced: (inputs, outputs, options) -> what the call is in a graph, in place of the node's.
        lengths: how many of the first options are whole numbers that change from call to call as
            sizes of arrays do: a plan for all sizes takes any.
        autocast: how many of the first inputs torch.autocast casts, as PyTorch's attention's.
        guard: looks at the numbers in index arrays within fkjit.sanitize(indices=True).
        batched: whether tensors of torch.func.vmap go to the operator, which knows what to do.
    """

    def __init__(
        self,
        name: str,
        *,
        inputs: Sequence[str],
        outputs: Sequence[str] = (),
        check: Callable[..., Request],
        options: type[Any] | None = None,
        optional: Sequence[str] = (),
        written: Sequence[str] = (),
        in_place: Sequence[tuple[str, str]] = (),
        autograd: Callable[..., Any] | None = None,
        node: Node | None = None,
        traced: Callable[..., Any] | None = None,
        lengths: int = 0,
        autocast: int = 0,
        batched: bool = False,
        guard: Callable[[Arrays], None] | None = None,
    ) -> None:
        self.name, self.check, self.options, self.autograd = name, check, options, autograd
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.names = self.inputs + self.outputs
        self.optional = frozenset(optional) | frozenset(outputs)
        self.written = frozenset(written) | frozenset(outputs)
        self.in_place = frozenset(in_place)
        self.plans = Plans(self.name, self.names, self.outputs, lengths)
        self.autocast, self.batched, self.guard = autocast, batched, guard
        self.node = node
        self.operator = None if node is None else nodes.define(self, node)
        self.traced = traced or (None if node is None else self._node_of)

    def __call__(
        self,
        inputs: Arrays,
        outputs: Arrays = (),
        options: tuple[Any, ...] = (),
        *,
        running: bool = False,
    ) -> Any:
        """Run on `inputs` and `outputs`, in the declared order; None for what is not given, also
        for what is left out at the end.

        running: this is the node of a graph, whatever is being traced meanwhile.
        """
        if self.traced is not None and not running and torch_ops.compiling():
            return self.traced(self._cast(self._whole(inputs)), outputs, options)
        if self.guard is not None and looks_at_indices():
            self.guard(inputs)
        try:
            last = self.plans.last.get(options)
        except Exception:  # no key at all, or one that cannot be compared: the check explains it
            last = None
        if last is not None and (not outputs or len(inputs) == len(self.inputs)):
            for plan in last:
                made = plan.try_arrays(*inputs, *outputs)
                if made is not MISSED:
                    return made
        try:
            if self.autograd is not None and torch_ops.wants_grad_plainly(inputs):
                return self.autograd(self._cast(inputs), outputs, options)
            return self._met(self._whole(inputs), outputs, options)
        except Exception as error:
            raise self._blame((*inputs, *outputs), options, error) from error.__cause__

    def _blame(self, arrays: Arrays, options: tuple[Any, ...], error: Exception) -> Exception:
        """The error to raise, see `arguments.blame`."""
        names = list(getattr(self.options, "_fields", ()))
        names = names or [*inspect.signature(self.check).parameters][1:]
        if len(names) < len(options) and self.node is not None:  # a check takes them as a tuple
            names = [part.split()[-1] for part in self.node.options.split(",")]
        given = dict(zip(names, options, strict=False))
        return blame(self.name, given, dict(zip(self.names, arrays, strict=False)), error)

    def _whole(self, inputs: Arrays) -> Arrays:
        return (*inputs, *(None,) * (len(self.inputs) - len(inputs)))

    def _cast(self, inputs: Arrays) -> Arrays:
        """As torch.autocast has them. (Also while a graph is traced: the graph then belongs to the
        dtype that autocast had.)"""
        if not (self.autocast and torch_ops.autocasting()):
            return inputs
        return (*torch_ops.autocast(*inputs[: self.autocast]), *inputs[self.autocast :])

    def _met(self, inputs: Arrays, outputs: Arrays, options: tuple[Any, ...]) -> Any:
        """A call unlike the last one."""
        inputs = self._cast(inputs)
        outputs = (*outputs, *(None,) * (len(self.outputs) - len(outputs)))
        arrays = [*inputs, *outputs]
        seen = self.plans.sight(arrays)
        if seen is not None:
            plan = self.plans.lookup(arrays, options, seen)
            if plan is not None:
                return plan.run(*arrays)
            again = self.plans.meet(seen[1], options)
            if not again:
                made = self.plans.try_dynamic(arrays, options, seen)
                if made is not MISSED:
                    return made
            if self.plans.are_plain(seen):
                return self._checked(arrays, options, seen, again)
        if self.traced is not None and torch_ops.abstract(*inputs):
            return self.traced(inputs, outputs, options)
        if self.autograd is not None and torch_ops.wants_grad(inputs):
            if not torch_ops.are_tensors(inputs):
                check_alike(self.name, self._views(arrays))  # which says what is wrong
            return self.autograd(inputs, outputs, options)
        if self.batched and torch_ops.wrapped(*inputs):
            assert self.traced is not None
            return self.traced(inputs, outputs, options)
        if jax_node.is_traced(inputs):
            return jax_node.traced(self, inputs, outputs, options)
        return self._checked(arrays, options, seen)

    def _node_of(self, inputs: Arrays, outputs: Arrays, options: tuple[Any, ...]) -> Any:
        """A node of the graph that is being traced."""
        assert self.node is not None and self.operator is not None
        return nodes.traced(self, self.node, self.operator, inputs, outputs, options)

    def _checked(
        self,
        arrays: list[Any],
        options: tuple[Any, ...],
        seen: Geometry | None,
        again: bool = False,
    ) -> Any:
        """A call that has no plan; `again`: its geometry was met before."""
        views = (None if seen is None else self._seen(arrays, seen)) or self._views(arrays)
        if self.autograd is None and requires_grad(views.values()):
            refuse_grad(self.name, views)
        request = self._request(views, options)
        if request.delegate is not None:
            self._remember(arrays, options, request, [], views, seen, again)
            return self._delegated(request, arrays, options)
        like = request.like
        written = results.written(request, like)
        if like.device == CPU:
            self._on_cpu(request, written)
        elif request.launches:
            kernels = self._on_gpu(request, written)
            self._remember(arrays, options, request, kernels, views, seen, again)
        return results.returned(request, like, written)

    def _delegated(self, request: Request, arrays: list[Any], options: tuple[Any, ...]) -> Any:
        assert request.delegate is not None
        inputs = len(self.inputs)
        return request.delegate(tuple(arrays[:inputs]), tuple(arrays[inputs:]), options)

    def _remember(
        self,
        arrays: list[Any],
        options: Any,
        request: Request,
        kernels: list[LoadedKernel],
        views: dict[str, View | None],
        seen: Geometry | None,
        again: bool,
    ) -> None:
        """A plan for a geometry that was met before; not while a graph is captured, whose memory
        would be the plan's. For a new geometry perhaps one for all sizes."""
        if seen is None or request.like.device == CPU:
            return
        if not again:
            self._generalise(options, views, seen)
        elif not is_capturing(interop.current_stream(request.like)):
            self.plans.store(arrays, options, request, kernels, self._pairs(request))

    def _generalise(self, options: Any, views: dict[str, View | None], seen: Geometry) -> None:
        """A plan for all sizes, where one is worth making."""
        if any(view is not None and view.kind != "torch" for view in views.values()):
            return
        plans = self.plans.dynamic_for(options, seen)
        if plans is not None:
            names, lengths = (self.names, len(self.inputs)), self.plans.lengths
            plans.add(traced(self.name, *names, views, options, lengths, self._request))

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
            given = bind(self.name, signature, args, options)
            self.prepare(
                [given.get(name) for name in self.names],
                tuple(value for name, value in given.items() if name not in self.names),
            )

        return prepare

    def prepare(self, arrays: Sequence[Any], options: tuple[Any, ...]) -> None:
        """Compile and load what a call on these arrays needs: inputs and outputs in the declared
        order, None for what is not given, also for what is left out at the end."""
        arrays = [*arrays, *(None,) * (len(self.names) - len(arrays))]
        request = self.request(arrays, options)
        if request.delegate is not None:
            request.delegate.prepare(arrays[: len(self.inputs)], options)
        if request.like.device < CPU:
            return compile_for(request.launches, request.like.device)
        if request.like.device == CPU or not request.launches:
            return
        stream = interop.current_stream(request.like)
        kernels = load_all(request.launches, request.like.device, stream, self.name)
        workspace.reserve(request.like.device, request.counters)
        self.plans.store(arrays, options, request, kernels, self._pairs(request))

    def request(self, arrays: Sequence[Any], options: tuple[Any, ...]) -> Request:
        """What the check makes of inputs and outputs in the declared order."""
        return self._request(self._views(arrays), options)

    def run_into(
        self, arrays: Sequence[Any], options: tuple[Any, ...], returned: Sequence[Any]
    ) -> None:
        """The call on inputs and outputs in the declared order; what it returns goes to `returned`,
        contiguous arrays that nothing else has."""
        request = self.request(arrays, options)
        if request.delegate is not None:
            made = self._delegated(request, list(arrays), options)
            made = made if isinstance(made, tuple) else (made,)
            for array, values in zip(returned, made, strict=True):
                array[...] = values
            return
        request = results.into(request, returned, self.name)
        run = self._on_cpu if request.like.device == CPU else self._on_gpu
        run(request, results.written(request, request.like))

    def _seen(self, arrays: list[Any], seen: Geometry) -> dict[str, View | None] | None:
        """Views out of a geometry, of tensors on a GPU; None where one wants a closer look."""
        if self.plans.kinds.get(type(arrays[0])) != "torch":
            return None
        views: dict[str, View | None] = {}
        pointers, (traits, sizes) = seen
        rows = zip(self.names, arrays, pointers, traits, sizes, strict=True)
        for name, array, pointer, own, size in rows:
            if array is None:
                if name not in self.optional:
                    return None
                views[name] = None
                continue
            view = interop.on_gpu(array, pointer, own, size)
            if view is None:
                return None
            views[name] = view
        return views

    def _views(self, arrays: Sequence[Any]) -> dict[str, View | None]:
        return {
            name: None
            if array is None and name in self.optional
            else interop.view(
                array, self.name, name if name in self.inputs else _SAID.get(name, name)
            )
            for name, array in zip(self.names, arrays, strict=True)
        }

    def _request(self, views: dict[str, View | None], options: tuple[Any, ...]) -> Request:
        check_alike(self.name, views)
        if self.options is None:
            request = self.check(views, *options)
        else:
            request = self.check(views, self.options(*options))
        assert request.outputs.keys() <= set(self.outputs), f"{self.name}: plans know no others"
        pairs = self._pairs(request)
        if pairs:
            check_overlaps(self.name, pairs, self.in_place)
        return request

    def _pairs(self, request: Request) -> list[Pair]:
        """Each array of the caller's that is written, beside each other one of his."""
        seen = {name: view for name, view in request.inputs.items() if view is not None}
        for name, output in request.outputs.items():
            if output is not None and output.given is not None:
                seen[name] = output.given
        return [
            (name, seen[name], other, beside)
            for name in seen
            if name in self.written
            for other, beside in seen.items()
            if other != name
        ]

    def _on_cpu(self, request: Request, views: Mapping[str, View | None]) -> None:
        arrays = {n: None if v is None else interop.as_numpy(v) for n, v in views.items()}
        arrays |= dict.fromkeys(workspace.ARGUMENTS)
        if request.workspace:
            arrays["workspace"] = np.full(-(-request.workspace // 4), np.nan, np.float32)
        if request.counters:
            arrays["counters"] = np.zeros(request.counters, np.uint32)
        for launch in request.launches:
            interpret(launch.spec, launch.params, launch.problem, arrays)

    def _on_gpu(self, request: Request, views: Mapping[str, View | None]) -> list[LoadedKernel]:
        like, owner = request.like, None
        stream, device = interop.current_stream(like), like.device
        arrays: dict[str, Any] = {
            name: interop.NULL if view is None else interop.Pointer(view)
            for name, view in views.items()
        }
        if request.workspace or request.counters:
            with import_module("cupy.cuda").Device(device):
                size, counters = request.workspace, request.counters
                *found, owner = workspace.find(like.array, device, stream, size, counters)
            arrays.update(zip(workspace.ARGUMENTS, found, strict=True))
        else:
            arrays |= _NO_SCRATCH
        kernels = []
        if len(request.launches) > 1:
            load_all(request.launches, device, stream, self.name)
        for spec, params, problem in request.launches:
            named = dict(spec.arguments(params, problem, arrays))
            for name in workspace.ARGUMENTS:
                named.setdefault(name, arrays[name])
            kernels.append(
                launch_on_device(spec, params, problem, named, device, stream, self.name)
            )
        del owner  # what was enqueued comes first on this stream
        if like.kind == "dlpack":  # its owner may reuse the memory once we return
            interop.synchronise(like)
        return kernels


_NO_SCRATCH = dict.fromkeys(workspace.ARGUMENTS, 0)
_SAID = {"o": "out"}  # what callers call attention's output
