"""Reading a paged KV cache: the cases of appending, the other way."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

import fkjit
from fkjit.ops import kv_problem as kv
from fkjit.ops.kv_read import READ
from fkjit.spec import Problem

from ..accuracy import LIMITS, Expected
from ..op import Arrays, Op, Prepared
from ..peers.kv_cache import READ as PEERS
from .kv_append import SETS, choose, held, label, pool


def inputs(problem: Problem, device: Any) -> Arrays:
    """Pages full of N(0, 1), or of random codes."""
    torch, place = device.torch, getattr(device, "place", "cuda")
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

    def full(shape: tuple[int, ...]) -> Any:
        if problem["storage"] == "same":
            return torch.randn(shape, device=place).to(names[problem["dtype"]])
        codes = torch.randint(0, 100, shape, device=place, dtype=torch.int8)
        codes -= 128 * torch.randint(0, 2, shape, device=place, dtype=torch.int8)  # never fp8's NaN
        return codes.view(getattr(torch, kv.CODES[problem["storage"]]))

    return pool(problem, device, full)


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """k and v, [2, tokens, heads, head_dim]."""
    torch = import_module("torch")
    slots, both = arrays["slot_mapping"].cpu().numpy(), []
    for side in "kv":
        pages = arrays[f"{side}_pages"]
        scaled = problem["storage"] != "same"
        kept = kv.by_slot(problem, (pages if scaled else pages.float()).cpu().numpy())[slots]
        if scaled:
            scale = arrays[f"{side}_scale"].cpu().numpy()
            kept = kv.decode(kept, problem["storage"], scale, "fp32")
        both.append(torch.from_numpy(np.asarray(kept, np.float64)).to(pages.device))
    return Expected([(..., torch.stack(both))], LIMITS[problem["dtype"]])


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    cache, slots = held(problem, arrays), arrays["slot_mapping"]
    dtype = None if problem["storage"] == "same" else problem["dtype"]
    variant = None
    if slots.is_cuda:
        from fkjit.device import device_target

        variant = (READ, choose(READ, problem, device_target(slots.get_device()).arch))
    return Prepared(
        lambda: fkjit.kv_read(cache, slots, dtype=dtype),
        import_module("torch").stack,
        variant=variant,
    )


OP = Op(
    name="kv_read",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    peers=PEERS,
)
