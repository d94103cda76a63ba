"""A caller's value -> the bytes or the array of one kernel parameter, or an error that names it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from fkjit.errors import ArgumentTypeError, DeviceError, ParameterError
from fkjit.jit.signature import Argument
from fkjit.runtime import interop
from fkjit.runtime.interop import CPU

if TYPE_CHECKING:
    from fkjit.interp import Arg

_FLOATS = {2: "e", 4: "f", 8: "d"}
# What an array may hold behind a pointer to one of these; other pointers take any array.
_POINTEES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("float", "fp32"), ("float32",)),
    "double": ("float64",),
    **dict.fromkeys(("half", "__half", "fp16"), ("float16", "uint16")),
    **dict.fromkeys(("__nv_bfloat16", "bf16"), ("bfloat16", "uint16")),
    **dict.fromkeys(("short", "unsigned short"), ("int16", "uint16")),
    **dict.fromkeys(("int", "unsigned", "unsigned int", "i32", "u32"), ("int32", "uint32")),
    **dict.fromkeys(("long long", "unsigned long long", "i64", "u64"), ("int64", "uint64")),
}


def argument(call: str, declared: Argument, size: int, value: Any) -> Arg:
    """One argument for `interp.run`. `size`: the parameter's bytes in the PTX.

    ArgumentTypeError and ParameterError name the parameter; DeviceError for an array on a GPU.
    """
    from fkjit.interp import Arg, TensorMap

    if isinstance(value, TensorMap):
        return Arg(declared.name, value, writable=value.array.flags.writeable)
    array = isinstance(value, np.ndarray) or hasattr(value, "__dlpack__")
    if declared.pointer or (array and not declared.code and size == 8):
        return _pointer(call, declared, value)
    if array:
        raise _wrong(call, declared, size, value, "a number")
    data = _data(call, declared, size, value)
    if len(data) != size:
        raise ParameterError(
            f"{call}: {declared.name} has {len(data)} bytes; the kernel's {_shown(declared, size)} "
            f"has {size}"
        )
    return Arg(declared.name, data)


def _shown(declared: Argument, size: int) -> str:
    return f"'{declared.ctype} {declared.name}'" if declared.ctype else f"parameter of {size} bytes"


def _wrong(call: str, declared: Argument, size: int, value: Any, allowed: str) -> ArgumentTypeError:
    kind = value.dtype.name if isinstance(value, np.generic) else type(value).__name__
    return ArgumentTypeError(
        f"{call}: {declared.name} is a {kind}; the kernel's {_shown(declared, size)} takes "
        f"{allowed}"
    )


def _pointer(call: str, declared: Argument, value: Any) -> Arg:
    from fkjit.interp import Arg

    if value is None:
        return Arg(declared.name, np.uint64(0))
    if isinstance(value, int | float | np.generic | bytes):
        raise _wrong(call, declared, 8, value, "an array, or None")
    seen = interop.view(value, call, declared.name)
    if seen.device != CPU:
        raise DeviceError(
            f"{call}: {declared.name} is on cuda:{seen.device}, and this runs on the CPU; pass "
            "NumPy arrays (cupy.asnumpy(x), x.cpu())"
        )
    array = interop.as_numpy(seen)
    bare = " ".join(declared.ctype.replace("const", " ").replace("*", " ").split())
    holds = _POINTEES.get(bare) if declared.ctype.count("*") == 1 else None
    if holds and array.dtype.name not in holds:
        raise ArgumentTypeError(
            f"{call}: {declared.name} is an array of {array.dtype.name}; the kernel's "
            f"{_shown(declared, 8)} takes {' or '.join(holds)}"
        )
    if not declared.const and not array.flags.writeable:
        raise ParameterError(
            f"{call}: {declared.name} is read-only, but the kernel's {_shown(declared, 8)} is not "
            "a pointer to const"
        )
    return Arg(declared.name, array, writable=not declared.const)


def _data(call: str, declared: Argument, size: int, value: Any) -> bytes:
    """The bytes of a number or a struct."""
    if isinstance(value, bytes | bytearray | memoryview | np.void):
        return bytes(value) if not isinstance(value, np.void) else value.tobytes()
    code = declared.code
    if isinstance(value, tuple):
        return _struct(value) if len(code) < 2 else _packed(call, declared, code, *value)
    if len(code) > 1:
        raise _wrong(call, declared, size, value, "a tuple or bytes")
    if isinstance(value, np.generic) and (not code or code in "fd"):
        if code and value.dtype.kind != "f":
            raise _wrong(call, declared, size, value, "a float")
        return value.tobytes()
    if isinstance(value, np.generic):
        if value.dtype.kind not in "iub":
            raise _wrong(call, declared, size, value, "a whole number")
        if value.dtype.itemsize != size:
            return value.tobytes()
        value = value.item()
    if not isinstance(value, int | float):
        raise _wrong(call, declared, size, value, "a number")
    if isinstance(value, float) and code and code not in "fd":
        raise _wrong(call, declared, size, value, "a whole number")
    if isinstance(value, float):
        code = code or _FLOATS.get(size, "")
    else:
        code = code or {1: "bB", 2: "hH", 4: "iI", 8: "qQ"}.get(size, "  ")[value >= 0].strip()
    if not code:
        raise _wrong(call, declared, size, value, "bytes, or a tuple of NumPy scalars")
    return _packed(call, declared, code, value)


def _packed(call: str, declared: Argument, code: str, *values: Any) -> bytes:
    native = "@" if len(code) > 1 else "="  # "=" refuses what is too large for a float
    try:
        return struct.pack(native + code, *values)
    except (struct.error, OverflowError) as error:
        shown = values[0] if len(code) == 1 else values
        raise ParameterError(
            f"{call}: {declared.name}={shown!r} does not fit the kernel's "
            f"{_shown(declared, struct.calcsize('@' + code))}: {error}"
        ) from error


def _struct(values: tuple[Any, ...]) -> bytes:
    """A struct of typed scalars with their natural alignment; an int is an int, a float a float."""
    data, largest = b"", 1
    for value in values:
        if not isinstance(value, np.generic):
            kind = (
                np.bool_ if isinstance(value, bool) else "f4" if isinstance(value, float) else "i4"
            )
            value = np.array(value, kind)[()]
        raw = value.tobytes()
        largest = max(largest, len(raw))
        data += b"\0" * (-len(data) % len(raw)) + raw
    return data + b"\0" * (-len(data) % largest)
