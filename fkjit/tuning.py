"""Which values of a kernel's free parameters are the fastest on a GPU, as `fkjit tune` found them.

Winners stand in one JSON file a GPU: in the user's folder and, as far as fkjit comes with them, in
tuned/ beside this module. docs/TUNING.md describes the file. Any op may ask `lookup` where it
chooses.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fkjit.arch import Arch
from fkjit.cache import trust
from fkjit.cache.file import write_atomically
from fkjit.cache.untrusted import MAX_JSON, parse_json, read_file
from fkjit.errors import CacheError, TuningError
from fkjit.messages import say
from fkjit.paths import HERE
from fkjit.settings import Settings, settings
from fkjit.spec import KernelSpec, Params, Problem
from fkjit.symbolic import decision

SCHEMA = 1
SHIPPED = HERE / "tuned"
KEY = ("kernel", "capability", "fixed", "shape")  # what an entry is found by

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """One file: its entries by the text of their keys."""

    path: Path
    gpu: str
    entries: Mapping[str, Entry]


@dataclass(frozen=True)
class Found:
    """What the files say of one problem. `values` None: the default stands, `notes` say why."""

    values: dict[str, Any] | None
    notes: tuple[str, ...] = ()
    path: Path | None = None
    entry: Entry | None = None


def lookup(spec: KernelSpec, fixed: Params, problem: Problem, arch: Arch) -> dict[str, Any] | None:
    """The tuned values of the free parameters of `spec`, or None for the default.

    `fixed` has the other parameters. An entry that names a variant which is no longer legal does
    not count, nor does a file that cannot be read (one line on stderr says so).
    """
    if arch.gpu is None or not _tables(arch.gpu)[0]:
        return None
    kept = tuple([fixed[param.name] for param in spec.params if not param.tunable])
    found = _winner(spec, arch, kept, tuple(spec.shape_class(problem).items()))
    return None if found is None else dict(found)


@decision(4096)
def _winner(
    spec: KernelSpec, arch: Arch, kept: tuple[Any, ...], shape: tuple[tuple[str, Any], ...]
) -> dict[str, Any] | None:
    """The same for all problems of a class; `kept`: values of the parameters that are not free."""
    names = [param.name for param in spec.params if not param.tunable]
    return _find(spec, dict(zip(names, kept, strict=True)), dict(shape), arch).values


def tuned(spec: KernelSpec, params: Params, problem: Problem, arch: Arch) -> dict[str, Any]:
    """These parameters, the free ones as `lookup` has them; as they are where it has none."""
    found = lookup(spec, params, problem, arch)
    return dict(params) if found is None else {**params, **found}


def find(spec: KernelSpec, fixed: Params, problem: Problem, arch: Arch) -> Found:
    """The same, with where it comes from."""
    return _find(spec, fixed, spec.shape_class(problem), arch)


def _find(spec: KernelSpec, fixed: Params, shape: Mapping[str, Any], arch: Arch) -> Found:
    if arch.gpu is None:
        return Found(None, ("no GPU, so nothing tuned",))
    tables, troubles = _tables(arch.gpu)
    if not tables:
        return Found(None, (*troubles, f"no file of tuned values for {arch.gpu}"))
    text = key_text(_key(spec, fixed, shape, arch))
    notes = list(troubles)
    for table in tables:
        entry = table.entries.get(text)
        if entry is None:
            notes.append(f"no entry for this in {table.path}")
            continue
        values = _declared(spec, entry["choice"])
        stale = _why_stale(spec, values, fixed, arch)
        if values is not None and stale is None:
            return Found(values, tuple(notes), table.path, entry)
        notes.append(f"{table.path} has a stale entry, {entry['choice']}: {stale}")
    return Found(None, tuple(notes))


def key(spec: KernelSpec, fixed: Params, problem: Problem, arch: Arch) -> dict[str, Any]:
    """What the winner of a problem is stored by, beside the GPU's name."""
    return _key(spec, fixed, spec.shape_class(problem), arch)


def _key(spec: KernelSpec, fixed: Params, shape: Mapping[str, Any], arch: Arch) -> dict[str, Any]:
    names = {param.name for param in spec.params}
    shape = {n: v for n, v in shape.items() if n not in names}
    kept = {param.name: fixed[param.name] for param in spec.params if not param.tunable}
    capability = ".".join(map(str, arch.capability))
    return {"kernel": spec.id, "capability": capability, "fixed": kept, "shape": shape}


def key_text(entry: Entry) -> str:
    """A key, or that of an entry, as one string."""
    return json.dumps([entry[name] for name in KEY], sort_keys=True)


def free(spec: KernelSpec, params: Params) -> dict[str, Any]:
    """The tunable ones of these parameters."""
    return {param.name: params[param.name] for param in spec.params if param.tunable}


def _declared(spec: KernelSpec, choice: Mapping[str, Any]) -> dict[str, Any] | None:
    """JSON's values as the spec declares them (a list is a tuple there); None for unknown ones."""
    made = {}
    for param in spec.params:
        if param.tunable:
            given = choice.get(param.name)
            matching = [v for v in param.values if json.dumps(v) == json.dumps(given)]
            if not matching:
                return None
            made[param.name] = matching[0]
    return made if len(made) == len(choice) else None


def _why_stale(
    spec: KernelSpec, values: dict[str, Any] | None, fixed: Params, arch: Arch
) -> str | None:
    if values is None:
        return f"{spec.id} has no such values"
    return spec.why_not({**fixed, **values}, arch)


# ------------------------------------------------------------------ files


def file_name(gpu: str) -> str:
    """ "NVIDIA H200" -> "nvidia_h200.json" """
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + ".json"


def user_folder() -> Path | None:
    """Where this user's winners are: in FKJIT_CACHE_DIR if set, else among the platform's user
    data; None without a home directory."""
    chosen = settings().cache_dir
    if chosen is not None:
        return chosen / "tuning"
    import platformdirs

    try:
        found = Path(platformdirs.user_data_dir("fkjit"))
    except (OSError, RuntimeError, KeyError):
        return None
    return found / "tuning" if found.is_absolute() else None


def user_file(gpu: str) -> Path:
    """The user's file for a GPU. TuningError without a home directory."""
    folder = user_folder()
    if folder is None:
        variable = Settings.variable("cache_dir")
        raise TuningError(f"tune: no home directory to keep results in; {variable} names a folder")
    return folder / file_name(gpu)


def forget() -> None:
    """Read the files anew when they are next asked for."""
    _tables.cache_clear()
    _winner.cache_clear()


@lru_cache(maxsize=16)
def _tables(gpu: str) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """The user's file and the shipped one, those that are there; and what was wrong with a file."""
    tables, troubles = [], []
    for folder in (user_folder(), SHIPPED):
        path = folder / file_name(gpu) if folder else None
        if path is None or not os.path.exists(path):  # False as well where it is out of reach
            continue
        try:
            table = read(path)
        except TuningError as error:
            troubles.append(str(error))
            say(f"{error}; its tuned values are not used")
            continue
        if table.gpu == gpu:
            tables.append(table)
        else:
            troubles.append(f"{path} is for {table.gpu}")
    return tuple(tables), tuple(troubles)


def read(path: Path) -> Table:
    """One file. TuningError, naming it and the fix, for anything else, and for a user's file that
    others could have written; what comes with the package is as good as the package."""
    try:
        if path.parent != SHIPPED:
            trust.require(path)
        stored = parse_json(read_file(path, MAX_JSON, judged=path.parent != SHIPPED))
        if stored["schema"] != SCHEMA:
            raise ValueError(f"schema {stored['schema']}, and this fkjit reads {SCHEMA}")
        entries = {key_text(entry): entry for entry in stored["entries"]}
        for entry in entries.values():
            if not isinstance(entry["choice"], dict):
                raise ValueError(f"choice {entry['choice']!r} is not an object")
        return Table(path, str(stored["gpu"]), entries)
    except (OSError, CacheError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise TuningError(
            f"tuning: {path} is not a file of tuned values ({reason}); mend or remove it"
        ) from error


def store(path: Path, gpu: str, entries: Iterable[Entry]) -> None:
    """Put entries into a file, each in the place of the one with its key; the rest stays.

    The file is replaced as a whole. TuningError where it cannot be written, is another GPU's, or
    is there and cannot be read.
    """
    kept: dict[str, Entry] = {}
    if os.path.exists(path):
        table = read(path)
        if table.gpu != gpu:
            raise TuningError(f"tune: {path} is for {table.gpu}, not {gpu}; choose another file")
        kept.update(table.entries)
    kept.update({key_text(entry): entry for entry in entries})
    lines = ",\n".join(f"  {json.dumps(kept[text])}" for text in sorted(kept))
    text = f'{{\n "schema": {SCHEMA},\n "gpu": {json.dumps(gpu)},\n "entries": [\n{lines}\n ]\n}}\n'
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise TuningError(f"tune: {path} cannot be written: {error}") from error
    forget()
