"""`generate` of Hugging Face models, patched and not: prompts' time and new tokens a second.

    python -m bench.models.generate [--config llama-3.2-1b,gpt2] [--batch 1,16]
        [--shapes 512+128,32+512,8192+128] [--peers dynamic,hand,static] [--draws] [--out FILE]

Random weights, bf16, greedy unless a row says otherwise; the best of two calls. A prompt's time is
that of a call for one new token, the median of nine after three (of a patched model the second one
captures a graph); what a call for all of them takes longer is the decoding. The host's part of a
prompt is until such a call has returned: a patched one waits for its tokens' way to the host alone.
--draws: with a repetition penalty and with top-k and top-p, too. Patched rows come first, and
`unpatch` before those of peers: transformers ("dynamic"), with a static cache and torch.compile,
which compiles for a minute ("static"), and what one would write by hand: the same layers in plain
PyTorch (cuBLAS, scaled_dot_product_attention), prompt and step each a CUDA graph ("hand").
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers

from bench.models import parsed
from fkjit.models import Decoder, ModelConfig, named_configs, patch, unpatch
from fkjit.models.config import fields_of

from .sdpa_step import SdpaStep, captured

TURNS = 2
PROMPTS = 9
_STATIC = {"cache_implementation": "static"}
_DRAWN = {"do_sample": True, "top_k": 50, "top_p": 0.95, "temperature": 0.8}
PATCHED: dict[str, dict[str, Any]] = {"patched": {}, "patched, static cache": _STATIC}
DRAWS: dict[str, dict[str, Any]] = {
    "patched, a repetition penalty": {"repetition_penalty": 1.01},
    "patched, top-k and top-p": _DRAWN,
}


class Shape(NamedTuple):
    """Tokens of each sequence."""

    batch: int
    prompt: int
    new: int


class Row(NamedTuple):
    """prefill: milliseconds until the first new token; host: until the call has returned; decode:
    tokens per second of the others; whole: tokens per second of both together."""

    shape: Shape
    name: str
    prefill: float
    host: float
    decode: float
    whole: float


def built(name: str, device: str = "cuda") -> Any:
    """A model of random weights that never stops by itself."""
    fields = {**fields_of(name), "pad_token_id": 0, "eos_token_id": None}
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made.eval()


def timed(shape: Shape, name: str, run: Callable[[int], Any]) -> Row:
    """Of a call for so many new tokens; the first ones, which compile, are not counted."""
    for new in (shape.new, 1, 1):
        run(new)
    host, prefill = map(median, zip(*(_seconds(run, 1) for _ in range(PROMPTS)), strict=True))
    whole = min(_seconds(run, shape.new)[1] for _ in range(TURNS))
    decoded = shape.batch * (shape.new - 1)
    return Row(
        shape, name, prefill * 1e3, host * 1e3, decoded / max(whole - prefill, 1e-9),
        shape.batch * shape.new / whole,
    )  # fmt: skip


def _seconds(run: Callable[[int], Any], new: int) -> tuple[float, float]:
    """Until the call has returned, and until the GPU is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run(new)
    returned = time.perf_counter() - begin
    torch.cuda.synchronize()
    return returned, time.perf_counter() - begin


def generates(model: Any, shape: Shape, **said: Any) -> Callable[[int], Any]:
    """Calls of `generate`."""
    size = (shape.batch, shape.prompt)
    tokens = torch.randint(1, model.config.vocab_size, size, device=model.device)
    asked = {
        "input_ids": tokens, "attention_mask": torch.ones_like(tokens), "do_sample": False, **said
    }  # fmt: skip
    return lambda new: model.generate(**asked, max_new_tokens=new)


def by_hand(model: Any, shape: Shape) -> Callable[[int], Any]:
    """The same tokens of plain PyTorch in two CUDA graphs."""
    config, length = ModelConfig.of(model.config), shape.prompt + shape.new
    weights = Decoder(model.config, model.state_dict(), max_batch=1, max_length=64).weights
    step = SdpaStep(config, weights, shape.batch, length)
    size = (shape.batch, shape.prompt)
    tokens = torch.randint(1, config.vocabulary, size, device=step.tokens.device)

    def decode() -> None:
        step()
        step.position.add_(1)

    prompt, following = captured(lambda: step.prompt(tokens)), captured(decode)

    def run(new: int) -> Any:
        prompt.replay()
        made = [step.tokens.clone()]
        for _ in range(new - 1):
            following.replay()
            made.append(step.tokens.clone())
        return torch.stack(made, 1)

    return run


def measure(model: Any, shape: Shape, chosen: argparse.Namespace) -> Iterator[Row]:
    """Patched, then as transformers has it, then by hand."""
    patch(model)
    for name, said in {**PATCHED, **(DRAWS if chosen.draws else {})}.items():
        yield timed(shape, name, generates(model, shape, **said))
    unpatch(model)
    for peer in chosen.peers.split(","):
        name, make = _PEERS[peer]
        yield timed(shape, name, make(model, shape))


_PEERS: dict[str, tuple[str, Callable[..., Callable[[int], Any]]]] = {
    "dynamic": ("transformers, dynamic cache", generates),
    "hand": ("PyTorch by hand, CUDA graphs", by_hand),
    "static": ("transformers, static cache, torch.compile", partial(generates, **_STATIC)),
}


def line(config: str, row: Row) -> str:
    """A row of the table in docs/MODELS.md, with the host's part behind the prompt's time."""
    batch, prompt, new = row.shape
    return (
        f"| {config} | {batch} | {prompt} + {new} | {row.name} | {row.prefill:.2f} | "
        f"{row.host:.2f} | {row.decode:,.0f} | {row.whole:,.0f} |"
    )


def main() -> None:
    """Print the rows."""
    chosen = parsed(_parser())
    shapes = [tuple(map(int, one.split("+"))) for one in chosen.shapes.split(",")]
    for name in chosen.config.split(","):
        model = built(name)
        for prompt, new in shapes:
            if prompt + new > model.config.max_position_embeddings:
                continue
            for batch in map(int, chosen.batch.split(",")):
                for row in measure(model, Shape(batch, prompt, new), chosen):
                    print(line(name, row), flush=True)
                    _keep(chosen.out, {"config": name, **row.shape._asdict(), **row._asdict()})
                gc.collect()


def _keep(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        record.pop("shape")
        with path.open("a") as file:
            file.write(json.dumps({**record, "device": torch.cuda.get_device_name()}) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--config", default="llama-3.2-1b", help=", ".join(named_configs()))
    parser.add_argument("--batch", default="1,16", help="sequences, several with commas")
    parser.add_argument("--shapes", default="512+128", help="tokens of prompts + new ones")
    parser.add_argument("--draws", action="store_true", help="patched, with processors and draws")
    parser.add_argument("--peers", default="dynamic,hand", help=f"of {', '.join(_PEERS)}")
    parser.add_argument("--out", type=Path, help="JSON lines, appended")
    return parser


if __name__ == "__main__":
    main()
