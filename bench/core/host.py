"""What a call costs the host, in microseconds and in multiples of `torch.add` of the same run.

    fkjit bench host [--only WORDS] [--rounds 30] [--soak N] [--out FILE]

Three columns. Warm: the same arrays again and again, the least of many rounds, in turns with
`torch.add`. Alternating: two shapes in turns. New: shapes that no call has had, each once, the
median and the least. The GPU gets little work and is waited for between rounds, so that nobody
waits for room in its queue. `--soak` makes so many calls of new shapes through all operations and
tells by how much the process grew. Only public calls are used.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Call = Callable[[], Any]
_CALLS = 100  # of a round
_WIDTHS = (512, 640)  # the two shapes that alternate
_FIRST_NEW, _NEW = 700, 250  # shapes that are new: the first is not timed for a fifth of them


@dataclass(frozen=True)
class Case:
    """A call to be timed. `arrays`: (torch, a size) -> arrays; `call`: of these."""

    name: str
    arrays: Callable[[Any, int], tuple[Any, ...]]
    call: Callable[..., Any]
    ours: bool = True
    new: bool = True  # whether shapes that are new are timed too
    grad: bool = False


def _rows(torch: Any, n: int, columns: int = 1024) -> Any:
    return torch.randn(n, columns, device="cuda", dtype=torch.bfloat16)


def _heads(torch: Any, n: int, keys: int | None = None, heads: int = 4) -> tuple[Any, ...]:
    def made(length: int) -> Any:
        return torch.randn(1, heads, length, 128, device="cuda", dtype=torch.bfloat16)

    return made(n), made(keys or n), made(keys or n)


def _learned(torch: Any, n: int) -> tuple[Any, ...]:
    return tuple(x.requires_grad_() for x in _heads(torch, n))


def cases(torch: Any) -> Iterator[Case]:
    """Every public call, and what PyTorch has beside it."""
    import fkjit

    functional = torch.nn.functional
    weight = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    square = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    slopes = torch.full((4,), 0.1, device="cuda")
    pages = torch.randn(64, 16, 4, 128, device="cuda", dtype=torch.bfloat16)
    attention, sdpa = fkjit.attention, functional.scaled_dot_product_attention

    def both(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *qkv: torch.autograd.grad(call(*qkv), qkv, qkv[0])

    def bias(torch: Any, n: int) -> tuple[Any, ...]:
        return (*_heads(torch, n), torch.zeros(1, 4, n, n, device="cuda", dtype=torch.bfloat16))

    def packed(torch: Any, n: int) -> tuple[Any, ...]:
        ends = torch.tensor([0, n // 2, n], device="cuda", dtype=torch.int32)
        rows = (torch.randn(n, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        return (*rows, ends, ends, n, n)

    def paged(torch: Any, n: int) -> tuple[Any, ...]:
        """One new token of each of n sequences, 50 keys each."""
        q = torch.randn(n, 1, 4, 128, device="cuda", dtype=torch.bfloat16)
        table = torch.arange(4 * n, device="cuda", dtype=torch.int32).view(n, 4) % 64
        return q, table, torch.full((n,), 50, device="cuda", dtype=torch.int32)

    yield Case("attention", _heads, attention)
    yield Case("attention causal", _heads, lambda *x: attention(*x, causal=True))
    yield Case("attention window", _heads, lambda *x: attention(*x, causal=True, window=(64, 0)))
    yield Case("attention softcap", _heads, lambda *x: attention(*x, softcap=20.0))
    yield Case("attention alibi", _heads, lambda *x: attention(*x, alibi_slopes=slopes))
    yield Case("attention bias", bias, lambda q, k, v, b: attention(q, k, v, bias=b))
    yield Case("attention sinks", _heads, lambda *x: attention(*x, sinks=slopes))
    yield Case("attention score_mod", _heads, lambda *x: attention(*x, score_mod="score * 0.5f"))
    yield Case("attention_varlen", packed, lambda *x: fkjit.attention_varlen(*x, causal=True))
    yield Case("SDPA (PyTorch)", _heads, sdpa, ours=False, new=False)
    yield Case("attention fwd+bwd", _learned, both(attention), grad=True)
    yield Case("attention window fwd+bwd", _learned,
               both(lambda *x: attention(*x, causal=True, window=(64, 0))), grad=True)  # fmt: skip
    yield Case("SDPA fwd+bwd (PyTorch)", _learned, both(sdpa), ours=False, new=False, grad=True)
    yield Case("attention_decode", lambda t, n: _heads(t, 1, n), fkjit.attention_decode)
    yield Case("paged_attention", paged,
               lambda q, table, used: fkjit.paged_attention(
                   q, (pages, pages), table, used, layout="nhd"))  # fmt: skip
    yield Case("linear", lambda t, n: (_rows(t, n),), lambda x: fkjit.linear(x, square, weight))
    yield Case("linear gelu_tanh", lambda t, n: (_rows(t, n),),
               lambda x: fkjit.gelu_linear(x, square, weight))  # fmt: skip
    yield Case("F.linear (PyTorch)", lambda t, n: (_rows(t, n),),
               lambda x: functional.linear(x, square, weight), ours=False)  # fmt: skip
    yield Case("rms_norm", lambda t, n: (_rows(t, n),), lambda x: fkjit.rms_norm(x, weight))
    yield Case("F.rms_norm (PyTorch)", lambda t, n: (_rows(t, n),),
               lambda x: functional.rms_norm(x, (1024,), weight, 1e-6), ours=False)  # fmt: skip
    yield Case("rms_norm + residual", lambda t, n: (_rows(t, n), _rows(t, n)),
               lambda x, r: fkjit.rms_norm(x, weight, residual=r))  # fmt: skip
    yield Case("layer_norm", lambda t, n: (_rows(t, n),),
               lambda x: fkjit.layer_norm(x, weight, weight))  # fmt: skip
    logits = lambda t, n: (t.randn(n, 64, device="cuda"),)  # noqa: E731
    yield Case("moe_route", logits, lambda x: fkjit.moe_route(x, 2))
    yield Case("moe_route_and_regroup", logits, lambda x: fkjit.moe_route_and_regroup(x, 2))
    yield Case("rope", lambda t, n: _heads(t, n)[:2], lambda q, k: fkjit.rope(q, k))
    yield Case("vector_add", lambda t, n: (_rows(t, n), _rows(t, n)), fkjit.vector_add)
    yield Case("reduce_sum", lambda t, n: (_rows(t, n),), lambda x: fkjit.reduce_sum(x, -1))


def least(torch: Any, calls: Sequence[Call], rounds: int) -> list[float]:
    """Microseconds of each call, the least of rounds in turns."""
    found = [float("inf")] * len(calls)
    for call in calls:
        for _ in range(5):
            call()
    for _ in range(rounds):
        for at, call in enumerate(calls):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(_CALLS):
                call()
            found[at] = min(found[at], (time.perf_counter() - begin) / _CALLS * 1e6)
    return found


def once(torch: Any, case: Case) -> tuple[float, float]:
    """Microseconds of calls whose shape is new: median, least."""
    times = []
    for n in range(_FIRST_NEW, _FIRST_NEW + _NEW):
        arrays = case.arrays(torch, n)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        case.call(*arrays)
        times.append((time.perf_counter() - begin) * 1e6)
    times = sorted(times[_NEW // 5 :])
    return times[len(times) // 2], times[0]


def measure(torch: Any, some: Sequence[Case], rounds: int) -> Iterator[dict[str, Any]]:
    """A cell for each case."""
    x = torch.zeros(8, device="cuda")
    add = lambda: torch.add(x, x)  # noqa: E731
    for case in some:
        with torch.set_grad_enabled(case.grad):
            one, two = (case.arrays(torch, n) for n in _WIDTHS)
            calls = (lambda: case.call(*one), lambda: (case.call(*one), case.call(*two)))  # noqa: B023
            of_add, warm, pair = least(torch, (add, *calls), rounds)
            median, low = once(torch, case) if case.new else (None, None)
        yield {
            "record": "host", "case": case.name, "unit": "us",
            "kind": "ours" if case.ours else "peer",
            "torch_add": of_add, "warm": warm, "alternating": pair / 2, "new": median,
            "new_least": low,
        }  # fmt: skip


def shown(cell: dict[str, Any]) -> str:
    """A cell as a line."""
    new = (
        "" if cell["new"] is None else f"   new {cell['new']:7.1f} (least {cell['new_least']:.1f})"
    )
    return (
        f"{cell['case']:26} warm {cell['warm']:6.2f} ({cell['warm'] / cell['torch_add']:.2f} x)   "
        f"alternating {cell['alternating']:6.2f} (+{cell['alternating'] - cell['warm']:.1f}){new}"
    )


def soak(torch: Any, some: Sequence[Case], calls: int) -> dict[str, Any]:
    """Resident megabytes before and after so many calls of new shapes."""
    ours = [case for case in some if case.ours and case.new and not case.grad]
    at = _FIRST_NEW + _NEW
    for _ in range(2000 // len(ours)):  # what every process grows by once
        at += 1
        for case in ours:
            case.call(*case.arrays(torch, at % 4000 + 1))
    before = resident()
    for turn in range(calls // len(ours)):
        at += 1
        for case in ours:
            case.call(*case.arrays(torch, at % 4000 + 1))
        if turn % 500 == 0:
            torch.cuda.synchronize()
            print(f"soak: {turn * len(ours)} calls, {resident():.0f} MB", file=sys.stderr)
    torch.cuda.synchronize()
    gc.collect()
    return {"record": "host", "case": f"soak of {calls} calls", "kind": "ours", "unit": "MB",
            "before": before, "after": resident()}  # fmt: skip


def resident() -> float:
    """Megabytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096 / 1e6


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status. ToolchainError where torch or a GPU is missing."""
    parser = argparse.ArgumentParser(
        prog="fkjit bench host", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="of a case's name")
    parser.add_argument("--rounds", type=int, default=30, help="of which the least counts")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="calls of new shapes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a new result file")
    chosen = parser.parse_args(arguments)
    from .device import TorchDevice
    from .environment import environment
    from .store import SCHEMA, Writer

    name = TorchDevice(False).name
    torch = sys.modules["torch"]
    writer = chosen.out and Writer(chosen.out)
    if writer:
        command = {"gpu": name, "command": "fkjit bench host"}
        writer.write({"record": "run", "schema": SCHEMA, **environment(), **command})
    some = [case for case in cases(torch) if chosen.only in case.name]
    for cell in measure(torch, some, chosen.rounds):
        print(shown(cell), flush=True)
        if writer:
            writer.write(cell)
    if chosen.soak:
        cell = soak(torch, some, chosen.soak)
        print(f"{cell['case']}: {cell['before']:.0f} -> {cell['after']:.0f} MB")
        if writer:
            writer.write(cell)
    return 0
