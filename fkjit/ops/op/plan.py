"""The plan cache: a geometry seen before is checked no more. What is left of such a call is to
allocate the outputs, put addresses into the arguments and launch.

Three steps, the cheapest first. Most calls are like the last one with the same options: `try_last`
asks that plan, whose guards are PyTorch's own. Calls that alternate among geometries are looked up
(`lookup`). A geometry gets a plan when it is met for the second time (`meet`, `store`): lengths
that are new at every step leave nothing behind.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

from fkjit.ops.op import torch_ops
from fkjit.ops.op.checks import Pair, extent
from fkjit.ops.op.launches import ready
from fkjit.ops.op.request import Output, Request
from fkjit.runtime import interop, workspace
from fkjit.runtime.device import LoadedKernel
from fkjit.sanitizer import refuse_gpu

MAX_PLANS = 512  # of a generation: the last two are kept
MAX_MET = 8192  # geometries that were met once
MAX_APART = 4096  # distances between two arrays that were checked
_ALIGNMENT = 31  # bits of an address that a plan depends on
MISSED: Any = object()  # there is no plan for this call

Key = tuple[Any, ...]
Geometry = tuple[list[int], Key]  # the addresses, and all else that a plan depends on


# Of an array: where it is, and what a plan depends on. A subclass of torch's or CuPy's class has a
# type of its own, and no plan.
_ADDRESS = {"torch": "{x}.data_ptr()", "cupy": "{x}.data.ptr"}
_TRAITS = {
    "torch": "type({x}), {x}.shape, {x}.stride(), {x}.dtype, {x}.get_device(), {x}.is_neg(), "
    "{x}.requires_grad",
    "cupy": "type({x}), {x}.shape, {x}.strides, {x}.dtype, {x}.data.device_id",
}


@lru_cache(maxsize=64)
def geometry(kind: str, count: int) -> Callable[..., Geometry]:
    """What makes a geometry of `count` arrays, some of them None.

    Each call goes through it, so it is written out array by array: a loop takes half as long again.
    """
    names, pointers, keys = [f"x{i}" for i in range(count)], [], []
    for i, x in enumerate(names):
        pointers.append(f"p{i} := 0 if {x} is None else {_ADDRESS[kind].format(x=x)}")
        traits = _TRAITS[kind].format(x=x)
        keys.append(f"None if {x} is None else ({traits}, p{i} & {_ALIGNMENT})")
    made = f"[{', '.join(pointers)}], ({', '.join(keys)},)"
    return eval(f"lambda {', '.join(names)}: ({made})")


@lru_cache(maxsize=1)
def _guards() -> Callable[..., Any] | None:
    """PyTorch's test whether a tensor is like another one as far as graphs of it are concerned: its
    type, dispatch keys, dtype, device, shape, strides, and whether gradients are wanted. None where
    this PyTorch has another test."""
    torch = sys.modules["torch"]

    def guard(x: Any) -> Callable[[Any], bool]:
        exact = {"dynamic_dims_sizes": [list(x.shape)], "dynamic_dims_strides": [list(x.stride())]}
        return torch._C._dynamo.guards.TensorGuards(x, **exact).check

    x = torch.zeros(2, 3, device="cpu")
    others = (x[:1], x.t(), x.t().contiguous().t(), x.double(), torch._neg_view(x), x.to("meta"), 0)
    try:
        fits = guard(x)
        return guard if fits(x.clone()) and not any(map(fits, others)) else None
    except Exception:
        return None


def _types(kind: str) -> tuple[type, ...]:
    """The types that have plans; what a subclass means, nobody knows."""
    framework = sys.modules.get(kind)
    if framework is None:
        return ()
    if kind == "torch":
        return framework.Tensor, framework.nn.Parameter
    return (framework.ndarray,)


def _is_plain(option: Any) -> bool:
    """Whether equal keys mean equal options: a tensor is hashed by identity and may change."""
    if isinstance(option, tuple):
        return all(map(_is_plain, option))
    return type(option) in (bool, int, float, str, type(None))


_all: weakref.WeakSet[Plans] = weakref.WeakSet()


def _after_fork() -> None:
    """In a child process GPUs may not work: calls are to be checked again."""
    for plans in _all:
        plans.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Plans:
    """The plans of one op, by geometry and options.

    Those used least recently go first: plans are in two generations, a plan that is used moves to
    the young one, and when that is full the old one is dropped.
    """

    def __init__(self, call: str, names: tuple[str, ...], outputs: tuple[str, ...] = ()) -> None:
        """`names`: of all arrays, the outputs last."""
        self.call, self.names, self.outputs = call, names, outputs
        self.young: dict[Key, Plan] = {}
        self.old: dict[Key, Plan] = {}
        self.last: dict[Any, Plan] = {}  # by options: what they had last
        # By the type of the first array: what makes a geometry, and whose arrays these are.
        self.geometries: dict[type, Callable[..., Geometry]] = {}
        self.kinds: dict[type, str] = {}
        self._met: set[int] = set()
        _all.add(self)

    @property
    def known(self) -> list[Plan]:
        """Every plan there is."""
        return [*self.young.values(), *self.old.values()]

    def forget(self) -> None:
        """Drop every plan (for tests): the next call is checked."""
        for kept in (self.young, self.old, self.last, self.geometries, self._met):
            kept.clear()

    def try_last(self, arrays: Sequence[Any], options: Any) -> Any:
        """What the call returns, if its arrays are like those that these options had last; else
        MISSED. (`Op.__call__` has these lines too.)"""
        plan = self.last.get(options)
        return MISSED if plan is None else plan.try_arrays(*arrays)

    def sight(self, arrays: Sequence[Any]) -> Geometry | None:
        """Addresses and traits of the arrays; None where they are of no type that has plans."""
        find = self.geometries.get(type(arrays[0]))
        if find is None:
            find = self._introduced(arrays)
        try:
            return None if find is None else find(*arrays)
        except (AttributeError, TypeError, RuntimeError):  # whatever it is, the check explains it
            return None

    def _introduced(self, arrays: Sequence[Any]) -> Callable[..., Geometry] | None:
        """What makes the geometry of a framework's arrays that are met for the first time."""
        kind = next((kind for kind in _ADDRESS if type(arrays[0]) in _types(kind)), None)
        if kind is None:
            return None
        find = geometry(kind, len(arrays))
        self.kinds.update(dict.fromkeys(_types(kind), kind))
        self.geometries.update(dict.fromkeys(_types(kind), find))
        return find

    def lookup(
        self, arrays: Sequence[Any], options: Any, seen: Geometry | None = None
    ) -> Plan | None:
        """The plan for these arrays, or None: then the call is checked."""
        seen = seen or self.sight(arrays)
        if seen is None:
            return None
        key = (seen[1], options)
        try:
            plan = self.young.get(key) or self._rejuvenated(key)
        except TypeError:  # an option that is no key
            return None
        if plan is None or (plan.guarded and plan.refuses(seen[0])):
            return None
        if plan.expects(arrays):
            self.last[options] = plan
        return plan

    def _rejuvenated(self, key: Key) -> Plan | None:
        plan = self.old.pop(key, None)
        if plan is not None:
            self._put(key, plan)
        return plan

    def _put(self, key: Key, plan: Plan) -> None:
        if len(self.young) >= MAX_PLANS:
            self.old, self.young, self.last = self.young, {}, {}
        self.young[key] = plan  # last: other threads take it from here

    def meet(self, traits: Key, options: Any) -> bool:
        """Note that a geometry was met; whether it had been, so that a plan is worth making."""
        try:
            key = hash((traits, options))
        except TypeError:
            return False
        if key in self._met:
            self._met.discard(key)
            return True
        if len(self._met) >= MAX_MET:
            self._met.clear()
        self._met.add(key)
        return False

    def store(
        self,
        arrays: Sequence[Any],
        options: Any,
        request: Request,
        kernels: Sequence[LoadedKernel],
        pairs: Sequence[Pair],
    ) -> None:
        """The next call with arrays of this geometry takes the warm path."""
        kind = request.like.kind
        if kind not in ("torch", "cupy") or not _is_plain(options):
            return
        types = _types(kind)
        seen = self.sight(arrays)
        if seen is None or not all(x is None or type(x) in types for x in arrays):
            return
        key = (seen[1], options)
        plan = self.young.get(key) or self.old.get(key)
        if plan is None:
            plan = Plan(self, arrays, options, request, kernels)
        plan.allow(pairs)
        self.old.pop(key, None)
        self._put(key, plan)


class Plan:
    """What is left to do for one geometry.

    run: (*arrays) -> what the call returns, for arrays of this geometry. try_arrays: the same, or
    MISSED for any others; only after `expects`.
    """

    def __init__(
        self,
        plans: Plans,
        arrays: Sequence[Any],
        options: Any,
        request: Request,
        kernels: Sequence[LoadedKernel],
    ) -> None:
        self.names, self.kind = plans.names, request.like.kind
        self.wants_grad = any(getattr(x, "requires_grad", False) for x in arrays)
        self.apart: dict[tuple[int, int], tuple[int, int, set[int]]] = {}
        self.steps = _steps(plans, arrays, options, request, kernels)
        self.run: Callable[..., Any] = _compiled(self.steps.shape, False)(self.steps, (), None)
        self.try_arrays: Callable[..., Any] = _missed
        self.alignments = tuple(p & _ALIGNMENT for p in _pointers(self.kind, arrays))

    @property
    def guarded(self) -> bool:
        """Whether it may refuse arrays of its geometry."""
        return self.wants_grad or bool(self.apart)

    def expects(self, arrays: Sequence[Any]) -> bool:
        """Have `try_arrays`, as calls like this one come again. (Not where autocast has made the
        arrays: the next ones would be like those that it was given.)"""
        if self.try_arrays is not _missed:
            return True
        if self.kind != "torch" or torch_ops.autocasting():
            return False
        guard = _guards()
        if guard is None:
            return False
        fits = tuple(None if x is None else guard(x) for x in arrays)
        shape = self.steps.shape._replace(guarded=self.guarded, aligned=not any(self.alignments))
        self.try_arrays = _compiled(shape, True)(self.steps, fits, self)
        return True

    def allow(self, pairs: Sequence[Pair]) -> None:
        """Arrays as far apart as these do not overlap in a harmful way: that was checked."""
        if pairs and not self.apart:
            self.try_arrays = _missed  # which asks nothing yet
        for name, view, other, beside in pairs:
            one, two = self.names.index(name), self.names.index(other)
            (low, high), (low2, high2) = extent(view), extent(beside)
            near = self.apart.setdefault((one, two), (low2 - high, high2 - low, set()))
            if len(near[2]) < MAX_APART:
                near[2].add(view.pointer - beside.pointer)

    def refuses(self, pointers: Sequence[int]) -> bool:
        """Whether autograd has to see the call, or arrays that the caller gave may overlap in a way
        that was not checked yet."""
        if self.wants_grad and sys.modules["torch"].is_grad_enabled():
            return True
        for (one, two), (low, high, harmless) in self.apart.items():
            apart = pointers[one] - pointers[two]
            if low < apart < high and apart not in harmless:
                return True
        return False


def _missed(*arrays: Any) -> Any:
    return MISSED


# ------------------------------------------------------------------ a plan's function


class Shape(NamedTuple):
    """What the text of a plan's function depends on. Numbers are places among a call's arrays."""

    kind: str  # torch | cupy
    count: int
    given: tuple[int, ...]
    made: tuple[int, ...]  # outputs that are allocated
    returned: tuple[int, ...]
    launches: tuple[
        tuple[int, ...], ...
    ]  # the addresses that each wants; count, count + 1: scratch
    scratch: bool  # whether there are a workspace or counters
    delegated: bool
    inputs: int
    alone: bool  # whether the device is the only one, and so the current one
    guarded: bool = False
    aligned: bool = True


class Steps(NamedTuple):
    """What a plan's function uses. It is compiled once a `Shape`."""

    shape: Shape
    call: str
    device: int
    starts: tuple[Any, ...]
    allocations: tuple[Callable[[], Any], ...]
    scratch: Callable[..., Any]  # (array, stream) -> workspace, counters, owner
    delegate: Any
    options: Any


def _steps(
    plans: Plans, arrays: Sequence[Any], options: Any, request: Request, kernels: Sequence[Any]
) -> Steps:
    names, device = plans.names, request.like.device
    outputs = {name: output for name, output in request.outputs.items() if output is not None}
    made = [name for name, output in outputs.items() if output.given is None]
    known = set(request.inputs) | set(outputs)
    views = {
        name: _outline(request, name) if name in known else interop.Pointer(None) for name in names
    }
    pointers = (*names, *workspace.ARGUMENTS)
    pairs = zip(kernels, request.launches, strict=True) if request.delegate is None else ()
    launches = [ready(kernel, launch, views, pointers) for kernel, launch in pairs]
    shape = Shape(
        kind=request.like.kind,
        count=len(names),
        given=tuple(i for i, x in enumerate(arrays) if x is not None),
        made=tuple(map(names.index, made)),
        returned=tuple(names.index(name) for name, o in outputs.items() if o.returned),
        launches=tuple(tuple(places) for _, places in launches),
        scratch=bool(request.workspace or request.counters),
        delegated=request.delegate is not None,
        inputs=len(names) - len(plans.outputs),
        alone=request.like.kind == "torch" and sys.modules["torch"].cuda.device_count() == 1,
    )
    return Steps(
        shape,
        plans.call,
        device,
        tuple(start for start, _ in launches),
        tuple(_allocation(request, outputs[name]) for name in made),
        partial(_scratch, device, request.workspace, request.counters),
        request.delegate,
        options,
    )


def _scratch(device: int, size: int, counters: int, like: Any, stream: int) -> Any:
    return workspace.find(like, device, stream, size, counters)


def _allocation(request: Request, output: Output) -> Callable[[], Any]:
    """What makes a new array for an output."""
    if request.like.kind == "torch":
        like = interop.outline(output.shape, output.dtype, request.like.array.device)
        return partial(sys.modules["torch"].empty_like, like)
    dtype = interop.numpy_dtype(output.dtype)
    return partial(import_module("cupy").empty, output.shape, dtype)


def _outline(request: Request, name: str) -> interop.Pointer:
    """Shape and strides of an array, for the spec's `arguments`."""
    if name in request.inputs:
        return interop.Pointer(request.inputs[name])
    output = request.outputs[name]
    return (
        interop.Pointer(None)
        if output is None
        else interop.Pointer(output.given, output.shape, output.dtype)
    )


def _pointers(kind: str, arrays: Sequence[Any]) -> list[int]:
    return geometry(kind, len(arrays))(*arrays)[0]


@lru_cache(maxsize=1024)
def _compiled(shape: Shape, guarded: bool) -> Callable[[Steps, tuple[Any, ...], Any], Any]:
    """(steps, PyTorch's guards, plan) -> the plan's function; with its guards or without.

    Every warm call of every op goes through this text, so it has no loop and no test that a plan
    can decide when it is made.
    """
    lines = ["def make(steps, fits, plan):"]
    lines += [f" {line}" for line in _bound(shape, guarded)]
    arrays = [f"x{i}" for i in range(shape.count)]
    head = ", ".join([arrays[0], *(f"{x}=None" for x in arrays[1:])])
    lines += [f" def run({head}):", *(f"  {line}" for line in _body(shape, guarded)), " return run"]
    namespace = {
        "MISSED": MISSED, "refuse_gpu": refuse_gpu, "import_module": import_module, "sys": sys,
        "others": _on_its_device,
    }  # fmt: skip
    exec("\n".join(lines), namespace)
    return namespace["make"]


def _bound(shape: Shape, guarded: bool) -> list[str]:
    """Names that the function finds beside it."""
    lines = ["call, device = steps.call, steps.device"]
    lines += [f"make{i} = steps.allocations[{at}]" for at, i in enumerate(shape.made)]
    lines += [f"start{at} = steps.starts[{at}]" for at in range(len(shape.launches))]
    if guarded:
        lines += [f"fits{i} = fits[{i}]" for i in shape.given]
        lines += ["refuses, alignments = plan.refuses, plan.alignments"]
    if shape.delegated:
        return [*lines, "delegate, options = steps.delegate, steps.options"]
    lines += ["scratch = steps.scratch"] if shape.scratch else []
    if shape.kind == "torch":
        return [
            *lines,
            "torch = sys.modules['torch']",
            "stream_of, current = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice",
        ]
    return [
        *lines,
        "cuda = import_module('cupy.cuda')",
        "current = cuda.runtime.getDevice",
        "stream_of = lambda device: cuda.get_current_stream().ptr",
    ]


def _body(shape: Shape, guarded: bool) -> list[str]:
    """Guards, addresses, allocations, launches, results."""
    lines = _tests(shape) if guarded else []
    lines.append("refuse_gpu(call)")
    arrays = [f"x{i}" for i in range(shape.count)]
    if shape.delegated:
        inputs, outputs = arrays[: shape.inputs], arrays[shape.inputs :]
        lists = (f"({', '.join(some)}{',' * bool(some)})" for some in (inputs, outputs))
        return [*lines, f"return delegate({', '.join(lists)}, options)"]
    if not shape.alone:
        lines.append(f"if current() != device: return others(run, device, ({', '.join(arrays)},))")
    address = _ADDRESS[shape.kind]
    if not guarded:
        lines += [f"p{i} = {address.format(x=f'x{i}')}" for i in shape.given]
    lines += [f"x{i} = make{i}(); p{i} = {address.format(x=f'x{i}')}" for i in shape.made]
    lines.append("stream = stream_of(device)")
    there = {*shape.given, *shape.made}
    if shape.scratch:
        first = f"x{min(there)}"
        lines.append(f"p{shape.count}, p{shape.count + 1}, owner = scratch({first}, stream)")
        there |= {shape.count, shape.count + 1}
    for at, places in enumerate(shape.launches):
        pointers = ", ".join(f"p{i}" if i in there else "0" for i in places)
        lines.append(f"start{at}(({pointers},), stream)")
    results = [f"x{i}" for i in shape.returned]
    made = results[0] if len(results) == 1 else f"({', '.join(results)})" if results else "None"
    return [*lines, f"return {made}"]  # whoever gets the scratch memory next comes after us


def _tests(shape: Shape) -> list[str]:
    """Whether the arrays are of the plan's geometry."""
    like = [f"fits{i}(x{i})" if i in shape.given else f"x{i} is None" for i in range(shape.count)]
    lines = [f"if not ({' and '.join(like)}): return MISSED"]
    lines += [f"p{i} = x{i}.data_ptr()" for i in shape.given]
    if shape.aligned:
        together = " | ".join(f"p{i}" for i in shape.given)
        lines.append(f"if ({together}) & {_ALIGNMENT}: return MISSED")
    else:
        each = [f"p{i} & {_ALIGNMENT} == alignments[{i}]" for i in shape.given]
        lines.append(f"if not ({' and '.join(each)}): return MISSED")
    if shape.guarded:
        pointers = ", ".join(f"p{i}" if i in shape.given else "0" for i in range(shape.count))
        lines.append(f"if refuses(({pointers},)): return MISSED")
    return lines


def _on_its_device(run: Callable[..., Any], device: int, arrays: tuple[Any, ...]) -> Any:
    """The plan's function with its device as the current one."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(arrays[0], torch.Tensor):
        with torch.cuda.device(device):
            return run(*arrays)
    with import_module("cupy.cuda").Device(device):
        return run(*arrays)
