"""`--list` and `--dry-run`: what there is, and what would run. Neither needs a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fkjit.cli import console as report

from .cases import Case
from .op import Candidate, Op


def print_operations(ops: Sequence[Op]) -> None:
    """Operations with their sets, kernels and peers."""
    out = report.console()
    made = report.table("operation", "", "")
    for op in ops:
        kernels = " ".join(spec.name for spec in op.specs)
        sets = ", ".join(f"{name} ({len(problems)})" for name, problems in op.sets.items())
        rows = [(op.name, "kernels", kernels), ("", "sets", sets)]
        for peer in op.peers:
            about = peer.missing() or peer.version() or "here"
            rows.append(("", peer.name, f"{about}{f'; {peer.slow}' if peer.slow else ''}"))
        report.add_rows(made, rows)
    out.print(made)


def print_plan(
    cases: Sequence[Case],
    candidates: Mapping[str, Sequence[Candidate]],
    left_out: Mapping[str, str],
) -> None:
    """Every case with its counted work, and every candidate with what keeps it from running."""
    out = report.console()
    made = report.table("operation", "case", ">TFLOP", ">bytes")
    for case in cases:
        flops, moved = case.op.flops(case.problem), case.op.bytes(case.problem)
        row = (case.op.name, case.label, f"{flops / 1e12:.3g}", report.size(moved))
        report.add_rows(made, [row])
    out.print(made)
    listed = report.table("operation", "candidate", "kind", "")
    for op, found in candidates.items():
        for candidate in found:
            about = candidate.missing() or candidate.version() or ""
            report.add_rows(listed, [(op, candidate.name, candidate.kind, about)])
    for name, why in left_out.items():
        report.add_rows(listed, [("", name, "peer", f"left out: {why}")])
    out.print()
    out.print(listed)
    out.print(f"\n{len(cases)} cases, {sum(len(candidates[c.op.name]) for c in cases)} cells")
