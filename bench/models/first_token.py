"""Seconds from the start of Python to a model's first token, part by part.

    FKJIT_REQUIRE_CACHED=1 python -m bench.models.first_token [--config llama-3.2-1b]

Run `fkjit warm --config llama-3.2-1b --batch 1` before it, or name a bundle in FKJIT_BUNDLE_PATH.
Random weights, a prompt of 512 tokens, one sequence.
"""

from __future__ import annotations

import time
from itertools import pairwise

_PARTS = [("", time.perf_counter())]


def _done(part: str) -> None:
    _PARTS.append((part, time.perf_counter()))


def main() -> None:
    """Print a line."""
    import argparse

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--config", default="llama-3.2-1b")

    import torch

    _done("import torch")
    from bench.models import parsed

    name = parsed(parser).config
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    _done("CUDA")
    from fkjit.models import Decoder, ModelConfig, random_weights

    config = ModelConfig.of(name)
    weights = random_weights(config, torch.bfloat16, "cuda")
    torch.cuda.synchronize()
    _done("import fkjit, weights")
    decoder = Decoder(config, weights, max_batch=1)
    _done("Decoder")
    decoder.submit(list(range(1, 513)), max_new_tokens=3)
    stream = decoder.stream()
    next(stream)
    _done("first token")
    list(stream)
    _done("a graph, two more")
    parts = [f"{part} {end - begin:.2f}" for (_, begin), (part, end) in pairwise(_PARTS)]
    print(f"{name}: {', '.join(parts)} s")


if __name__ == "__main__":
    main()
