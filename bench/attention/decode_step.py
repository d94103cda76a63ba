"""A whole decoding step, eager and in a CUDA graph: what launching it costs.

    python -m bench.attention.decode_step [--steps 64] [--out FILE]

The model is decode_model.py's. Of each case: microseconds of host time a step (issuing it, the GPU
never waited for), and of elapsed time a step (CUDA events around eight of them). Logits of the
captured step are compared with eager ones before anything is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.environment import environment
from ..core.statistics import summary
from ..core.store import SCHEMA, Writer
from .decode_model import Decoder, Size, weights

SIZE = Size(1024, 16, 4, 64, 2816, 8, 32_000)
CASES = ((1, 128), (1, 4096), (16, 1024), (64, 1024))  # sequences, tokens of their prompts
_TURN = 8  # steps between two waits for the GPU: fewer launches than the driver queues


class Captured:
    """A decoder's step as a CUDA graph. `logits` are the step's, overwritten by the next one."""

    def __init__(self, decoder: Decoder) -> None:
        """A first step without sequences compiles and loads every kernel, and writes nothing; it
        also makes what cuBLAS keeps for a stream. Then the step is captured, which runs nothing."""
        rows = decoder.rows.clone()
        decoder.rows.fill_(-1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            decoder.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = decoder.step()
        decoder.rows.copy_(rows)

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.logits


def advance(decoder: Decoder, batch: Sequence[int], step: Callable[[], Any]) -> Any:
    """One token of each sequence: pages where they are full, the step, and the count."""
    decoder.cache.reserve(batch, 1)
    logits = step()
    decoder.cache.advance(batch, 1)
    return logits


def started(sequences: int, length: int, steps: int, kept: Any) -> tuple[Decoder, list[int]]:
    """A decoder whose sequences have prompts of `length` random tokens, and room for `steps`."""
    pages = sequences * -(-(length + steps) // 16) + 1
    decoder = Decoder(SIZE, kept, sequences, pages)
    made = torch.Generator().manual_seed(length)
    prompts = torch.randint(SIZE.vocabulary, (sequences, length), generator=made)
    batch = decoder.prefill(prompts.tolist())
    decoder.rows.copy_(decoder.cache.rows(batch))
    decoder.tokens.copy_(prompts[:, 0])
    return decoder, batch


def timed(decoder: Decoder, batch: list[int], step: Callable[[], Any], turns: int) -> Any:
    """Host and elapsed milliseconds of a step, over so many turns."""
    found: dict[str, list[float]] = {"host": [], "elapsed": []}
    for _ in range(turns + 1):  # the first one is not counted
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        start = time.perf_counter()
        for _ in range(_TURN):
            advance(decoder, batch, step)
        found["host"].append((time.perf_counter() - start) * 1e3 / _TURN)
        end.record()
        torch.cuda.synchronize()
        found["elapsed"].append(begin.elapsed_time(end) / _TURN)
    return {name: summary(times[1:]) for name, times in found.items()}


def measure(sequences: int, length: int, steps: int, kept: Any) -> list[dict[str, Any]]:
    """A cell of each kind; `apart` is how far its logits are from eager ones, at most."""
    kinds = ("eager", "graph")
    turns = max(steps // _TURN, 1)
    made = {kind: started(sequences, length, (turns + 2) * _TURN, kept) for kind in kinds}
    step: dict[str, Callable[[], Any]] = {}
    for kind, (decoder, _) in made.items():
        step[kind] = decoder.step if kind == "eager" else Captured(decoder)
    apart = dict.fromkeys(kinds, 0.0)
    for _ in range(3):
        logits = {kind: advance(*made[kind], step[kind]).float() for kind in kinds}
        for kind, (decoder, _) in made.items():
            off = (logits[kind] - logits["eager"]).abs().max()
            apart[kind] = max(apart[kind], float(off))
            decoder.tokens.copy_(logits["eager"].argmax(-1))
    case = {"record": "cell", "op": "decode_step", "case": f"bf16 B{sequences} S{length}"}
    return [
        {**case, "candidate": kind, "kind": "ours", "apart": apart[kind],
         **timed(*made[kind], step[kind], turns)}
        for kind in kinds
    ]  # fmt: skip


def line(eager: dict[str, Any], graph: dict[str, Any]) -> str:
    """For people."""

    def shown(cell: dict[str, Any]) -> str:
        elapsed, host = (cell[name]["p50"] * 1e3 for name in ("elapsed", "host"))
        return f"{cell['candidate']} {elapsed:.0f} us a step (host {host:.0f})"

    faster = eager["elapsed"]["p50"] / graph["elapsed"]["p50"]
    return (
        f"{eager['case']}: {shown(eager)}, {shown(graph)}: {faster:.2f} times as fast; logits "
        f"apart by {graph['apart']:.2g}"
    )


def main() -> None:
    """Measure the cases and print them; with --out also as result lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=64, help="timed steps of each kind")
    parser.add_argument("--out", type=Path, help="a file of result lines")
    chosen = parser.parse_args()
    writer = chosen.out and Writer(chosen.out)
    if writer:
        header = {"record": "run", "schema": SCHEMA, **environment()}
        writer.write({**header, "command": "bench.attention.decode_step"})
    kept = weights(SIZE, torch.bfloat16, "cuda")
    for case in CASES:
        cells = measure(*case, chosen.steps, kept)
        print(line(*cells), flush=True)
        for cell in cells if writer else ():
            writer.write(cell)


if __name__ == "__main__":
    main()
