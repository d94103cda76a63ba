"""Appending to a paged KV cache: prompts and steps of decoding."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

import fkjit
from fkjit.arch import Arch
from fkjit.ops.kv import cases as kv
from fkjit.ops.kv.append import APPEND, default
from fkjit.ops.kv.planes import Planes
from fkjit.spec import KernelSpec, Params, Problem
from fkjit.tuning import tuned

from ..core.accuracy import Expected
from ..core.kernels import arch_of
from ..core.op import Arrays, Op, Prepared
from .peers_kv_cache import APPEND as PEERS
from .peers_kv_cache import emptied

_SLACK = 2  # pages of the pool for each one that is used
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def problem(
    tokens: int, page_size: int = 16, layout: str = "nhd", storage: str = "same",
    dtype: str = "bf16", heads: int = 8, head_dim: int = 128,
) -> dict[str, Any]:  # fmt: skip
    """Tokens of one sequence, in whole pages that lie in any order in a pool twice as large."""
    pages = _SLACK * -(-tokens // page_size)
    params = {"dtype": dtype, "storage": storage}
    return kv.problem_of(params, tokens, heads, head_dim, page_size, pages, layout, skipped=0.0)


def label(p: Problem) -> str:
    """ "bf16 T16384 H8 D128 p16 nhd", "… fp8" where numbers are scaled."""
    kept = "" if p["storage"] == "same" else f" {p['storage']}"
    shape = f"T{p['tokens']} H{p['heads']} D{p['head_dim']} p{p['page_size']}"
    return f"{p['dtype']} {shape} {p['layout']}{kept}"


SETS: dict[str, list[dict[str, Any]]] = {
    "default": [
        *(problem(16_384, size, layout) for size in (16, 256) for layout in kv.LAYOUTS),
        *(problem(16_384, storage=storage) for storage in ("fp8", "int8")),
        *(problem(tokens) for tokens in (1, 64, 1024)),
    ],
    "quick": [problem(16_384), problem(64)],
    "decode": [problem(tokens) for tokens in (1, 2, 4, 8, 16, 32, 64)],
}


def pool(problem: Problem, device: Any, fill: Any) -> Arrays:
    """Pages of `fill(shape)` each, slots, and scales where there are any."""
    torch, size = device.torch, problem["page_size"]
    place = getattr(device, "place", "cuda")
    shape = kv.page_shape(
        problem["layout"], *(problem[n] for n in ("num_pages", "page_size", "heads", "head_dim"))
    )
    order = np.random.default_rng().permutation(problem["num_pages"])[:, None] * size
    slots = (order + np.arange(size)).reshape(-1)[: problem["tokens"]].astype(np.int32)
    arrays = {f"{side}_pages": fill(shape) for side in "kv"}
    arrays["slot_mapping"] = torch.from_numpy(slots).to(place)
    if problem["storage"] != "same":
        scale = torch.full((problem["heads"],), 3 / kv.GREATEST[problem["storage"]])
        arrays |= {f"{side}_scale": scale.to(place) for side in "kv"}
    return arrays


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1) k and v, and zeros in the pages."""
    torch, place = device.torch, getattr(device, "place", "cuda")
    dtype = getattr(torch, DTYPES[problem["dtype"]])
    kept = getattr(torch, kv.CODES.get(problem["storage"], DTYPES[problem["dtype"]]))
    shape = (problem["tokens"], problem["heads"], problem["head_dim"])
    made = pool(problem, device, lambda s: torch.zeros(s, dtype=kept, device=place))
    return made | {side: torch.randn(shape, device=place).to(dtype) for side in "kv"}


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """Both pools, [2, pages, …], exactly; of fp8 the codes."""
    torch = import_module("torch")
    slots = arrays["slot_mapping"].cpu().numpy()
    pools = []
    for side in "kv":
        x = arrays[side].float().cpu().numpy()
        scale = arrays[f"{side}_scale"].cpu().numpy() if problem["storage"] != "same" else None
        codes = x if scale is None else kv.encode(x, problem["storage"], scale)
        kept = np.zeros((problem["num_pages"] * problem["page_size"], *x.shape[1:]))
        kept[slots] = codes
        pools.append(torch.from_numpy(kv.from_slots(problem, kept)).to(arrays[side].device))
    return Expected([(..., torch.stack(pools))], 0.0)


def fixed(problem: Problem) -> dict[str, Any]:
    """Parameters that the problem decides."""
    return {"dtype": problem["dtype"], "storage": problem["storage"], "vector": True}


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What the public call takes."""
    return tuned(spec, default(fixed(problem)), problem, arch)


def launch(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """Into pages of its own."""
    arrays, torch = emptied(arrays), import_module("torch")
    return Prepared(
        lambda: fkjit.launch(spec, params, problem, arrays),
        lambda _: torch.stack([arrays["k_pages"], arrays["v_pages"]]),
        variant=(spec, params),
    )


def held(problem: Problem, arrays: Arrays) -> Any:
    """What the public calls take as `cache`."""
    names = ("k_pages", "v_pages", "k_scale", "v_scale")
    k_pages, v_pages, k_scale, v_scale = (arrays.get(name) for name in names)
    layer = Planes((k_pages, v_pages, k_scale, v_scale), problem["storage"], problem["layout"])
    return SimpleNamespace(planes=[layer])


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    arrays = emptied(arrays)
    torch, cache = import_module("torch"), held(problem, arrays)
    k, v, slots = arrays["k"], arrays["v"], arrays["slot_mapping"]
    variant = (APPEND, choose(APPEND, problem, arch_of(k))) if k.is_cuda else None
    return Prepared(
        lambda: fkjit.kv_append(k, v, cache, slots),
        lambda _: torch.stack([arrays["k_pages"], arrays["v_pages"]]),
        variant=variant,
    )


OP = Op(
    name="kv_append",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    launch=launch,
    peers=PEERS,
)
