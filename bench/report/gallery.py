"""fkjit/gallery/measured.json out of stored runs: what the gallery's steps say was measured.

python -m bench.report.gallery
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fkjit.errors import ParameterError
from fkjit.gallery import catalog
from fkjit.gallery.ladder import Cell, Profiled, Quote, Step

from ..core import store

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "fkjit" / "gallery" / "measured.json"
# Of quotes: bench/NOTES.md says it of all of the record.
_RECORD = {"gpu": "NVIDIA H200", "date": "2026-11-21 or 22"}


def text() -> str:
    """The file's content. ParameterError where a step's measurement is not what it says."""
    found: dict[str, Any] = {}
    for name in catalog.NAMES:
        for step in catalog.find(name).steps:
            one = step.measured
            if isinstance(one, Cell):
                found[one.key] = _of_cell(step, one)
            elif isinstance(one, Profiled):
                found[one.key] = _of_profile(step, one)
            elif isinstance(one, Quote):
                found[one.key] = _of_quote(one)
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _of_cell(step: Step, cell: Cell) -> dict[str, Any]:
    """The last cell of that name in the file."""
    last = None
    for run in store.read(ROOT / cell.file):
        for one in run.cells:
            if (one["op"], one["case"], one["candidate"]) == (cell.op, cell.case, cell.candidate):
                last = run.header, one
    if last is None:
        raise ParameterError(f"gallery: {cell.key}: there is no such cell")
    header, found = last
    _check(step, cell, found.get("variant"))
    times = found["graph"]
    return {
        "microseconds": round(times["p50"] * 1e3, 2),
        "tflops": _rounded(times.get("tflops")),
        "tbs": _rounded(times.get("gbs"), 1e-3),
        "gpu": header["gpu"],
        "date": header["date"][:10],
        "source": cell.file,
        "how": "graph",
    }


def _rounded(value: float | None, scale: float = 1.0) -> float | None:
    return None if not value else float(f"{value * scale:.4g}")


def _check(step: Step, cell: Cell, variant: dict[str, Any] | None) -> None:
    """That the cell is of the step's kernel, with the values that the file names."""
    if variant is None:  # a file from before variants were stored
        return
    label, dtype = variant["label"], step.params.get("dtype")
    words = dict(one.split("=", 1) for one in _words(label) if "=" in one)
    other = {
        name: value
        for name, value in words.items()
        if name in step.params and value != str(step.params[name])
    }
    if variant["kernel"] != step.kernel or other or (dtype and label.split()[0] != dtype):
        raise ParameterError(f"gallery: {cell.key} was {variant['kernel']} {label}, not the step's")


def _words(label: str) -> list[str]:
    """ "bf16 tile=(8, 16) a=1" -> ["bf16", "tile=(8, 16)", "a=1"]."""
    made: list[str] = []
    for word in label.split():
        inside = made and made[-1].count("(") > made[-1].count(")")
        made[-1:] = [f"{made[-1]} {word}"] if inside else [*made[-1:], word]
    return made


def _of_profile(step: Step, one: Profiled) -> dict[str, Any]:
    """The entry of that name; a profile has the kernel's name, but not its parameters."""
    stored = json.loads((ROOT / one.file).read_text(encoding="utf-8"))
    entry = next(e for e in stored["entries"] if (e["op"], e["case"]) == (one.op, one.case))
    (found,) = (c for c in entry["candidates"] if c["candidate"] == one.candidate)
    (kernel,) = found["kernels"]
    if kernel["kernel"] != step.spec.entry:
        raise ParameterError(f"gallery: {one.key} is of {kernel['kernel']}, not the step's kernel")
    run, seconds = stored["runs"][found["run"]], kernel["duration"] * 1e-9
    return {
        "microseconds": round(seconds * 1e6, 2),
        "tflops": _rounded(entry["flops"] / seconds, 1e-12),
        "tbs": _rounded(entry["bytes"] / seconds, 1e-12),
        "gpu": run["gpu"],
        "date": run["date"],
        "source": one.file,
        "how": "profile",
    }


def _of_quote(quote: Quote) -> dict[str, Any]:
    written = " ".join((ROOT / quote.file).read_text(encoding="utf-8").split())
    if quote.text not in written or f"{quote.microseconds:g}" not in quote.text:
        raise ParameterError(f"gallery: {quote.key}: the record does not say so")
    numbers = {"microseconds": quote.microseconds, "tflops": None, "tbs": None}
    return {**numbers, **_RECORD, "source": quote.file, "how": "script"}


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(FILE)
