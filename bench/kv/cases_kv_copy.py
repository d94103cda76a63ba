"""Copying pages of a paged KV cache: what a fork's first write and defragmentation cost."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from fkjit.arch import Arch
from fkjit.ops.kv.copy import COPY, kv_copy
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import Expected
from ..core.op import Arrays, Candidate, Op, Prepared


def problem(copies: int, tokens: int, layers: int = 1) -> dict[str, Any]:
    """Pages of so many tokens of 8 heads of 128 in bf16, half of a pool."""
    size = tokens * 8 * 128 * 2
    return {"planes": 2 * layers, "num_pages": 2 * copies, "page_bytes": size, "copies": copies}


SETS: dict[str, list[dict[str, Any]]] = {
    "default": [problem(1, 16, 32), problem(1, 256, 32), problem(512, 16), problem(64, 256)],
    "quick": [problem(512, 16)],
}


def label(p: Problem) -> str:
    """ "512 pages of 32 KiB in 2 planes"."""
    return f"{p['copies']} pages of {p['page_bytes'] >> 10} KiB in {p['planes']} planes"


def inputs(problem: Problem, device: Any) -> Arrays:
    """Random bytes; the pool's one half into the other, in any order."""
    torch, place = device.torch, getattr(device, "place", "cuda")
    shape = (problem["planes"], problem["num_pages"], problem["page_bytes"])
    pairs = np.random.default_rng().permutation(problem["num_pages"]).reshape(-1, 2)
    return {
        "storage": torch.randint(0, 256, shape, dtype=torch.uint8, device=place),
        "pairs": torch.from_numpy(pairs.astype(np.int32)).to(place),
    }


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """The targets of the first plane."""
    sources = arrays["pairs"][:, 0].long()
    return Expected([(..., arrays["storage"][0, sources].double())], 0.0)


def _targets(arrays: Arrays) -> Any:
    return lambda _: arrays["storage"][0, arrays["pairs"][:, 1].long()]


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """What the cache calls."""
    storage, pairs = arrays["storage"], arrays["pairs"]
    return Prepared(lambda: kv_copy(storage, pairs), _targets(arrays))


def _torch(problem: Problem, arrays: Arrays) -> Prepared:
    """Whole pages by index, as words of 8 bytes."""
    words = arrays["storage"].view(import_module("torch").int64)
    sources, targets = (arrays["pairs"][:, i].long() for i in range(2))
    return Prepared(
        lambda: words.index_copy_(1, targets, words.index_select(1, sources)), _targets(arrays)
    )


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """There is one variant."""
    return next(spec.variants(arch))


OP = Op(
    name=COPY.op,
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    peers=(Candidate(name="torch", package="torch", module="torch", prepare=_torch),),
)
