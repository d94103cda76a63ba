"""A whole run: ceilings, then case after case, each result on the disk before the next begins."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fkjit.errors import DeviceError

from .cases import Case
from .device import Device
from .method import Effort, shown
from .op import Candidate
from .store import SCHEMA, Writer
from .trial import Trial

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@dataclass
class Plan:
    """What to run. `candidates` are those of each operation, by its name."""

    cases: Sequence[Case]
    candidates: dict[str, list[Candidate]]
    effort: Effort
    budget: float | None = None  # seconds for the whole run
    left_out: dict[str, str] | None = None  # peers that were not asked for, and why


def _print(text: str) -> None:
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else 0
    print(folded(text, width) if width else text, file=sys.stderr, flush=True)


def folded(text: str, width: int) -> str:
    """A line of a case on a terminal: where it is too long a new one begins with a candidate."""
    lines: list[str] = []
    for part in text.split("  "):
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"    {part}" if lines else part)
    return "\n".join(lines)


def execute(
    plan: Plan,
    device: Device,
    writer: Writer,
    header: dict[str, Any],
    limits: dict[str, Any] | None,
    say: Callable[[str], None] = _print,
) -> int:
    """0; 1 when one of ours had no time because it was wrong or failed; 130 after Ctrl-C.

    `say` gets a line a case, with what is left.
    """
    begin = device.now()
    peers = _peers(plan)
    writer.write({"record": "run", "schema": SCHEMA, **header, "ceilings": limits, "peers": peers})
    status, reason, total = 0, "complete", len(plan.cases)
    done = 0
    try:
        for case in plan.cases:
            records = _case(plan, device, case, limits, done, begin)
            for record in records:
                writer.write(record)
            done += 1
            if any("error" in r and r["kind"] == "ours" for r in records):
                status = 1
            say(_line(records, done, total, device.now() - begin, plan.budget))
    except KeyboardInterrupt:
        status, reason = INTERRUPTED, "interrupted"
        say(f"interrupted: {done} of {total} cases are done and kept in {writer.path}")
    except DeviceError as error:
        status, reason = 1, str(error)
        say(reason)
    end = {"record": "end", "reason": reason, "cases": done, "of": total}
    writer.write({**end, "seconds": device.now() - begin})
    return status


def _case(
    plan: Plan,
    device: Device,
    case: Case,
    limits: dict[str, Any] | None,
    done: int,
    begin: float,
) -> list[dict[str, Any]]:
    """One case within its share of what is left of the budget."""
    seconds = None
    if plan.budget is not None:
        left = plan.budget - (device.now() - begin)
        seconds = max(left, 0.0) / (len(plan.cases) - done)
    start = device.now()
    with device.span(f"{case.op.name} {case.label}"):
        trial = Trial(device, case, replace(plan.effort), limits)
        try:
            records = trial.run(plan.candidates[case.op.name], seconds)
        except (DeviceError, KeyboardInterrupt):
            raise
        except Exception as error:  # inputs or reference did not fit: the next case may
            device.release()
            return [_failed(case, error)]
    for record in records:
        record["case_seconds"] = device.now() - start
    return records


def _failed(case: Case, error: Exception) -> dict[str, Any]:
    from .method import first_line

    return {
        "record": "cell", "op": case.op.name, "case": case.label, "candidate": "(inputs)",
        "kind": "ours", "problem": dict(case.problem), "error": first_line(error),
    }  # fmt: skip


def _peers(plan: Plan) -> list[dict[str, Any]]:
    """Every candidate with its version, and why it is missing if it is."""
    found = [
        {"op": op, "name": c.name, "kind": c.kind, "version": c.version(), "missing": c.missing()}
        for op, candidates in plan.candidates.items()
        for c in candidates
    ]
    out = [{"name": name, "missing": why} for name, why in (plan.left_out or {}).items()]
    return found + out


def _line(
    records: Sequence[dict[str, Any]], done: int, total: int, spent: float, budget: float | None
) -> str:
    """One case: our time, everybody's speed, how long the rest may take."""
    first = records[0]
    parts = [f"[{done}/{total}] {first['op']} {first['case']}:"]
    for record in records:
        if "error" in record:
            parts.append(f"{record['candidate']} FAILED ({record['error']})")
        elif "missing" not in record:
            parts.append(f"{record['candidate']} {speed(record)}")
    gone = sum("missing" in record for record in records)
    left = spent / done * (total - done)
    if budget is not None:
        left = min(left, max(budget - spent, 0.0)) if done < total else 0.0
    tail = f"({gone} missing; " if gone else "("
    return "  ".join(parts) + f"  {tail}{_clock(left)} left)"


def speed(record: dict[str, Any]) -> str:
    """A cell for people: its time, and TFLOP/s or GB/s, whichever is nearer to its ceiling."""
    ms = shown(record)
    best: dict[str, Any] = next((record[m] for m in ("warm", "cold", "graph") if m in record), {})
    bound_by_bytes = best.get("share_copy", 0.0) > best.get("share_gemm", 0.0)
    rate = ""
    if "tflops" in best and not bound_by_bytes:
        rate = f" {best['tflops']:.0f} TFLOP/s"
    elif "gbs" in best:
        rate = f" {best['gbs']:.0f} GB/s"
    return (f"{ms:.3f} ms" if ms >= 1 else f"{ms * 1e3:.1f} us") + rate


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
