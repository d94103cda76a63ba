"""What the results say, in words: what is fastest where, how far behind we are, what failed."""

from __future__ import annotations

import math
from collections import Counter

from fkjit.cli.console import value

from .cells import Study, median

_LISTED = 6


def words(study: Study) -> list[str]:
    """Sentences about one operation on one GPU, from the mode that most figures quote."""
    if not study.modes:
        return [f"{study.op}: nothing has a time.", *failures(study)]
    mode = study.modes[0]
    timed = [case for case in study.cases if fastest(study, case, mode)]
    made = [
        f"{study.op}: {len(timed)} cases on {study.gpu}, {len(study.candidates)} candidates; "
        f"times are medians, {mode}."
    ]
    made += _winners(study, timed, mode)
    made += [line for name in study.candidates if (line := _against(study, name, mode))]
    return made + failures(study)


def fastest(study: Study, case: str, mode: str) -> str | None:
    """The candidate with the least time."""
    times = {n: t for n, cell in study.cells(case).items() if (t := median(cell, mode))}
    return min(times, key=lambda name: times[name]) if times else None


def _winners(study: Study, cases: list[str], mode: str) -> list[str]:
    """How often each is the fastest, and where ours is not, worst first."""
    own = study.own
    wins = Counter(fastest(study, case, mode) for case in cases)
    parts = [f"{name} in {count}" for name, count in wins.most_common()]
    made = [f"Fastest: {', '.join(parts)} of {len(cases)} cases."]
    if own is None:
        return [*made, "None of ours was measured."]
    behind = []
    for case in cases:
        best = fastest(study, case, mode)
        ratio = study.speedup(case, best, mode) if best and _foreign(study, case, best) else None
        if best and ratio and ratio < 1:
            behind.append((ratio, case, best))
    if not behind:
        return [*made, "We are behind nobody."]
    behind.sort()
    worst = [f"{case} ({1 / ratio:.2f} times the time of {best})" for ratio, case, best in behind]
    rest = f", and {len(behind) - _LISTED} more" if len(behind) > _LISTED else ""
    made.append(f"We are behind in {len(behind)}: {'; '.join(worst[:_LISTED])}{rest}.")
    return made


def _foreign(study: Study, case: str, name: str) -> bool:
    return study.cells(case)[name]["kind"] != "ours"


def _against(study: Study, name: str, mode: str) -> str | None:
    """Geometric mean, least and most of a peer's time over ours."""
    if name == study.own:
        return None
    found = [(ratio, case) for case in study.cases if (ratio := study.speedup(case, name, mode))]
    if not found:
        return None
    mean = math.exp(sum(math.log(ratio) for ratio, _ in found) / len(found))
    low, high = min(found), max(found)
    faster = sum(ratio > 1 for ratio, _ in found)
    text = f"{name}: {study.own} is {_times(mean)} on average"
    if len(found) > 1:
        text += f", from {_times(low[0])} ({low[1]}) to {_times(high[0])} ({high[1]})"
    return f"{text}; faster in {faster} of {len(found)}."


def _times(ratio: float) -> str:
    """1.25 -> "1.25 times as fast"; 0.5 -> "0.50 times as fast"."""
    return f"{ratio:.2f} times as fast"


def failures(study: Study) -> list[str]:
    """Cells of ours that were wrong or failed, and peers that are missing everywhere."""
    made = []
    for case in study.cases:
        for name, cell in study.cells(case).items():
            if "error" in cell:
                made.append(f"{name} has no time for {case}: {cell['error']}.")
    missing: dict[str, str] = {}
    for run in study.runs:
        for peer in run.header.get("peers") or ():
            if peer.get("missing") and peer.get("op", study.op) == study.op:
                missing[peer["name"]] = value(peer["missing"])
    if missing:
        listed = "; ".join(f"{name}: {why}" for name, why in missing.items())
        made.append(f"Not measured: {listed}.")
    return made
