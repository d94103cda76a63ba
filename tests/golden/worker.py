"""A process of its own that runs cases one after the other: a CUDA error ends it, and only it.

A case that takes longer than SECONDS is ended, with the process, by its alarm.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

import numpy as np

from tests.golden.groups import cases_of

SECONDS = 30  # compiling and running a case takes one; the first one imports CuPy too


def main(engine: str, group: str, folder: str, names: list[str]) -> int:
    """Each case leaves <number>.npz or <number>.txt in `folder`; a CUDA error ends the loop."""
    cases = cases_of(group)
    if engine == "gpu":
        from tests.golden.device import run_on_gpu as run_case
    else:
        from tests.golden.replay import replay as run_case
    for number, name in enumerate(names):
        place = Path(folder) / str(number)
        signal.alarm(SECONDS)
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
    status = main(sys.argv[1], sys.argv[2], sys.argv[3], sys.stdin.read().split())
    sys.stderr.flush()
    os._exit(status)  # a spoilt context would complain, or hang, on the way out
