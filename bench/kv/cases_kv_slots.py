"""Slots of the tokens of sequences: a step of decoding, and prompts."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

import fkjit
from fkjit.arch import Arch
from fkjit.ops.kv.cases import slots_of
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import Expected
from ..core.op import Arrays, Candidate, Op, Prepared

_TABLES = ("page_table", "lengths", "capacities")


def problem(sequences: int, each: int, page_size: int = 16) -> dict[str, Any]:
    """The first `each` tokens of so many sequences, which have twice as many."""
    return {
        **{"sequences": sequences, "tokens": sequences * each, "append": False},
        **{"page_size": page_size, "max_sequences": 2 * sequences},
        **{"max_pages": -(-2 * each // page_size), "counts": [each] * sequences},
    }


SETS: dict[str, list[dict[str, Any]]] = {
    "default": [problem(64, 1), problem(1, 16_384), problem(8, 2048, 256)],
    "quick": [problem(64, 1)],
}


def label(p: Problem) -> str:
    """ "64 sequences of 1 p16"."""
    return f"{p['sequences']} sequences of {p['counts'][0]} p{p['page_size']}"


def inputs(problem: Problem, device: Any) -> Arrays:
    """Full tables, pages and rows in any order."""
    rng, rows = np.random.default_rng(), problem["max_sequences"]
    table = rng.permutation(rows * problem["max_pages"]).reshape(rows, -1)
    held = np.full(rows, problem["max_pages"] * problem["page_size"])
    made = {
        "rows": rng.permutation(rows)[: problem["sequences"]],
        "cu_seqlens": np.cumsum([0, *problem["counts"]]),
        **dict(zip(_TABLES, (table, held, held), strict=True)),
    }
    torch, place = device.torch, getattr(device, "place", "cuda")
    return {n: torch.from_numpy(x.astype(np.int32)).to(place) for n, x in made.items()}


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """All of them, exactly."""
    given = {name: array.cpu().numpy() for name, array in arrays.items()}
    torch, want = import_module("torch"), slots_of(problem, given)["slot_mapping"]
    return Expected([(..., torch.from_numpy(want).to(arrays["rows"].device))], 0.0)


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public call; decoding has a token of each sequence, and no cu_seqlens."""
    tables = {name: arrays[name] for name in _TABLES}
    cache = SimpleNamespace(**tables, page_size=problem["page_size"], flush=lambda: None)
    single = problem["tokens"] == problem["sequences"]
    given = () if single else (arrays["cu_seqlens"],)
    options = {} if single else {"num_tokens": problem["tokens"]}
    rows, call = arrays["rows"], fkjit.kv_slots
    return Prepared(lambda: call(cache, rows, *given, append=False, **options))


def _torch(problem: Problem, arrays: Arrays) -> Prepared:
    """Indices into the tables, as a model would spell them."""
    torch, size = import_module("torch"), problem["page_size"]
    rows, ends, table, lengths = (
        arrays[name] for name in ("rows", "cu_seqlens", "page_table", "lengths")
    )
    tokens = problem["tokens"]
    numbers = torch.arange(tokens, device=rows.device, dtype=torch.int32)

    def call() -> Any:
        sequence = torch.searchsorted(ends, numbers, right=True) - 1
        row, place = rows[sequence], numbers - ends[sequence]
        slots = table[row, place // size] * size + place % size
        return torch.where(place < lengths[row], slots, -1)

    return Prepared(call)


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """There is one variant."""
    return next(spec.variants(arch))


OP = Op(
    name="kv_slots",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    peers=(Candidate(name="torch", package="torch", module="torch", prepare=_torch),),
)
