"""Small launches of every kernel and tile, for compute-sanitizer; see test_sanitizer_gpu.py.

compute-sanitizer --tool memcheck python -m tests.sanitizer_cases
"""

from __future__ import annotations

import cupy
import numpy as np

import fkjit
from fkjit import ops
from fkjit.build import quiet
from fkjit.device import device_target
from fkjit.spec import registered


def main() -> None:
    """One launch a variant and small problem; bf16 only where fp16 has no variant."""
    ops.load()
    launches = 0
    for spec in registered():
        variants = list(spec.variants(device_target(0).arch))
        for params in variants:
            if params.get("dtype") == "bf16" and {**params, "dtype": "fp16"} in variants:
                continue  # the same code but for the instruction's type
            for problem in spec.problems(params, "small"):
                arrays = spec.inputs(params, problem, np.random.default_rng(0))
                arrays |= spec.outputs(params, problem)
                with quiet():
                    moved = {name: cupy.asarray(array) for name, array in arrays.items()}
                    fkjit.launch(spec, params, problem, moved)
                launches += 1
    cupy.cuda.Device().synchronize()
    print("launches", launches)


if __name__ == "__main__":
    main()
