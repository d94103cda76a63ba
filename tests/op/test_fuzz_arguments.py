"""Whatever is passed to a public function: it works, or says in one sentence what is wrong.

2,000 random calls, the same in each run. `--fuzz-calls 20000` makes more of them, `--fuzz-seed N`
others. A failure prints the seed of its call: `--fuzz-seed SEED --fuzz-calls 1` makes it again.
"""

from __future__ import annotations

import re
import resource
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fkjit.errors import FkjitError, InterpreterError
from fkjit.ops.op import op as ops
from tests.op.fuzz_kit import Arguments, Target, random_call, run


def _no_run(spec: Any, params: Any, problem: Any, arrays: Mapping[str, Any]) -> None:
    """In the place of the interpreter: all that a launch needs, but no launch."""
    spec.grid(params, problem)
    spec.block(params)
    spec.arguments(params, problem, arrays)


def bounded_memory(request: pytest.FixtureRequest) -> None:
    """What asks for more than 16 GiB fails at once, before the machine does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 30), hard))
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_AS, (soft, hard)))


def fault(target: Target, arguments: Arguments, changed: tuple[str, ...]) -> str | None:
    """What is wrong with how a call ended, None if nothing is."""
    try:
        run(target, arguments)
    except (FkjitError, TypeError, ValueError) as error:
        text = str(error)
        if isinstance(error, InterpreterError):
            return None
        if not re.search(rf"\b({'|'.join((target.name, *target.also))})[.\w]*(:|\(\))", text):
            return f"no call in: {type(error).__name__}: {text}"
        if not any(name.removesuffix("s") in text for name in target.parameters + target.parts):
            return f"no parameter in: {type(error).__name__}: {text}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_random_arguments(request, monkeypatch):
    monkeypatch.setattr(ops, "interpret", _no_run)
    bounded_memory(request)
    first, count = (request.config.getoption(name) for name in ("--fuzz-seed", "--fuzz-calls"))
    faults = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(first, first + count):
            target, arguments, changed = random_call(seed)
            wrong = fault(target, arguments, changed)
            if wrong is not None:
                given = {name: _shown(arguments[name]) for name in changed}
                faults.append(f"seed {seed}: {target.name}({given}): {wrong[:300]}")
    assert not faults, f"{len(faults)} of {count}:\n" + "\n".join(faults[:400])


def _shown(value: Any) -> str:
    """Of an array its kind alone."""
    if type(value).__module__.partition(".")[0] in ("numpy", "torch"):
        with suppress(Exception):
            return f"{type(value).__name__} {value.dtype} {tuple(value.shape)}"
        return type(value).__name__
    return repr(value)[:60]
