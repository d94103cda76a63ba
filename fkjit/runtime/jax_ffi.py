"""Calls inside `jax.jit`: custom calls of XLA's foreign function interface, from Python alone.

XLA calls a C function with a frame: addresses of arguments and results, and ways to ask for the
stream. `ctypes` makes that function of a Python one and reads the frame; the structures are those
of XLA's C interface, version 0 (xla/ffi/api/c_api.h), in which members are only added. A compiled
program knows a call by its number; what it does stands in `_calls` as long as the process.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from fkjit.errors import ArgumentTypeError

_TARGET = "fkjit_call"
_EXECUTE = 3  # the stage of a frame; before that come three that prepare
_METADATA = 1  # the extension that asks what the handler is made for
_INTERNAL = 13  # the code of an error


class Frame(NamedTuple):
    """One execution of a call: addresses, and the stream on a GPU, None on a CPU."""

    arguments: tuple[int, ...]
    results: tuple[int, ...]
    stream: int | None


Run = Callable[[Frame], None]

_calls: list[Run] = []
_numbers: dict[Any, int] = {}  # of `_calls`
_lock = threading.Lock()
_handlers: list[Any] = []  # ctypes' functions live as long as XLA may call them


def is_traced(arrays: Sequence[Any]) -> bool:
    """Whether one of these is a tracer of JAX's: of jit, grad or vmap."""
    jax = sys.modules.get("jax")
    return jax is not None and any(isinstance(array, jax.core.Tracer) for array in arrays)


def compiles_for_gpu() -> bool:
    """Whether a CUDA device is where JAX runs what it compiles, unless it is told otherwise."""
    return bool(sys.modules["jax"].default_backend() in ("gpu", "cuda"))


def node(call: str, key: Any, arrays: Sequence[Any], results: Sequence[Any], run: Run) -> list[Any]:
    """The traced results of a call, which `run` makes whenever the program runs: with vmap once for
    each element.

    `results`: (shape, NumPy dtype) of each. `key`: calls that are equal in it do the same.
    ArgumentTypeError where JAX wants a derivative.
    """
    jax = sys.modules["jax"]
    with _lock:
        _register(jax)
        number = _numbers.setdefault(key, len(_calls))
        if number == len(_calls):
            _calls.append(run)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    made = jax.ffi.ffi_call(_TARGET, shapes, vmap_method="sequential")
    try:
        return list(made(*arrays, number=np.int64(number)))
    except ValueError as error:
        if "differentiated" not in str(error):
            raise
        raise ArgumentTypeError(
            f"{call}: its gradient is asked for by JAX, for which it has none: give one with "
            "jax.custom_vjp (fkjit.attention_backward and its like make it)"
        ) from error


def _register(jax: Any) -> None:
    if not _handlers:
        for platform, has_stream in (("cpu", False), ("CUDA", True)):
            handler = _Handler(_handle_on_gpu if has_stream else _handle_on_cpu)
            capsule = jax.ffi.pycapsule(ctypes.cast(handler, ctypes.c_void_p).value)
            jax.ffi.register_ffi_target(_TARGET, capsule, platform=platform)
            _handlers.append(handler)


def _handle_on_cpu(address: int) -> int | None:
    with _plain_floats():
        return _handle(_CallFrame.from_address(address), lambda _: None)


def _handle_on_gpu(address: int) -> int | None:
    return _handle(_CallFrame.from_address(address), _stream)


def _handle(frame: _CallFrame, stream: Callable[[_CallFrame], int | None]) -> int | None:
    """What XLA calls, in any thread. None: it went well; else the address of XLA's error."""
    if frame.extension and frame.extension.contents.type == _METADATA:
        asked = ctypes.cast(frame.extension, ctypes.POINTER(_MetadataExtension)).contents
        asked.metadata.contents.version = frame.api.contents.version
        asked.metadata.contents.traits = 0  # what it launches may differ from run to run
        return None
    try:
        if frame.stage == _EXECUTE:
            places = _addresses(frame.arguments), _addresses(frame.results)
            _calls[_number(frame)](Frame(*places, stream(frame)))
    except BaseException as error:  # XLA is no Python: it raises what it is told
        return _error(frame, f"{type(error).__name__}: {error}")
    return None


@contextmanager
def _plain_floats() -> Iterator[None]:
    """XLA's threads take subnormal numbers for zero, where kernels do not. C's library says it for
    the thread that asks, NumPy cannot."""
    library = ctypes.CDLL(None)
    before = ctypes.create_string_buffer(64)
    if sys.platform != "linux" or library.fegetenv(before):
        yield
        return
    library.fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV
    try:
        yield
    finally:
        library.fesetenv(before)


def _number(frame: _CallFrame) -> int:
    scalar = ctypes.cast(frame.attributes.values[0], ctypes.POINTER(_Scalar)).contents
    return ctypes.c_int64.from_address(scalar.value).value


def _addresses(arrays: _Arrays) -> tuple[int, ...]:
    buffer = ctypes.POINTER(_Buffer)
    found = [ctypes.cast(arrays.values[i], buffer).contents.data for i in range(arrays.size)]
    return tuple(address or 0 for address in found)


def _stream(frame: _CallFrame) -> int:
    asked = _StreamGet(ctypes.sizeof(_StreamGet), None, frame.context, None)
    if frame.api.contents.stream_get(ctypes.addressof(asked)):
        raise RuntimeError("XLA has no stream for a call on a GPU")
    return asked.stream or 0


def _error(frame: _CallFrame, message: str) -> int:
    text = ctypes.c_char_p(message.encode())
    asked = _ErrorCreate(ctypes.sizeof(_ErrorCreate), None, text, _INTERNAL)
    made: int = frame.api.contents.error_create(ctypes.addressof(asked))
    return made


_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_Pointers = ctypes.POINTER(ctypes.c_void_p)


class _Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
    )


_BASE = (("struct_size", ctypes.c_size_t), ("extension", ctypes.POINTER(_Extension)))


class _Scalar(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int), ("value", ctypes.c_void_p))


class _Version(ctypes.Structure):
    _fields_ = (*_BASE, ("major", ctypes.c_int), ("minor", ctypes.c_int))


class _Buffer(ctypes.Structure):  # its rank and sizes follow
    _fields_ = (*_BASE, ("dtype", ctypes.c_int), ("data", ctypes.c_void_p))


class _Arrays(ctypes.Structure):
    _fields_ = (
        *_BASE,
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("values", _Pointers),
    )


class _Attributes(ctypes.Structure):
    _fields_ = (
        *_BASE,
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("values", _Pointers),
    )


class _Api(ctypes.Structure):  # more functions follow
    _fields_ = (
        *_BASE,
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        ("error_create", _Handler),
        ("error_get_message", ctypes.c_void_p),
        ("error_destroy", ctypes.c_void_p),
        ("handler_register", ctypes.c_void_p),
        ("stream_get", _Handler),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (
        *_BASE,
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _Arrays),
        ("results", _Arrays),
        ("attributes", _Attributes),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("version", _Version),
        ("traits", ctypes.c_uint32),
    )


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _StreamGet(ctypes.Structure):
    _fields_ = (*_BASE, ("context", ctypes.c_void_p), ("stream", ctypes.c_void_p))


class _ErrorCreate(ctypes.Structure):
    _fields_ = (*_BASE, ("message", ctypes.c_char_p), ("code", ctypes.c_int))
