"""`generate` of Hugging Face models, patched and not: new tokens a second, with prompts' time.

    python -m bench.models.generate [--config llama-3.2-1b,gpt2] [--batch 1,16] [--compile]

Random weights, bf16, prompts of 512 tokens, 128 new ones, greedy unless a row says otherwise; the
best of a few calls. --compile: with transformers' static cache under torch.compile, too, which
compiles for a minute. Patched rows come first, and `unpatch` before the others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers

from fkjit.models import named_configs, patch, unpatch
from fkjit.models.config import fields_of

PROMPT, NEW, TURNS = 512, 128, 2
_STATIC = {"cache_implementation": "static"}
_DRAWN = {"do_sample": True, "top_k": 50, "top_p": 0.95, "temperature": 0.8}
PATCHED: dict[str, dict[str, Any]] = {
    "patched": {}, "patched, static cache": _STATIC,
    "patched, a repetition penalty": {"repetition_penalty": 1.01},
    "patched, top-k and top-p": _DRAWN,
}  # fmt: skip


class Row(NamedTuple):
    """new: tokens per second."""

    batch: int
    name: str
    new: float


def built(name: str, device: str = "cuda") -> Any:
    """A model of random weights that never stops by itself."""
    fields = {**fields_of(name), "pad_token_id": 0, "eos_token_id": None}
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made.eval()


def rate(model: Any, batch: int, **said: Any) -> float:
    """New tokens per second; the first call, which compiles, is not counted."""
    tokens = torch.randint(1, model.config.vocab_size, (batch, PROMPT), device=model.device)
    asked = {
        "input_ids": tokens, "attention_mask": torch.ones_like(tokens), "do_sample": False, **said
    }  # fmt: skip
    model.generate(**asked, max_new_tokens=NEW)
    times = []
    for _ in range(TURNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(**asked, max_new_tokens=NEW)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return batch * NEW / min(times)


def measure(name: str, batches: list[int], compiles: bool) -> Iterator[Row]:
    """Patched, then as transformers has it."""
    model = built(name)
    for batch in batches:
        patch(model)
        for called, said in PATCHED.items():
            yield Row(batch, called, rate(model, batch, **said))
        unpatch(model)
        yield Row(batch, "transformers, dynamic cache", rate(model, batch))
        if compiles:
            yield Row(batch, "transformers, static cache", rate(model, batch, **_STATIC))


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--config", default="llama-3.2-1b", help=", ".join(named_configs()))
    parser.add_argument("--batch", default="1,16", help="sequences, several with commas")
    parser.add_argument("--compile", action="store_true", help="torch.compile as well")
    chosen = parser.parse_args()
    for name in chosen.config.split(","):
        for row in measure(name, list(map(int, chosen.batch.split(","))), chosen.compile):
            print(f"| {name} | {row.batch} | {row.name} | {row.new:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
