"""A process of its own that runs cases one after the other: a CUDA error ends it, and only it."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import numpy as np

from tests.golden.groups import cases_of


def main(engine: str, group: str, folder: str, names: list[str]) -> int:
    """Each case leaves <number>.npz or <number>.txt in `folder`; a CUDA error ends the loop."""
    cases = cases_of(group)
    if engine == "gpu":
        from tests.golden.device import run_on_gpu as run_case
    else:
        from tests.golden.replay import replay as run_case
    for number, name in enumerate(names):
        place = Path(folder) / str(number)
        try:
            outputs = run_case(cases[name])
        except Exception as error:
            traceback.print_exc()
            place.with_suffix(".txt").write_text(f"{type(error).__name__}: {error}")
            if "CUDADriverError" in type(error).__name__ or "CUDARuntime" in type(error).__name__:
                return 1  # the context is spoilt; whoever started this process starts another
            continue
        partial = place.with_suffix(".partial.npz")
        np.savez(partial, **outputs)
        partial.rename(place.with_suffix(".npz"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.stdin.read().split()))
