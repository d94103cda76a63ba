"""Arrays of any framework -> pointer, shape, strides, dtype, device; and the same kind back.

torch and CuPy are never imported here until an array of theirs is seen: an array's own module is
already in `sys.modules`. Nothing is copied between devices: an array is used where it lies.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any, NamedTuple

import numpy as np

from fkjit.errors import ArgumentTypeError, DeviceError
from fkjit.runtime import abstract
from fkjit.runtime.abstract import Abstract

CPU = -1  # the device number of host memory

_DL_CPU, _DL_CUDA = 1, 2  # DLPack's device types
_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_LONG_NAMES = {short: long for long, short in _NAMES.items()}
_torch_names: dict[Any, str] = {}  # by torch's dtypes, as they are seen
_torch_dtypes: dict[str, Any] = {}  # the other way
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}


_used_before_fork = False
_forked = False  # from a process that had used CUDA, which works in only one of the two


def _before_fork() -> None:
    global _used_before_fork
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    _used_before_fork = torch is not None and torch.cuda.is_initialized()
    if cupy is not None and not _used_before_fork:
        try:
            _used_before_fork = bool(cupy.cuda.driver.ctxGetCurrent())
        except Exception:  # no driver
            _used_before_fork = False


def _after_fork() -> None:
    """In the child."""
    global _forked
    _forked = _forked or _used_before_fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


class View(NamedTuple):
    """One array as a kernel sees it. Strides are in elements; `device` is CPU or a CUDA ordinal, or
    below CPU the number of an abstract one."""

    kind: str  # numpy | torch | cupy | dlpack | abstract
    array: Any  # what `kind` says; for dlpack a CuPy view of the caller's array
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str  # "fp16", or the framework's own name for what no kernel takes
    device: int
    source: Any = None  # dlpack: the caller's array, to give back the same kind


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


class Pointer:
    """What a spec's `arguments` may ask of an array: shape, strides in bytes, itemsize.

    None stands for a null pointer; with a shape and a dtype for a contiguous array still to come.
    """

    __slots__ = ("itemsize", "pointer", "shape", "strides")

    def __init__(
        self, seen: View | None, shape: tuple[int, ...] = (), dtype: str | None = None
    ) -> None:
        if seen is None:
            self.pointer, self.shape, strides = 0, tuple(shape), contiguous(shape)
            itemsize = ITEMSIZE.get(dtype or "", 0)
        else:
            self.pointer, self.shape, strides = seen.pointer, seen.shape, seen.strides
            itemsize = ITEMSIZE.get(seen.dtype) or _itemsize(seen)
        self.itemsize = itemsize
        self.strides = tuple([step * itemsize for step in strides])

    def transposed(self, order: tuple[int, ...]) -> Pointer:
        """The same array with its dimensions in another order."""
        other = Pointer.__new__(Pointer)
        other.pointer, other.itemsize = self.pointer, self.itemsize
        other.shape = tuple([self.shape[i] for i in order])
        other.strides = tuple([self.strides[i] for i in order])
        return other


NULL = Pointer(None)  # no array


def _itemsize(seen: View) -> int:
    return int(seen.array.dtype.itemsize)


def view(array: Any, call: str, name: str) -> View:
    """Look at one argument. ArgumentTypeError names the call and parameter for anything else.

    DeviceError where it is on a GPU that this process cannot use.
    """
    seen = _view(array, call, name)
    if _forked and seen.device > CPU:
        raise DeviceError(
            f"{call}: {name} is on cuda:{seen.device}, but this process was forked from one that "
            "had used CUDA, which works in only one of them: start it with multiprocessing's "
            '"spawn"'
        )
    return seen


def _view(array: Any, call: str, name: str) -> View:
    if isinstance(array, _kind("torch", "Tensor")):
        return _torch_view(array, call, name)
    if isinstance(array, np.ndarray):
        return _strided("numpy", array, array.ctypes.data, CPU, call, name)
    if isinstance(array, Abstract):
        return _strided("abstract", array, array.pointer, array.device, call, name)
    if isinstance(array, _kind("cupy", "ndarray")):
        return _strided("cupy", array, array.data.ptr, array.device.id, call, name)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _dlpack_view(array, call, name)
    kind = f"{type(array).__module__}.{type(array).__qualname__}"
    if kind.startswith("jax.") and kind.endswith("Tracer"):
        raise ArgumentTypeError(
            f"{call}: {name} is traced by JAX (jax.jit, grad or vmap) and holds no numbers: "
            "call it outside jit, between functions that are jitted"
        )
    raise ArgumentTypeError(
        f"{call}: {name} is a {kind}; allowed: a torch tensor, a CuPy or NumPy array, or any array "
        "with __dlpack__"
    )


def _kind(module: str, name: str) -> Any:
    """A type for isinstance; () where the module is not there, or another thread imports it."""
    return getattr(sys.modules.get(module), name, ())


def _torch_view(tensor: Any, call: str, name: str) -> View:
    torch = sys.modules["torch"]
    if tensor.is_nested:
        raise ArgumentTypeError(
            f"{call}: {name} is a nested tensor; allowed: plain tensors (for sequences of several "
            "lengths, packed ones: fkjit.attention_varlen)"
        )
    if not (tensor.is_cuda or tensor.is_cpu) or tensor.layout is not torch.strided:
        raise DeviceError(
            f"{call}: {name} is a {tensor.layout} tensor on {tensor.device}; allowed: dense "
            "tensors on a CUDA device or the CPU"
        )
    if _has_no_memory(torch, tensor):
        raise ArgumentTypeError(
            f"{call}: {name} is a {type(tensor).__name__} without memory of its own; allowed: "
            "plain tensors (wrap the call in torch.compiler.disable where a compiler traces it)"
        )
    if tensor.is_neg() or tensor.is_conj():
        raise ArgumentTypeError(
            f"{call}: {name} is a lazily negated or conjugated view; call .resolve_neg()"
        )
    dtype = tensor.dtype
    label = _torch_names.get(dtype) or _torch_name(dtype)
    device = tensor.get_device() if tensor.is_cuda else CPU
    return View(
        "torch", tensor, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), label, device
    )


def on_gpu(
    tensor: Any,
    pointer: int,
    traits: tuple[Any, ...],
    sizes: tuple[tuple[int, ...], tuple[int, ...]],
) -> View | None:
    """A view of a plain CUDA tensor, of what is known of it (a plan's geometry: type, rank, dtype,
    device, …; shape and strides); None for any other, which `view` looks at more closely."""
    _, _, dtype, device, negated, *_ = traits
    shape, strides = sizes
    if device < 0 or negated or _forked or not tensor.is_cuda or not (pointer or 0 in shape):
        return None
    label = _torch_names.get(dtype) or _torch_name(dtype)
    return View("torch", tensor, pointer, tuple(shape), strides, label, device)


def _torch_name(dtype: Any) -> str:
    long = str(dtype).removeprefix("torch.")
    made = _torch_names[dtype] = _NAMES.get(long, long)
    return made


def _has_no_memory(torch: Any, tensor: Any) -> bool:
    """Fake, functional, nested and wrapped tensors: what they point to is not their data."""
    try:
        if (
            type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
            or tensor.is_nested
        ):
            return True
        return tensor.numel() > 0 and tensor.data_ptr() == 0
    except RuntimeError:  # vmap and the like
        return True


def _strided(
    kind: str, array: Any, pointer: int, device: int, call: str, name: str, source: Any = None
) -> View:
    dtype = array.dtype
    trouble = None
    if not dtype.itemsize:
        trouble = f"has dtype {dtype}, whose elements have no bytes"
    elif not dtype.isnative:
        trouble = (
            f"has byte order {dtype.byteorder!r}; convert it with .astype(dtype.newbyteorder('='))"
        )
    elif type(array).__name__ == "MaskedArray":
        trouble = "is a masked array, whose mask no kernel reads; pass .filled() or .data"
    elif array.size and (
        pointer % dtype.itemsize or any(step % dtype.itemsize for step in array.strides)
    ):
        trouble = "has elements that are not aligned to their size; pass a contiguous copy"
    if trouble:
        raise ArgumentTypeError(f"{call}: {name} {trouble}")
    strides = tuple(step // dtype.itemsize for step in array.strides)
    label: str = _NAMES.get(dtype.name) or dtype.name
    return View(kind, array, pointer, array.shape, strides, label, device, source)


def _dlpack_view(array: Any, call: str, name: str) -> View:
    """Any other framework: seen through NumPy on the CPU, through CuPy on a GPU. No copy."""
    where = int(array.__dlpack_device__()[0])
    if where not in (_DL_CPU, _DL_CUDA):
        raise DeviceError(
            f"{call}: {name} is on a device of DLPack type {where}; allowed: the CPU ({_DL_CPU}) "
            f"and CUDA devices ({_DL_CUDA})"
        )
    try:
        if where == _DL_CPU:
            seen = _numpy_of(array)
            return _strided("dlpack", seen, seen.ctypes.data, CPU, call, name, array)
        import cupy

        seen = cupy.from_dlpack(array)
    except (RuntimeError, BufferError, TypeError, ValueError) as error:
        if isinstance(error, ArgumentTypeError):
            raise
        raise ArgumentTypeError(
            f"{call}: {name} ({type(array).__qualname__}) cannot be taken through DLPack: {error}"
        ) from error
    return _strided("dlpack", seen, seen.data.ptr, seen.device.id, call, name, array)


def _numpy_of(array: Any) -> np.ndarray:
    """A CPU array of another framework as NumPy; bf16 and fp8, which NumPy's DLPack does not know,
    as ml_dtypes has them where the framework shares them (JAX), read-only."""
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError):
        seen = np.asarray(array) if hasattr(array, "__array__") else None
        if seen is None or not _of_ml_dtypes(seen):
            raise
        return seen


def _of_ml_dtypes(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.type.__module__.startswith("ml_dtypes")


def as_numpy(seen: View) -> np.ndarray:
    """A CPU array as NumPy, sharing memory; bf16 as ml_dtypes.bfloat16."""
    if seen.kind != "torch":
        return seen.array
    tensor = seen.array.detach()
    if seen.dtype != "bf16":
        return tensor.numpy()
    import ml_dtypes

    return tensor.view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16)


def numpy_dtype(dtype: str) -> np.dtype:
    """The NumPy dtype of "fp16", "bf16" (ml_dtypes), "fp32", "fp64", or one of NumPy's names."""
    if dtype == "bf16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype({"fp16": "f2", "fp32": "f4", "fp64": "f8"}.get(dtype, dtype))


def torch_dtype(dtype: str) -> Any:
    """torch's own name for "fp16", "bf16", "fp32", "fp64"; others are torch's already."""
    found = _torch_dtypes.get(dtype)
    if found is None:
        found = getattr(sys.modules["torch"], _LONG_NAMES.get(dtype, dtype))
        _torch_dtypes[dtype] = found
    return found


def empty(like: View, shape: tuple[int, ...], dtype: str) -> Any:
    """An uninitialised contiguous array of the same framework, on the same device."""
    if like.kind == "torch":
        torch = sys.modules["torch"]
        made = fast_empty()
        if made is not None and like.device != CPU and torch._C._cuda_getDevice() == like.device:
            return made(shape, contiguous(shape), torch_dtype(dtype))
        return torch.empty(shape, dtype=torch_dtype(dtype), device=like.array.device)
    if like.device == CPU:
        return np.empty(shape, numpy_dtype(dtype))
    if like.kind == "abstract":
        return abstract.made(shape, dtype, None, like.device)
    import cupy

    with cupy.cuda.Device(like.device):
        return cupy.empty(shape, numpy_dtype(dtype))


def fast_empty() -> Any:
    """(shape, strides, dtype) -> a tensor on the current CUDA device, in a third of torch.empty's
    time; None where this PyTorch has nothing like it."""
    return getattr(sys.modules["torch"]._C._dynamo.guards, "_empty_strided_cuda", None)


def new(like: View, shape: tuple[int, ...], dtype: str) -> View:
    """What `empty` makes, as kernels see it."""
    made = empty(like, shape, dtype)
    if like.kind == "torch":
        pointer = made.data_ptr()
    else:
        pointer = made.ctypes.data if like.device == CPU else made.data.ptr
    return View(like.kind, made, pointer, tuple(shape), contiguous(shape), dtype, like.device)


def outline(shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    """What torch.empty_like makes contiguous tensors like, in half the host time of torch.empty: a
    tensor without memory, so that none is kept of a CUDA graph's."""
    torch = sys.modules["torch"]
    one = shape if math.prod(shape) < 2 else (1,) * len(shape)
    like = torch.empty(one, dtype=torch_dtype(dtype), device=device).expand(shape)
    like.untyped_storage().resize_(0)
    if torch.empty_like(like).is_contiguous():
        return like
    return torch.empty(shape, dtype=torch_dtype(dtype), device=device)  # as PyTorch could have it


def give_back(like: View, array: Any) -> Any:
    """`array` as the caller's kind; only "dlpack" arrays need turning."""
    if like.kind != "dlpack":
        return array
    if hasattr(like.source, "__array_namespace__"):
        namespace = like.source.__array_namespace__()
        made = namespace.asarray if _of_ml_dtypes(array) else namespace.from_dlpack
        return made(array)
    package = sys.modules.get(type(like.source).__module__.partition(".")[0])
    for holder in (package, getattr(package, "dlpack", None)):
        if holder is not None and hasattr(holder, "from_dlpack"):
            return holder.from_dlpack(array)
    return array


def synchronise(seen: View) -> None:
    """Wait for what was enqueued on `current_stream(seen)` of a CuPy or DLPack array."""
    import cupy

    cupy.cuda.get_current_stream(seen.device).synchronize()


def current_stream(seen: View) -> int:
    """The CUDA stream handle the caller is working on: torch's for tensors, else CuPy's."""
    if seen.kind == "torch":
        return sys.modules["torch"]._C._cuda_getCurrentRawStream(seen.device)
    import cupy

    return cupy.cuda.get_current_stream(seen.device).ptr
