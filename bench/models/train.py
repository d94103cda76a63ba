"""A training step with fkjit's kernels beside Hugging Face's own, in bf16.

    python -m bench.models.train [--config gpt2] [--batch 8] [--length 1024]
        [--candidates graph,fkjit,compile,sdpa,eager] [--curve 200] [--rate 3e-4] [--out FILE]

Of each candidate (bench/models/training.py): milliseconds of a step by CUDA events (the median of
10), tokens/s, and the most memory that PyTorch's allocator held, weights and optimizer included.
With --curve, in place of that, the losses of so many steps from the same weights and batches, and
how far each curve is from that of `sdpa`. --out keeps all as JSON lines.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.models import parsed
from fkjit.models import ModelConfig, named_configs

from .training import CANDIDATES, RATE, Training, apart, batches, curve

_WARM, _STEPS = 6, 10


class Row(NamedTuple):
    """milliseconds: of a step. memory: GiB."""

    candidate: str
    tokens: int
    milliseconds: float
    memory: float


def measure(training: Training, candidate: str, given: Iterator[Any]) -> Row:
    """Steps one after the other; the first ones, which compile, are not counted."""
    tokens = next(given)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(_WARM):
        training.step(tokens)
    torch.cuda.synchronize()
    if not candidate.endswith("graph"):  # whose memory is taken at the capture
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(_STEPS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        training.step(tokens)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    memory = torch.cuda.max_memory_allocated() / 2**30
    return Row(candidate, tokens.numel(), float(np.median(times)), memory)


def line(name: str, length: int, row: Row) -> str:
    """A row of the table in docs/MODELS.md."""
    rate = row.tokens / row.milliseconds * 1e3
    return (
        f"| {name} | {row.tokens // length} x {length} | {row.candidate} | "
        f"{row.milliseconds:.1f} | {rate:,.0f} | {row.memory:.1f} |"
    )


def main() -> None:
    """Print the rows, or the curves and their distances."""
    chosen = parsed(_parser())
    curves: dict[str, list[float]] = {}
    for name in chosen.candidates.split(","):
        try:
            record = _measured(chosen, name)
        except Exception as error:  # of a peer, whose other candidates are to go on
            print(f"| {chosen.config} | {name}: {type(error).__name__}: {error} |", flush=True)
            continue
        finally:
            gc.collect()
            torch.compiler.reset()
            torch.cuda.empty_cache()
        _keep(chosen.out, record)
        if chosen.curve:
            curves[name] = record["curve"]
            _compare(curves, name)


def _measured(chosen: argparse.Namespace, name: str) -> dict[str, Any]:
    """A record of one candidate, printed."""
    vocabulary = ModelConfig.of(chosen.config).vocabulary
    given = batches(vocabulary, chosen.batch, chosen.length, "cuda")
    begin = time.perf_counter()
    training = Training(name, chosen.config, torch.bfloat16, "cuda", chosen.rate)
    said = {"config": chosen.config, "batch": chosen.batch, "length": chosen.length,
            "rate": chosen.rate, "device": torch.cuda.get_device_name(),
            "candidate": name}  # fmt: skip
    if chosen.curve:
        losses = curve(
            training, given, chosen.curve,
            lambda step, loss: print(f"{chosen.config} {name} {step}: {loss:.4f}", flush=True),
        )  # fmt: skip
        return {**said, "curve": losses}
    row = measure(training, name, given)
    seconds = time.perf_counter() - begin
    print(line(chosen.config, chosen.length, row), f"{seconds:.0f} s", flush=True)
    return {**said, **row._asdict()}


def _compare(curves: dict[str, list[float]], name: str) -> None:
    """Print how far the newest curve is from `sdpa`, or all are as soon as that is there."""
    if "sdpa" not in curves:
        return
    found = apart(curves, "sdpa")
    for one in curves if name == "sdpa" else (name,):
        print(
            f"{one}: loss {curves[one][-1]:.4f}, from sdpa's {found[one].most:.2e} at most, "
            f"{found[one].mean:.2e} in the mean", flush=True,
        )  # fmt: skip


def _keep(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--config", default="gpt2", choices=named_configs())
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each")
    parser.add_argument("--candidates", default=",".join(CANDIDATES), help="with commas")
    parser.add_argument("--curve", type=int, default=0, help="steps of the loss curves")
    parser.add_argument("--rate", type=float, default=RATE, help="of learning, after a warm-up")
    parser.add_argument("--out", type=Path, help="JSON lines, appended")
    return parser


if __name__ == "__main__":
    main()
