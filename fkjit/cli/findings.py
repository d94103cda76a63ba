"""What `fkjit check` found, for programs: JSON of every kernel, or SARIF 2.1.0 of the faults, which
code hosts show at their lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fkjit.errors import FkjitError
from fkjit.jit.render import Rendered, load
from fkjit.paths import source_root

if TYPE_CHECKING:
    from fkjit.cli.check import Checked

FORMATS = ("text", "json", "sarif")
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def text(found: Sequence[Checked], format_: str) -> str:
    """The findings as "json" or "sarif"."""
    made = [_record(one) for one in found] if format_ == "json" else _sarif(found)
    return json.dumps(made, indent=2)


def window(one: Checked) -> str:
    """Five lines around a fault, as a compile error has them; "" where it has no line."""
    rendered = _rendered(one)
    name, _, line = one.location.rpartition(":")
    return rendered.window(name, int(line)) if rendered and line.isdigit() else ""


def _rendered(one: Checked) -> Rendered | None:
    try:
        return None if one.params is None else load(one.spec, one.params)
    except FkjitError:  # the fault itself, where a template cannot be read
        return None


def _record(one: Checked) -> dict[str, Any]:
    return {
        "kernel": one.spec.id,
        "target": one.to.name,
        "variants": one.variants,
        "of": one.of,
        "problems": one.problems,
        "seconds": round(one.seconds, 3),
        "error_in_tolerances": one.ratio,
        "bank_conflicts": one.banks[0] if one.counted else None,
        "ok": not one.error,
        "verdict": one.verdict,
        "error": one.error or None,
        "location": one.location or None,
        "params": None if one.params is None else {n: str(v) for n, v in one.params.items()},
    }


def _sarif(found: Sequence[Checked]) -> dict[str, Any]:
    faults = [one for one in found if one.error]
    rules = sorted({_rule(one) for one in faults})
    driver = {"name": "fkjit check", "rules": [{"id": rule} for rule in rules]}
    run = {"tool": {"driver": driver}, "results": [_result(one) for one in faults]}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(one: Checked) -> str:
    """ "wrong numbers: out" -> "wrong-numbers": alike for all kernels."""
    return one.verdict.partition(":")[0].strip().replace(" ", "-")


def _result(one: Checked) -> dict[str, Any]:
    name, _, line = one.location.rpartition(":")
    rendered = _rendered(one)
    name = name or (rendered.name if rendered else one.spec.source)
    place = {
        "artifactLocation": {"uri": _uri(name, rendered)},
        "region": {"startLine": int(line) if line.isdigit() else 1},
    }
    return {
        "ruleId": _rule(one),
        "level": "error",
        "message": {"text": one.error},
        "locations": [{"physicalLocation": place}],
    }


def _uri(name: str, rendered: Rendered | None) -> str:
    """The file's path below the working directory, where it is there; else as errors name it."""
    file = rendered.where if rendered and name == rendered.name else source_root() / name
    try:
        return file.resolve().relative_to(Path.cwd().resolve()).as_posix()
    except ValueError:
        return name
