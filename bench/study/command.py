"""What 16, 8 and 4 bits cost in accuracy, on the CPU: products, attention, models, a needle.

    python -m bench study [--out DIR] [--append] [--quick] [--seed 0] [--only PART ...]

Writes DIR/DATE-study.jsonl (default: bench/results/study/): a header, then a record for each
number. `python -m bench.study.tables FILE` puts them into docs/PRECISION.md. Everything is drawn
from the seed, on one thread. --quick takes seconds and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.environment import environment
from ..core.store import SCHEMA, Writer, in_help, results_folder
from . import attention, device, language, needle, on_gpu, products

PARTS: dict[str, Callable[[np.random.Generator, bool], Iterator[dict[str, Any]]]] = {
    "products": products.schemes,
    "product sums": products.short_sums,
    "attention": attention.schemes,
    "attention sums": attention.short_sums,
    "needle": needle.records,
    "models": language.records,
    # On a GPU alone:
    "kernel sums": device.records,
    "kernel forms": on_gpu.forms,
    "kernel needle": on_gpu.needles,
    "speed": on_gpu.speed,
}


def parser() -> argparse.ArgumentParser:
    """Every option, with its default."""
    made = argparse.ArgumentParser(
        prog="fkjit bench study", description=(__doc__ or "").partition("\n")[0]
    )
    where = in_help(results_folder() / "study")
    made.add_argument("--out", type=Path, metavar="DIR", help=f"default: {where}")
    made.add_argument("--append", action="store_true", help="add a run to today's file")
    made.add_argument("--quick", action="store_true", help="seconds, to see that it runs")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of all draws")
    made.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status. ParameterError where today's file is there already
    and --append is not."""
    chosen = parser().parse_args(arguments)
    where = environment()
    folder = chosen.out or results_folder() / "study"
    writer = Writer(
        folder / f"{where['date'][:10]}-study{'-quick' * chosen.quick}.jsonl", chosen.append
    )
    writer.write({
        "record": "run", "schema": SCHEMA, **where,
        "command": " ".join(["python -m bench study", *arguments]),
        "configuration": {"seed": chosen.seed, "quick": chosen.quick},
    })  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of several threads differ in their last bits
    begin = time.perf_counter()
    try:
        for number, part in enumerate(PARTS):
            if part in (chosen.only or PARTS):
                _run(part, np.random.default_rng((chosen.seed, number)), chosen.quick, writer)
    finally:
        torch.set_num_threads(threads)
    writer.write({"record": "end", "seconds": round(time.perf_counter() - begin, 1)})
    print(writer.path)
    return 0


def _run(part: str, rng: np.random.Generator, quick: bool, writer: Writer) -> None:
    """One part, each number written as soon as it is known."""
    begin = time.perf_counter()
    print(f"{part} ...", file=sys.stderr, flush=True)
    count = 0
    for count, record in enumerate(PARTS[part](rng, quick), 1):  # noqa: B007
        writer.write({"record": "study", **record})
    seconds = time.perf_counter() - begin
    print(f"{part}: {count} numbers, {seconds:.0f} s", file=sys.stderr, flush=True)
