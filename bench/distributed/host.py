"""Ranks that share one GPU: messages of GPU tensors go through the host, by gloo.

NCCL refuses two ranks on one device. With this, everything else of a run on several GPUs can be
tried on one: kernels, streams, shapes, who sends what to whom, symmetric memory. Times of it say
nothing about several GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fkjit.ops.gemm import flagged

_SPARE = 16  # SMs for copies inside the GPU, which may want some while a product waits for them
_GATHERS = ("all_gather_into_tensor", "all_gather_single")  # what PyTorch calls it, and called it


class Staged:
    """A message of host tensors; behind `wait`, `deliver` has put it where it belongs."""

    def __init__(self, work: Any, deliver: Callable[[], None] | None = None, *held: Any) -> None:
        self.work, self.deliver, self.held = work, deliver, held

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self, *timeout: Any) -> bool:
        self.work.wait(*timeout)
        if self.deliver is not None:
            self.deliver()
            self.deliver, self.held = None, ()
        return True


def begin() -> None:
    """A gloo group of the ranks that the environment names, all on GPU 0."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    flagged.SPARE[0] = _SPARE
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    through_host()


def through_host() -> None:
    """From now on functions of torch.distributed that fkjit and its bench call."""
    dist.batch_isend_irecv = _between_two(dist.batch_isend_irecv)
    for name in (*_GATHERS, "all_to_all_single", "reduce_scatter_tensor"):
        if hasattr(dist, name):
            setattr(dist, name, _collective(getattr(dist, name)))


def _between_two(send: Any) -> Any:
    """Of `batch_isend_irecv`."""

    def staged(messages: list[Any]) -> list[Any]:
        hosts = [m.tensor.to("cpu", copy=True) for m in messages]  # waits for what made it
        ops = [
            dist.P2POp(m.op, host, m.peer, m.group, m.tag)
            for m, host in zip(messages, hosts, strict=True)
        ]
        works = send(ops)
        return [
            Staged(work, _copy(m.tensor, host) if m.op is dist.irecv else None, host)
            for work, m, host in zip(works, messages, hosts, strict=True)
        ]

    return staged


def _collective(call: Any) -> Any:
    """Of a function of (result, given, …)."""

    def staged(result: Any, given: Any, *more: Any, async_op: bool = False, **named: Any) -> Any:
        made, sent = torch.empty(result.shape, dtype=result.dtype), given.to("cpu")
        work = call(made, sent, *more, async_op=True, **named)
        pending = Staged(work, _copy(result, made), made, sent)
        if async_op:
            return pending
        return pending.wait() and None

    return staged


def _copy(into: Any, source: Any) -> Callable[[], None]:
    return lambda: into.copy_(source)
