"""From what a user types (`attention --block 32 --dtype bf16`) to variants of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from fkjit import ops
from fkjit.arch import Target, target
from fkjit.cli.console import value
from fkjit.errors import ParameterError
from fkjit.spec import KernelSpec, Param

DEFAULT_TARGET = "sm_80"  # of a machine without a GPU


def machine_target() -> str:
    """The target of this machine's first GPU; without one, sm_80."""
    from fkjit.jit.build import gpu_target
    from fkjit.runtime.gpus import gpus

    found, _ = gpus()
    return gpu_target(found[0].capability).name if found else DEFAULT_TARGET


def given_values(call: str, words: Sequence[str]) -> dict[str, str]:
    """["--block", "32", "--dtype=bf16"] -> {"block": "32", "dtype": "bf16"}."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name or not (equals or rest):
            raise ParameterError(
                f"{call}: {word!r} is not a kernel parameter with its value; write --block 32"
            )
        found[name.replace("-", "_")] = text if equals else rest.pop(0)
    return found


def select(
    call: str, kernel: str, words: Sequence[str], to: Target
) -> tuple[KernelSpec, list[dict[str, Any]]]:
    """The first kernel of that name with variants that have these values, and all of those.

    ParameterError when there is none: it is the last kernel's, which names the parameter at fault.
    """
    given = given_values(call, words)
    last: ParameterError | None = None
    for spec in ops.kernels(call, kernel):
        try:
            return spec, _matching(call, spec, given, to)
        except ParameterError as error:
            last = last or error
    assert last is not None
    raise last


def _matching(
    call: str, spec: KernelSpec, given: dict[str, str], to: Target
) -> list[dict[str, Any]]:
    by_name = {param.name: param for param in spec.params}
    for name in given:
        if name not in by_name:
            raise ParameterError(
                f"{call}: {spec.id} has no parameter --{name.replace('_', '-')} "
                f"(has: {', '.join(by_name)})"
            )
    wanted = {name: parse(call, spec, by_name[name], text) for name, text in given.items()}
    found = [p for p in spec.variants(to.arch) if all(p[n] == v for n, v in wanted.items())]
    if found:
        return found
    chosen = " ".join([spec.id, *(f"{name}={value(v)}" for name, v in wanted.items())])
    why = _why_none(spec, wanted, to)
    raise ParameterError(f"{call}: {chosen} has no variant for {to.name}: {why}")


def _why_none(spec: KernelSpec, wanted: dict[str, Any], to: Target) -> str:
    """Why no variant has these values: where another tile would do, that one's reason and tiles."""
    choices = ([wanted[p.name]] if p.name in wanted else p.values for p in spec.params)
    names = [param.name for param in spec.params]
    combined = [dict(zip(names, values, strict=True)) for values in product(*choices)]
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


def targets(text: str | None) -> list[Target]:
    """ "sm_90a,sm_120a" -> targets, each once; None: this machine's."""
    names = [part.strip() for part in (text or machine_target()).split(",") if part.strip()]
    if not names:
        raise ParameterError(f"--arch {text!r} names no target; sm_90a is one")
    return [target(name) for name in dict.fromkeys(names)]
