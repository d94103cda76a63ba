"""How every command is told kernels: `attention flash --block 32 --where head_dim=64`.

Names of calls, ops and kernels; `--PARAMETER VALUE` of a kernel; `--where FIELD=V[,V]`, of a
parameter or of a problem, where any of the values will do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from fkjit import ops
from fkjit.arch import Target, target
from fkjit.cli.console import value
from fkjit.errors import ParameterError, did_you_mean
from fkjit.spec import KernelSpec, Param, Params, Problem, registered

DEFAULT_TARGET = "sm_80"  # of a machine without a GPU
_ASKED = 1000  # combinations of values, for the reason why a kernel has none


def machine_target() -> str:
    """The target of this machine's first GPU; without one, sm_80."""
    from fkjit.jit.build import gpu_target
    from fkjit.runtime.gpus import gpus

    found, _ = gpus()
    return gpu_target(found[0].capability).name if found else DEFAULT_TARGET


@dataclass(frozen=True)
class Selection:
    """What `attention flash --block 32 --where head_dim=64,128` says; of one command, `call`."""

    call: str
    names: tuple[str, ...]
    given: Mapping[str, str]  # --block 32
    where: Mapping[str, tuple[str, ...]]  # --where head_dim=64,128

    def specs(self) -> list[KernelSpec]:
        """The kernels: `attention`, `attention.flash`, or `attention flash tiled`."""
        if not self.names:
            raise ParameterError(f"{self.call}: no kernel is named; `fkjit list` has them")
        head, *rest = self.names
        first = ops.kernels(self.call, head)
        found = [spec for name in rest for spec in self._beside(first, name)]
        whole = not any(spec in first for spec in found)
        return [*(first if whole else []), *found]

    def _beside(self, first: list[KernelSpec], name: str) -> list[KernelSpec]:
        """A kernel of the first name's op, else whatever the name means by itself."""
        own = [spec for spec in first if spec.name == name]
        names = [spec.name for spec in first]
        near = did_you_mean(name, names)
        if not own and near and name not in ops.known_names():
            raise ParameterError(
                f"{self.call}: {name!r} is no call and no kernel of {first[0].op}{near} "
                f"(has: {', '.join(names)})"
            )
        return own or ops.kernels(self.call, name)

    def variants(self, to: Target) -> list[tuple[KernelSpec, list[Params]]]:
        """Each kernel that has such variants on a target, and these.

        ParameterError when none has: the first kernel's, which names the parameter at fault.
        """
        found, first = [], None
        for spec in self.specs():
            try:
                found.append((spec, self._matching(spec, to)))
            except ParameterError as error:
                first = first or error
        if first is not None and not found:
            raise first
        return found

    def _matching(self, spec: KernelSpec, to: Target) -> list[Params]:
        wanted = self._values(spec)
        found = [p for p in spec.variants(to.arch) if all(p[n] in v for n, v in wanted.items())]
        if found:
            return list(found)
        shown = (f"{name}={'|'.join(map(value, v))}" for name, v in wanted.items())
        why = _why_none(spec, wanted, to)
        raise ParameterError(
            f"{self.call}: {' '.join([spec.id, *shown])} has no variant for {to.name}: {why}"
        )

    def _values(self, spec: KernelSpec) -> dict[str, list[Any]]:
        """The declared values that each parameter may have."""
        by_name = {param.name: param for param in spec.params}
        for name in self.given:
            if name not in by_name:
                near = did_you_mean(name, by_name).replace("mean ", "mean --").replace("_", "-")
                raise ParameterError(
                    f"{self.call}: {spec.id} has no parameter --{name.replace('_', '-')}{near} "
                    f"(has: {', '.join(by_name)})"
                )
        made = {n: [parse(self.call, spec, by_name[n], text)] for n, text in self.given.items()}
        for name in by_name.keys() & self.where.keys():
            made[name] = parse_any(self.call, spec, by_name[name], self.where[name])
        return made

    def takes(self, problem: Problem) -> bool:
        """Whether a problem's fields are as `--where` has them; it may have others."""
        return all(
            str(problem[name]).lower() in values
            for name, values in self.where.items()
            if name in problem
        )

    def check_fields(self, fields: Collection[str]) -> None:
        """ParameterError for a `--where` that is no parameter of the kernels and none of these."""
        known = {param.name for spec in self.specs() for param in spec.params} | {*fields}
        for name in self.where:
            if name not in known:
                raise ParameterError(
                    f"{self.call}: --where {name}: not one of {', '.join(sorted(known))}"
                    f"{did_you_mean(name, known)}"
                )


def completions(given: Sequence[str], begun: str) -> list[str]:
    """Names that begin so: kernels of an op that was given, calls, ops; past a dot `op.kernel`."""
    ops.load()
    beside = [spec.name for spec in registered() if spec.op in given]
    known = [name for name in ops.known_names() if ("." in name) == ("." in begun)]
    return sorted({name for name in (*beside, *known) if name.startswith(begun)})


def selection(call: str, words: Sequence[str]) -> Selection:
    """["attention", "--block", "32", "--where", "head_dim=64,128"], in any order, as a Selection.

    ParameterError for an option without its value.
    """
    names: list[str] = []
    given: dict[str, str] = {}
    where: dict[str, tuple[str, ...]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            names.append(word)
            continue
        name, equals, text = word.removeprefix("--").partition("=")
        if not name or not (equals or rest):
            raise ParameterError(
                f"{call}: {word!r} is not a kernel parameter with its value; write --block 32"
            )
        text = text if equals else rest.pop(0)
        if name == "where":
            field, allowed = _condition(call, text)
            where[field] = allowed
        else:
            given[name.replace("-", "_")] = text
    return Selection(call, tuple(names), given, where)


def _condition(call: str, text: str) -> tuple[str, tuple[str, ...]]:
    name, equals, values = text.partition("=")
    if not (name and equals and values):
        raise ParameterError(
            f"{call}: --where {text!r} is not FIELD=VALUE[,VALUE]: head_dim=64,128"
        )
    parts = (part.strip().lower() for part in values.split(","))
    return name.strip().replace("-", "_"), tuple(parts)


def _why_none(spec: KernelSpec, wanted: Mapping[str, Sequence[Any]], to: Target) -> str:
    """Why no variant has these values: where another tile would do, that one's reason and tiles.
    Of all combinations some are asked, those that are compiled for other targets first."""
    choices = (wanted.get(p.name, p.values) for p in spec.params)
    names = [param.name for param in spec.params]
    combined = [p for p in spec.variants() if all(p[n] in v for n, v in wanted.items())]
    rest = (dict(zip(names, values, strict=True)) for values in product(*choices))
    combined += islice(rest, _ASKED)
    for params in combined:
        for param in spec.params:
            legal = spec.legal_values(param.name, params, to.arch) if param.tunable else []
            if legal:
                reason = spec.why_not(params, to.arch)
                listed = "; ".join(map(value, legal))
                return f"{param.name}={value(params[param.name])} {reason} (legal here: {listed})"
    arch_only = [why for p in combined if not spec.why_not(p) and (why := spec.why_not(p, to.arch))]
    return min(arch_only, default=str(spec.why_not(combined[0], to.arch)))


def parse(call: str, spec: KernelSpec, param: Param, text: str) -> Any:
    """The declared value that `text` writes: "32" -> 32, "(128, 64)" -> (128, 64)."""
    plain = text.strip("()[] ").replace(" ", "").lower()
    for declared in param.values:
        if value(declared).lower() == plain:
            return declared
    raise ParameterError(
        f"{call}: {param.name}={text} is not one of [{'; '.join(map(value, param.values))}] "
        f"({spec.id})"
    )


def parse_any(call: str, spec: KernelSpec, param: Param, texts: Sequence[str]) -> list[Any]:
    """The values of `--where head_dim=64,128`; `block=128,64` is one, where it is declared."""
    try:
        return [parse(call, spec, param, ",".join(texts))]
    except ParameterError:
        return [parse(call, spec, param, text) for text in texts]


def targets(text: str | None) -> list[Target]:
    """ "sm_90a,sm_120a" -> targets, each once; None: this machine's."""
    names = [part.strip() for part in (text or machine_target()).split(",") if part.strip()]
    if not names:
        raise ParameterError(f"--arch {text!r} names no target; sm_90a is one")
    return [target(name) for name in dict.fromkeys(names)]
