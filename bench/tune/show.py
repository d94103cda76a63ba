"""`fkjit tune --show`: what a problem gets, out of which file, and why."""

from __future__ import annotations

from collections.abc import Iterable

from fkjit import tuning
from fkjit.arch import Arch

from .task import Task, shown


def explain(task: Task, arch: Arch) -> list[str]:
    """Lines for people: the kernel and case, the values it runs with, where these come from."""
    found = tuning.find(task.spec, task.default, task.case.problem, arch)
    default = task.shown(task.default)
    fixed = shown(task.key["fixed"])
    lines = [f"{task.label}", f"  class: {shown(task.key['shape']) or 'all'} ({fixed})"]
    if found.values is None or found.entry is None:
        lines.append(f"  runs {default}: the default")
    else:
        lines.append(f"  runs {shown(found.values)}: tuned; the default is {default}")
        lines += _measured(found)
    return lines + [f"  note: {note}" for note in found.notes]


def _measured(found: tuning.Found) -> Iterable[str]:
    entry = found.entry or {}
    yield f"  from {found.path}"
    if isinstance(entry.get("ms"), (int, float)):
        ratio = entry.get("ratio")
        against = f", {100 * ratio:.1f} % of the default's" if isinstance(ratio, float) else ""
        yield (
            f"  measured {entry['ms'] * 1e3:.1f} us{against}, L2 {entry.get('mode')}, best of "
            f"{entry.get('tried')}, on {entry.get('date')}: {entry.get('case')}"
        )
