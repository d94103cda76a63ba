"""One JSON file a GPU, docs/profiles/<gpu>.json: an entry a case, a candidate's last profile."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fkjit.errors import ParameterError

from ..core.store import results_folder

SCHEMA = 1
_CHECKOUT = Path(__file__).resolve().parents[2]
_KEPT = ("date", "gpu", "driver", "nvrtc", "commit", "versions")


def folder() -> Path:
    """docs/profiles/ of a checkout; beside an installed fkjit's results otherwise."""
    if (_CHECKOUT / "pyproject.toml").exists():
        return _CHECKOUT / "docs" / "profiles"
    return results_folder() / "profiles"


def file_name(gpu: str) -> str:
    """ "NVIDIA H200" -> "nvidia_h200.json" """
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + ".json"


def read(path: Path) -> dict[str, Any]:
    """A stored profile. ParameterError for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        schema = found["schema"]
        found["entries"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParameterError(f"profile: {path} is not a profile: {error}") from error
    if schema != SCHEMA:
        raise ParameterError(f"profile: {path} has schema {schema}; this fkjit reads {SCHEMA}")
    return found


def add(path: Path, taken: dict[str, Any]) -> dict[str, Any]:
    """Put a new profile into the file; candidates that were profiled again are replaced.

    ParameterError when the file is another GPU's.
    """
    where = {name: taken["environment"].get(name) for name in _KEPT}
    run = {**where, "date": str(where["date"])[:10], "ncu": taken.get("ncu")}
    made = read(path) if path.exists() else {"schema": SCHEMA, "gpu": run["gpu"], "entries": []}
    if made["gpu"] != run["gpu"]:
        raise ParameterError(f"profile: {path} is of {made['gpu']}, this one of {run['gpu']}")
    entries = {(entry["op"], entry["case"]): entry for entry in made["entries"]}
    for entry in taken["entries"]:
        key = (entry["op"], entry["case"])
        old = entries.get(key, {"candidates": []})
        candidates = {one["candidate"]: one for one in old["candidates"]}
        for one in entry["candidates"]:
            if "missing" not in one:
                candidates[one["candidate"]] = {**one, "run": _run(made, run)}
        if candidates:
            entries[key] = {**entry, "candidates": list(candidates.values())}
    made["entries"] = list(entries.values())
    _drop_unused_runs(made)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(made), encoding="utf-8")
    return made


def _run(made: dict[str, Any], run: dict[str, Any]) -> int:
    """The place of a run in the file's list, where it is put if it is not there."""
    runs = made.setdefault("runs", [])
    if run not in runs:
        runs.append(run)
    return runs.index(run)


def _drop_unused_runs(made: dict[str, Any]) -> None:
    candidates = [one for entry in made["entries"] for one in entry["candidates"]]
    used = sorted({one["run"] for one in candidates})
    made["runs"] = [made.get("runs", [])[number] for number in used]
    for one in candidates:
        one["run"] = used.index(one["run"])


def _text(made: dict[str, Any]) -> str:
    """JSON with a candidate a line: a new profile is a small diff."""
    head = {name: value for name, value in made.items() if name != "entries"}
    entries = []
    for entry in made["entries"]:
        rest = {name: value for name, value in entry.items() if name != "candidates"}
        lines = ",\n   ".join(json.dumps(one) for one in entry["candidates"])
        entries.append(json.dumps(rest)[:-1] + f', "candidates": [\n   {lines}]}}')
    body = ",\n  ".join(entries)
    return json.dumps(head)[:-1] + f',\n "entries": [\n  {body}]}}\n'
