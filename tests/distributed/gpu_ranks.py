"""`torchrun --nproc-per-node 2 -m tests.distributed.gpu_ranks`: this folder's checks on GPUs.

Values and gradients against float64, by NCCL and by symmetric memory; the same bits again; exits
with 1 and says which where one is off. `--out FILE` gets a line of JSON for each.

`python -m tests.distributed.gpu_ranks --host --pairs 4`: the same with pairs of ranks on one GPU,
each with a share of the checks, messages by way of the host (bench/distributed/host.py). CUDA
graphs are left out then: no message to the host can be captured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.distributed import host
from bench.distributed.run import free_port
from tests.distributed import kit
from tests.distributed.kit import draw
from tests.distributed.test_dist_layers import decoding, experts, products
from tests.distributed.test_ring_attention import compare

LIMIT = {"float16": 6e-3, "bfloat16": 5e-2}


def checks(size: int) -> list[tuple[str, Any]]:
    """(name, function of the rank that returns errors by name)."""
    found: list[tuple[str, Any]] = []
    for dtype in LIMIT:
        for said in (
            {"form": "ring", "causal": True}, {"form": "gather", "causal": True},
            {"form": "ulysses", "causal": True}, {"form": "ring", "layout": "contiguous"},
            {"form": "ring", "causal": True, "transport": "symmetric"},
            {"form": "ring", "causal": True, "window": (100, 0), "sinks": True},
        ):  # fmt: skip
            shape = (1, 8, 4, 128 * 2 * size + 16 * size, 128, 128, True)
            found.append((f"{said} {dtype}", _attention(shape, dtype, said)))
        found += [(f"graph of {name} {dtype}", _graph(name, dtype)) for name in ("ring", "experts")]
        for said in ({}, {"dispatch": "e4m3"}, {"max_rows": 450}):
            sizes = ((300, *[70] * (size - 1)), 4 * size, 256, 128, 3)
            found.append((f"experts {said} {dtype}", _call(experts, sizes, dtype, said)))
        for transport in ("nccl", "symmetric", "tiles"):
            for said in ({}, {"activation": "silu", "gate": True}):
                said = {**said, "transport": transport}
                rows = 1024 if transport == "tiles" else 136
                found.append(
                    (f"products {said} {dtype}", _call(products, (rows, 128, 192), dtype, said))
                )
        lengths = tuple((700 + 90 * rank, 33) for rank in range(size))
        for tokens in (1, 4):
            sizes = (lengths, 8, 2, tokens, 128, 128)
            found.append((f"decode {tokens} {dtype}", _call(decoding, sizes, dtype, {})))
    return found


def _attention(shape: Any, dtype: str, said: dict[str, Any]) -> Any:
    def check(rank: int) -> dict[str, float]:
        errors, once = compare(rank, 3, shape, dtype, said)
        _, again = compare(rank, 3, shape, dtype, said)
        return {**errors, "other bits": float(once != again)}

    return check


def _call(function: Any, sizes: Any, dtype: str, said: dict[str, Any]) -> Any:
    return lambda rank: function(rank, 3, sizes, dtype, said)


def _graph(name: str, dtype: str) -> Any:
    """Whether a replayed CUDA graph with new inputs gives what a call gives, to the bit."""
    import fkjit.distributed as fd

    def calls() -> tuple[Any, Any]:
        kind = getattr(torch, dtype)
        if name == "ring":
            x = draw(4, (1, 8, 256, 128), kind)
            return x, lambda: fd.ring_attention(x, x, x, causal=True, form="ring")
        x, logits = draw(4, (96, 256), kind), draw(5, (96, 8), torch.float32)
        here = 8 // dist.get_world_size()
        up, down = draw(6, (here, 256, 256), kind) / 16, draw(7, (here, 256, 128), kind) / 11
        return x, lambda: fd.moe_layer(x, logits, up, down, 2, max_rows=96)

    def check(rank: int) -> dict[str, float]:
        x, call = calls()
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = call()
        x.copy_(draw(9, tuple(x.shape), x.dtype))
        graph.replay()
        return {"other bits": float(not torch.equal(made, call()))}

    return check


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--host", action="store_true", help="ranks on one GPU")
    parser.add_argument("--pairs", type=int, default=1, help="of ranks, with --host")
    parser.add_argument("--only", default="", help="checks whose names have this")
    given = parser.parse_args()
    if given.host and "RANK" not in os.environ:
        return _pairs(given)
    device = torch.device("cuda", 0 if given.host else int(os.environ["LOCAL_RANK"]))
    kit.DEVICE[0] = "cuda"
    if given.host:
        host.begin()
    else:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    found = [c for c in checks(dist.get_world_size()) if given.only in c[0]]
    if given.host:
        share = int(os.environ["PAIR"])
        found = [c for c in found if "graph of" not in c[0]][share :: given.pairs]
    wrong = run(found, device, given.out)
    dist.destroy_process_group()
    return wrong > 0


def run(found: list[tuple[str, Any]], device: Any, out: Path | None) -> int:
    """How many are wrong."""
    rank, wrong = dist.get_rank(), 0
    for name, check in found:
        limit = LIMIT[name.rpartition(" ")[2]] * (16 if "e4m3" in name else 1)
        try:
            errors = check(rank)
            bad = torch.tensor([float(not max(errors.values()) < limit)], device=device)
        except Exception as error:
            errors, bad = {"raised": str(error)[:300]}, torch.ones(1, device=device)
        dist.all_reduce(bad)
        wrong += bool(bad.item())
        line = {"check": name, "rank": rank, "wrong": bool(bad.item()), "errors": errors}
        if rank == 0 or bad.item():
            print(json.dumps(line), flush=True)
        if out is not None and rank == 0:
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return wrong


def _pairs(given: argparse.Namespace) -> int:
    """Starts pairs of ranks; whether all were right."""
    command = [sys.executable, "-m", "tests.distributed.gpu_ranks", *sys.argv[1:]]
    started = []
    for pair in range(given.pairs):
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "PAIR": str(pair)}
        place["MASTER_PORT"] = str(free_port())
        for rank in range(2):
            ranked = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": "0"}
            started.append(subprocess.Popen(command, env=ranked))
    return int(any([process.wait() for process in started]))


if __name__ == "__main__":
    sys.exit(main())
