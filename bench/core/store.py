"""Results as JSON lines, valid at any time: a header for each run, then a line for each cell.

{"record": "run", ...}      GPU, versions, commit, command, configuration, ceilings
{"record": "cell", ...}     one candidate on one case
{"record": "host", ...}     what a call costs the host (`fkjit bench host`)
{"record": "end", ...}      how the run ended; missing after a crash
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fkjit.errors import ParameterError

SCHEMA = 1
_SUITE = Path(__file__).resolve().parents[1]


@dataclass
class Run:
    """One run of a file. `cells` in the order of measurement; `end` None if it was cut short."""

    header: dict[str, Any]
    cells: list[dict[str, Any]] = field(default_factory=list)
    host: list[dict[str, Any]] = field(default_factory=list)  # what calls cost the host
    end: dict[str, Any] | None = None


class Writer:
    """Appends records to one file; each is on the disk before the next is measured.

    ParameterError when the file is there already and `append` is not asked for.
    """

    def __init__(self, path: Path, append: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not append:
            raise ParameterError(
                f"bench: --out {path} exists; choose another name, or --append a run to it"
            )
        _cut_torn_line(path)

    def write(self, record: dict[str, Any]) -> None:
        """One line, flushed to the disk."""
        line = json.dumps(_plain(record), separators=(", ", ": "), allow_nan=False) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _plain(value: Any) -> Any:
    """What JSON can hold: NaN and infinities as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _cut_torn_line(path: Path) -> None:
    """Take away what an interrupted write left after the last whole line."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Every record whose line is whole, with its newline. ParameterError for any other line."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ParameterError(f"bench: {path} cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            record = json.loads(line)
            record["record"]
        except (ValueError, KeyError, TypeError) as error:
            raise ParameterError(f"bench: {path}:{number} is not a result line") from error
        yield record


def read(path: Path) -> list[Run]:
    """The runs of a file. ParameterError for a file that is none of ours."""
    runs: list[Run] = []
    for record in records(path):
        if record["record"] == "run":
            if record.get("schema") != SCHEMA:
                raise ParameterError(
                    f"bench: {path} has schema {record.get('schema')}; this fkjit reads {SCHEMA}"
                )
            runs.append(Run(record))
        elif not runs:
            raise ParameterError(f"bench: {path} begins without a run's header")
        elif record["record"] == "cell":
            runs[-1].cells.append(record)
        elif record["record"] == "host":
            runs[-1].host.append(record)
        elif record["record"] == "end":
            runs[-1].end = record
    if not runs:
        raise ParameterError(f"bench: {path} holds no run")
    return runs


def latest(runs: list[Run]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """{(op, case, candidate): cell}; of one that was measured more than once, the last."""
    return {
        (cell["op"], cell["case"], cell["candidate"]): cell for run in runs for cell in run.cells
    }


def results_folder() -> Path:
    """bench/results/ of a checkout; for an installed fkjit, fkjit-bench/ where one stands."""
    if (_SUITE.parent / "pyproject.toml").exists():
        return _SUITE / "results"
    return Path.cwd() / "fkjit-bench"


def in_help(path: Path) -> str:
    """A path in an argparse help, where % is a sign of its own."""
    return str(path).replace("%", "%%")


def file_name(header: dict[str, Any]) -> str:
    """Date, GPU and commit: 20261121-093015-h200-fe6e164.jsonl"""
    gpu = re.sub(r"nvidia|geforce", "", str(header.get("gpu") or "no-gpu"), flags=re.IGNORECASE)
    when = re.sub(r"[^0-9T]", "", header["date"]).replace("T", "-")[:15]
    parts = (when, gpu.strip().lower(), header.get("commit") or "unknown")
    return "-".join(re.sub(r"[^a-z0-9-]+", "-", part).strip("-") for part in parts) + ".jsonl"
