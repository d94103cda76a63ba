"""A training step with fkjit's kernels beside Hugging Face's own, in bf16.

    python -m bench.models.train [--config gpt2] [--batch 8] [--length 1024]
        [--candidates eager,sdpa,compile,patch,fkjit] [--curve 200] [--out FILE]

Of each candidate (bench/models/training.py): milliseconds of a step by CUDA events (the median of
10), tokens/s, and the most memory that PyTorch's allocator held, weights and optimizer included.
With --curve the losses of so many steps from the same weights and batches, and how far each curve
is from that of `sdpa`. --out keeps all as JSON lines.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fkjit.models import ModelConfig, named_configs

from .training import CANDIDATES, Training, apart, batches, curve

_WARM, _STEPS = 3, 10


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
    if candidate != "graph":  # whose memory is taken at the capture
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
    """Print the rows, then the curves' distances."""
    chosen = _parser().parse_args()
    config = ModelConfig.of(chosen.config)
    curves: dict[str, list[float]] = {}
    for name in chosen.candidates.split(","):
        given = batches(config.vocabulary, chosen.batch, chosen.length, "cuda")
        try:
            training = Training(name, chosen.config, torch.bfloat16, "cuda")
            if chosen.curve:
                curves[name] = curve(training, given, chosen.curve)
            row = measure(training, name, given)
        except torch.cuda.OutOfMemoryError:
            print(f"| {chosen.config} | {name}: out of memory |", flush=True)
            continue
        finally:
            training = None
            gc.collect()
            torch.cuda.empty_cache()
        print(line(chosen.config, chosen.length, row), flush=True)
        _keep(chosen.out, {"config": chosen.config, **row._asdict(), "curve": curves.get(name)})
    if "sdpa" in curves:
        for name, distance in apart(curves, "sdpa").items():
            print(f"{name}: loss {curves[name][-1]:.4f}, at most {distance:.2e} from sdpa's")


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
    parser.add_argument("--out", type=Path, help="JSON lines, appended")
    return parser


if __name__ == "__main__":
    main()
