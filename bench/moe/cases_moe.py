"""What the benchmarks of routing to experts share: problems, arrays, what is right."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.moe import cases
from fkjit.ops.moe import groups as groups
from fkjit.ops.moe import problem as moe
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import Expected
from ..core.op import Arrays, Prepared

BLOCK_SIZE = 64
_GPU_BLOCKS = 132
_LIMIT = 2e-6


def problem(
    tokens: int, experts: int, top_k: int, dtype: str = "fp32", block_size: int = BLOCK_SIZE
) -> dict[str, Any]:
    """Softmax over all experts, and tiles of `block_size`; every expert is here."""
    whole = cases.group_problem(tokens, top_k, experts, block_size, _GPU_BLOCKS)
    return {**cases.route_problem(dtype, tokens, experts, top_k), **whole}


def label(p: Problem) -> str:
    """ "fp32 T32768 E64 K2"."""
    return f"{p['dtype']} T{p['tokens']} E{p['experts']} K{p['top_k']}"


SEED = (32_768, 64, 2)
SETS: dict[str, list[dict[str, Any]]] = {
    "default": [
        problem(*SEED),
        problem(*SEED, dtype="bf16"),
        problem(64, 64, 2),
        problem(4096, 128, 8),
        problem(32_768, 256, 8),
    ],
    "quick": [problem(*SEED), problem(64, 64, 2)],
    "table": [
        problem(tokens, experts, top_k)
        for experts in (8, 64, 128, 256, 512)
        for top_k in (1, 2, 8)
        for tokens in (1, 64, 1024, 8192, 32_768, 131_072)
    ],
}


def logits_of(p: Problem, device: Any) -> Any:
    """Each row in another random order of the same different numbers, which look like N(0, 1) in
    fp32: without ties, which PyTorch breaks in any order and float64 does not always break."""
    torch, place = device.torch, getattr(device, "place", "cuda")
    experts = p["experts"]
    order = torch.rand(p["tokens"], experts, device=place).argsort(1)
    if p["dtype"] == "fp32":
        share = (torch.arange(experts, device=place) + 0.5) / experts
        return torch.special.ndtri(share)[order]
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[p["dtype"]]
    return ((order - experts // 2) / 32).to(dtype)


def inputs(p: Problem, device: Any) -> Arrays:
    """Fresh logits, and the choices that they lead to."""
    logits = logits_of(p, device)
    return {"logits": logits, "topk_ids": logits.float().topk(p["top_k"]).indices.int()}


def routed(weights: Any, ids: Any, experts: int) -> Any:
    """Weights and ids as numbers of one size: [2, tokens, top_k]."""
    return import_module("torch").stack([weights.double() * experts, ids.double() / experts])


def expected_route(p: Problem, arrays: Arrays) -> Expected:
    """In float64."""
    torch = import_module("torch")
    best = torch.softmax(arrays["logits"].double(), -1).topk(p["top_k"])
    return Expected([(..., routed(best.values, best.indices, p["experts"]))], _LIMIT)


def expected_places(p: Problem, arrays: Arrays) -> Expected:
    """sorted_token_ids, exactly."""
    order, counts = sort(arrays["topk_ids"], p["experts"])
    return Expected([(..., padded(order, counts, p).double())], 0.0)


def sort(ids: Any, experts: int) -> tuple[Any, Any]:
    """(choices in order of experts, how many each has), as PyTorch does it."""
    torch, flat = import_module("torch"), ids.flatten().long()
    order = torch.sort(flat, stable=True).indices
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    return order, counts.scatter_add_(0, flat, torch.ones_like(flat))


def padded(order: Any, counts: Any, p: Problem) -> Any:
    """What `sort` found in the layout of sorted_token_ids."""
    torch, size = import_module("torch"), p["block_size"]
    wide = -(-counts // size) * size
    shift = (wide.cumsum(0) - wide) - (counts.cumsum(0) - counts)
    place = torch.arange(order.numel(), device=order.device)
    place = place + torch.repeat_interleave(shift, counts)
    made = torch.full((p["places"],), order.numel(), device=order.device)
    made[place] = order
    return made


def in_order(sorted_token_ids: Any, offsets: Any) -> Any:
    """Each expert's choices in order, where a kernel leaves them in any."""
    torch = import_module("torch")
    places = torch.arange(sorted_token_ids.numel(), device=sorted_token_ids.device)
    group = torch.bucketize(places, offsets[1:].long(), right=True)
    key = group * (1 << 32) + sorted_token_ids.long()
    return torch.sort(key).values % (1 << 32)


def choose(fixed: Mapping[str, Any], spec: KernelSpec, arch: Arch) -> Params:
    """The variant with these values."""
    for params in spec.variants(arch):
        if {**params, **fixed} == params:
            return params
    raise ParameterError(f"{spec.id} has no variant for {dict(fixed)}")


def tile(spec: KernelSpec, p: Problem, arch: Arch) -> Params:
    """What the public calls would take."""
    found = moe.choose_tile(p, quick=spec.op == "moe_route")
    return choose(moe.variant({**p, "tile": found}), spec, arch)


def _words(spec: KernelSpec, params: Params, p: Problem) -> int:
    """Words that the blocks of a variant's grid add up in."""
    first, second = params["tile"]
    room = second if spec.op == "moe_regroup" else max(first * second, 32)
    return max(groups.counters(p, room), 1)


def launch(
    spec: KernelSpec,
    params: Params,
    p: Problem,
    arrays: Arrays,
    device: Any,
    names: tuple[str, ...],
) -> Prepared:
    """`fkjit.launch` of one variant, with what its blocks meet in; the outputs of these names."""
    torch, like = import_module("torch"), arrays["logits"]
    made = {n: device.array(array) for n, array in spec.verification.outputs(params, p).items()}
    counters = torch.zeros(_words(spec, params, p), dtype=torch.int32, device=like.device)
    named = {**arrays, **made, "counters": counters}
    results = tuple(made[name] for name in names)

    def call() -> Any:
        fkjit.launch(spec, params, p, named)
        return results

    return Prepared(call, variant=(spec, params))
