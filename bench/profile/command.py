"""The command line of `fkjit profile`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fkjit.errors import ParameterError, did_you_mean
from fkjit.paths import document

from ..core.catalog import selected
from ..core.store import in_help
from ..core.words import fields_and_tiles, kernels_named
from . import collect, show, store


def parser() -> argparse.ArgumentParser:
    """Every option, with its default."""
    made = argparse.ArgumentParser(
        prog="fkjit profile",
        description="One launch of each implementation under Nsight Compute, clocks left alone.",
        epilog=document("PROFILING.md") + " says how a profile is read.",
    )
    add = made.add_argument
    add("op", metavar="OP", help="an operation: attention")
    add("kernels", nargs="*", metavar="KERNEL", help="of it: flash tiled; default: all; auto")
    add(
        "--shape", action="append", default=[], metavar="WORDS",
        help='of a case: "D128 S4096 causal" or "head_dim=64 seqlen_k=4096"; the first that has '
        "them; may be given more than once",
    )  # fmt: skip
    add("--where", action="append", default=[], metavar="FIELD=V", help="of a case: head_dim=64")
    add("--peers", default="", metavar="NAMES", help="sdpa-cudnn,fa4: beside ours; default: none")
    add("--out", type=Path, metavar="FILE", help=f"default: {in_help(store.folder())}/GPU.json")
    add("--report", type=Path, metavar="FILE", help="keep Nsight's own report, for its window")
    add("--commit", metavar="TEXT", help="what was profiled, for a copy without its .git")
    add("--nvtx", action="store_true", help="a timeline with named ranges (nsys), no counters")
    add("--show", action="store_true", help="print what --out has; nothing is run")
    return made


def main(arguments: Sequence[str]) -> int:
    """Profile, print, store; the exit status.

    ParameterError for an unknown operation or kernel, ToolchainError without the profiler.
    """
    chosen, words = parser().parse_known_args(arguments)
    asked = request(chosen, words)
    if chosen.show:
        return _show(chosen)
    if chosen.nvtx:
        print(collect.timeline(asked, chosen.report or Path(f"fkjit-{chosen.op}.nsys-rep")))
        return 0
    collect.find("ncu")
    print("fkjit: profiling; each kernel runs some 30 times", file=sys.stderr, flush=True)
    taken = collect.counters(asked, chosen.report)
    taken["environment"]["commit"] = chosen.commit or taken["environment"]["commit"]
    path = chosen.out or store.folder() / store.file_name(taken["environment"]["gpu"])
    store.add(path, taken)
    for entry in taken["entries"]:
        show.print_entry(entry)
    show.print_reading(taken["entries"])
    print(path)
    return 0


def request(chosen: argparse.Namespace, words: Sequence[str] = ()) -> dict[str, Any]:
    """What the target is asked for. ParameterError for an unknown operation or kernel."""
    (name,), first = kernels_named([chosen.op])
    (op,) = selected([name])
    chosen.op, chosen.kernels = op.name, [*first, *chosen.kernels]
    fields, tiles = fields_and_tiles("profile", words, [op])
    fields += chosen.where
    if tiles:
        raise ParameterError(
            f"profile: {', '.join(tiles)}: profile takes the tiles that calls take"
        )
    known = [spec.name for spec in op.specs]
    for name in chosen.kernels:
        if name not in {*known, "auto"}:
            allowed = ", ".join([*known, "auto"])
            near = did_you_mean(name, known)
            raise ParameterError(
                f"profile: kernel {name!r} of {op.name} is not one of {allowed}{near}"
            )
    peers = [name.strip() for name in chosen.peers.split(",") if name.strip()]
    of_several = ["auto"] if op.kernel and op.ours else []  # a kernel alone is not what calls take
    impl = ",".join(chosen.kernels or [*of_several, *known])
    shapes = [
        " ".join([shape, *fields]).strip() for shape in chosen.shape or [""] if shape or fields
    ]
    return {"op": op.name, "impl": impl, "shapes": shapes, "peers": peers}


def _show(chosen: argparse.Namespace) -> int:
    paths = [chosen.out] if chosen.out else sorted(store.folder().glob("*.json"))
    if not paths:
        raise ParameterError(f"profile: no profile in {store.folder()}")
    for path in paths:
        entries = [e for e in store.read(path)["entries"] if e["op"] == chosen.op]
        print(f"{path}:")
        for entry in entries:
            show.print_entry(entry)
        show.print_reading(entries)
    return 0
