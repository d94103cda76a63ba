"""Sections about the machine: what each shipped variant takes of it, and the stored profile."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

from fkjit.arch import Target, target
from fkjit.errors import FkjitError
from fkjit.jit.build import build, quiet
from fkjit.occupancy import occupancy
from fkjit.spec import registered
from fkjit.warming import warm

from ..profile.metrics import METRICS, STALLS
from ..profile.show import rows
from .cells import Study
from .section import Section, Table
from .work import profile_entries

_HEAD = (
    "variant", ">registers", ">spills [B]", ">stack [B]", ">shared [B]", ">threads",
    ">blocks/SM", ">occupancy [%]", "bound by",
)  # fmt: skip


def resources(op: str, to: str | None) -> Section:
    """A row for each variant that is shipped for a target; those not in the cache are compiled."""
    made = Section("resources", "Registers, shared memory, occupancy")
    if to is None:
        made.missing = (
            "no target was asked for (`fkjit report --target sm_90a` compiles every variant)"
        )
        return made
    if not registered(op):
        made.missing = f"{op} is not registered here"
        return made
    chosen = target(to)
    _compile(op, to)
    failed = []
    for spec in registered(op):
        try:
            table = _table(spec, chosen)
        except FkjitError as error:  # one kernel under construction is no reason to lose the rest
            failed.append(f"{spec.id} is left out: {str(error).splitlines()[0]}.")
            continue
        made.tables += [table] if table else []
    spilled = sum(row[2] > 0 for table in made.tables for row in table.rows)
    count = sum(len(table.rows) for table in made.tables)
    made.text = [
        f"{count} variants compiled for {chosen.name}; {spilled or 'none'} of them "
        f"{'spills' if spilled == 1 else 'spill'} registers. Occupancy is the one in theory: warps "
        "that fit on an SM over the warps that it can hold.",
        *failed,
    ]
    if not made.tables:
        made.missing = f"no kernel of {op} is shipped for {chosen.name}"
    return made


def _compile(op: str, to: str) -> None:
    """Fill the cache; a line now and then where it takes long."""

    def progress(done: int, total: int, label: str) -> None:
        if done % 20 == 0:
            print(f"fkjit: compiling for the table: {done} of {total}", file=sys.stderr, flush=True)

    warm(op, arch=to, progress=progress)


def _table(spec: Any, to: Target) -> Table | None:
    found = []
    for params in spec.variants(to.arch):
        with quiet():
            used = build(spec, params, to).meta["resources"] or {}
        threads = prod(spec.block(params))
        shared = used.get("shared", 0) + spec.shared_bytes(params)
        fits = occupancy(to.arch, used.get("registers", 0), shared, threads)
        spills = used.get("spill_stores", 0) + used.get("spill_loads", 0)
        found.append(
            (
                spec.label(params), used.get("registers", 0), spills, used.get("stack", 0), shared,
                threads, fits.blocks, round(100 * fits.share, 1), fits.limit,
            )
        )  # fmt: skip
    return Table(_HEAD, found, f"{spec.id}: {len(found)} variants", fold=True) if found else None


def counters(study: Study, profile: dict[str, Any] | None) -> Section:
    """The stored profile of this GPU as tables, and how its rows are read."""
    made = Section("profile", "Profile")
    entries = profile_entries(study, profile)
    if profile is None or not entries:
        made.missing = f"no profile of {study.op} on {study.gpu} (`fkjit profile {study.op}`)"
        return made
    for entry in entries:
        there = [one for one in entry["candidates"] if one.get("kernels")]
        head = ("", *(f">{one['candidate']}" for one in there))
        made.tables.append(Table(head, rows(there), entry["case"], fold=True))
    made.tables.append(Table(("", "how to read it"), _reading(), "How to read the rows", fold=True))
    runs = {f"{run['date']}, Nsight Compute {run['ncu']}" for run in profile["runs"]}
    made.text = [
        "One launch of each under Nsight Compute, caches flushed before it, clocks left alone "
        f"({'; '.join(sorted(runs))}). Stalls are cycles between two instructions of a warp."
    ]
    return made


def _reading() -> Sequence[tuple[str, str]]:
    stalls = [(f"stall {name}", text) for name, text in STALLS.items()]
    return [*((metric.title, metric.reading) for metric in METRICS), *stalls]
