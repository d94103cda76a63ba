"""What the first call of a process costs, with nothing cached and from a warm disk cache.

    python -m bench.core.first_call [--samples 5] [--out FILE]

Each sample is a fresh process on a CUDA GPU that has imported torch and touched the device; timed
is `fkjit.attention(...)` up to the finished result, import of fkjit's parts and CuPy included or
not, as the columns say. Results are cells of the same store as the suite's, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .environment import environment
from .statistics import summary
from .store import SCHEMA, Writer

DIMS = (64, 128, 256)
_CHILD = """
import json, sys, time
import torch
q, k, v = (torch.randn(1, 8, 256, {dim}, device="cuda", dtype=torch.float16) for _ in range(3))
torch.cuda.synchronize()
start = time.perf_counter()
import cupy
cupy.cuda.runtime.getDevice()
imported = time.perf_counter()
import fkjit
fkjit.attention(q, k, v)
torch.cuda.synchronize()
done = time.perf_counter()
fkjit.attention(q, k, v, causal=True, softmax_scale=0.5)
torch.cuda.synchronize()
again = time.perf_counter()
print(json.dumps({{"cupy_import": (imported - start) * 1e3, "first_call": (done - imported) * 1e3,
                   "new_geometry": (again - done) * 1e3}}))
"""


def sample(cache: str, dim: int) -> dict[str, float]:
    """Milliseconds of one fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD.format(dim=dim)],
        env={**os.environ, "FKJIT_CACHE_DIR": cache, "FKJIT_LOG": "quiet"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def measure(
    samples: int, take: Callable[[str, int], dict[str, float]] = sample
) -> list[dict[str, Any]]:
    """A cell for each head dimension and each state of the cache."""
    cells = []
    for dim in DIMS:
        print(f"head_dim {dim}: {2 * samples} processes", file=sys.stderr, flush=True)
        states: dict[str, list[dict[str, float]]] = {"cold": [], "warm disk cache": []}
        for _ in range(samples):
            with tempfile.TemporaryDirectory() as cache:
                for found in states.values():
                    found.append(take(cache, dim))
        for state, found in states.items():
            times = {name: summary([one[name] for one in found]) for name in found[0]}
            cells.append(
                {
                    "record": "cell", "op": "first_call", "case": f"fp16 D{dim} {state}",
                    "candidate": "fkjit", "kind": "ours", **times,
                }
            )  # fmt: skip
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--samples", type=int, default=5, help="processes of each kind")
    parser.add_argument("--out", type=Path, help="a new result file")
    chosen = parser.parse_args()
    writer = chosen.out and Writer(chosen.out)
    cells = measure(chosen.samples)
    if writer:
        writer.write(
            {"record": "run", "schema": SCHEMA, **environment(), "command": "bench.core.first_call"}
        )
        for cell in cells:
            writer.write(cell)
    for cell in cells:
        print(
            f"{cell['case']:26} first call {cell['first_call']['p50']:7.1f} ms   (importing CuPy "
            f"before it {cell['cupy_import']['p50']:.0f} ms; next geometry "
            f"{cell['new_geometry']['p50']:.2f} ms)"
        )


if __name__ == "__main__":
    main()
