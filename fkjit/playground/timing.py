"""Times on this machine's GPU, the edited kernel and the unedited one in turns.

A process of its own: CUDA needs more address space than a worker has, and an edited kernel may not
end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fkjit.errors import DeviceError, FkjitError
from fkjit.numerics import drawn
from fkjit.playground.request import Variant, variants
from fkjit.replay import Replay
from fkjit.runtime.device import device_target
from fkjit.spec import KernelSpec, Problem

SECONDS = 30.0
TURNS, LAUNCHES = 15, 10  # graphs of so many launches each
_CHILD = "import sys; sys.path[:] = {path!r}; from fkjit.playground.timing import main; main()"


def measured(asked: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of a variant as the page asked for it: {"edited", "unedited", …}, or {"why"}."""
    command = [sys.executable, "-c", _CHILD.format(path=sys.path)]
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, timeout=SECONDS
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"why": f"the kernel did not end on the GPU within {SECONDS:g} s"}
    except (OSError, ValueError, IndexError):
        return {"why": "the process that measures has ended"}


def main() -> None:
    """A variant on stdin, its times on stdout."""
    import resource

    from fkjit import ops

    with suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    ops.load()
    try:
        (variant,) = variants({"a": json.load(sys.stdin)})
        print(json.dumps(times(variant)))
    except FkjitError as error:
        print(json.dumps({"why": str(error)}))


def times(variant: Variant) -> dict[str, Any]:
    """The same of a variant, in this process. DeviceError where the GPU is of another target."""
    spec, to = variant.spec, device_target(0)
    if to.name != variant.to.name:
        raise DeviceError(f"times are of this GPU, which is {to.name}: choose that target")
    problems = spec.work.bench(variant.params) or spec.verification.problems(variant.params, "full")
    problem = max(problems, key=spec.work.bytes)
    with tempfile.TemporaryDirectory(prefix="fkjit-playground-") as folder:
        each = {"unedited": spec}
        if variant.text is not None:
            each["edited"] = _edited(spec, variant.text, Path(folder))
        runs = {name: _graph(one, variant, problem) for name, one in each.items()}
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(TURNS):
            for name, run in runs.items():
                taken[name].append(run())
    return {
        **{name: median(some) for name, some in taken.items()},
        "gpu": to.arch.gpu,
        "problem": " ".join(f"{name}={value}" for name, value in problem.items()),
        "flops": spec.work.flops(problem),
        "bytes": spec.work.bytes(problem),
    }


def _edited(spec: KernelSpec, text: str, folder: Path) -> KernelSpec:
    """The kernel with another template, under a name of its own."""
    source = folder / Path(spec.source).name
    source.write_text(text, encoding="utf-8")
    return replace(spec, name=f"{spec.name}_edited", root=folder, source=source.name)


def _graph(spec: KernelSpec, variant: Variant, problem: Problem) -> Callable[[], float]:
    """Replays a captured graph of launches; returns microseconds a launch."""
    _, arrays = drawn(spec, variant.params, problem, np.random.default_rng(0))
    made = Replay(spec, variant.params, problem, arrays, LAUNCHES)
    made.seconds()
    return lambda: made.seconds() * 1e6
