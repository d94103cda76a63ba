"""fkjit/gallery/measured.json: every step of the gallery's ladders, timed in one run on a GPU.

python -m bench.report.gallery [--out FILE] [--commit TEXT]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fkjit.errors import DeviceError
from fkjit.gallery import catalog
from fkjit.gallery.climb import Row, chosen_target, climb
from fkjit.gallery.ladder import Ladder
from fkjit.gallery.measured import entry

from ..core.environment import environment

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "fkjit" / "gallery" / "measured.json"
_KEPT = ("gpu", "date", "driver", "nvrtc", "commit")


def measure() -> dict[str, Any]:
    """The file's content. DeviceError without a GPU, or where a step's numbers are wrong."""
    where = environment()
    if where["gpu"] is None:
        raise DeviceError(f"gallery: {where['gpu_missing']}")
    kept = {name: where[name] for name in _KEPT} | {"date": where["date"][:10]}
    return {**kept, "steps": {name: _of(catalog.find(name)) for name in catalog.NAMES}}


def _of(ladder: Ladder) -> list[dict[str, Any]]:
    from fkjit.runtime.device import device_target

    def told(number: int, title: str) -> None:
        print(f"{ladder.name} {number + 1} of {len(ladder.steps)}: {title}", file=sys.stderr)

    rows = climb(ladder, chosen_target(None, device_target(0).name), True, {}, told)
    return [_timed(ladder, row) for row in rows if row.why_not is None]


def _timed(ladder: Ladder, row: Row) -> dict[str, Any]:
    if row.error is None or row.error > 1 or row.seconds is None:
        raise DeviceError(f"gallery: {ladder.name}: {row.step.title}: error {row.error} tolerances")
    speed = None if row.speed is None else float(f"{row.speed:.4g}")
    return {**entry(ladder, row.step), "microseconds": round(row.seconds * 1e6, 2), "speed": speed}


def text(run: dict[str, Any]) -> str:
    """A run as the file has it, a line for each step."""
    head = "".join(f" {json.dumps(name)}: {json.dumps(run[name])},\n" for name in _KEPT)
    ladders = [
        f"  {json.dumps(name)}: [\n   " + ",\n   ".join(map(json.dumps, steps)) + "\n  ]"
        for name, steps in run["steps"].items()
    ]
    return "{\n" + head + ' "steps": {\n' + ",\n".join(ladders) + "\n }\n}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.report.gallery", description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE, help="the file to write")
    parser.add_argument("--commit", help="what was measured, for a copy without its .git")
    said = parser.parse_args()
    run = measure()
    if said.commit:
        run["commit"] = said.commit
    said.out.write_text(text(run), encoding="utf-8")
    print(said.out)
