"""What a run compiled, as a file: `fkjit warm --record FILE -- COMMAND`, `fkjit warm --from FILE`.

{"fkjit": "0.2.0", "variants": [{"kernel": "attention.flash", "params": {…}, "target": "sm_90a"}]}
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fkjit import __version__, ops
from fkjit.arch import target
from fkjit.cache.lookup import Cache, EntryInfo, default_cache
from fkjit.errors import CacheError, FkjitError, ParameterError
from fkjit.settings import Settings
from fkjit.spec import find, registered
from fkjit.warm_worker import Job, job_of


def record(path: Path, command: Sequence[str]) -> tuple[int, int]:
    """Run a command and write the variants that it compiled: how many, and its exit status.

    The command starts with an empty cache, so that it compiles all it uses; then the entries go
    into the user's cache. No command: what the user's cache holds is written. ParameterError for a
    command that cannot be started and a file that cannot be written.
    """
    if not command:
        return write(path, default_cache().entries()), 0
    with TemporaryDirectory(prefix="fkjit-record-") as folder:
        empty = {
            "cache_dir": folder,
            "bundle_path": "",
            "require_cached": "",
            "cache_size": "64GiB",
        }
        more = {Settings.variable(name): value for name, value in empty.items()}
        try:
            done = subprocess.run(command, env={**os.environ, **more})
        except OSError as error:
            raise ParameterError(f"warm: --record: {command[0]} cannot be run: {error}") from error
        made = Path(folder, "v1")
        count = write(path, Cache(made).entries())
        with suppress(CacheError):  # nowhere to keep them: they are in the file at least
            if count:
                default_cache().import_(made)
    return count, done.returncode


def write(path: Path, entries: Iterable[EntryInfo]) -> int:
    """The registered kernels among some entries; how many variants there are."""
    ops.load()
    known = {spec.id for spec in registered()}
    rows = {
        json.dumps({name: entry.meta[name] for name in ("kernel", "params", "target")})
        for entry in entries
        if entry.meta.get("kernel") in known
    }
    found = {"fkjit": __version__, "variants": [json.loads(row) for row in sorted(rows)]}
    try:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"warm: --record {path} cannot be written: {error}") from error
    return len(rows)


def read(path: Path) -> list[Job]:
    """The variants of a file, for the targets that they were compiled for.

    ParameterError for a file that is no record, and for kernels that are not registered.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["variants"]
        asked = [(row["kernel"], _tuples(row["params"]), row["target"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParameterError(
            f"warm: --from {path} is no file that `fkjit warm --record` wrote: {error!r}"
        ) from error
    ops.load()
    try:
        return [job_of(find(kernel), params, target(to)) for kernel, params, to in asked]
    except (FkjitError, KeyError) as error:
        raise ParameterError(f"warm: --from {path}: {error}") from error


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
