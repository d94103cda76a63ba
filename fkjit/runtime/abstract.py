"""Arrays of which only shape and dtype are known, on a GPU that need not be there: what
`fkjit.prepare(..., arch="sm_90a")` checks and selects kernels with, and compiles them for."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fkjit.arch import Target, target
from fkjit.errors import ArgumentTypeError
from fkjit.jit.build import build_all
from fkjit.spec import KernelSpec, Params

# SMs of the GPUs that most calls are for; one with more or fewer takes other tiles for few shapes.
_SMS = {(7, 5): 40, (8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 170}
_FEW_SMS = 108  # of a GPU that is not in the table
_TEXT = r"(\w+)\[([\d, ]*)\]"
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}

Take = Callable[[KernelSpec, Params, Target], None]

_targets: list[Target] = []  # of device -2, -3, …
_addresses = itertools.count(1 << 40, 1 << 32)  # apart, so that no two arrays overlap
_taking: ContextVar[Take | None] = ContextVar("fkjit.abstract", default=None)


@dataclass(frozen=True, eq=False)
class Abstract:
    """An array without memory. `strides` in bytes, as NumPy's."""

    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...]
    device: int  # below -1
    pointer: int = field(default_factory=lambda: next(_addresses))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def contiguous(self) -> Abstract:
        """Without gaps, as torch's tensors have it."""
        return made(self.shape, self.dtype.name, None, self.device)

    def astype(self, dtype: str) -> Abstract:
        """Of another dtype, as NumPy's arrays have it; without gaps."""
        return made(self.shape, dtype, None, self.device)

    def view(self, dtype: str) -> Abstract:
        """The same bytes by another dtype of as many, as NumPy's arrays have it."""
        return replace(self, dtype=np.dtype(dtype))


def device_for(arch: str) -> int:
    """The number of a GPU that stands for all of an architecture. ParameterError for no such."""
    to = target(arch)
    if to not in _targets:
        _targets.append(to)
    return -2 - _targets.index(to)


def target_of(device: int) -> Target:
    """What kernels on such a device are compiled for."""
    return _targets[-2 - device]


def multiprocessors_of(device: int) -> int:
    """SMs of the usual GPU of that architecture."""
    return _SMS.get(target_of(device).arch.capability, _FEW_SMS)


def described(value: Any, device: int) -> Any:
    """An argument of a call as an abstract array, where it is one, or the text of one.

    Anything with a shape and a dtype counts (NumPy, torch, also on "meta", jax.ShapeDtypeStruct),
    and texts such as "bf16[2, 16, 4096, 128]"; in tuples, too. ArgumentTypeError for a dtype of no
    name.
    """
    if isinstance(value, tuple):
        parts = [described(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, str) and (found := re.fullmatch(_TEXT, value.strip())):
        shape = tuple(int(size) for size in found[2].replace(" ", "").split(",") if size)
        return made(shape, found[1], None, device)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return value
    name = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    stride = getattr(value, "stride", None)
    steps = stride() if callable(stride) else None
    if steps is None and isinstance(value, np.ndarray):
        steps = tuple(step // value.itemsize for step in value.strides)
    return made(tuple(map(int, shape)), str(name), steps, device)


def made(shape: tuple[int, ...], name: str, steps: Any, device: int) -> Abstract:
    """An abstract array; `steps`: strides in elements, None for contiguous."""
    import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 and float8 by its names then)

    try:
        dtype = np.dtype(_SHORT.get(name, name))
    except TypeError as error:
        raise ArgumentTypeError(f"prepare: {name!r} is the name of no dtype, as fp16 is") from error
    if steps is None:
        steps = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Abstract(shape, dtype, tuple(step * dtype.itemsize for step in steps), device)


def compile_for(launches: Iterable[Any], device: int) -> None:
    """Compile a call's kernels into the cache for such a device, or hand them to whoever is
    `taking`."""
    to = target_of(device)
    each = [(spec, spec.canonical(params)) for spec, params, _ in launches]
    take = _taking.get()
    if take is None:
        return build_all(each, to)
    for spec, params in each:
        spec.check(params, to.arch)
        take(spec, params, to)


@contextmanager
def taking(take: Take) -> Iterator[None]:
    """Within, `compile_for` compiles nothing: it calls `take`."""
    token = _taking.set(take)
    try:
        yield
    finally:
        _taking.reset(token)
