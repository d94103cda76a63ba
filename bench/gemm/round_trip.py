"""Whether what a product gives goes to memory before its activation: bytes by Nsight Compute.

python -m bench.gemm.round_trip [--shape WORDS] [--append FILE]

Beside ours stand nn.Linear with a kernel for the activation, which writes and reads the
intermediate [m, n] once, and cuBLASLt's epilogue, which does not. The default shape's intermediate
is 268 MB, so that no L2 cache can hold it. Without ncu it says so, with status 1. --append keeps
the bytes in a file of results, as a record "profile", for the table of docs/GEMM.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fkjit.errors import ToolchainError
from fkjit.runtime.interop import ITEMSIZE

from ..core.store import Writer
from ..profile import collect, show
from ..report.tables import markdown

SHAPE = "M8192 K4096 N16384 bias gelu_tanh"
PEERS = ("torch", "addmm_activation")
RECORD = "profile"
_DRAM = ("dram_read_bytes", "dram_write_bytes")


def rows(entry: Mapping[str, Any]) -> Iterator[list[str]]:
    """A line a candidate: its kernels, what they moved, and how much that is beyond what must."""
    p, needed = entry["problem"], entry["bytes"]
    intermediate = ITEMSIZE[p["out_dtype"]] * p["m"] * p["n"]
    yield ["", "kernels", "DRAM read, MB", "written, MB", "beyond what must move, in intermediates"]
    for candidate in entry["candidates"]:
        if "kernels" not in candidate:
            yield [candidate["candidate"], candidate.get("missing", ""), "", "", ""]
            continue
        read, written = (show.total(candidate, name) for name in _DRAM)
        moved = show.total(candidate, *_DRAM)
        beyond = "" if moved is None else f"{(moved - needed) / intermediate:.2f}"
        count = str(len(candidate["kernels"]))
        yield [candidate["candidate"], count, _mb(read), _mb(written), beyond]
    yield [
        "must move (x, weight, bias; out)",
        "",
        _mb(needed - intermediate),
        _mb(intermediate),
        "",
    ]


def _mb(size: float | None) -> str:
    return "" if size is None else f"{size / 1e6:.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile one launch of each and print the table; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", default=SHAPE, help="words of a case of `fkjit bench linear`")
    parser.add_argument("--append", type=Path, metavar="FILE", help="results of `fkjit bench`")
    chosen = parser.parse_args(arguments)
    request = {"op": "linear", "impl": "auto", "shapes": [chosen.shape], "peers": list(PEERS)}
    try:
        (entry,) = collect.counters(request)["entries"]
    except ToolchainError as error:
        print(f"fkjit: {error}", file=sys.stderr)
        return 1
    if chosen.append:
        Writer(chosen.append, append=True).write({"record": RECORD, **entry})
    print(f"{entry['case']}:\n\n{markdown(list(rows(entry)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
