"""What this GPU can do at best, measured in the same run: copying, and GEMMs of cuBLAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .device import Device
from .statistics import summary

_COPY_BYTES = 1 << 30  # of each of source and destination
_GEMM = {"bf16": 8192, "fp16": 8192, "fp32": 4096}  # M = N = K
_WARMUP, _REPEATS = 3, 20
_AHEAD = 100e-6  # seconds that the host has to launch in, as in method.py


def measure(device: Device, calls: dict[str, tuple[float, Callable[[], Any]]]) -> dict[str, float]:
    """{name: amount / second} of {name: (amount, call)}: medians, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_WARMUP + _REPEATS):
        for name, (_, call) in calls.items():
            begin, end = device.mark(), device.mark()
            device.delay(_AHEAD)
            begin.record()
            call()
            end.record()
            device.synchronize()
            if turn >= _WARMUP:
                times[name].append(device.between(begin, end) * 1e-3)
    return {name: amount / summary(times[name])["p50"] for name, (amount, _) in calls.items()}


def ceilings(device: Any) -> dict[str, Any]:
    """{"copy_gbs": GB/s read and written, "gemm_tflops": {dtype: TFLOP/s}} of a TorchDevice.

    On random numbers: matrix units draw less power, and clock higher, on zeros.
    """
    torch = device.torch
    source = torch.randint(0, 1 << 30, (_COPY_BYTES // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    calls = {"copy": (2.0 * _COPY_BYTES, lambda: target.copy_(source))}
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for name, size in _GEMM.items():
        a, b = (torch.randn(size, size, device="cuda").to(kinds[name]) for _ in range(2))
        out = torch.empty_like(a)
        calls[name] = (2.0 * size**3, lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
    found = measure(device, calls)
    device.release()
    return {
        "copy_gbs": found["copy"] / 1e9,
        "gemm_tflops": {name: found[name] / 1e12 for name in _GEMM},
    }


def rates(
    seconds: float, flops: float, moved: float, dtype: str | None, limits: dict[str, Any] | None
) -> dict[str, float]:
    """TFLOP/s, GB/s and their shares of the ceilings, for one call's time and counted work."""
    made: dict[str, float] = {}
    if flops:
        made["tflops"] = flops / seconds / 1e12
    if moved:
        made["gbs"] = moved / seconds / 1e9
    if limits:
        gemm = limits["gemm_tflops"].get(dtype)
        if flops and gemm:
            made["share_gemm"] = made["tflops"] / gemm
        if moved:
            made["share_copy"] = made["gbs"] / limits["copy_gbs"]
    return made
