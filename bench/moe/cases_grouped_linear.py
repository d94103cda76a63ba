"""The products of a mixture of experts alone, on rows that are sorted already."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.grouped import kernels, select
from fkjit.ops.moe.groups import places_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.drawn import Drawn
from ..core.kernels import arch_of
from ..core.op import Arrays, Op, Prepared
from . import layer
from .layer import DECODED, SHORT, WIDE
from .peers_grouped_linear import PEERS

_SMS = 132
_ROWS = 64  # places that are checked
_DRAWN = 24
_ALL = {"wgmma": kernels.WGMMA_ALL, "mma": kernels.MMA_ALL_GROUPED, "fma": kernels.FMA_ALL_GROUPED}


def problem(
    tokens: int, experts: int, top_k: int, k: int, n: int, *, gate: bool = False,
    dtype: str = "bf16", skew: float = 0.0, seed: int = 0, block_size: int = 64,
) -> dict[str, Any]:  # fmt: skip
    """A product of all choices' rows, in the words of the kernels' specs; a gate is SwiGLU's."""
    chunk = 16 // ITEMSIZE[dtype]
    return {
        "tokens": tokens, "top_k": top_k, "skew": skew, "seed": seed,
        "m": places_of(tokens * top_k, experts, block_size), "n": n, "k": k, "experts": experts,
        "block_size": block_size, "dtype": dtype, "out_dtype": dtype, "groups": "ROWS",
        "gather": False,
        "activation": "silu" if gate else "none", "gate": gate, "pre": False, "bias": False,
        "residual": False, "scale": 1.0, "x_layout": "mk", "weight_layout": "nk", "x_stride": k,
        "weight_stride": k, "out_stride": n, "residual_stride": n, "aligned": k % chunk == 0,
        "aligned_out": n % chunk == 0,
    }  # fmt: skip


def products(tokens: int, shape: tuple[int, int, int, int], **more: Any) -> list[dict[str, Any]]:
    """Of a layer: gate and up with SwiGLU, the same as a product alone, down."""
    experts, top_k, hidden, width = shape
    return [
        problem(tokens, experts, top_k, hidden, width, gate=True, **more),
        problem(tokens, experts, top_k, hidden, 2 * width, **more),
        problem(tokens, experts, top_k, width, hidden, **more),
    ]


def label(p: Problem) -> str:
    """ "bf16 T4096 E128 K8 k7168 n2048 swiglu"."""
    words = [p["dtype"], f"T{p['tokens']}", f"E{p['experts']}", f"K{p['top_k']}"]
    words += [f"k{p['k']}", f"n{p['n']}", *(["swiglu"] if p["gate"] else [])]
    block = [f"tiles{p['block_size']}"] if p["block_size"] != 64 else []
    return " ".join([*words, *block, *layer.drawn_by(p)])


def _drawn(rng: random.Random) -> list[dict[str, Any]]:
    made = []
    for one in layer.drawn(rng, _DRAWN // 2):
        shape = tuple(one[name] for name in ("experts", "top_k", "hidden", "width"))
        first, _, last = products(one["tokens"], shape, skew=one["skew"])
        made += [first, last]
    return made


SETS: dict[str, Sequence[Problem]] = {
    "default": [
        *products(4096, WIDE),
        *products(32_768, SHORT),
        *(p for shape in DECODED for t in (1, 8, 64) for p in products(t, shape)[::2]),
    ],
    "quick": [problem(4096, 128, 8, 2048, 768, gate=True), problem(8, 128, 8, 4096, 768)],
    "skew": [p for skew in (0.0, 1.0) for p in products(4096, WIDE, skew=skew)],
    "random": _drawn(random.Random(layer.SEED)),
    "drawn": Drawn(_drawn),
}

# ------------------------------------------------------------------ arrays and what is right


def inputs(p: Problem, device: Any) -> Arrays:
    """Fresh rows, zeros where no choice is, and a weight such that sums are N(0, 1)."""
    torch, place, wide = device.torch, getattr(device, "place", "cuda"), p["n"] * (1 + p["gate"])
    best = torch.from_numpy(layer.logits(p)).to(place).topk(p["top_k"]).indices
    groups = fkjit.moe_regroup(best.int(), p["experts"], p["block_size"])
    x = layer.normal(device, p["dtype"], p["m"], p["k"])
    x[groups.sorted_token_ids >= layer.choices(p)] = 0
    scale = p["k"] ** -0.5
    weight = layer.normal(device, p["dtype"], p["experts"], wide, p["k"], scale=scale)
    return {"x": x, "weight": weight, **groups._asdict()}


def expected(p: Problem, arrays: Arrays) -> Expected:
    """Some places that have a choice, in float64."""
    import torch

    places = (arrays["sorted_token_ids"] < layer.choices(p)).nonzero().flatten()
    spread = torch.linspace(0, len(places) - 1, min(len(places), _ROWS)).long().unique()
    rows = places[spread.to(places.device)]
    owners = arrays["expert_ids"][rows // p["block_size"]]
    made = torch.empty(len(rows), p["n"], dtype=torch.float64, device=rows.device)
    for expert in owners.unique().tolist():
        own = owners == expert
        z = arrays["x"][rows[own]].double() @ arrays["weight"][expert].double().t()
        made[own] = layer.swiglu(z) if p["gate"] else z
    return Expected([(rows, made)], LIMITS[p["dtype"]])


# ------------------------------------------------------------------ ours


def ours(p: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    x, weight = arrays["x"], arrays["weight"]
    groups = fkjit.MoeGroups(*(arrays[name] for name in fkjit.MoeGroups._fields))
    activation, gate, variant = "silu" if p["gate"] else None, p["gate"], None
    if x.is_cuda:
        placed = {**p, "multiprocessors": multiprocessors(x.get_device())}
        made = select.choose(placed, "auto", None, arch_of(x))
        variant = (made.spec, made.params)
    return Prepared(
        lambda: fkjit.grouped_linear(x, weight, groups, activation=activation, gate=gate),
        variant=variant,
    )


def chosen(p: Problem, arch: Arch) -> tuple[KernelSpec, Params]:
    """What the public call launches, on a GPU of the size of an H100."""
    made = select.choose({"multiprocessors": _SMS, **p}, "auto", None, arch)
    return made.spec, made.params


def choose(spec: KernelSpec, p: Problem, arch: Arch) -> Params:
    """What the public call takes of a kernel."""
    return select.choose({"multiprocessors": _SMS, **p}, spec.name, None, arch).params


def launch(spec: KernelSpec, params: Params, p: Problem, arrays: Arrays, device: Any) -> Prepared:
    """A variant, into rows of its own."""
    x = arrays["x"]
    out = x.new_empty(p["m"], p["n"])
    placed = {**p, "multiprocessors": multiprocessors(x.get_device())} if x.is_cuda else p

    def call() -> Any:
        fkjit.launch(spec, params, placed, {**arrays, "out": out})
        return out

    return Prepared(call, variant=(spec, params))


@dataclass(frozen=True, kw_only=True)
class _Op(Op):
    """Work of the rows that have a choice, and weights of experts that have a row."""

    def flops(self, problem: Problem) -> float:
        wide = problem["n"] * (1 + problem["gate"])
        return 2.0 * layer.choices(problem) * problem["k"] * wide

    def bytes(self, problem: Problem) -> float:
        p, wide = problem, problem["n"] * (1 + problem["gate"])
        rows = layer.choices(p) * (p["k"] + p["n"])
        return float(ITEMSIZE[p["dtype"]] * (layer.active(p) * wide * p["k"] + rows))


OP = _Op(
    name="grouped_linear",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    chosen=chosen,
    launch=launch,
    whole=lambda spec: _ALL.get(spec.name, spec),
    peers=PEERS,
)
