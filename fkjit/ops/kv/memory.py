"""Arrays of a framework on a device, for objects of ours that keep some."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np

from fkjit.arguments import one_of, shown
from fkjit.errors import ArgumentTypeError, DeviceError
from fkjit.runtime.device import is_capturing
from fkjit.runtime.interop import numpy_dtype, torch_dtype

FRAMEWORKS = ("torch", "cupy", "numpy")
_DTYPES = {
    **{"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float8_e4m3fn": "fp8"},
    **{name: name for name in ("fp16", "bf16", "fp32", "fp8", "int8")},
}


def dtype_name(call: str, dtype: Any) -> str:
    """ "fp16", "bf16", "fp32", "fp8" or "int8" of a name, a torch dtype or a NumPy dtype."""
    try:
        text = np.dtype(dtype).name if isinstance(dtype, type) else str(dtype)
    except Exception:  # a class that is no number
        text = ""
    text = text.removeprefix("torch.")
    if text not in _DTYPES:
        raise ArgumentTypeError(
            f"{call}: dtype={shown(dtype)}; allowed: fp16, bf16, fp32, fp8 (e4m3) and int8"
        )
    return _DTYPES[text]


def _unusable(call: str, device: str, error: Exception) -> str:
    fix = "" if device.startswith("cpu") else "; without a GPU pass device='cpu'"
    reason = str(error).partition("\n")[0]  # of CUDA's errors the first line says which
    return f"{call}: device={device!r} cannot be used: {reason}{fix}"


class Memory:
    """Where a cache lives. `framework` None: torch if it was imported, else CuPy, NumPy on the CPU.

    `device` is "cpu", "cuda", "cuda:1", a number of a CUDA device, or a torch.device.
    """

    def __init__(self, call: str, framework: str | None, device: Any) -> None:
        text = f"cuda:{device}" if isinstance(device, int) else str(device)
        kind, _, number = text.partition(":")
        if kind not in ("cpu", "cuda") or not (number or "0").isdecimal():
            raise DeviceError(f'{call}: device={shown(device)}; allowed: "cpu", "cuda", "cuda:0" …')
        if framework is None:
            other = "cupy" if kind == "cuda" else "numpy"
            framework = "torch" if "torch" in sys.modules else other
        one_of(call, "framework", framework, FRAMEWORKS)
        if (framework, kind) in (("cupy", "cpu"), ("numpy", "cuda")):
            raise DeviceError(f"{call}: framework={framework!r} has no arrays on {text}")
        self.framework, self.on_gpu = framework, kind == "cuda"
        try:
            self._xp = import_module(framework)
        except ImportError as error:
            raise DeviceError(_unusable(call, text, error)) from error
        self.device = self._place(call, kind, number, text)

    def _place(self, call: str, kind: str, number: str, text: str) -> Any:
        """A torch.device, or the number of a CUDA device."""
        try:
            if self.framework == "torch":
                index = int(number or self._xp.cuda.current_device()) if self.on_gpu else None
                place = self._xp.device(kind, index)
                self._xp.empty(0, device=place)
                return place
            if self.framework == "cupy":
                return self._xp.cuda.Device(int(number) if number else None).id
        except (RuntimeError, AssertionError) as error:
            raise DeviceError(_unusable(call, text, error)) from error
        return None

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array of zeros."""
        if self.framework == "torch":
            return self._xp.zeros(shape, dtype=torch_dtype(dtype), device=self.device)
        if self.framework == "numpy":
            return np.zeros(shape, numpy_dtype(dtype))
        with self._xp.cuda.Device(self.device):
            return self._xp.zeros(shape, numpy_dtype(dtype))

    def upload(self, values: np.ndarray) -> Any:
        """A copy of a NumPy array, in the order of the caller's stream; nothing waits for it."""
        if self.framework == "torch":
            return self._xp.from_numpy(values.copy()).to(self.device, non_blocking=True)
        if self.framework == "numpy":
            return values.copy()
        with self._xp.cuda.Device(self.device):
            return self._xp.asarray(values)

    def scatter(self, target: Any, places: np.ndarray, values: np.ndarray) -> None:
        """target[places] = values, for different places of a flat int32 array."""
        if self.framework == "torch":
            parts = places.astype(np.int64), values.astype(np.int32)
            both = self.upload(np.concatenate([one.view(np.uint8) for one in parts]))
            at, given = both.split([one.nbytes for one in parts])
            target.index_copy_(0, at.view(self._xp.int64), given.view(self._xp.int32))
        elif self.framework == "numpy":
            target[places] = values
        else:
            pair = self.upload(np.stack([places, values]).astype(np.int64))
            with self._xp.cuda.Device(self.device):
                target[pair[0]] = pair[1].astype(target.dtype)

    def reinterpret(self, array: Any, dtype: str) -> Any:
        """The same bytes as another dtype; as they are where the framework has no such dtype."""
        if self.framework == "torch":
            return array.view(torch_dtype("float8_e4m3fn" if dtype == "fp8" else dtype))
        if dtype == "fp8" and self.framework == "cupy":
            return array
        if dtype == "fp8":
            import ml_dtypes

            return array.view(ml_dtypes.float8_e4m3fn)
        return array.view(numpy_dtype(dtype))

    def capturing(self) -> bool:
        """Whether the caller's stream is being captured into a CUDA graph."""
        if not self.on_gpu:
            return False
        if self.framework == "torch":
            return is_capturing(self._xp._C._cuda_getCurrentRawStream(self.device.index))
        return is_capturing(self._xp.cuda.get_current_stream(self.device).ptr)
