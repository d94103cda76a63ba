"""Decoding with whole models: `fkjit.models.Decoder` beside a CUDA graph of PyTorch's kernels.

    python -m bench.models.decode [--config llama-3.2-1b] [--batch 1,16,64] [--plan measured]
                                  [--weights int4_group] [--head int4_group]

Random weights, prompts of 512 tokens, 128 new ones, bf16, greedy. Of each batch: tokens/s of
prompts and of new tokens through `Decoder.stream`, and microseconds of a step's graph by CUDA
events (the median of 30 replays, a GPU that waits between them), both candidates in turns.
PyTorch's weights stay bf16. A first generation captures graphs and is not counted. New tokens are
timed from where the last prompt's first token has been read: of several chunks of prompts, steps
between these are the prompts' time, and the last steps have fewer sequences.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from bench.models import parsed
from fkjit.models import Decoder, ModelConfig, StepPlan, named_configs, random_weights
from fkjit.models.weights import Weights

from .sdpa_step import SdpaStep, captured

PROMPT, NEW = 512, 128
PLANS: dict[str, StepPlan | str] = {
    "measured": "measured", "fused": StepPlan(fused=True), "linear": StepPlan(),
}  # fmt: skip
_REPLAYS, _TURNS = 30, 2


class Row(NamedTuple):
    """Tokens per second of prompts and of new tokens; microseconds of a step, and of PyTorch's."""

    batch: int
    prefill: float
    decode: float
    step: float
    peer: float


def measure(
    config: ModelConfig, weights: Weights, batch: int, plan: StepPlan | str | None = None,
    quantize: str | None = None, head: str | None = None,
) -> Row:  # fmt: skip
    """One batch; the first generation, which compiles, is not counted."""
    decoder = Decoder(
        config, weights, max_batch=batch, max_length=PROMPT + NEW, plan=plan, quantize=quantize,
        quantize_head=head,
    )  # fmt: skip
    rates = [generated(decoder, batch) for _ in range(_TURNS + 1)][1:]
    peer = SdpaStep(config, weights, batch, PROMPT + NEW)
    peer.position.fill_(PROMPT + NEW // 2)
    step, other = halfway(decoder, batch), captured(peer).replay
    times = [(replayed(step), replayed(other)) for _ in range(_TURNS)]
    prefill, decode = (max(found) for found in zip(*rates, strict=True))
    return Row(batch, prefill, decode, *(min(found) for found in zip(*times, strict=True)))


def submit(decoder: Decoder, batch: int) -> None:
    """Prompts of random tokens."""
    made = np.random.default_rng(1)
    for _ in range(batch):
        prompt = made.integers(decoder.config.vocabulary, size=PROMPT).tolist()
        decoder.submit(prompt, max_new_tokens=NEW)


def generated(decoder: Decoder, batch: int) -> tuple[float, float]:
    """Tokens per second of prompts and of new tokens."""
    submit(decoder, batch)
    torch.cuda.synchronize()
    times, done, firsts = [time.perf_counter()], 0, set()
    while len(firsts) < batch:
        found = decoder.advance()
        firsts |= {token.request for token in found}
        done += len(found)
    times.append(time.perf_counter())
    rest = sum(1 for _ in decoder.stream())
    times.append(time.perf_counter())
    return batch * PROMPT / (times[1] - times[0]), rest / (times[2] - times[1])


def halfway(decoder: Decoder, batch: int) -> Callable[[], None]:
    """A step with half of the new tokens in the cache, which keeps its positions."""
    submit(decoder, batch)
    for _ in range(-(-batch * PROMPT // decoder.chunk) + NEW // 2):
        decoder.advance()
    decoder._slots.state.active.zero_()
    return decoder._steps.graph(1 << (batch - 1).bit_length(), "greedy").replay


def replayed(run: Callable[[], None]) -> float:
    """Microseconds, by events."""
    for _ in range(3):
        run()
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(times))


def line(name: str, row: Row) -> str:
    """A row of the table in docs/MODELS.md."""
    other = row.batch / row.peer * 1e6
    return (
        f"| {name} | {row.batch} | {row.prefill:,.0f} | {row.decode:,.0f} | {row.step:.0f} | "
        f"{row.peer:.0f} | {other:,.0f} |"
    )


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--config", default="llama-3.2-1b", choices=named_configs())
    parser.add_argument("--batch", default="1,16,64", help="sequences, several with commas")
    parser.add_argument("--plan", choices=tuple(PLANS), help="of a step's kernels")
    parser.add_argument("--weights", help="a scheme of fkjit.quantize, for ours")
    parser.add_argument("--head", help="the same for the head alone")
    chosen = parsed(parser)
    config = ModelConfig.of(chosen.config)
    weights = random_weights(config, torch.bfloat16, "cuda")
    for batch in map(int, chosen.batch.split(",")):
        plan = PLANS.get(chosen.plan)
        row = measure(config, weights, batch, plan, chosen.weights, chosen.head)
        print(line(chosen.config, row), flush=True)


if __name__ == "__main__":
    main()
