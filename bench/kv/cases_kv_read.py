"""Reading a paged KV cache: the cases of appending, the other way."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

import fkjit
from fkjit.arch import Arch
from fkjit.ops.kv import cases as kv
from fkjit.ops.kv.read import READ, default
from fkjit.spec import KernelSpec, Params, Problem
from fkjit.tuning import tuned

from ..core.accuracy import LIMITS, Expected
from ..core.kernels import arch_of
from ..core.op import Arrays, Op, Prepared
from .cases_kv_append import DTYPES, SETS, fixed, held, label, pool
from .peers_kv_cache import READ as PEERS


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
    variant = (READ, choose(READ, problem, arch_of(slots))) if slots.is_cuda else None
    return Prepared(
        lambda: fkjit.kv_read(cache, slots, dtype=dtype),
        import_module("torch").stack,
        variant=variant,
    )


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What the public call takes."""
    return tuned(spec, default(fixed(problem)), problem, arch)


def launch(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """Into new arrays."""
    torch = import_module("torch")
    shape = [problem[name] for name in ("tokens", "heads", "head_dim")]
    kind = getattr(torch, DTYPES[problem["dtype"]])
    both = arrays["k_pages"].new_empty([2, *shape], dtype=kind)
    named = {**arrays, "k": both[0], "v": both[1]}
    return Prepared(
        lambda: fkjit.launch(spec, params, problem, named), lambda _: both, variant=(spec, params)
    )


OP = Op(
    name="kv_read",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    launch=launch,
    peers=PEERS,
)
