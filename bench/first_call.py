"""What the first call of a process costs, with nothing cached and from a warm disk cache.

    python -m bench.first_call [--out F]

Each sample is a fresh process on a CUDA GPU that has imported torch and touched the device; timed
is `fkjit.attention(...)` up to the finished result, import of fkjit's parts and CuPy included or
not, as the columns say.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile

from bench.common import parser, progress, write

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
print(json.dumps({{"cupy_ms": (imported - start) * 1e3, "first_ms": (done - imported) * 1e3,
                   "new_geometry_ms": (again - done) * 1e3}}))
"""


def sample(cache: str, dim: int) -> dict[str, float]:
    """Milliseconds of one fresh process."""
    import os

    done = subprocess.run(
        [sys.executable, "-c", _CHILD.format(dim=dim)],
        env={**os.environ, "FKJIT_CACHE_DIR": cache, "FKJIT_LOG": "quiet"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--samples", type=int, default=5)
    chosen = options.parse_args()
    rows = []
    for dim in (64, 128, 256):
        progress(f"head_dim {dim}: {2 * chosen.samples} processes")
        cold, warm = [], []
        for _ in range(chosen.samples):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(sample(cache, dim))
                warm.append(sample(cache, dim))
        for state, samples in (("cold", cold), ("warm disk cache", warm)):
            medians = {name: statistics.median(s[name] for s in samples) for name in samples[0]}
            rows.append({"bench": "first_call", "state": state, "head_dim": dim, **medians})
            print(
                f"D{dim:<3} {state:15} first call {medians['first_ms']:7.1f} ms   (importing CuPy "
                f"before it {medians['cupy_ms']:.0f} ms; next geometry "
                f"{medians['new_geometry_ms']:.2f} ms)",
                flush=True,
            )
    write(chosen.out, rows)


if __name__ == "__main__":
    main()
