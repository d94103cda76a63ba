"""What differs between a step and the one before it, computed from what both are now."""

from __future__ import annotations

from difflib import unified_diff
from math import prod

from fkjit.gallery.ladder import Ladder, Step
from fkjit.jit.render import load

SMS = 132  # of the H200 that all measurements are of


def launch_sheet(ladder: Ladder, step: Step) -> dict[str, str]:
    """How a step is launched at the ladder's sizes."""
    spec, problem = step.spec, ladder.problem_of(step, False, SMS)
    sheet: dict[str, object] = {
        "kernel": step.kernel,
        **{param.name: step.params[param.name] for param in spec.params},
        **{f"size {name}": value for name, value in ladder.sizes_of(step, False).items()},
        "blocks": " x ".join(map(str, spec.grid(step.params, problem))),
        "threads of a block": prod(spec.block(step.params)),
        "dynamic shared memory": f"{spec.shared_bytes(step.params):,} bytes",
    }
    return {name: str(value) for name, value in sheet.items()}


def launch_changes(ladder: Ladder, step: Step, before: Step) -> list[tuple[str, str, str]]:
    """What is different in the launch: (what, before, now); "" for what one of both has not."""
    old, new = launch_sheet(ladder, before), launch_sheet(ladder, step)
    every = ((name, old.get(name, ""), new.get(name, "")) for name in {**new, **old})
    return [(name, was, now) for name, was, now in every if was != now]


def one_file(step: Step, before: Step) -> bool:
    """Whether both are variants of one template."""
    return step.spec.source == before.spec.source


def source_changes(step: Step, before: Step) -> list[str]:
    """A unified diff: of what one template renders to, or of two templates."""
    old, new = load(before.spec, before.params), load(step.spec, step.params)
    if one_file(step, before):
        was, now = _without_lines(old.text), _without_lines(new.text)
    else:
        was, now = old.template.splitlines(), new.template.splitlines()
    return list(unified_diff(was, now, old.name, new.name, n=3, lineterm=""))


def _without_lines(text: str) -> list[str]:
    """Rendered source without the directives that say where a line is from."""
    return [line for line in text.splitlines() if not line.lstrip().startswith("#line ")]
