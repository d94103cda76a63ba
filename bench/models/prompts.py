"""A prompt of 8,192 tokens through a whole model: fkjit beside PyTorch's kernels.

    python -m bench.models.prompts [--config llama-3.2-1b] [--batch 1,4] [--tokens 8192] [--compile]

Random weights, bf16; milliseconds until the logits behind the last token are there, by CUDA events,
the median of seven. `Decoder` and a patched model; transformers with scaled_dot_product_attention,
with --compile also under torch.compile; and the same layers written in plain PyTorch (one product
for q, k and v and one for gate and up, cuBLAS) as a CUDA graph. The last column is how far logits
are from transformers', relative to their norm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.models import parsed
from fkjit.models import Decoder, ModelConfig, named_configs, patch, unpatch
from fkjit.models.prefill import Piece

from .generate import built
from .sdpa_step import SdpaStep, captured

_TURNS = 7


class Row(NamedTuple):
    """milliseconds: of a pass. apart: of its logits."""

    name: str
    milliseconds: float
    apart: float


def decoded(decoder: Decoder, rows: np.ndarray) -> Any:
    """A Decoder's pass, with its bookkeeping."""
    cache = decoder.cache
    sequences = [cache.allocate() for _ in rows]
    cache.reserve(sequences, rows.shape[1])
    pieces = [Piece(one, 0, row) for one, row in zip(sequences, rows, strict=True)]
    stream, _ = decoder._prompts.fill(pieces)
    logits = decoder._network.logits(stream)
    for one in sequences:
        cache.free(one)
    return logits


def timed(run: Callable[[], Any]) -> float:
    """Milliseconds, by events."""
    for _ in range(2):
        run()
    times = []
    for _ in range(_TURNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times))


@torch.no_grad()
def measure(name: str, batch: int, length: int, compiles: bool) -> Iterator[Row]:
    """All of one shape."""
    model = built(name)
    config = ModelConfig.of(model.config)
    tokens = torch.randint(0, config.vocabulary, (batch, length), device="cuda")
    decoder = Decoder(model.config, model.state_dict(), max_batch=batch, max_length=length + 1)
    plain = SdpaStep(config, decoder.weights, batch, length)
    rows = tokens.cpu().numpy()

    def own(called: Any = model) -> Any:
        return called(input_ids=tokens, logits_to_keep=1, use_cache=False).logits[:, -1]

    exact = own().float()

    def row(title: str, run: Callable[[], Any], fast: Callable[[], Any] | None = None) -> Row:
        apart = float((run().float() - exact).norm() / exact.norm())
        return Row(title, timed(fast or run), apart)

    yield row("transformers, sdpa", own)
    if compiles:
        compiled = torch.compile(model)
        yield row("transformers, torch.compile", lambda: own(compiled))
    graph = captured(lambda: plain.prompt(tokens))
    yield row("PyTorch's kernels, a graph", lambda: plain.prompt(tokens), graph.replay)
    yield row("Decoder", lambda: decoded(decoder, rows))
    patch(model)
    yield row("patch", own)
    unpatch(model)


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--config", default="llama-3.2-1b", choices=named_configs())
    parser.add_argument("--batch", default="1,4", help="sequences, several with commas")
    parser.add_argument("--tokens", type=int, default=8192, help="of all sequences together")
    parser.add_argument("--compile", action="store_true", help="torch.compile as well")
    chosen = parsed(parser)
    for batch in map(int, chosen.batch.split(",")):
        length = chosen.tokens // batch
        for row in measure(chosen.config, batch, length, chosen.compile):
            print(
                f"| {chosen.config} | {batch} x {length} | {row.name} | {row.milliseconds:.1f} | "
                f"{row.apart:.1e} |", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
