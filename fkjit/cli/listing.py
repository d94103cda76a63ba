"""`fkjit list`: one line an op, the kernels of some with their parameters, or all of it as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fkjit import ops
from fkjit.cli import console as report
from fkjit.spec import KernelSpec, registered


def run(names: Sequence[str], as_json: bool) -> None:
    """Print ops; with names their kernels. ParameterError for a name that there is not."""
    ops.load()
    wanted = [spec for name in names for spec in ops.kernels("list", name)]
    chosen = list(dict.fromkeys(wanted)) or registered()
    if as_json:
        print(json.dumps([_entry(spec) for spec in chosen], indent=2))
    elif names:
        _print_kernels(chosen)
    else:
        _print_ops(chosen)


def _print_ops(specs: Sequence[KernelSpec]) -> None:
    by_op: dict[str, list[KernelSpec]] = {}
    for spec in specs:
        by_op.setdefault(spec.op, []).append(spec)
    rows = [(op, _names(some), some[0].doc or some[0].source) for op, some in by_op.items()]
    rows.insert(0, ("op", "kernels", "what the first one does"))
    wide = [max(len(row[i]) for row in rows) for i in range(2)]
    most = report.console().width
    for op, kernels, doc in rows:
        line = f"{op:{wide[0]}} {kernels:{wide[1]}} {doc}"
        print(line if len(line) <= most else line[: most - 1] + "…")
    print(f"{len(by_op)} ops, {len(specs)} kernels; `fkjit list OP` has an op's, with parameters")


def _names(specs: Sequence[KernelSpec]) -> str:
    """The first kernels of an op, and how many others."""
    shown = " ".join(spec.name for spec in specs[:2])
    return f"{shown} +{len(specs) - 2}" if len(specs) > 2 else shown


def _print_kernels(specs: Sequence[KernelSpec]) -> None:
    made = report.table("kernel", ">variants", "parameters (* free to choose for a problem)")
    for spec in specs:
        head = (spec.id, sum(1 for _ in spec.variants()), spec.doc or spec.source)
        rows = [
            ("", "", f"  {p.name}{'*' * p.tunable}: {' '.join(map(report.value, p.values))}")
            for p in spec.params
        ]
        report.add_rows(made, [head, *rows])
    report.console().print(made)


def _entry(spec: KernelSpec) -> dict[str, Any]:
    """A kernel for programs; values as the command line takes them."""
    calls = [name for name, mapped in ops.OPS_OF_CALLS.items() if spec.op in mapped]
    return {
        "kernel": spec.id,
        "op": spec.op,
        "calls": ([spec.op] if spec.op in ops.calls() else []) + calls,
        "doc": spec.doc,
        "source": spec.source,
        "variants": sum(1 for _ in spec.variants()),
        "parameters": [
            {
                "name": param.name,
                "values": [report.value(value) for value in param.values],
                "tunable": param.tunable,
                "doc": param.doc,
            }
            for param in spec.params
        ],
    }
