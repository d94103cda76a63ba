"""What the suite knows of an operation: how to call it, what it is compared with, on which cases.

`catalog.py` finds them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from fkjit import __version__
from fkjit.arch import Arch
from fkjit.spec import KernelSpec, Params, Problem, find, registered

from .accuracy import Expected

Arrays = Mapping[str, Any]


class Refused(Exception):
    """A candidate does not take this problem; the text says why."""


@dataclass(frozen=True)
class Prepared:
    """A call ready to be timed: inputs laid out and plans made beforehand.

    `output` turns what the call returns into what the reference is compared with. `variant` is the
    kernel of ours that it launches.
    """

    call: Callable[[], Any]
    output: Callable[[Any], Any] = lambda returned: returned
    capturable: bool = True
    variant: tuple[KernelSpec, Params] | None = None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Ours, a twin or a peer. `prepare` raises Refused for problems that it does not take.

    `slow`: why it is left out unless it is asked for by name. `variant`: of ours, what it launches
    for a problem; it raises Refused, or an error of fkjit's, where there is none.
    """

    name: str
    prepare: Callable[[Problem, Arrays], Prepared]
    kind: str = "peer"  # "ours", "twin", "peer"
    package: str | None = None  # whose version counts
    module: str | None = None  # what must be importable
    slow: str | None = None
    variant: Callable[[Problem], tuple[KernelSpec, Params]] | None = None

    def version(self) -> str | None:
        """Of its package; None where there is none."""
        return __version__ if self.kind == "ours" else version(self.package)

    def missing(self) -> str | None:
        """Why it cannot be used here, or None."""
        return _why_missing(self.module) if self.module else None


def version(package: str | None) -> str | None:
    """The installed version of a package."""
    try:
        return metadata.version(package) if package else None
    except metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=64)
def _why_missing(module: str) -> str | None:
    try:
        if find_spec(module.split(".")[0]) is None:
            return f"not installed (no module {module.split('.')[0]})"
        import_module(module)
    except Exception as error:  # a library that is there but does not load says why itself
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
    return None


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation. Work and traffic come from the specs of its kernels."""

    name: str
    sets: Mapping[str, Sequence[Problem]]  # "default" is one of them
    label: Callable[[Problem], str]  # short and unique: "bf16 D128 S4096 B4 H16 causal"
    inputs: Callable[[Problem, Any], Arrays]  # fresh random arrays on a device
    expected: Callable[[Problem, Arrays], Expected]
    ours: Callable[[Problem, Arrays], Prepared] | None = None  # the public call
    # Parameters of a kernel for a problem; ParameterError where none fit.
    choose: Callable[[KernelSpec, Problem, Arch], Params]
    # What the public call launches, to be compiled ahead; None: each variant when it is called.
    chosen: Callable[[Problem, Arch], tuple[KernelSpec, Params]] | None = None
    peers: Sequence[Candidate] = field(default=())
    # What is measured: a kernel "op.name", or all kernels of an op; None: those of this name.
    kernel: str | None = None
    # A kernel with each variant that calls take, where fewer are registered.
    whole: Callable[[KernelSpec], KernelSpec] = lambda spec: spec
    # Launches a variant of a kernel; None: `fkjit.launch` into the outputs of its spec.
    launch: Callable[[KernelSpec, Params, Problem, Arrays, Any], Prepared] | None = None

    def flops(self, problem: Problem) -> float:
        """Counted work of a problem."""
        return self.specs[0].work.flops(problem)

    def bytes(self, problem: Problem) -> float:
        """Compulsory device-memory traffic of a problem."""
        return self.specs[0].work.bytes(problem)

    @property
    def specs(self) -> list[KernelSpec]:
        """Its kernels; the first one counts work and traffic."""
        name = self.kernel or self.name
        found = [find(name)] if "." in name else registered(name)
        return [self.whole(spec) for spec in found]
