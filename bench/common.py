"""Timing, and what a result has to say about where it was measured."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """GPU, driver, versions and commit: what a figure means nothing without."""
    import cupy

    from fkjit.toolchain import dotted, driver_cuda_version, nvrtc_info

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    versions = {}
    for name in ("torch", "cupy-cuda13x", "cupy-cuda12x", "triton", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    driver = driver_cuda_version()
    return {
        "gpu": properties["name"].decode(),
        "driver_cuda": dotted(driver) if driver else None,
        "nvrtc": dotted(nvrtc_info().version),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str | None:
    here = Path(__file__).parent
    found = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return found.stdout.strip() or None


def interleaved(
    candidates: Mapping[str, Callable[[], Any]], rounds: int = 5, repeats: int = 20
) -> dict[str, list[float]]:
    """GPU milliseconds of each candidate, `rounds * repeats` of each, taken in turns.

    Turns, so that clocks and temperature fall on all alike; every launch has its own pair of
    events. Each candidate is warmed up first.
    """
    import torch

    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        for _ in range(3):
            run()
    for _ in range(rounds):
        for name, run in candidates.items():
            events = [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                for _ in range(repeats)
            ]
            for begin, end in events:
                begin.record()
                run()
                end.record()
            torch.cuda.synchronize()
            times[name] += [begin.elapsed_time(end) for begin, end in events]
    return times


def host_microseconds(run: Callable[[], Any], calls: int = 300, rounds: int = 15) -> float:
    """Median host time of one call, the GPU kept from ever being waited for."""
    import torch

    for _ in range(50):
        run()
    torch.cuda.synchronize()
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - begin) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(found)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """`--out FILE` for JSON lines; each benchmark adds its own."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    made.add_argument("--out", type=Path, help="append the results to this file as JSON lines")
    return made


def write(out: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a row, each with the environment."""
    if out is None:
        return
    where = environment()
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        for row in rows:
            file.write(json.dumps({**row, "environment": where}) + "\n")


def progress(text: str) -> None:
    """What is going on, on stderr."""
    print(text, file=sys.stderr, flush=True)
