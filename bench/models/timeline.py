"""Where the microseconds of a decode step go: docs/decode_step.svg, docs/decode_step_measured.svg.

    python -m bench.models.timeline --write                          # the pictures of the docs
    python -m bench.models.timeline --record steps.jsonl --batch 1   # on a GPU: a step's launches
    python -m bench.models.timeline --times steps.jsonl --out step.svg
    python -m bench.models.timeline --times steps.jsonl --store      # what the second picture shows

A floor is the bytes that a part of the step has to read and write, at the rate of device memory: no
measurement, and less than any step takes. Launches of a recorded step come from PyTorch's profiler;
time in which two of them overlap is the earlier one's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from fkjit.models import ModelConfig, named_configs
from fkjit.models.quantized import PRODUCTS

from ..report.chart import PALETTE
from ..report.svg import TEXT, WIDTH

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURE, MEASURED = DOCS / "decode_step.svg", DOCS / "decode_step_measured.svg"
STORED = Path(__file__).with_name("steps.json")  # of the second picture: bars of recorded steps
CONFIG, CONTEXT = "llama-3.2-1b", 576  # tokens of a sequence: 512 and half of 128
BYTES_A_US = 4.58e6  # of an H200, as a sum over an array reads
PARTS: tuple[str, ...] = ("qkv", "attention", "out", "up", "down", "head", "norm, append", "rest")
SCHEMES = (None, "int8_group", "int4_group")
_BITS = {None: 16, "int8_group": 8 + 16 / 128, "int4_group": 4 + 16 / 128}  # with their scales
_LEFT, _TOP, _ROW, _BAR, _LETTER = 8, 66, 56, 26, 6.6


class Line(NamedTuple):
    """A bar: its name, and microseconds by part."""

    name: str
    parts: dict[str, float]


# ------------------------------------------------------------------ floors


def floor(
    config: ModelConfig, batch: int, context: int = CONTEXT, scheme: str | None = None,
    rate: float = BYTES_A_US,
) -> Line:  # fmt: skip
    """Of a step of `batch` sequences with `context` tokens each, 16-bit activations and cache."""
    found = dict.fromkeys(PARTS, 0.0)
    for name, (n, k) in config.products().items():
        made = n // 2 if name == "up" and config.gated else n
        found[name] = config.layers * (n * k * _BITS[scheme] / 8 + 2 * batch * (k + made))
    kv = 2 * config.heads_kv * config.head_dim
    found["attention"] = config.layers * 2.0 * batch * context * kv
    words = config.vocabulary
    found["head"] = 2.0 * words * config.hidden + 4 * batch * words
    found["norm, append"] = config.layers * 2.0 * batch * (4 * config.hidden + 2 * kv)
    found["rest"] = 4.0 * batch * words  # logits, which sampling reads
    named = "bf16" if scheme is None else scheme
    return Line(f"floor, {named} weights", {name: n / rate for name, n in found.items()})


# ------------------------------------------------------------------ recorded steps


def shares(launches: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Microseconds by part of launches in their order: (kernel, begin, end)."""
    found, at = dict.fromkeys(PARTS, 0.0), launches[0][1] if launches else 0.0
    names = [name for name, _, _ in launches]
    for part, (_, begin, end) in zip(_parts(names), launches, strict=True):
        found["rest"] += max(begin - at, 0.0)  # nothing runs
        found[part] += max(end - max(at, begin), 0.0)
        at = max(at, end)
    return found


def _parts(names: Sequence[str]) -> list[str]:
    """A layer's products come in one order; the last product is the head."""
    products = [n for n, name in enumerate(names) if _is_product(name)]
    cycle = {n: PRODUCTS[place % 4] for place, n in enumerate(products)}
    return [
        "head" if products and n == products[-1] else cycle.get(n) or _other(name)
        for n, name in enumerate(names)
    ]


def _is_product(name: str) -> bool:
    return any(part in name for part in ("linear_", "normed_gemv", "step_stream", "quantized_"))


def _other(name: str) -> str:
    if "attention" in name or "merge_states" in name:
        return "attention"
    return "norm, append" if "norm" in name or "append" in name else "rest"


def record(path: Path, config: str, batch: int, fused: bool, scheme: str | None) -> None:
    """A line behind those of the file: a step halfway through 128 new tokens, its launches and its
    time without a profiler."""
    import torch

    from fkjit.models import Decoder, StepPlan, random_weights

    from ..distributed.trace import traced
    from .decode import NEW, PROMPT, halfway, replayed

    model = ModelConfig.of(config)
    decoder = Decoder(
        model, random_weights(model, torch.bfloat16, "cuda"), max_batch=batch,
        max_length=PROMPT + NEW, plan=StepPlan(fused=fused), quantize=scheme,
    )  # fmt: skip
    step = halfway(decoder, batch)
    alone = replayed(step)
    tasks = traced(step, 0).tasks
    said = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "config": config,
        "batch": batch, "fused": fused, "weights": scheme, "step_us": alone,
        "launches": [(task.name, task.begin * 1e6, task.end * 1e6) for task in tasks],
    }  # fmt: skip
    with path.open("a") as file:
        file.write(json.dumps(said) + "\n")


def recorded(path: Path) -> list[Line]:
    """A bar for each step in the file."""
    return [_recorded(json.loads(line)) for line in path.read_text().splitlines()]


def _recorded(said: dict[str, Any]) -> Line:
    how = "five" if said["fused"] and said["weights"] is None else "eight"
    name = (
        f"{said['gpu']}, {said['config']}, batch {said['batch']}, {said['weights'] or 'bf16'} "
        f"weights, {how} launches a layer; {said['step_us']:.0f} us without the profiler, with it"
    )
    return Line(name, shares([tuple(launch) for launch in said["launches"]]))


def store(lines: Sequence[Line]) -> None:
    """Their parts, to a tenth of a microsecond."""
    rounded = [
        {"name": name, "parts": {part: round(us, 1) for part, us in parts.items() if us}}
        for name, parts in lines
    ]
    STORED.write_text(json.dumps(rounded, indent=1) + "\n")


def stored() -> list[Line]:
    """What `store` kept."""
    return [
        Line(one["name"], {part: one["parts"].get(part, 0.0) for part in PARTS})
        for one in json.loads(STORED.read_text())
    ]


# ------------------------------------------------------------------ the pictures


def draw(title: str, lines: Sequence[Line]) -> str:
    """An SVG: bars of one scale, one below the other."""
    longest = max(sum(line.parts.values()) for line in lines)
    scale = (WIDTH - 2 * _LEFT) / longest
    body = [_text(0, 18, title, 15), *_legend()]
    for row, (name, parts) in enumerate(lines):
        x, y = float(_LEFT), _TOP + _ROW * row
        body.append(_text(_LEFT, y + 12, f"{name}: {sum(parts.values()):.0f} us", 12))
        for part, us in parts.items():
            body += _bar(x, y + 18, us * scale, part, us)
            x += us * scale
    inside, height = "\n  ".join(body), _TOP + _ROW * len(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" font-family="system-ui, sans-serif" fill="{TEXT}">\n'
        f"  <title>{escape(title)}</title>\n  {inside}\n</svg>\n"
    )


def _legend() -> list[str]:
    found, x = [], _LEFT
    for part in PARTS:
        found.append(f'<rect x="{x}" y="30" width="11" height="11" fill="{_colour(part)}"/>')
        found.append(_text(x + 16, 40, part, 12))
        x += 36 + int(_LETTER * len(part))
    return found


def _bar(x: float, y: int, width: float, part: str, us: float) -> list[str]:
    said = f"{part} {us:.0f}"
    found = [
        f'<rect x="{x:.1f}" y="{y}" width="{max(width - 1, 0.5):.1f}" height="{_BAR}" '
        f'fill="{_colour(part)}"><title>{escape(part)}: {us:.1f} us</title></rect>'
    ]
    if len(said) * _LETTER < width - 6:
        found.append(f'<text x="{x + 4:.1f}" y="{y + 17}" font-size="11" fill="#fff">{said}</text>')
    return found


def _colour(part: str) -> str:
    return PALETTE[PARTS.index(part) % len(PALETTE)]


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}">{escape(text)}</text>'


def floors() -> str:
    """The picture of docs/MODELS.md."""
    config = ModelConfig.of(CONFIG)
    lines = [floor(config, 1, scheme=scheme) for scheme in SCHEMES]
    rate = BYTES_A_US / 1e6
    return draw(
        f"Bytes of a decode step at {rate:.2f} TB/s: {CONFIG}, one sequence, {CONTEXT} tokens",
        lines,
    )


def measured() -> str:
    """The second picture."""
    return draw("Launches of decode steps, one after the other, under PyTorch's profiler", stored())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--write", action="store_true", help="the pictures of docs/")
    parser.add_argument("--record", type=Path, metavar="FILE", help="a step's launches, on a GPU")
    parser.add_argument("--config", default=CONFIG, choices=named_configs())
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--fused", action="store_true", help="five launches a layer")
    parser.add_argument("--weights", help="a scheme of fkjit.quantize")
    parser.add_argument("--times", type=Path, metavar="FILE", help="draw recorded steps")
    parser.add_argument("--store", action="store_true", help="keep recorded steps for docs/")
    parser.add_argument("--out", type=Path, default=PICTURE)
    said = parser.parse_args(arguments)
    if said.record:
        record(said.record, said.config, said.batch, said.fused, said.weights)
    if said.times and said.store:
        store(recorded(said.times))
    elif said.times:
        said.out.write_text(draw("Launches of a decode step", recorded(said.times)))
    elif said.write:
        PICTURE.write_text(floors())
        MEASURED.write_text(measured())
    return 0


if __name__ == "__main__":
    sys.exit(main())
