"""The picture of where each microsecond of a layer goes: kernels as PyTorch's profiler saw them.

python -m bench.moe.layer_timeline --out FILE.jsonl     on a GPU: measure
python -m bench.moe.layer_timeline --draw FILE.jsonl    anywhere: docs/moe_timeline.svg

A replay of a CUDA graph is one timeline; of each kernel the median over replays is drawn. Which
part of the layer a kernel is follows from its place before, between and behind the products.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..report.chart import PALETTE
from ..report.svg import TEXT, WIDTH
from . import cases_moe_layer, layer
from .layer import DECODED, SHORT, WIDE

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "moe_timeline.svg"
CASES = [
    layer.problem(4096, *WIDE), layer.problem(32_768, *SHORT), layer.problem(8, *DECODED[0]),
]  # fmt: skip
WHO = ("grouped_mm", "transformers grouped_mm", "triton", "fkjit")
PARTS = ("route, sort, rows", "gate and up", "activation", "down", "weighted sums")
_PRODUCT = re.compile(r"gemm|cutlass|wgmma|mma|nvjet|grouped|expert", re.IGNORECASE)
_REPLAYS = 20


class Span(NamedTuple):
    """A kernel: name, microseconds from the first one's begin on."""

    name: str
    begin: float
    end: float


# ------------------------------------------------------------------ what ran


def parts_of(names: Sequence[str]) -> list[str]:
    """Which part of the layer each of its kernels is, in the order in which they ran.

    Products are known by name. The first run of them is gate and up, the next one down; where
    nothing stands between, the activation is inside the first kernel, and the rest is down.
    """
    products = [n for n, name in enumerate(names) if _PRODUCT.search(name)]
    if not products:
        return [PARTS[0]] * len(names)
    first, last = products[0], products[-1]
    between = [n for n in range(first, last) if n not in products]
    behind = between[0] if between else first
    second = next((n for n in products if n > behind), len(names))

    def part(n: int) -> str:
        if not first <= n <= last:
            return PARTS[0 if n < first else 4]
        return PARTS[(1 if n in products else 2) if n < second else 3]

    return [part(n) for n in range(len(names))]


def replays(events: Iterable[Any], count: int) -> list[list[Span]]:
    """A profile's kernels, divided into as many replays of the same kernels."""
    kernels = [e for e in events if str(e.device_type).endswith("CUDA")]
    kernels.sort(key=lambda e: e.time_range.start)
    each, rest = divmod(len(kernels), count)
    if not each or rest:
        raise ValueError(f"{len(kernels)} kernels are no {count} replays of the same ones")
    found = []
    for at in range(0, len(kernels), each):
        run = kernels[at : at + each]
        start = run[0].time_range.start
        times = [(e.time_range.start - start, e.time_range.end - start) for e in run]
        found.append([Span(e.name, *time) for e, time in zip(run, times, strict=True)])
    return found


def typical(runs: Sequence[Sequence[Span]]) -> list[Span]:
    """Kernel by kernel the median of begin and end."""
    columns = list(zip(*runs, strict=True))
    if any(len({span.name for span in column}) > 1 for column in columns):
        raise ValueError("replays differ in their kernels")
    return [
        Span(column[0].name, median(s.begin for s in column), median(s.end for s in column))
        for column in columns
    ]


def traced(replay: Callable[[], None], count: int = _REPLAYS) -> list[Span]:
    """Of a graph's replays on the current GPU."""
    torch, profiler = import_module("torch"), import_module("torch.profiler")
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            replay()
            torch.cuda.synchronize()
    return typical(replays(found.events(), count))


def measured(p: dict[str, Any], device: Any) -> Iterable[dict[str, Any]]:
    """A record for each candidate that is there and right."""
    from ..core.catalog import operations

    op = operations()[cases_moe_layer.OP.name]
    arrays = op.inputs(p, device)
    expected = op.expected(p, arrays)
    prepare = {"fkjit": op.ours, **{peer.name: peer.prepare for peer in op.peers}}
    for who in WHO:
        record = {"record": "timeline", "gpu": device.name, "case": op.label(p), "candidate": who}
        try:
            prepared = prepare[who](p, arrays)
            wrong = expected.judge(prepared.output(prepared.call())).why_wrong()
            replay, kept = device.capture(prepared.call, 1)
            spans = [] if wrong else traced(replay)
            del kept
            yield {**record, "spans": spans} if spans else {**record, "error": wrong}
        except Exception as error:
            yield {**record, "error": f"{type(error).__name__}: {error}"[:300]}
        device.release()


# ------------------------------------------------------------------ the picture

_LEFT, _ROW, _BAR, _TOP = 230, 24, 17, 46


def picture(records: Sequence[dict[str, Any]]) -> str:
    """A block for each case, its own scale; a row for each candidate, from its first kernel on."""
    title = "A mixture of experts, kernel by kernel"
    body, y = [_text(0, 18, title, 15), *_legend()], _TOP
    drawn = [one for one in records if one.get("spans")]
    for case in dict.fromkeys(one["case"] for one in drawn):
        rows = [one for one in drawn if one["case"] == case]
        longest = max(one["spans"][-1][2] for one in rows)
        body.append(_text(0, y + 14, case, 12))
        y += 22
        for one in rows:
            spans = [Span(*span) for span in one["spans"]]
            said = f"{one['candidate']}: {spans[-1].end:,.0f} µs"
            body += [_text(8, y + 12, said, 11), *_bars(spans, y, longest)]
            y += _ROW
        y += 10
    gpus = ", ".join(dict.fromkeys(one["gpu"] for one in drawn))
    body.append(_text(0, y + 12, f"{gpus}; medians of {_REPLAYS} replays of a CUDA graph", 11))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 20}" '
        f'role="img" font-family="system-ui, sans-serif" fill="{TEXT}">\n'
        f"  <title>{escape(title)}</title>\n  {chr(10).join(body)}\n</svg>\n"
    )


def _bars(spans: Sequence[Span], y: int, longest: float) -> list[str]:
    scale, made = (WIDTH - _LEFT - 14) / longest, []
    for span, part in zip(spans, parts_of([span.name for span in spans]), strict=True):
        width = max((span.end - span.begin) * scale - 1, 0.8)
        short = re.sub(r"^void |[<(](?!anonymous).*", "", span.name)
        said = escape(f"{part}: {short}, {span.end - span.begin:.1f} µs")
        made.append(
            f'<rect x="{_LEFT + span.begin * scale:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{_BAR}" fill="{PALETTE[PARTS.index(part)]}"><title>{said}</title></rect>'
        )
    return made


def _legend() -> list[str]:
    made = []
    for n, part in enumerate(PARTS):
        made.append(
            f'<rect x="{8 + 150 * n}" y="28" width="11" height="11" fill="{PALETTE[n]}"/>'
            + _text(24 + 150 * n, 38, part, 12)
        )
    return made


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}">{escape(text)}</text>'


def main() -> None:
    """Measure, or draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="measure, and write records there")
    parser.add_argument("--draw", type=Path, help="a file of records")
    chosen = parser.parse_args()
    if chosen.out is not None:
        from ..core.device import TorchDevice

        device = TorchDevice()
        with chosen.out.open("a") as file:
            for p in CASES:
                for record in measured(p, device):
                    file.write(json.dumps(record) + "\n")
                device.release()
    if chosen.draw is not None:
        PICTURE.write_text(picture([json.loads(x) for x in chosen.draw.read_text().splitlines()]))


if __name__ == "__main__":
    main()
