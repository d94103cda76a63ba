"""The steps of docs/GEMM.md, from tiles in shared memory to what the call chooses: what was
predicted of each and what came out, as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..report import svg
from ..report.chart import Axis, Chart, Point, Series
from ..report.tables import NOT_MEASURED, Known, Trial, shown, time_of

_SQUARE, _SINGLE = "bf16 M8192 K8192 N8192", "fp32 M4096 K4096 N4096"
_WHOLE = ("schedule=cooperative", "shares=False")


class Step(NamedTuple):
    """What it is called; whose fastest variant it is (a kernel, words of its name; no kernel: the
    public call); on which case; the TFLOP/s that were predicted."""

    text: str
    kernel: str
    words: Sequence[str] = ()
    case: str = _SQUARE
    predicted: tuple[float, ...] = ()


LADDER = (
    Step("1. tiles in shared memory (`tiled.cu`)", "tiled", predicted=(20,)),
    Step("2. register tiles, a ring (`fma.cu`), fp32", "fma", (), _SINGLE, (48, 52)),
    Step("3. tensor cores, warp by warp (`mma.cu`)", "mma", predicted=(400, 440)),
    Step("4. wgmma and TMA (`wgmma.cu`)", "wgmma", (*_WHOLE, "cluster=1"), predicted=(600, 650)),
    Step("5. clusters of two", "wgmma", (*_WHOLE, "cluster=2"), predicted=(780, 800)),
    Step("6. ping-pong", "wgmma", ("schedule=pingpong", "shares=False")),
    Step("8. the last tiles shared", "wgmma", ("shares=True",)),
    Step("what the call chooses", ""),
)


class Outcome(NamedTuple):
    """A step's fastest variant, beside cuBLAS of the same run. Times in microseconds."""

    step: Step
    trial: Trial
    name: str
    time: float
    cublas: float | None

    @property
    def speed(self) -> float:
        """TFLOP/s."""
        return self.trial.cells[self.name]["graph"]["tflops"]


def outcomes(known: Known) -> list[Outcome]:
    """Of the steps that were measured."""
    found = []
    for step in LADDER:
        trial = known.get(("linear", step.case), NOT_MEASURED)
        times = {
            name: time_of(trial.cells, name) or math.inf
            for name, cell in trial.cells.items()
            if cell["kind"] == "ours" and _is(name, step)
        }
        if times:
            name = min(times, key=lambda one: times[one])
            cublas = time_of(trial.cells, "torch")
            found.append(Outcome(step, trial, name, times[name], cublas))
    return found if any(one.step.kernel for one in found) else []


def _is(name: str, step: Step) -> bool:
    """Whether a candidate ("fkjit wgmma block=... cluster=2", "fkjit") is one of this step's."""
    kernel = [step.kernel] if step.kernel else []
    return name.split()[1:2] == kernel and all(word in name for word in step.words)


def rows(known: Known) -> Iterator[list[str]]:
    """A line a step."""
    head = ["step", "case", "the fastest variant", "us", "TFLOP/s", "predicted", "of cuBLAS"]
    yield head
    for one in outcomes(known):
        step, share = one.step, "" if one.cublas is None else f"{one.cublas / one.time:.2f}"
        yield [
            step.text + one.trial.mark, step.case, " ".join(one.name.split()[2:]),
            shown(one.time), f"{one.speed:.0f}", _range(step.predicted), share,
        ]  # fmt: skip


def _range(predicted: Sequence[float]) -> str:
    return " to ".join(f"{value:.0f}" for value in predicted)


def picture(known: Known) -> str | None:
    """A row for each step, TFLOP/s to the right; None where there is nothing to draw."""
    found = outcomes(known)
    if not found:
        return None
    measured = [Point(n, one.speed) for n, one in enumerate(found)]
    predicted = [Point(n, p) for n, one in enumerate(found) for p in one.step.predicted]
    series = [Series("measured", measured, 0), Series("predicted (from, to)", predicted, 1)]
    series += _cublas(found)
    title = "Products of 8192³ in bf16 (step 2: 4096³ in fp32), step by step"
    chart = Chart(title, "dots", Axis(""), Axis("speed [TFLOP/s]"), series)
    chart.categories = [(f"{_plain(one.step.text)}: {one.speed:.0f}", "") for one in found]
    return svg.draw(chart, "Medians in CUDA graphs, NVIDIA H200, candidates in turns")


def _cublas(found: Sequence[Outcome]) -> list[Series]:
    """Where cuBLAS is, on the case of most steps."""
    speeds: list[Any] = [
        one.trial.cells["torch"]["graph"]["tflops"]
        for one in found
        if one.step.case == _SQUARE and one.cublas is not None
    ]
    if not speeds:
        return []
    return [Series(f"cuBLAS {speeds[0]:.0f}", [Point(0, speeds[0])], guide=True)]


def _plain(text: str) -> str:
    return text.replace("`", "")
