"""KernelSpec: what a kernel is, said once. Sweeps, snapshots, benchmarks, the warm list, the
command line and the docs all read it from the registry here.

A spec has three parts: the launch contract (fields of `KernelSpec`), what a problem costs (`Work`)
and how the kernel is checked (`Verification`), which a call never needs.

A *parameter* is what a variant of the kernel is compiled for (tile, dtype, head dimension). A
*problem* is what one call works on (batch, sequence lengths, causal): a plain mapping of sizes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np

from fkjit.arch import Arch
from fkjit.arguments import shown
from fkjit.errors import ArgumentTypeError, ParameterError, did_you_mean

Params = Mapping[str, Any]
Problem = Mapping[str, Any]
Arrays = dict[str, np.ndarray]
Dim3 = tuple[int, int, int]
SharedLayout = Sequence[tuple[str, int]]  # name and bytes of arrays that follow one another


def _no_shared(params: Params) -> int:
    return 0


def powers_of_two(problem: Problem) -> dict[str, Any]:
    """The whole numbers of a problem, each up to the next power of two, and its flags."""
    return {
        name: value if isinstance(value, bool) else 1 << (max(value, 1) - 1).bit_length()
        for name, value in problem.items()
        if isinstance(value, int)
    }


def size_class(value: int, most: int) -> int:
    """The next power of two, at most `most`: sizes that share what is tuned for them."""
    return min(most, 1 << (max(value, 1) - 1).bit_length())


@dataclass(frozen=True)
class Param:
    """One declared parameter of a kernel.

    `values` are all legal values in the order they should be listed. A `tunable` parameter is free
    to choose for a given problem (a tile); the others follow from the problem (dtype, head_dim).
    """

    name: str
    values: tuple[Any, ...]
    doc: str
    tunable: bool = False


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a problem costs, and which problems are worth timing."""

    flops: Callable[[Problem], float] = lambda problem: 0.0
    bytes: Callable[[Problem], float] = lambda problem: 0.0  # compulsory device-memory traffic
    # Problems worth timing on a GPU, for `fkjit bench`. None given: Verification's "full" ones.
    bench: Callable[[Params], Sequence[Problem]] = lambda params: ()
    interpreter_flops: float = 5e7  # flops a second the CPU interpreter manages, for estimates
    # Flops the interpreter really does: with padding. None: those of the problem.
    interpreter_work: Callable[[Params, Problem], float] | None = None


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How the kernel is checked: problems, arrays for them, and what has to come out."""

    # One fresh random problem of each kind worth testing: scale "small" (interpreter) or "full".
    problems: Callable[[Params, str], Sequence[Problem]] = lambda params, scale: ()
    inputs: Callable[[Params, Problem, np.random.Generator], Arrays] = lambda p, q, rng: {}
    outputs: Callable[[Params, Problem], Arrays] = lambda params, problem: {}  # empty arrays
    reference: Callable[[Problem, Mapping[str, Any]], Arrays] | None = None  # float64, by name
    # Greatest absolute error for N(0, 1) inputs.
    tolerance: Callable[[Params], float] = lambda params: 0.0
    # An output, by its name, as the numbers that its bytes stand for; of the reference, too.
    numbers: Callable[[Params, str, Any], Any] = lambda params, name, array: array


class _Named:
    """The Verification called "module:NAME"; its module is imported when a field of it is read."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __getattr__(self, name: str) -> Any:
        module, _, attribute = self.where.partition(":")
        return getattr(getattr(import_module(module), attribute), name)


class _VerificationField:
    """A dataclass field that takes a Verification or its name, and reads as a Verification."""

    def __get__(self, spec: Any, owner: type) -> Verification:
        return Verification() if spec is None else spec.__dict__["verification"]

    def __set__(self, spec: Any, given: Verification | str) -> None:
        found = cast(Verification, _Named(given)) if isinstance(given, str) else given
        spec.__dict__["verification"] = found


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class KernelSpec:
    """One `.cu` file and everything fkjit has to know of it.

    Fields marked (params) are functions of a full parameter mapping, (problem) of a problem. The
    fields of `Work` and `Verification` may be given here as well, each as a keyword of its own;
    they are read as `spec.work.flops`, `spec.verification.problems`.
    """

    op: str  # the family of implementations: "attention"
    name: str  # the implementation: "flash"
    source: str  # the .cu file, relative to `root`: "attention/flash.cu"
    entry: str  # its extern "C" __global__ name
    params: tuple[Param, ...]
    doc: str = ""
    root: Path | None = None  # None: fkjit's own kernels_cu/; else the user's folder

    derive: Callable[[Params], Mapping[str, Any]] = lambda params: {}  # further template values
    illegal: Callable[[Params], str | None] = lambda params: None  # a reason, or None
    # The variants that are compiled ahead, where those that are legal are too many to go through:
    # all others are refused.
    ahead: Sequence[Params] = ()
    features: Callable[[Params], frozenset[str]] = lambda params: (
        frozenset()
    )  # Arch.features needed
    # Arch.features that make the variant pointless: what it does without, they do better.
    superseded: Callable[[Params], frozenset[str]] = lambda params: frozenset()
    shared_bytes: Callable[[Params], int] = _no_shared  # dynamic shared memory of a block
    # The arrays that shared_bytes is the sum of. The template leaves `${guard}` bytes between them,
    # 0 on a GPU: where the interpreter checks memory, running out of one is not running into the
    # next.
    shared_layout: Callable[[Params], SharedLayout] | None = None
    block: Callable[[Params], Dim3]  # threads
    grid: Callable[[Params, Problem], Dim3]  # blocks
    # Blocks wait for one another: all of a grid run at the same time, or the launch is refused.
    cooperative: bool = False
    # Starts before the previous kernel ends (programmatic dependent launch) and waits for it by
    # itself: templates/ptx/pdl.cuh.
    pdl: bool = False
    arguments: Callable[[Params, Problem, Mapping[str, Any]], Mapping[str, Any]] = (
        lambda params, problem, arrays: dict(arrays)
    )  # kernel argument name -> array (passed as pointer) or scalar
    # Problems that share their tuned values (fkjit/tuning.py) are those for which this is the same.
    shape_class: Callable[[Problem], Mapping[str, Any]] = powers_of_two

    work: Work = Work()
    verification: _VerificationField = _VerificationField()

    flops: InitVar[Callable[[Problem], float] | None] = None
    bytes: InitVar[Callable[[Problem], float] | None] = None
    bench: InitVar[Callable[[Params], Sequence[Problem]] | None] = None
    interpreter_flops: InitVar[float | None] = None
    interpreter_work: InitVar[Callable[[Params, Problem], float] | None] = None
    problems: InitVar[Callable[[Params, str], Sequence[Problem]] | None] = None
    inputs: InitVar[Callable[[Params, Problem, np.random.Generator], Arrays] | None] = None
    outputs: InitVar[Callable[[Params, Problem], Arrays] | None] = None
    reference: InitVar[Callable[[Problem, Mapping[str, Any]], Arrays] | None] = None
    tolerance: InitVar[Callable[[Params], float] | None] = None
    numbers: InitVar[Callable[[Params, str, Any], Any] | None] = None
    dependent: InitVar[bool | None] = None  # what `pdl` was called

    _names: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self, *flat: Any) -> None:
        given = {k: v for k, v in zip(_FLAT, flat, strict=True) if v is not None}
        made: dict[str, Any] = {"_names": tuple(param.name for param in self.params)}
        if given.keys() & _WORK:
            made["work"] = replace(self.work, **{n: given[n] for n in _WORK if n in given})
        if given.keys() & _VERIFICATION:
            made["verification"] = self._verification(given)
        if "dependent" in given:
            made["pdl"] = given["dependent"]
        layout = self.shared_layout
        if layout is not None and self.shared_bytes is _no_shared:
            made["shared_bytes"] = lambda params: sum(size for _, size in layout(params))
        for name, value in made.items():
            object.__setattr__(self, name, value)

    def _verification(self, given: Mapping[str, Any]) -> Verification:
        changed = {name: given[name] for name in _VERIFICATION if name in given}
        if isinstance(self.verification, _Named):
            raise ParameterError(
                f"KernelSpec: {self.id} has verification={self.verification.where!r} and "
                f"{', '.join(changed)} too; put these into the Verification of that name"
            )
        return replace(self.verification, **changed)

    def __repr__(self) -> str:
        return f"<KernelSpec {self.id}: {', '.join(self._names)}>"

    @property
    def id(self) -> str:
        """The kernel's full name: "attention.flash"."""
        return f"{self.op}.{self.name}"

    def template_values(self, params: Params, guard: int = 0) -> dict[str, Any]:
        """Everything `${}` and `//%` may name in this kernel's file.

        `guard`: bytes between carve-outs of shared memory, for kernels with a `shared_layout`.
        """
        guarded = {} if self.shared_layout is None else {"guard": guard}
        return {**params, **self.derive(params), **guarded}

    def label(self, params: Params) -> str:
        """Short and unique: "fp16 block=64 head_dim=128"."""
        return " ".join(
            str(params[n]) if n == "dtype" else f"{n}={_show(params[n])}" for n in self._names
        )

    def variants(
        self, arch: Arch | None = None, fixed: Params | None = None
    ) -> Iterator[dict[str, Any]]:
        """Every legal combination of parameters; on `arch` if one is given, else on any. `fixed`:
        values that some of them have."""
        for params in self._ahead(fixed or {}) if self.ahead else self._product(fixed or {}):
            if self.why_not(params, arch) is None:
                yield params

    def _product(self, fixed: Params) -> Iterator[dict[str, Any]]:
        choices = ((fixed[p.name],) if p.name in fixed else p.values for p in self.params)
        for values in itertools.product(*choices):
            yield dict(zip(self._names, values, strict=True))

    def _ahead(self, fixed: Params) -> list[dict[str, Any]]:
        """Those of `ahead`, in the order in which the product has them."""
        found = [{n: params[n] for n in self._names} for params in self.ahead]
        found = [params for params in found if fixed.items() <= params.items()]
        return sorted(found, key=lambda v: [p.values.index(v[p.name]) for p in self.params])

    def why_not(self, params: Params, arch: Arch | None = None) -> str | None:
        """Why this combination is refused, or None when it is legal."""
        reason = self.illegal(params)
        if not reason and self.ahead and params not in self.ahead:
            reason = "is compiled when it is called"
        if reason or arch is None:
            return reason
        missing = sorted(self.features(params) - arch.features)
        if missing:
            return f"needs {', '.join(missing)}, which {arch.name} has not"
        better = sorted(self.superseded(params) & arch.features)
        if better:
            return f"is for GPUs without {', '.join(better)}, which {arch.name} has"
        need = self.shared_bytes(params)
        if need > arch.shared_per_block:
            return (
                f"needs {need:,} bytes of shared memory; {arch.name} has {arch.shared_per_block:,}"
            )
        return None

    def canonical(self, params: Params) -> dict[str, Any]:
        """The same parameters, checked for names, in declared order, values as declared.

        Whatever equals a declared value (64.0, a NumPy integer) becomes that value.
        """
        self._check_names(params)
        values = {param.name: param.values for param in self.params}
        return {
            name: next((v for v in values[name] if v == params[name]), params[name])
            for name in self._names
        }

    def check(self, params: Params, arch: Arch | None = None) -> None:
        """Raise ParameterError, naming the parameter at fault and what would be legal."""
        self._check_names(params)
        for param in self.params:
            if params[param.name] not in param.values:
                self._refuse_value(param, params, arch)
        reason = self.why_not(params, arch)
        if reason:
            self._refuse_combination(reason, params, arch)

    def _check_names(self, params: Params) -> None:
        for name in params:
            if name not in self._names:
                known = ", ".join(self._names)
                near = did_you_mean(name, self._names)
                raise ParameterError(
                    f"{self.op}: {self.name} has no parameter {name!r}{near} (has: {known})"
                )
        for name in self._names:
            if name not in params:
                raise ParameterError(f"{self.op}: {self.name} needs a value for {name!r}")

    def legal_values(self, name: str, params: Params, arch: Arch | None = None) -> list[Any]:
        """The values of one parameter that are legal beside the others as they are."""
        values = next(param.values for param in self.params if param.name == name)
        return [v for v in values if self.why_not({**params, name: v}, arch) is None]

    def _refuse_value(self, param: Param, params: Params, arch: Arch | None) -> None:
        legal = self.legal_values(param.name, params, arch) or param.values
        others = [f"{n}={_show(params[n])}" for n in self._names if n != param.name]
        where = ", ".join(others + ([arch.name] if arch else []))
        raise ParameterError(
            f"{self.op}: {param.name}={_show(params[param.name])} is not one of "
            f"[{', '.join(map(_show, legal))}]" + (f" ({where})" if where else "")
        )

    def _refuse_combination(self, reason: str, params: Params, arch: Arch | None) -> None:
        for param in self.params:
            legal = self.legal_values(param.name, params, arch) if param.tunable else []
            if legal:
                raise ParameterError(
                    f"{self.op}: {param.name}={_show(params[param.name])} {reason} "
                    f"(legal here: {', '.join(map(_show, legal))})"
                )
        raise ParameterError(f"{self.op}: {self.label(params)}: {reason}")


def _show(value: Any) -> str:
    return str(value)


# The flat keywords, in the order in which KernelSpec declares them.
_WORK = tuple(field.name for field in fields(Work))
_VERIFICATION = tuple(field.name for field in fields(Verification))
_FLAT = (*_WORK, *_VERIFICATION, "dependent")

_REGISTRY: dict[str, KernelSpec] = {}
_HOME: dict[str, tuple[str, Any]] = {}  # kernel -> the module that registered it, and its file


def register(spec: KernelSpec, *, replace: bool = False) -> KernelSpec:
    """Add a kernel to the registry and return it; a second one of the same name needs `replace`.

    A file that runs again under another name (imported after FKJIT_KERNEL_PATH found it) replaces
    its own kernels.
    """
    if not isinstance(spec, KernelSpec):
        raise ArgumentTypeError(f"register: spec={shown(spec)} is not a KernelSpec")
    if not isinstance(replace, bool):
        raise ArgumentTypeError(f"register: replace={shown(replace)} is not True or False")
    around = sys._getframe(1).f_globals
    home = around["__name__"], around.get("__file__")
    module, file = _HOME.get(spec.id, home)
    again = file is not None and file == home[1] and module != home[0]
    if spec.id in _REGISTRY and not (replace or again):
        raise ParameterError(
            f"register: a kernel named {spec.id!r} stands already ({_REGISTRY[spec.id].source}); "
            "choose another op or name, or pass replace=True"
        )
    _REGISTRY[spec.id] = spec
    _HOME[spec.id] = home
    return spec


def arrange(modules: Sequence[str]) -> None:
    """Order the registry by the modules that registered, whatever was imported first.

    Kernels of other modules follow, in the order in which they came.
    """
    place = {module: number for number, module in enumerate(modules)}
    ids = sorted(_REGISTRY, key=lambda name: place.get(_HOME[name][0], len(place)))
    ordered = {name: _REGISTRY[name] for name in ids}
    _REGISTRY.clear()
    _REGISTRY.update(ordered)


def registered(op: str | None = None) -> list[KernelSpec]:
    """Every registered kernel (of one op), in the order of registration."""
    return [spec for spec in _REGISTRY.values() if op is None or spec.op == op]


def find(name: str) -> KernelSpec:
    """The kernel called "op.name", or the op's first kernel for a bare "op"."""
    if name in _REGISTRY:
        return _REGISTRY[name]
    of_op = registered(name)
    if not of_op:
        known = ", ".join(_REGISTRY) or "none"
        near = did_you_mean(name, [*(spec.op for spec in registered()), *_REGISTRY])
        raise ParameterError(f"kernel {name!r} is not registered{near} (registered: {known})")
    return of_op[0]
