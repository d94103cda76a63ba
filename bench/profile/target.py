"""What runs under the profiler: each candidate once, in a named range, between start and stop.

    python -m bench.profile.target REQUEST.json ANSWER.json

The request says op, shapes, implementations, peers; the answer what each range stands for.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from fkjit.errors import FkjitError, ParameterError

from ..core import kernels
from ..core.cases import Case, select
from ..core.catalog import selected
from ..core.device import TorchDevice
from ..core.environment import environment
from ..core.method import first_line
from ..core.op import Candidate, Op, Refused
from .parse import range_name


def cases(op: Op, shapes: list[str]) -> list[Case]:
    """The first case of each shape: words of its label, fields as head_dim=64; without: quick's."""
    if not shapes:
        return select([op], ["quick"], [], [])[:1]
    found = []
    for shape in shapes:
        words = shape.split()
        where = [word for word in words if "=" in word]
        only = [word for word in words if "=" not in word]
        found.append(select([op], ["all"], where, only)[0])
    return found


def candidates(op: Op, request: dict[str, Any], device: Any, arch: Any) -> list[Candidate]:
    """Our kernels, then the peers that were asked for. ParameterError for an unknown peer."""
    known = {peer.name: peer for peer in op.peers}
    for name in request["peers"]:
        if name not in known:
            raise ParameterError(
                f"profile: --peers {name!r} is not one of {', '.join(known) or '(none)'}"
            )
    ours = kernels.ours(op, request["impl"], False, device, arch)
    return [*ours, *(known[name] for name in request["peers"])]


def run(request: dict[str, Any], device: Any, arch: Any) -> list[dict[str, Any]]:
    """Launch everything; an entry a case, with its candidates and why some are missing."""
    (op,) = selected([request["op"]])
    entries = []
    for number, case in enumerate(cases(op, request["shapes"])):
        arrays = op.inputs(case.problem, device)
        entry = {
            "op": op.name, "case": case.label, "problem": dict(case.problem),
            "flops": op.flops(case.problem), "bytes": op.bytes(case.problem), "candidates": [],
        }  # fmt: skip
        for candidate in candidates(op, request, device, arch):
            made = {"candidate": candidate.name, "kind": candidate.kind, "range": None}
            made["version"] = candidate.version()
            why = candidate.missing() or _once(device, candidate, case, arrays, number)
            made.update({"missing": why} if why else {"range": _key(number, candidate)})
            entry["candidates"].append(made)
        entries.append(entry)
        device.release()
    return entries


def _key(number: int, candidate: Candidate) -> str:
    return f"{number} {candidate.name}"


def _once(device: Any, candidate: Candidate, case: Case, arrays: Any, number: int) -> str | None:
    """Two calls unseen, one in its range; why there was none."""
    try:
        prepared = candidate.prepare(case.problem, arrays)
        for _ in range(2):
            prepared.call()
        device.synchronize()
        profiler = device.torch.cuda.profiler
        profiler.start()
        with device.span(range_name(_key(number, candidate))):
            prepared.call()
            device.synchronize()
        profiler.stop()
    except Refused as refused:
        return str(refused)
    except Exception as error:  # a peer that fails is no reason to lose the others
        return first_line(error)
    return None


def main() -> int:
    """Read the request, run it, write the answer; 1 with one message where it cannot be."""
    from fkjit.runtime.device import device_target

    request_file, answer_file = map(Path, sys.argv[1:3])
    request = json.loads(request_file.read_text())
    try:
        device = TorchDevice(nvtx=True)
        entries = run(request, device, device_target(device.index).arch)
    except FkjitError as error:
        print(f"fkjit: {error}", file=sys.stderr)
        return 1
    where = {**environment(), "gpu": device.name}
    answer_file.write_text(json.dumps({"environment": where, "entries": entries}))
    import_module("torch").cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
