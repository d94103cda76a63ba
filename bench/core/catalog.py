"""Every operation the suite measures, by name.

An operation has one file, `bench/<family>/cases_<op>.py`, with an `OP`; a registered kernel whose
op has none is measured from its spec alone (generic.py). Its Triton baseline, if it has one, is
`bench/<family>/triton_<op>.py` (twins.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

from fkjit.errors import ParameterError, did_you_mean
from fkjit.spec import registered

from . import generic, twins
from .families import modules
from .op import Op


def operations() -> dict[str, Op]:
    """Every operation: those with a file, and those that only have kernels; with their twins."""
    from fkjit import ops as kernels

    kernels.load()
    found: dict[str, Op] = {}
    for module in modules("cases_").values():
        made = getattr(import_module(module), "OP", None)
        if made is not None:
            found[made.name] = made
    for spec in registered():
        if spec.op not in found:
            found[spec.op] = generic.operation(spec.op)
    for name, op in found.items():
        made = twins.twin(name)
        found[name] = replace(op, peers=(made, *op.peers)) if made else op
    return found


def selected(names: Sequence[str]) -> list[Op]:
    """The operations of these names, all of them without names. ParameterError for others."""
    known = operations()
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            raise ParameterError(f"bench: {name!r} is not one of {', '.join(sorted(known))}{near}")
    return [known[name] for name in dict.fromkeys(names or known)]
