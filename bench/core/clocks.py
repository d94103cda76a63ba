"""Clocks, power, temperature and throttle reasons, through nvidia-ml-py where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from fkjit.jit.toolchain import cupy_cuda

# Bits of nvmlDeviceGetCurrentClocksEventReasons; idle (1) says nothing of a measurement.
_REASONS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal, software",
    0x40: "thermal, hardware",
    0x80: "power brake",
    0x100: "display clocks",
}


class Clocks:
    """One GPU's readings. `missing` says why there are none."""

    def __init__(self, index: int) -> None:
        self.missing: str | None = None
        try:
            self._nvml = nvml = import_module("pynvml")
            nvml.nvmlInit()
            bus = cupy_cuda().runtime.deviceGetPCIBusId(index)
            self._gpu = nvml.nvmlDeviceGetHandleByPciBusId(bus.encode())
        except Exception as error:  # no package, no library, a driver that refuses: all the same
            self.missing = f"{type(error).__name__}: {error}"

    def read(self) -> dict[str, Any]:
        """sm_mhz, memory_mhz, watts, celsius, throttle; without those that the driver refuses."""
        if self.missing:
            return {}
        nvml, gpu = self._nvml, self._gpu
        asks: dict[str, Callable[[], Any]] = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
            "watts": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "celsius": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "throttle": lambda: reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
        }
        found = {}
        for name, ask in asks.items():
            try:
                found[name] = ask()
            except Exception:  # "not supported" on some GPUs, "no permission" in some containers
                continue
        return found


def reasons(bits: int) -> list[str]:
    """What keeps the clocks down, by name."""
    return [name for bit, name in _REASONS.items() if bits & bit]


def over(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several readings as one: [least, greatest] of each number, every throttle reason seen."""
    made: dict[str, Any] = {}
    for name in ("sm_mhz", "memory_mhz", "watts", "celsius"):
        values = [state[name] for state in states if name in state]
        if values:
            made[name] = [min(values), max(values)]
    if any("throttle" in state for state in states):
        made["throttle"] = sorted({why for state in states for why in state.get("throttle", ())})
    return made
