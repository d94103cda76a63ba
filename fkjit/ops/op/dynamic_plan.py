"""Plans for all sizes: a call whose geometry is new, but like one before in all that its check
looked at, is not checked.

The check of a call runs once more with symbols for sizes, strides and addresses
(fkjit/symbolic.py), and so do the grid and the arguments of its kernels. What they compared are the
plan's guards: dtypes, ranks and options are its key. Nothing of an op is said twice for it; where a
guard fails the call is checked, and whatever is wrong is found there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fkjit.ops.op.plan_function import ADDRESS, MISSED, Shape, bound_for_work, function_of, work
from fkjit.ops.op.request import Output, Request
from fkjit.runtime import interop, workspace
from fkjit.runtime.device import flatten, loaded
from fkjit.runtime.interop import Pointer, View
from fkjit.runtime.tensor_map import TensorMap, encode
from fkjit.symbolic import NotTraceable, Symbol, Trace, pinned

MOST = 8  # plans of one key; those used least recently go first
_WORTH = 16  # calls that each further trace has to be worth
_ADDRESS = 1 << 30  # of outputs while there are none

# (sizes and lengths, addresses, *arrays) -> what the call returns, or MISSED
Run = Callable[..., Any]
Check = Callable[[dict[str, View | None], tuple[Any, ...]], Request]


class DynamicPlans:
    """Those of one key: dtypes, ranks, devices of the arrays, and options."""

    def __init__(self, wants_grad: bool) -> None:
        self.wants_grad = wants_grad
        self.plans: tuple[Run, ...] = ()
        self.met = self.traces = self.hits = 0

    def run(self, sizes: Any, pointers: Sequence[int], arrays: Sequence[Any]) -> Any:
        """What the call returns, or MISSED: then it is checked."""
        if self.wants_grad and sys.modules["torch"].is_grad_enabled():
            return MISSED
        for at, plan in enumerate(self.plans):
            made = plan(sizes, pointers, *arrays)
            if made is not MISSED:
                self.hits += 1
                if at:
                    self.plans = (plan, *(other for other in self.plans if other is not plan))
                return made
        return MISSED

    def wants_trace(self) -> bool:
        """Whether a geometry that no plan took is worth a trace: the first one may be the only one,
        and where each is unlike all others traces are in vain."""
        self.met += 1
        if self.traces and not self.plans:  # it cannot be traced
            return False
        return self.met > 1 and (self.traces < MOST or self.hits > _WORTH * self.traces)

    def add(self, plan: Run | None) -> None:
        """One more; None: the call cannot be traced."""
        self.traces += 1
        if plan is not None:
            self.plans = (plan, *self.plans[: MOST - 1])


class _Steps(NamedTuple):
    """What `work` finds in a plan's steps."""

    call: str
    device: int
    delegate: Any
    options: Any


class _Traced:
    """Stands for a view's array while a check is traced: only what the key has may be asked."""

    def __init__(self, array: Any) -> None:
        self.dtype, self.requires_grad = array.dtype, array.requires_grad


def traced(
    call: str,
    names: Sequence[str],
    inputs: int,
    views: Mapping[str, View | None],
    options: Any,
    lengths: int,
    check: Check,
) -> Run | None:
    """The plan of a call whose check has passed; None where no trace says all that it does.

    names: of all arrays, the inputs first. views: theirs, of torch tensors. lengths: how many of
    the first options are numbers that change.
    """
    try:
        return _Plan(call, list(names), inputs, views, options, lengths, check).function()
    except Exception:  # whatever it is: it did not happen without symbols
        return None


class _Plan:
    def __init__(
        self, call: str, names: list[str], inputs: int, views: Mapping[str, View | None],
        options: Any, lengths: int, check: Check,
    ) -> None:  # fmt: skip
        self.call, self.names, self.inputs, self.options = call, names, inputs, options
        self.trace = Trace()
        self.views = {name: self._symbolic(name, view) for name, view in views.items()}
        self.lengths = [self.trace.number(f"o{at}", options[at]) for at in range(lengths)]
        self.request = check(dict(self.views), (*self.lengths, *options[lengths:]))
        if lengths and self.request.delegate is not None:
            raise NotTraceable("lengths of a call that another op answers")
        like = next(view for view in views.values() if view is not None)
        self.device = like.device

    def _symbolic(self, name: str, view: View | None) -> View | None:
        """The view with symbols for its address, sizes and strides."""
        if view is None:
            return None
        at, number = self.names.index(name), self.trace.number
        shape = tuple(number(f"n{at}_{i}", size) for i, size in enumerate(view.shape))
        strides = tuple(number(f"s{at}_{i}", step) for i, step in enumerate(view.strides))
        array = _Traced(view.array)
        return view._replace(
            array=array, pointer=number(f"p{at}", view.pointer), shape=shape, strides=strides
        )

    def function(self) -> Run:
        """The guards, and what is left to do behind them, as a function."""
        request, trace = self.request, self.trace
        shape = self._shape()
        makes, starts, scratch = [], [], ""
        wanted: list[str] = []
        if not shape.delegated:
            arrays = self._outputs(makes, wanted)
            starts = [self._start(launch, arrays, wanted) for launch in request.launches]
            if shape.scratch:
                size, counters = trace.text(request.workspace), trace.text(request.counters)
                wanted += trace.names([request.workspace, request.counters])
                find = trace.bind(workspace.find)
                scratch = f"{find}({{x}}, device, stream, {size}, {counters})"
        early, late = trace.program(wanted)
        head = ", ".join(f"x{i}=None" for i in range(len(self.names)))
        body = [
            *self._unpacked(shape),
            *_program(early),
            *work(shape, "lambda *x: run(sizes, pointers, *x)", makes, scratch,
                  [*_program(late), *starts]),
        ]  # fmt: skip
        lines = [
            "def make(steps, bound):",
            *(f" {line}" for line in bound_for_work(shape)),
            *(f" c{at} = bound[{at}]" for at in range(len(trace.bound))),
            f" def run(sizes, pointers, {head}):",
            *(f"  {line}" for line in body),
            " return run",
        ]
        steps = _Steps(self.call, self.device, request.delegate, self.options)
        return function_of(lines)(steps, trace.bound)

    def _shape(self) -> Shape:
        request, place = self.request, self.names.index
        outputs = {name: one for name, one in request.outputs.items() if one is not None}
        return Shape(
            kind="torch",
            arrays=len(self.names),
            given=tuple(place(name) for name, view in self.views.items() if view is not None),
            made=tuple(place(name) for name, one in outputs.items() if one.given is None),
            returned=tuple(place(name) for name, one in outputs.items() if one.returned),
            launches=(),
            scratch=bool(request.workspace or request.counters),
            delegated=request.delegate is not None,
            inputs=self.inputs,
            alone=sys.modules["torch"].cuda.device_count() == 1,
        )

    def _unpacked(self, shape: Shape) -> list[str]:
        """Lines that name sizes, strides and addresses; an array without memory has no plan."""
        parts = ["_"] * shape.arrays
        for i in shape.given:
            view = self.views[self.names[i]]
            assert view is not None
            named = ("".join(f"{x}{i}_{axis}, " for axis in range(len(view.shape))) for x in "ns")
            parts[i] = f"({', '.join(f'({some})' for some in named)})"
        parts += [length.name for length in self.lengths]
        pointers = ", ".join(f"p{i}" for i in range(shape.arrays))
        there = " and ".join(f"p{i}" for i in shape.given)
        return [
            f"{', '.join(parts)}, = sizes",
            f"{pointers}, = pointers",
            f"if not ({there}): return MISSED",
        ]

    def _outputs(self, makes: list[str], wanted: list[str]) -> dict[str, Any]:
        """What kernels get for each array, as `Op._on_gpu` has it; and the lines that allocate."""
        request, trace = self.request, self.trace
        arrays: dict[str, Any] = {n: self._pointer(view) for n, view in request.inputs.items()}
        for name, output in request.outputs.items():
            if output is None or output.given is not None:
                arrays[name] = self._pointer(None if output is None else output.given)
                continue
            at = self.names.index(name)
            made: Any = Pointer(None, output.shape, output.dtype)
            made.pointer = trace.number(f"p{at}", _ADDRESS, late=True)
            arrays[name] = made
            shape, strides = tuple(output.shape), interop.contiguous(output.shape)
            wanted += trace.names([shape, strides])
            makes.append(self._allocation(at, output, shape, strides))
        scratch = bool(request.workspace or request.counters)
        for at, name in enumerate(workspace.ARGUMENTS, len(self.names)):
            arrays[name] = trace.number(f"p{at}", _ADDRESS, late=True) if scratch else 0
        return arrays

    def _pointer(self, view: View | None) -> Pointer:
        if view is None:
            return interop.NULL
        if all(view.array is not known.array for known in self.views.values() if known):
            raise NotTraceable("an array of the check's own")
        return Pointer(view)

    def _allocation(self, at: int, output: Output, shape: Any, strides: Any) -> str:
        text, dtype = self.trace.text, self.trace.bind(interop.torch_dtype(output.dtype))
        empty = interop.fast_empty()
        if empty is None or self.device == interop.CPU:
            made = f"torch.empty({text(shape)}, dtype={dtype}, device={_place(self.device)!r})"
        else:
            made = f"{self.trace.bind(empty)}({text(shape)}, {text(strides)}, {dtype})"
        return f"x{at} = {made}; p{at} = {ADDRESS['torch'].format(x=f'x{at}')}"

    def _start(self, launch: Any, arrays: Mapping[str, Any], wanted: list[str]) -> str:
        """The line that launches a kernel."""
        spec, problem, trace = launch.spec, launch.problem, self.trace
        params = pinned(launch.params)
        named = dict(spec.arguments(params, problem, arrays))
        for name in workspace.ARGUMENTS:
            named.setdefault(name, arrays[name])
        kernel = loaded(spec, params, self.device, call=self.call)
        for name, value in named.items():
            if type(value) is TensorMap:
                named[name] = self._encoded(value)
        values, grid = flatten(kernel.names, named), tuple(spec.grid(params, problem))
        for value in values:
            if type(value) not in (int, float, bool, Symbol):
                raise NotTraceable(f"an argument that is a {type(value).__name__}")
        wanted += trace.names([values, grid])
        return f"{trace.bind(kernel.launch)}({trace.text(grid)}, {trace.text(values)}, stream)"

    def _encoded(self, one: TensorMap) -> Symbol:
        """A line that encodes a tensor map: one for all maps that are the same."""
        address = one.array.pointer + one.origin
        sizes = (tuple(one.box), tuple(one.dims), tuple(one.strides))
        given = (one.dtype, sizes[0], one.swizzle, *sizes[1:], address)
        text = f"{self.trace.bind(encode)}({', '.join(map(self.trace.text, given))})"
        return self.trace.compute(text, b"", sizes, address)


def _place(device: int) -> str:
    return "cpu" if device == interop.CPU else f"cuda:{device}"


def _program(lines: Sequence[Any]) -> list[str]:
    """Python of a trace's lines; guards that follow one another are one test."""
    made: list[str] = []
    guards: list[str] = []
    for line in (*lines, None):
        if line is not None and not line.name:
            guards.append(line.text)
            continue
        if guards:
            made.append(f"if not ({' and '.join(guards)}): return MISSED")
            guards = []
        if line is not None:
            made.append(f"{line.name} = {line.text}")
    return made
