"""What GPUs and driver there are. Asks only; nothing is allocated and nothing raises."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fkjit.jit.toolchain import cupy_cuda


@dataclass(frozen=True)
class Gpu:
    """One CUDA device. `memory` in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    memory: int


def gpus() -> tuple[list[Gpu], str | None]:
    """Every CUDA device of this machine; and why there is none, if that is so."""
    try:
        runtime = cupy_cuda().runtime
        count = runtime.getDeviceCount()
        return [_gpu(runtime, index) for index in range(count)], None if count else "no CUDA device"
    except Exception as error:  # no CuPy, no driver, no device: each says so itself
        return [], str(error).strip().splitlines()[0] if str(error).strip() else repr(error)


def _gpu(runtime: object, index: int) -> Gpu:
    found = runtime.getDeviceProperties(index)  # type: ignore[attr-defined]
    name = found["name"]
    return Gpu(
        index=index,
        name=name.decode() if isinstance(name, bytes) else str(name),
        capability=(found["major"], found["minor"]),
        memory=found["totalGlobalMem"],
    )


def driver_version() -> str | None:
    """The NVIDIA kernel driver's version, "580.95.05"; None without one."""
    try:
        text = Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None
    return text or None
