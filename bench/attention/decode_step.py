"""A whole decoding step, eager, in a CUDA graph and by a `Decoder`: what launching it costs.

    python -m bench.attention.decode_step [--steps 64] [--out FILE]

The model is decode_model.py's; "eager" and "graph" run its own code, "decoder" is a
`fkjit.models.Decoder` with the same weights, which fuses across operations (docs/MODELS.md). Of
each case: microseconds of host time a step (issuing it, the GPU never waited for), and of elapsed
time a step (CUDA events around eight of them). Logits of the other two are compared with eager
ones before anything is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fkjit.models import Decoder as ModelDecoder
from fkjit.models import ModelConfig
from fkjit.models.sampling import GREEDY
from fkjit.models.step import LOGITS
from fkjit.models.weights import Affine, Layer, Weights

from ..core.environment import environment
from ..core.statistics import summary
from ..core.store import SCHEMA, Writer
from .decode_model import EPS, THETA, Decoder, Size, weights

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


class Modelled:
    """The same model as a `fkjit.models.Decoder`, with sequences of `length` tokens and room for
    `steps`; its pages are there from the start. mode: LOGITS, or GREEDY, which makes the next
    tokens, too."""

    def __init__(self, sequences: int, length: int, steps: int, kept: Any) -> None:
        room = length + steps + 1
        self.decoder = ModelDecoder(
            configuration(SIZE, room), arranged(kept), max_batch=sequences, max_length=room,
            chunk=sequences * length,
        )  # fmt: skip
        self.mode, self.sequences, prompts = LOGITS, sequences, texts(sequences, length)
        for prompt in prompts.tolist():
            self.decoder.submit(prompt, max_new_tokens=steps)
        self.decoder.advance()
        self.tokens = self.decoder._slots.state.tokens[:sequences]
        self.tokens.copy_(prompts[:, 0])

    def step(self) -> torch.Tensor:
        """Logits."""
        self.decoder._steps.launch(self.sequences, self.mode)
        return self.decoder._steps.logits(self.sequences)


def configuration(size: Size, length: int) -> ModelConfig:
    """Of the model, for `fkjit.models`."""
    return ModelConfig.of({
        "model_type": "llama", "hidden_size": size.hidden, "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads_q, "num_key_value_heads": size.heads_kv,
        "head_dim": size.head_dim, "intermediate_size": size.mlp, "vocab_size": size.vocabulary,
        "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": length,
        "tie_word_embeddings": False,
    })  # fmt: skip


def arranged(kept: Any) -> Weights:
    """Its weights, for `fkjit.models`."""
    names = ("norm", "qkv", "out", "mlp_norm", "up", "down")
    layers = tuple(Layer(*(Affine(layer[name]) for name in names)) for layer in kept["layers"])
    return Weights(kept["embedding"], None, layers, Affine(kept["norm"]), kept["head"])


def texts(sequences: int, length: int) -> torch.Tensor:
    """Prompts of random tokens, [sequences, length]."""
    made = torch.Generator().manual_seed(length)
    return torch.randint(SIZE.vocabulary, (sequences, length), generator=made)


def advance(decoder: Any, batch: Sequence[int], step: Callable[[], Any]) -> Any:
    """One token of each sequence: pages where they are full, the step, and the count."""
    if isinstance(decoder, Modelled):
        return step()
    decoder.cache.reserve(batch, 1)
    logits = step()
    decoder.cache.advance(batch, 1)
    return logits


def started(sequences: int, length: int, steps: int, kept: Any) -> tuple[Decoder, list[int]]:
    """A decoder whose sequences have prompts of `length` random tokens, and room for `steps`."""
    pages = sequences * -(-(length + steps) // 16) + 1
    decoder, prompts = Decoder(SIZE, kept, sequences, pages), texts(sequences, length)
    batch = decoder.prefill(prompts.tolist())
    decoder.rows.copy_(decoder.cache.rows(batch))
    decoder.tokens.copy_(prompts[:, 0])
    return decoder, batch


def timed(decoder: Any, batch: list[int], step: Callable[[], Any], turns: int) -> Any:
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
    kinds: tuple[str, ...] = ("eager", "graph", "decoder")
    turns = max(steps // _TURN, 1)
    room = (turns + 2) * _TURN
    made: dict[str, tuple[Any, list[int]]] = {
        kind: started(sequences, length, room, kept) for kind in kinds[:2]
    }
    made["decoder"] = (Modelled(sequences, length, room, kept), [])
    step: dict[str, Callable[[], Any]] = {}
    for kind, (decoder, _) in made.items():
        step[kind] = Captured(decoder) if kind == "graph" else decoder.step
    apart: dict[str, float] = dict.fromkeys(kinds, 0.0)
    for _ in range(3):
        logits = {kind: advance(*made[kind], step[kind]).float() for kind in kinds}
        for kind, (decoder, _) in made.items():
            off = (logits[kind] - logits["eager"]).abs().max()
            apart[kind] = max(apart[kind], float(off))
            decoder.tokens.copy_(logits["eager"].argmax(-1))
    made["decoder"][0].mode = GREEDY
    case = {"record": "cell", "op": "decode_step", "case": f"bf16 B{sequences} S{length}"}
    return [
        {**case, "candidate": kind, "kind": "ours", "apart": apart[kind],
         **timed(*made[kind], step[kind], turns)}
        for kind in kinds
    ]  # fmt: skip


def line(eager: dict[str, Any], *others: dict[str, Any]) -> str:
    """For people."""

    def shown(cell: dict[str, Any]) -> str:
        elapsed, host = (cell[name]["p50"] * 1e3 for name in ("elapsed", "host"))
        return f"{cell['candidate']} {elapsed:.0f} us a step (host {host:.0f})"

    def beside(cell: dict[str, Any]) -> str:
        faster = eager["elapsed"]["p50"] / cell["elapsed"]["p50"]
        return f"{shown(cell)}, {faster:.2f} times as fast, logits apart by {cell['apart']:.2g}"

    return f"{eager['case']}: " + "; ".join([shown(eager), *map(beside, others)])


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
