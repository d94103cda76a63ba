"""Timing variants beside the default one, each result on the disk before the next is measured."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fkjit import __version__, tuning
from fkjit.jit.render import load
from fkjit.spec import KernelSpec, Params

from ..core.device import Device
from ..core.kernels import launched
from ..core.method import Effort
from ..core.op import Arrays, Candidate, Prepared
from ..core.store import Writer
from ..core.trial import Trial
from .task import Task, Values

BATCH = 8  # variants that take turns with the default
MARGIN = 0.99  # of the default's time is what a winner must stay below, or the default stays

Record = dict[str, Any]


class OutOfTime(Exception):
    """The time that was allowed is over."""


@dataclass
class Session:
    """Times of variants. `known` are the results of earlier calls, each for one variant."""

    device: Device
    effort: Effort
    writer: Writer
    say: Callable[[str], None]
    known: dict[str, Record] = field(default_factory=dict)
    until: float | None = None  # on the device's host clock

    def remember(self, records: Iterable[Record]) -> None:
        """Take over the results of an earlier call."""
        self.known.update({_identity(record): record for record in records})

    def record(self, task: Task, params: Params) -> Record | None:
        """What is known of a variant as its source is now, or None."""
        return self.known.get(_identity(self._about(task, params)))

    def results(self, task: Task, variants: Sequence[Params]) -> list[Record]:
        """A record for each variant; those that are not known are measured, some at a time.

        OutOfTime between two measurements, DeviceError when nothing can run any more.
        """
        missing = [params for params in variants if self.record(task, params) is None]
        for first in range(0, len(missing), BATCH):
            if self.until is not None and self.device.now() >= self.until:
                raise OutOfTime
            self._measure(task, missing[first : first + BATCH])
        return [record for record in (self.record(task, p) for p in variants) if record]

    def _measure(self, task: Task, variants: Sequence[Params]) -> None:
        """One trial: these and the default in turns, all checked before and after."""
        others = [params for params in variants if params != task.default]
        tried = [task.default, *others]
        trial = Trial(self.device, task.case, self.effort, None)
        cells = trial.run([_candidate(task, params, self.device) for params in tried])
        mode = self.effort.modes[0]
        default_ms = cells[0].get(mode, {}).get("p50")
        for params, cell in zip(tried, cells, strict=True):
            if params in variants or self.record(task, params) is None:
                self._keep(task, params, _outcome(cell, mode, default_ms))

    def _keep(self, task: Task, params: Params, outcome: Record) -> None:
        record = {**self._about(task, params), **outcome, "date": time.strftime("%Y-%m-%d")}
        self.writer.write(record)
        self.known[_identity(record)] = record
        self.say(f"  {task.shown(params)}: {_line(record)}")

    def _about(self, task: Task, params: Params) -> Record:
        return {
            "record": "variant",
            "gpu": self.device.name,
            **task.key,
            "case": task.case.label,
            "mode": self.effort.modes[0],
            "choice": tuning.free(task.spec, params),
            "source": source(task.spec, params),
        }


def _identity(record: Record) -> str:
    """What a result is of. A changed source or another mode is something else."""
    names = (*tuning.KEY, "gpu", "mode", "choice", "source")
    return json.dumps([record.get(name) for name in names], sort_keys=True)


def source(spec: KernelSpec, params: Params) -> str:
    """A digest of the template, its headers and values: what a variant's speed depends on."""
    identity = json.dumps(load(spec, params).identity(), sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _candidate(task: Task, params: Params, device: Device) -> Candidate:
    def prepare(problem: Any, arrays: Arrays) -> Prepared:
        return launched(task.case.op, task.spec, params, problem, arrays, device)

    return Candidate(name=task.shown(params), kind="ours", prepare=prepare)


def _outcome(cell: Record, mode: str, default_ms: float | None) -> Record:
    """The time of a cell, also relative to the default's of the same trial; or what went wrong."""
    if "error" in cell or "missing" in cell:
        return {"error": cell.get("error") or cell["missing"]}
    if "p50" not in cell.get(mode, {}):
        return {"error": cell.get(mode, {}).get("missing", f"no time in mode {mode}")}
    ms = cell[mode]["p50"]
    return {"ms": ms, "default_ms": default_ms, "ratio": ms / default_ms if default_ms else None}


def _line(record: Record) -> str:
    if "error" in record:
        return f"left out: {record['error']}"
    against = "" if record["ratio"] is None else f", {100 * record['ratio']:.1f} % of the default"
    return f"{record['ms'] * 1e3:.1f} us{against}"


def cost(record: Record, records: Sequence[Record]) -> float | None:
    """What to minimise: the time relative to the default's in the same trial.

    Where the default itself has no time in any of `records`, milliseconds. None: no time.
    """
    relative = any(other.get("ratio") is not None for other in records)
    return record.get("ratio" if relative else "ms")


def entry(task: Task, records: Sequence[Record]) -> Values | None:
    """What to store of a task: the fastest, or the default where nothing is faster by a margin."""
    timed = [(value, r) for r in records if (value := cost(r, records)) is not None]
    if not timed:
        return None
    default = tuning.free(task.spec, task.default)
    value, best = min(timed, key=lambda pair: pair[0])
    own = next((r for _, r in timed if r["choice"] in (default, _json(default))), None)
    if own is not None and value > MARGIN * own["ratio"]:
        best = own
    return {
        **task.key,
        "choice": best["choice"],
        "ms": round(best["ms"], 6),
        "default": default,
        "ratio": None if best["ratio"] is None else round(best["ratio"], 4),
        **{name: best[name] for name in ("case", "mode", "source", "date")},
        "tried": len(timed),
        "fkjit": __version__,
    }


def _json(values: Values) -> Values:
    """Values as they come back from a file."""
    return json.loads(json.dumps(values))
