"""The plans for all sizes of any op, beside its full check: on CPU tensors, nothing is launched."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import pytest

from fkjit.errors import FkjitError
from fkjit.jit.render import load
from fkjit.jit.signature import signature
from fkjit.ops.op import dynamic_plan
from fkjit.ops.op.dynamic_plan import traced
from fkjit.ops.op.plan import geometry
from fkjit.ops.op.plan_function import MISSED
from fkjit.runtime import interop, workspace
from fkjit.runtime.device import flatten
from fkjit.runtime.interop import Pointer
from fkjit.runtime.tensor_map import TensorMap
from tests.op.plan_kit import STREAM, driver  # noqa: F401

torch = pytest.importorskip("torch", reason="needs torch")

SCRATCH = (1 << 40, 1 << 41)
_names: dict[Any, tuple[str, ...]] = {}


class Answer(NamedTuple):
    """What a call does. Addresses of outputs are told as their names."""

    outputs: dict[str, tuple[Any, ...]]  # shape, strides, dtype of those that are allocated
    scratch: tuple[int, int] | None
    launches: list[tuple[Any, ...]]
    returned: list[str]


class Recorder:
    """What plans do in place of a driver. Use `dynamic` to have one."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.made: list[Any] = []
        self.kernels: set[str] = set()  # all that were launched
        self.scratch: tuple[int, int] | None = None

    def loaded(self, spec: Any, params: Any, device: int, call: str) -> Any:
        return _Kernel(self, spec, dict(params))

    def empty(self, shape: Any, dtype: Any, device: Any) -> Any:
        self.made.append(torch.zeros(shape, dtype=dtype))
        return self.made[-1]

    def find(self, like: Any, device: int, stream: int, size: int, counters: int) -> Any:
        assert device == interop.CPU and stream == STREAM
        self.scratch = (size, counters)
        return (*SCRATCH, None)


class _Kernel:
    def __init__(self, recorder: Recorder, spec: Any, params: Any) -> None:
        self.recorder, self.spec, self.params = recorder, spec, params
        self.names = names_of(spec, params)

    def launch(self, grid: Any, values: Any, stream: int) -> None:
        assert stream == STREAM
        self.recorder.kernels.add(self.spec.id)
        self.recorder.launches.append((self.spec.id, self.params, grid, values))


def names_of(spec: Any, params: Any) -> tuple[str, ...]:
    """The kernel's arguments."""
    key = (spec, tuple(params.items()))
    if key not in _names:
        _names[key] = tuple(one.name for one in signature(load(spec, params), spec.entry))
    return _names[key]


@pytest.fixture
def dynamic(monkeypatch, driver):  # noqa: F811
    recorder = Recorder()
    monkeypatch.setattr(dynamic_plan, "loaded", recorder.loaded)
    monkeypatch.setattr(dynamic_plan, "encode", lambda *given: given)
    monkeypatch.setattr(workspace, "find", recorder.find)
    return recorder


def checked(op: Any, arrays: list[Any], options: tuple[Any, ...]) -> Answer | str:
    """What a call is to do by its full check; the error of one that is wrong."""
    try:
        request = op._request(op._views(arrays), options)
    except FkjitError as error:
        return str(error)
    outputs = {n: o for n, o in request.outputs.items() if o is not None}
    named: dict[str, Any] = {
        n: Pointer(view) if view else interop.NULL for n, view in request.inputs.items()
    }
    new = {}
    for name, output in request.outputs.items():
        if output is None:
            named[name] = interop.NULL
        elif output.given is not None:
            named[name] = Pointer(output.given)
        else:
            strides = interop.contiguous(output.shape)
            new[name] = (tuple(output.shape), strides, interop.torch_dtype(output.dtype))
            named[name] = Pointer(None, output.shape, output.dtype)
            named[name].pointer = _marker(name)
    scratch = None
    if request.workspace or request.counters:
        scratch = (request.workspace, request.counters)
    given = SCRATCH if scratch else (0, 0)
    named.update(zip(workspace.ARGUMENTS, given, strict=True))
    launches = [("delegate",)] if request.delegate is not None else []
    for spec, params, problem in request.launches:
        values = dict(spec.arguments(params, problem, named))
        for name in workspace.ARGUMENTS:
            values.setdefault(name, named[name])
        for name, value in values.items():
            if type(value) is TensorMap:
                values[name] = _Map(value)
        flat = flatten(names_of(spec, params), values)
        flat = tuple(one.text if isinstance(one, _Map) else one for one in flat)
        launches.append((spec.id, dict(params), tuple(spec.grid(params, problem)), flat))
    if request.delegate is not None:
        return Answer({}, None, launches, [])
    return Answer(new, scratch, launches, [n for n, o in outputs.items() if o.returned])


class _Map:
    def __init__(self, one: TensorMap) -> None:
        address = one.array.pointer + one.origin
        self.text = (one.dtype, one.box, one.swizzle, one.dims, one.strides, address)


def _marker(name: str) -> int:
    """An address that tells whose it is."""
    return 1 << 44 | zlib.crc32(name.encode()) << 8


class Calls:
    """Calls of one op, one after the other, as `Op` would have them."""

    def __init__(self, op: Any, recorder: Recorder) -> None:
        self.op, self.recorder = op, recorder
        self.plans: dict[Any, list[Any]] = {}
        self.answered = self.traces = self.untraced = 0

    def check(self, arrays: list[Any], options: tuple[Any, ...]) -> None:
        """Every plan so far gives what the full check gives, or leaves the call to it."""
        op = self.op
        arrays = [*arrays, *(None,) * (len(op.names) - len(arrays))]
        wanted = checked(op, arrays, options)
        lengths = op.plans.lengths
        pointers, (traits, sizes) = geometry("torch", len(arrays))(*arrays)
        plans = self.plans.setdefault((traits, options[lengths:]), [])
        given = ((*sizes, *options[:lengths]), pointers, arrays)
        took = [self._agrees(plan, given, wanted) for plan in plans]
        self.answered += any(took)
        if isinstance(wanted, str) or any(took):
            return
        plan = traced(
            op.name, op.names, len(op.inputs), op._views(arrays), options, lengths, op._request
        )
        self.traces += 1
        self.untraced += plan is None
        if plan is not None:
            assert self._agrees(plan, given, wanted) or any(
                x is not None and x.numel() == 0 for x in arrays
            ), "a plan refuses the call that it was traced from"
            plans.append(plan)

    def _agrees(self, plan: Any, given: Any, wanted: Answer | str) -> bool:
        """Whether the plan takes the call; then it does what is wanted."""
        sizes, pointers, arrays = given
        recorder = self.recorder
        recorder.launches, recorder.made, recorder.scratch = [], [], None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", recorder.empty)
            result = plan(sizes, pointers, *arrays)
        if result is MISSED:
            return False
        assert not isinstance(wanted, str), f"a plan took what the check refuses: {wanted}"
        if wanted.launches == [("delegate",)]:
            return True
        made = dict(zip(wanted.outputs, recorder.made, strict=True))
        for name, (shape, strides, dtype) in wanted.outputs.items():
            x = made[name]
            assert (tuple(x.shape), x.dtype) == (shape, dtype), name
            assert x.is_contiguous() and len(strides) == x.dim()
        moved = {_marker(n): x.data_ptr() for n, x in made.items()}
        launches = [
            (name, params, grid, tuple(_at(one, moved) for one in values))
            for name, params, grid, values in wanted.launches
        ]
        assert recorder.launches == launches
        assert recorder.scratch == wanted.scratch
        returned = [made.get(n, arrays[self.op.names.index(n)]) for n in wanted.returned]
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        assert len(results) == len(returned)
        assert all(one is two for one, two in zip(results, returned, strict=True))
        return True


def _at(value: Any, moved: dict[int, int]) -> Any:
    """A marker as the address that it stands for."""
    if isinstance(value, tuple):
        return (*value[:-1], _at(value[-1], moved))
    return moved.get(value, value) if isinstance(value, int) else value
