"""Measures cases on several GPUs, beside peers and the simulator's predictions.

    torchrun --nproc-per-node 2 -m bench.distributed.run --out two.jsonl
    python -m bench.distributed.run --ranks 2 --small    # gloo and the interpreter: does it run?
    python -m bench.distributed.run --ranks 2 --host     # ranks on one GPU (host.py): does it run?

A time is the slowest rank's of an iteration, from its own begin event to its end event behind a
barrier; the median of the iterations counts. Scaling: time of the whole work on one GPU over ranks
times the time (experts and products: of a rank's work without messages over the time).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fkjit.distributed.schedule import Timeline

from . import cases, host
from .cases import Case
from .timeline import draw
from .trace import hidden, traced

FIGURES = ("ms", "predicted_ms", "of_predicted", "tflops", "scaling", "hidden", "difference")
_WHOLE = ("ring", "decode")  # cases whose `alone` is the whole work
NAMES = {
    "ring8k": partial(cases.ring, 8192, backward=False),
    "ring8k-backward": partial(cases.ring, 8192, backward=True),
    "ring32k": partial(cases.ring, 32768, backward=False),
    "experts": partial(cases.experts, backward=False),
    "experts-backward": partial(cases.experts, backward=True),
    "column": partial(cases.products, kind="column"),
    "row": partial(cases.products, kind="row"),
    "decode": cases.decode,
}
PICTURED: list[tuple[str, Timeline]] = []  # of this rank
_SMALL = {
    "ring8k": partial(cases.ring, 16, backward=False),
    "ring8k-backward": partial(cases.ring, 16, backward=True),
    "ring32k": partial(cases.ring, 32, backward=False),
}


def seconds_of(call: Any, case: Case, iterations: int, device: Any) -> list[float]:
    """Of each iteration, the slowest rank's."""
    found = []
    for _ in range(iterations):
        for x in case.grads:
            x.grad = None
        dist.barrier()
        found.append(_timed(call, case, device))
    times = torch.tensor(found, device=device, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def _timed(call: Any, case: Case, device: Any) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        _run(call, case)
        return time.perf_counter() - begin
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    _run(call, case)
    marks[1].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1]) * 1e-3


def _run(call: Any, case: Case) -> Any:
    with torch.set_grad_enabled(bool(case.grads)):
        made = call()
    if case.grads:
        made.backward(torch.ones_like(made))
    return made


def measure(case: Case, given: argparse.Namespace, device: Any, end: float) -> list[dict[str, Any]]:
    """A line for each candidate, the work of one rank among them."""
    wanted, found = None, []
    for name, call in {**case.calls, "alone": case.alone}.items():
        line: dict[str, Any] = {
            "case": case.name,
            "candidate": name,
            "ranks": dist.get_world_size(),
        }
        found.append(line)
        if over(end, device):
            line["missing"] = "no time left"
            continue
        try:
            made = _run(call, case).detach()
            wanted = made if wanted is None else wanted
            if name in case.compared:
                scale = wanted.float().abs().max()
                line["difference"] = float((made.float() - wanted.float()).abs().max() / scale)
            for _ in range(given.warmup):
                _run(call, case)
            times = seconds_of(call, case, given.iterations, device)
            if given.picture is not None and name in case.predicted and device.type == "cuda":
                pictured = traced(partial(_run, call, case), dist.get_rank())
                line["hidden"] = hidden(pictured)
                PICTURED.append((f"{case.name}, {name}", pictured))
        except Exception as error:  # a peer that cannot is no reason to stop
            line["missing"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        line["ms"] = statistics.median(times) * 1e3
        line["min_ms"], line["tflops"] = min(times) * 1e3, case.flops / line["ms"] / 1e9
        if name in case.predicted:
            line["predicted_ms"] = case.predicted[name] * 1e3
            line["of_predicted"] = line["ms"] / line["predicted_ms"]
    return scaled(case, found)


def scaled(case: Case, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With scaling beside each time."""
    alone = found[-1].get("ms")
    share = dist.get_world_size() if case.name.startswith(_WHOLE) else 1
    for line in found[:-1]:
        if alone and "ms" in line:
            line["scaling"] = alone / share / line["ms"]
    return found


def over(end: float, device: Any) -> bool:
    """Whether any rank has no time left."""
    late = torch.tensor([float(time.monotonic() > end)], device=device)
    dist.all_reduce(late, dist.ReduceOp.MAX)
    return bool(late.item())


def work(given: argparse.Namespace) -> None:
    """What each rank does."""
    cuda = torch.cuda.is_available() and not given.small
    device = torch.device("cpu")
    if cuda and given.host:
        device = torch.device("cuda", 0)
        host.begin()
    elif cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
    end = time.monotonic() + given.seconds
    for name in given.cases.split(","):
        make = (_SMALL if given.small else {}).get(name, NAMES[name])
        with ExitStack() as stack:
            lines = measure(make(device=device, stack=stack, small=given.small), given, device, end)
        if dist.get_rank() == 0:
            show(lines, given.out)
        if cuda:
            torch.cuda.empty_cache()
    if PICTURED and dist.get_rank() == 0:
        given.picture.write_text(draw("Measured: kernels and messages of rank 0", PICTURED))
    dist.destroy_process_group()


def show(lines: list[dict[str, Any]], out: Path | None) -> None:
    for line in lines:
        figures = [f"{key} {line[key]:.4g}" for key in FIGURES if key in line]
        print(
            f"{line['case']} | {line['candidate']}:", *figures, line.get("missing", ""), flush=True
        )
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _spawned(rank: int, given: argparse.Namespace, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": given.ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    work(given)


def free_port() -> int:
    """Of this machine, for ranks to meet at."""
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(NAMES), help=",".join(NAMES))
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="then what is left is left out")
    parser.add_argument("--small", action="store_true", help="tiny arrays on gloo")
    parser.add_argument(
        "--host", action="store_true", help="all ranks on one GPU, messages by way of the host"
    )
    parser.add_argument("--ranks", type=int, default=0, help="start so many, without torchrun")
    parser.add_argument("--picture", type=Path, help="timelines of rank 0, as SVG")
    parser.add_argument("--out", type=Path, help="lines of JSON are added to it")
    given = parser.parse_args(arguments)
    if not given.ranks:
        work(given)
        return 0
    torch.multiprocessing.spawn(_spawned, (given, free_port()), given.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
