"""`python -m tests.distributed.server`: forks ranks, as lines of JSON on stdin ask for them.

Kernels that most tests run are run here once, without autograd, whose threads no fork may inherit.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Client
from typing import Any

import torch
import torch.distributed as dist

import fkjit
import fkjit.ops.attention.autograd


def warm() -> None:
    q, k, v = (torch.ones(1, heads, 16, 32, dtype=torch.float16) for heads in (4, 2, 2))
    for given in ({"causal": True}, {}, {"window": (1, 0)}):
        o, lse = fkjit.attention(q, k, v, return_lse=True, **given)
    fkjit.attention_backward(o, q, k, v, o, lse)
    fkjit.merge_states(torch.stack([o, o]), torch.stack([lse, lse]))
    fkjit.attention_decode(q[:, :, 0].contiguous(), k, v, return_lse=True)
    sizes = ((9, 32), (2, 64, 32), (2, 32, 32))
    x, up, down = (torch.ones(size, dtype=torch.float16) for size in sizes)
    fkjit.moe_layer(x, torch.ones(9, 2), up, down, 1)
    groups = fkjit.moe_regroup(torch.zeros(9, 1, dtype=torch.int32), 2)
    fkjit.moe_combine(fkjit.moe_permute(x, groups), groups, torch.ones(9, 1))
    fkjit.moe_route(torch.ones(9, 4), 2)
    fkjit.linear(x, down[0])


def serve(rank: int, order: dict[str, Any]) -> None:
    """Run what comes through the pipe, until it closes."""
    pipe = Client(order["address"], "AF_UNIX")
    pipe.send(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{order['folder']}/store", rank=rank,
        world_size=order["size"], timeout=timedelta(seconds=order["seconds"]),
    )  # fmt: skip
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(import_module(module), name)(rank, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)


def main() -> None:
    torch.set_num_threads(1)
    warm()
    forked = []
    for line in sys.stdin:
        order = json.loads(line)
        for rank in range(order["size"]):
            pid = os.fork()
            if pid == 0:
                try:
                    serve(rank, order)
                finally:
                    os._exit(0)  # at once: the others may have gone
            forked.append(pid)
    for pid in forked:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
