"""Small launches of every kernel and tile, for compute-sanitizer; see test_sanitizer_gpu.py.

compute-sanitizer --tool memcheck python -m tests.core.sanitizer_cases [OP…] [--without KERNEL]
                                                                   [--seconds N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import cupy
import numpy as np

import fkjit
from fkjit import ops
from fkjit.jit.build import quiet
from fkjit.runtime.device import device_target
from fkjit.spec import KernelSpec, registered


def variants(spec: KernelSpec) -> list[dict[str, Any]]:
    """Those of this GPU; bf16 only where fp16 has none: the code is the same but for a type."""
    every = list(spec.variants(device_target(0).arch))
    return [p for p in every if p.get("dtype") != "bf16" or {**p, "dtype": "fp16"} not in every]


def cases(names: list[str], without: list[str]) -> Iterator[tuple[KernelSpec, dict[str, Any]]]:
    """Kernel after kernel takes its turn, so that a run cut short has seen all of them."""
    specs = [spec for spec in registered() if not names or spec.op in names]
    specs = [spec for spec in specs if spec.id not in without]
    for row in zip_longest(*([(spec, p) for p in variants(spec)] for spec in specs)):
        yield from filter(None, row)


def part_of(text: str) -> slice:
    """ "2/16": the third of sixteen parts."""
    which, parts = map(int, text.split("/"))
    return slice(which, None, parts)


def launch(spec: KernelSpec, params: dict[str, Any], problem: Any) -> None:
    arrays = spec.verification.inputs(params, problem, np.random.default_rng(0))
    arrays |= spec.verification.outputs(params, problem)
    with quiet():
        moved = {name: cupy.asarray(array) for name, array in arrays.items()}
        fkjit.launch(spec, params, problem, moved)


def main() -> None:
    """One launch a variant and small problem."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ops", nargs="*", help="default: all")
    parser.add_argument("--without", action="append", default=[], help="a kernel, by its id")
    parser.add_argument("--part", type=part_of, default=slice(None), help='"2/16": the third of 16')
    parser.add_argument("--seconds", type=float, help="stop after so long")
    given = parser.parse_args()
    ops.load()
    begin, launches, seen, left = time.monotonic(), 0, set(), 0
    for spec, params in list(cases(given.ops, given.without))[given.part]:
        if given.seconds and time.monotonic() - begin > given.seconds:
            left += 1
            continue
        for problem in spec.verification.problems(params, "small"):
            launch(spec, params, problem)
            launches += 1
        seen.add(spec.id)
    cupy.cuda.Device().synchronize()
    print("kernels", *sorted(seen))
    print("variants left out", left)
    print("launches", launches)


if __name__ == "__main__":
    main()
