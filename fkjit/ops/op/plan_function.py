"""The function of a plan: straight-line Python, written for the pattern of arrays that a call has.

Every warm call of every op goes through such a text, so it has no loop and no test that can be
decided when the plan is made. What a plan of this pattern uses, its guards, addresses and launches,
is bound beside it (`Steps`), so that a text is compiled once a pattern.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

from fkjit.ops.op.launches import Form, bound_for, form_of, lines_for, ready
from fkjit.ops.op.request import Output, Request
from fkjit.runtime import interop, workspace
from fkjit.runtime.device import outside_graphs
from fkjit.sanitizer import refuse_gpu

ALIGNMENT = 31  # bits of an address that a plan depends on
MISSED: Any = object()  # there is no plan for this call

# Where an array of a framework is.
ADDRESS = {"torch": "{x}.data_ptr()", "cupy": "{x}.data.ptr"}


class Shape(NamedTuple):
    """What the text of a plan's function depends on. Numbers are places among a call's arrays."""

    kind: str  # torch | cupy
    arrays: int  # of a call, given or not
    given: tuple[int, ...]
    made: tuple[int, ...]  # outputs that are allocated
    returned: tuple[int, ...]
    # Of addresses, `arrays` and `arrays` + 1 are workspace and counters.
    launches: tuple[Form, ...]
    scratch: bool  # whether there are any
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


def steps(
    call: str,
    names: tuple[str, ...],
    inputs: int,
    arrays: Sequence[Any],
    options: Any,
    request: Request,
    kernels: Sequence[Any],
) -> Steps:
    """What is left to do of a checked call. `names`: of all arrays, the inputs first."""
    device = request.like.device
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
        arrays=len(names),
        given=tuple(i for i, x in enumerate(arrays) if x is not None),
        made=tuple(map(names.index, made)),
        returned=tuple(names.index(name) for name, o in outputs.items() if o.returned),
        launches=tuple(form_of(start, places) for start, places in launches),
        scratch=bool(request.workspace or request.counters),
        delegated=request.delegate is not None,
        inputs=inputs,
        alone=request.like.kind == "torch" and sys.modules["torch"].cuda.device_count() == 1,
    )
    return Steps(
        shape,
        call,
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
    """What makes a new array for an output; the device is current."""
    if request.like.kind == "torch":
        torch = sys.modules["torch"]
        empty = interop.fast_empty()
        if empty is not None and request.like.device != interop.CPU:
            shape = tuple(output.shape)
            return partial(
                empty, shape, interop.contiguous(shape), interop.torch_dtype(output.dtype)
            )
        like = interop.outline(output.shape, output.dtype, request.like.array.device)
        return partial(torch.empty_like, like)
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


@lru_cache(maxsize=1024)
def compiled(shape: Shape, guarded: bool) -> Callable[[Steps, tuple[Any, ...], Any], Any]:
    """(steps, PyTorch's guards, plan) -> the plan's function; with its guards or without."""
    lines = ["def make(steps, fits, plan):"]
    lines += [f" {line}" for line in _bound(shape, guarded)]
    arrays = [f"x{i}" for i in range(shape.arrays)]
    head = ", ".join([arrays[0], *(f"{x}=None" for x in arrays[1:])])
    lines += [f" def run({head}):", *(f"  {line}" for line in _body(shape, guarded)), " return run"]
    return function_of(lines)


def function_of(lines: list[str]) -> Callable[..., Any]:
    """`make` of a text."""
    namespace = {
        "MISSED": MISSED, "refuse_gpu": refuse_gpu, "import_module": import_module, "sys": sys,
        "others": _on_its_device, "outside_graphs": outside_graphs,
    }  # fmt: skip
    exec("\n".join(lines), namespace)
    return namespace["make"]


def _bound(shape: Shape, guarded: bool) -> list[str]:
    """Names that the function finds beside it."""
    lines = [f"make{i} = steps.allocations[{at}]" for at, i in enumerate(shape.made)]
    for at, form in enumerate(shape.launches):
        lines += bound_for(at, form)
    lines += ["scratch = steps.scratch"] if shape.scratch else []
    if guarded:
        lines += [f"fits{i} = fits[{i}]" for i in shape.given]
        lines += ["refuses, alignments = plan.refuses, plan.alignments"]
    return [*lines, *bound_for_work(shape)]


def bound_for_work(shape: Shape) -> list[str]:
    """The same of `work`; `steps` has them."""
    lines = ["call, device = steps.call, steps.device"]
    if shape.delegated:
        return [*lines, "delegate, options = steps.delegate, steps.options"]
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
    address = ADDRESS[shape.kind]
    lines = _tests(shape) if guarded else []
    if not guarded and not shape.delegated:
        lines += [f"p{i} = {address.format(x=f'x{i}')}" for i in shape.given]
    there = {*shape.given, *shape.made}
    if shape.scratch:
        there |= {shape.arrays, shape.arrays + 1}
    starts = []
    for at, form in enumerate(shape.launches):
        pointers = ", ".join(f"p{i}" if i in there else "0" for i in form.places)
        starts += lines_for(at, form, pointers)
    makes = [f"x{i} = make{i}(); p{i} = {address.format(x=f'x{i}')}" for i in shape.made]
    return [*lines, *work(shape, "run", makes, "scratch({x}, stream)", starts)]


def work(shape: Shape, run: str, makes: list[str], scratch: str, starts: list[str]) -> list[str]:
    """What is left to do behind the guards; `run` is called again with the device as current.

    makes: lines that allocate outputs. scratch: what finds (workspace, counters, owner) beside the
    array {x}. starts: lines that launch on `stream`.
    """
    lines = ["refuse_gpu(call)"]
    arrays = [f"x{i}" for i in range(shape.arrays)]
    if shape.delegated:
        inputs, outputs = arrays[: shape.inputs], arrays[shape.inputs :]
        lists = (f"({', '.join(some)}{',' * bool(some)})" for some in (inputs, outputs))
        return [*lines, f"return delegate({', '.join(lists)}, options)"]
    if not shape.alone:
        given = ", ".join(arrays)
        lines.append(f"if current() != device: return others({run}, device, ({given},))")
    lines += [*makes, "stream = stream_of(device)"]
    if shape.scratch:
        first = f"x{min((*shape.given, *shape.made))}"
        pair = f"p{shape.arrays}, p{shape.arrays + 1}, owner"
        lines.append(f"{pair} = {scratch.format(x=first)}")
    results = [f"x{i}" for i in shape.returned]
    made = results[0] if len(results) == 1 else f"({', '.join(results)})" if results else "None"
    # Whoever gets the scratch memory next comes after us.
    return [*lines, *starts, f"return {made}"]


def _tests(shape: Shape) -> list[str]:
    """Whether the arrays are of the plan's geometry."""
    like = [f"fits{i}(x{i})" if i in shape.given else f"x{i} is None" for i in range(shape.arrays)]
    lines = [f"if not ({' and '.join(like)}): return MISSED"]
    lines += [f"p{i} = x{i}.data_ptr()" for i in shape.given]
    if shape.aligned:
        together = " | ".join(f"p{i}" for i in shape.given)
        lines.append(f"if ({together}) & {ALIGNMENT}: return MISSED")
    else:
        each = [f"p{i} & {ALIGNMENT} == alignments[{i}]" for i in shape.given]
        lines.append(f"if not ({' and '.join(each)}): return MISSED")
    if shape.guarded:
        pointers = ", ".join(f"p{i}" if i in shape.given else "0" for i in range(shape.arrays))
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
