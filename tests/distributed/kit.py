"""Ranks on gloo: processes that stay for a whole file and run functions of its tests.

They are forked from a server that has imported PyTorch and run the kernels once (`server.py`), so
that a rank begins with them compiled and decoded, whatever the tests before it have done to this
process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.connection import Listener
from typing import Any

import numpy as np

_LIMIT = 600.0  # seconds that a test waits for a rank


@lru_cache(maxsize=1)
def _server() -> subprocess.Popen[str]:
    """It ends when its stdin closes: with this process."""
    command = [sys.executable, "-m", "tests.distributed.server"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True)


class Ranks:
    """`size` processes of one gloo group, whose time-out is `seconds`."""

    def __init__(self, size: int, seconds: float = 300.0) -> None:
        self.size, self.folder = size, tempfile.mkdtemp(prefix="ranks-")
        address = os.path.join(self.folder, "socket")
        with Listener(address, "AF_UNIX", backlog=size) as listener:
            order = {"size": size, "seconds": seconds, "folder": self.folder, "address": address}
            pipe = _server().stdin
            assert pipe is not None
            pipe.write(json.dumps(order) + "\n")
            pipe.flush()
            came = [listener.accept() for _ in range(size)]
        self.pipes = [pipe for _, pipe in sorted((pipe.recv(), pipe) for pipe in came)]

    def run(self, function: Callable[..., Any], *args: Any, ranks: Any = None) -> list[Any]:
        """What function(rank, *args) returns on each; an exception of one is raised here, with its
        traceback. The function has a name that its module has."""
        which = range(self.size) if ranks is None else ranks
        module = "tests.distributed." + function.__module__.rpartition(".")[2]
        for rank in which:
            self.pipes[rank].send((module, function.__name__, args))
        found = []
        for rank in which:
            assert self.pipes[rank].poll(_LIMIT), f"rank {rank} says nothing"
            done, result = self.pipes[rank].recv()
            assert done, f"rank {rank}:\n{result}"
            found.append(result)
        return found

    def close(self) -> None:
        for pipe in self.pipes:  # which ends their processes
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def ranks(size: int, **options: Any) -> Iterator[Ranks]:
    made = Ranks(size, **options)
    try:
        yield made
    finally:
        made.close()


# ------------------------------------------------------------------ numbers

DEVICE = ["cpu"]  # of what is drawn; gpu_ranks.py writes another one


def draw(seed: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """The same on every rank, on its device."""
    import torch

    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return found.to(DEVICE[0], dtype)


def error(found: Any, wanted: Any, every: Any = None) -> float:
    """The largest, of the largest number of `wanted` (of all ranks': `every`)."""
    assert found.shape == wanted.shape and found.isfinite().all()
    largest = (wanted if every is None else every).abs().max().clamp(min=1e-30)
    return float((found.double() - wanted).abs().max() / largest)


def visible(tokens: int, causal: bool, window: Any = None) -> np.ndarray:
    i, j = np.mgrid[0:tokens, 0:tokens]
    left, right = window or (None, None)
    found = j <= i if causal else np.ones((tokens, tokens), bool)
    found = found if left is None else found & (j >= i - left)
    return found if right is None else found & (j <= i + right)


def whole_attention(
    q: Any, k: Any, v: Any, seen: np.ndarray, sinks: Any = None, softcap: float = 0.0
) -> Any:
    """(o, lse) of [H, S, D] torch tensors in float64, with a graph if they have one."""
    import torch

    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    s = q @ k.mT / q.shape[-1] ** 0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(~torch.from_numpy(seen).to(s.device), float("-inf"))
    every = s if sinks is None else torch.cat([s, sinks.view(-1, 1, 1).expand(*s.shape[:2], 1)], -1)
    lse = every.logsumexp(-1)
    return (s - lse.unsqueeze(-1)).exp() @ v, lse
