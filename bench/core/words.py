"""The grammar of every command (`attention flash --block 32`), for operations and their cases."""

from __future__ import annotations

from collections.abc import Sequence

from fkjit.cli.select import selection
from fkjit.errors import ParameterError, did_you_mean
from fkjit.spec import Param

from .catalog import operations
from .op import Op

Values = dict[str, str]


def kernels_named(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """["attention", "flash", "rope.table"] -> operations and kernels: (["attention", "rope"],
    ["flash", "table"]). Words that are neither stay among the operations."""
    known = operations()
    ops: list[str] = []
    kernels: list[str] = []
    for name in names:
        op, _, kernel = name.partition(".")
        beside = {spec.name for one in ops if one in known for spec in known[one].specs}
        if name not in known and name in beside:
            kernels.append(name)
        elif kernel and op in known and kernel in {spec.name for spec in known[op].specs}:
            ops.append(op)
            kernels.append(kernel)
        else:
            ops.append(name)
    return list(dict.fromkeys(ops)), kernels


def fields_and_tiles(
    call: str, words: Sequence[str], ops: Sequence[Op]
) -> tuple[list[str], Values]:
    """`--head-dim 128 --block 32`: filters on cases (["head_dim=128"]), and values of tiles.

    ParameterError for what is neither.
    """
    asked = selection(call, words)
    if asked.names:
        raise ParameterError(f"{call}: {asked.names[0]!r} is not an option with its value")
    fields = {key for op in ops for some in op.sets.values() for p in some for key in p}
    free = {param.name for op in ops for spec in op.specs for param in spec.params if param.tunable}
    for name in asked.given:
        if name not in fields | free:
            known = sorted(fields | free)
            near = did_you_mean(name, known)
            raise ParameterError(
                f"{call}: --{name.replace('_', '-')} is no option, field or parameter{near} "
                f"(fields and parameters: {', '.join(known)})"
            )
    where = [f"{name}={text}" for name, text in asked.given.items() if name in fields]
    return where, {name: text for name, text in asked.given.items() if name not in fields}


def is_tile(free: Sequence[Param], values: Sequence[object], wanted: Values) -> bool:
    """Whether free parameters have the values that were written: "128,64" is (128, 64)."""
    from fkjit.cli.console import value

    shown = {param.name: value(given) for param, given in zip(free, values, strict=True)}
    plain = {name: text.strip("()[] ").replace(" ", "").lower() for name, text in wanted.items()}
    return all(shown.get(name) == text for name, text in plain.items())
