"""What there is to tune: a kernel, a case, and the variants that the case leaves free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fkjit import tuning
from fkjit.arch import Arch
from fkjit.errors import FkjitError, ParameterError
from fkjit.spec import KernelSpec, Params, Problem

from ..core import generic
from ..core.cases import Case
from ..core.drawn import Drawn
from ..core.op import Op

Values = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One choice to make. `default` is what is taken without tuning, one of the `variants`."""

    case: Case
    spec: KernelSpec
    default: Params
    variants: Sequence[Params]
    key: Values  # see fkjit.tuning.key

    @property
    def label(self) -> str:
        """ "attention.flash bf16 D128 S4096 B4 H16 full" """
        return f"{self.spec.id} {self.case.label}"

    def shown(self, params: Params) -> str:
        """The free parameters: "block=128,64"."""
        return shown(tuning.free(self.spec, params))


def shown(values: Values) -> str:
    """ "threads=256 block=128,64" """
    from fkjit.cli.console import value

    return " ".join(
        f"{n}={value(tuple(v) if isinstance(v, list) else v)}" for n, v in values.items()
    )


def kernels(name: str, op: Op) -> list[KernelSpec]:
    """The kernels that "op" or "op.kernel" means and that have something to choose.

    ParameterError when there are none.
    """
    found = [spec for spec in op.specs if name in (op.name, spec.id)]
    free = [spec for spec in found if any(param.tunable for param in spec.params)]
    if not found:
        known = ", ".join(spec.id for spec in op.specs)
        raise ParameterError(f"tune: kernel {name!r} is not registered (of {op.name}: {known})")
    if not free:
        raise ParameterError(f"tune: {name} has no parameter that is free to choose (`fkjit list`)")
    return free


def tasks(specs: Sequence[KernelSpec], cases: Sequence[Case], arch: Arch) -> Iterator[Task]:
    """A task for each kernel and case that has a choice; the first case of each shape class."""
    untuned = replace(arch, gpu=None)  # so that the default is what stands without tuning
    seen = set()
    for spec in specs:
        for case in cases:
            default = _default(case, spec, untuned)
            if default is None:
                continue
            key = tuning.key(spec, default, case.problem, arch)
            variants = list(spec.variants(arch, _fixed(spec, default)))
            if len(variants) > 1 and tuning.key_text(key) not in seen:
                seen.add(tuning.key_text(key))
                yield Task(case, spec, default, variants, key)


def _default(case: Case, spec: KernelSpec, arch: Arch) -> Params | None:
    """What the kernel runs this case with, or None if it does not take it."""
    if spec not in case.op.specs or case.problem.get("kernel", spec.name) != spec.name:
        return None
    try:
        params = spec.canonical(case.op.choose(spec, case.problem, arch))
    except FkjitError:
        return None
    return None if spec.why_not(params, arch) else params


def _fixed(spec: KernelSpec, params: Params) -> Params:
    """The values that a case decides."""
    return {param.name: params[param.name] for param in spec.params if not param.tunable}


# ------------------------------------------------------------------ --shape


def shaped(op: Op, text: str) -> Case:
    """The case "D128 causal seqlen=4096,batch=2" of an operation.

    A plain word is one of a case's label. FIELD=VALUE changes that field, and those that begin with
    its name and an underscore (seqlen: seqlen_q and seqlen_k) unless they are given as well. The
    rest is as in that case with these words which agrees most. ParameterError for what fits none.
    """
    parts = text.replace(",", " ").split()
    words = {part for part in parts if "=" not in part}
    listed = [p for some in op.sets.values() if not isinstance(some, Drawn) for p in some]
    problems = [p for p in listed if words <= {*op.label(p).split()}]
    if not problems:
        raise ParameterError(
            f"tune: --shape {text!r}: no case of {op.name} has the words {' '.join(sorted(words))} "
            "(`fkjit bench --list`); FIELD=VALUE changes a case"
        )
    given = _fields(problems[0], [part for part in parts if "=" in part])
    base = max(problems, key=lambda p: sum(p.get(n) == v for n, v in given.items()))
    return Case(op, generic.with_values(base, given))


def _fields(like: Problem, parts: Sequence[str]) -> Values:
    plain = [n for n, v in like.items() if isinstance(v, (bool, int, float, str)) and n != "kernel"]
    begun: Values = {}
    exact: Values = {}
    for part in parts:
        name, _, value = part.partition("=")
        fields = [n for n in plain if n == name or n.startswith(f"{name}_")]
        if not fields:
            raise ParameterError(
                f"tune: --shape {part!r}: {name!r} is not one of {', '.join(plain)}"
            )
        for field in fields:
            (exact if field == name else begun)[field] = _value(part, value, like[field])
    return {**begun, **exact}


def _value(part: str, text: str, like: Any) -> Any:
    """`text` as the type of `like`. ParameterError for what is none."""
    if isinstance(like, str):
        return text
    if isinstance(like, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ParameterError(f"tune: --shape {part!r}: {text!r} is not one of true, false")
    try:
        value = type(like)(text)
    except ValueError:
        value = 0
    if not value > 0:
        raise ParameterError(f"tune: --shape {part!r}: {text!r} is not a number above 0")
    return value
