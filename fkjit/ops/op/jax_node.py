"""A call inside `jax.jit`: a node of JAX's program, which makes the call when the program runs.

What a kernel writes are JAX's own results: nothing is copied. The call is checked with shapes and
dtypes alone while JAX traces it, and again with addresses at each run.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.runtime import jax_ffi
from fkjit.runtime.abstract import compile_for, described, device_for
from fkjit.runtime.device import device_target
from fkjit.runtime.interop import CPU, numpy_dtype

if TYPE_CHECKING:
    from fkjit.ops.op.op import Op

is_traced = jax_ffi.is_traced


def traced(op: Op, inputs: Sequence[Any], outputs: Sequence[Any], options: tuple[Any, ...]) -> Any:
    """The call's results in JAX's program. ArgumentTypeError for what no node can do."""
    _refuse(op, outputs)
    there = [number for number, array in enumerate(inputs) if array is not None]
    on_gpu = jax_ffi.compiles_for_gpu()
    device = device_for(device_target(0).name) if on_gpu else CPU
    arrays = [None if array is None else described(array, device) for array in inputs]
    request = op.request([*arrays, *(None,) * len(op.outputs)], options)
    results = [one for one in request.outputs.values() if one is not None and one.returned]
    if request.delegate is not None and not results:
        raise ArgumentTypeError(
            f"{op.name}: inside jax.jit arrays are taken as they are; allowed: dtypes and strides "
            "that a kernel reads, without a cast or a copy before"
        )
    if on_gpu and request.delegate is None:
        compile_for(request.launches, device)
    specs = [None if one is None else (one.shape, one.dtype) for one in arrays]
    shapes = [(one.shape, numpy_dtype(one.dtype)) for one in results]
    key = (op.name, options, tuple(specs), on_gpu)
    run = partial(_run, op, options, specs, shapes)
    made = jax_ffi.node(op.name, key, [inputs[number] for number in there], shapes, run)
    return made[0] if len(made) == 1 else tuple(made) or None


def _refuse(op: Op, outputs: Sequence[Any]) -> None:
    for name, given in zip(op.outputs, outputs, strict=False):
        if given is not None:
            raise ParameterError(f"{op.name}: {name} is given; JAX's results are new arrays")
    written = sorted(op.written - set(op.outputs))
    if written:
        raise ArgumentTypeError(
            f"{op.name}: writes {', '.join(written)} in place, which JAX's arrays do not allow: "
            "call it outside jit, with torch tensors or CuPy arrays"
        )


def _run(
    op: Op, options: tuple[Any, ...], specs: Sequence[Any], shapes: Sequence[Any],
    frame: jax_ffi.Frame,
) -> None:  # fmt: skip
    """The call itself, on the arrays of a frame."""
    with ExitStack() as stack:
        wrap = _on_host
        if frame.stream is not None:
            wrap = partial(_on_device, *_entered(stack, frame))
        addresses = iter(frame.arguments)
        arrays = [None if spec is None else wrap(next(addresses), *spec) for spec in specs]
        pairs = zip(frame.results, shapes, strict=True)
        results = [wrap(address, *shape) for address, shape in pairs]
        op.run_into([*arrays, *(None,) * len(op.outputs)], options, results)


def _on_host(address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = dtype.itemsize * math.prod(shape)
    if not size:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


def _entered(stack: ExitStack, frame: jax_ffi.Frame) -> tuple[Any, int]:
    """CuPy and the number of the device, which are current from now on, as is the stream."""
    cupy: Any = import_module("cupy")
    place = next((address for address in (*frame.results, *frame.arguments) if address), 0)
    device = cupy.cuda.runtime.pointerGetAttributes(place).device if place else 0
    stack.enter_context(cupy.cuda.Device(device))
    stack.enter_context(cupy.cuda.ExternalStream(frame.stream, device))
    return cupy, device


def _on_device(
    cupy: Any, device: int, address: int, shape: tuple[int, ...], dtype: np.dtype
) -> Any:
    size = dtype.itemsize * math.prod(shape)
    memory = cupy.cuda.UnownedMemory(address, size, None, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))
