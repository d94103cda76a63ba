"""What a GPU did during a call, as a timeline of the simulator's kind: kernels beside messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fkjit.distributed.schedule import Task, Timeline

_MESSAGES = ("nccl", "memcpy ptop", "memcpy p2p", "symm_mem", "barrier")
_DEVICE = "CUDA"


def traced(call: Callable[[], Any], rank: int) -> Timeline:
    """Of one call on this rank's GPU, by PyTorch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return timeline(found.events(), rank)


def timeline(events: Iterable[Any], rank: int) -> Timeline:
    """Events of a profile as tasks, from the first one's begin on."""
    kernels = [e for e in events if str(e.device_type).endswith(_DEVICE)]
    kernels.sort(key=lambda e: e.time_range.start)
    start = kernels[0].time_range.start if kernels else 0
    made = Timeline()
    for e in kernels:
        lane = "link" if any(word in e.name.lower() for word in _MESSAGES) else "compute"
        begin, end = ((at - start) * 1e-6 for at in (e.time_range.start, e.time_range.end))
        made.tasks.append(Task(rank, lane, e.name, begin, end))
    return made


def hidden(line: Timeline) -> float:
    """The share of messages' time during which the same rank computes; 1.0 without messages."""
    total = covered = 0.0
    compute = [task for task in line.tasks if task.lane == "compute"]
    for task in line.tasks:
        if task.lane == "compute":
            continue
        total += task.end - task.begin
        at = task.begin
        for other in compute:  # in order of their begin
            covered += max(min(other.end, task.end) - max(other.begin, at), 0.0)
            at = max(at, min(other.end, task.end))
    return covered / total if total else 1.0
