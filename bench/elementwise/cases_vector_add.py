"""a + b: the roofline's calibration."""

from __future__ import annotations

from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.elementwise import vector_add as kernels
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import Expected
from ..core.kernels import arch_of
from ..core.op import Arrays, Op, Prepared
from .peers_vector_add import PEERS

_LIMITS = {"fp32": 1e-7, "fp16": 1e-3, "bf16": 8e-3}  # one rounding
_CHECKED = 1 << 22  # elements at either end


def problem(size: int, dtype: str = "fp32") -> dict[str, Any]:
    """Arrays of `size` elements without gaps."""
    return kernels.describe(dtype, (size,), [(1,)] * 3, [0] * 3)[0]


def label(p: Problem) -> str:
    """ "fp32 2^28"."""
    n = p["columns"]
    return f"{p['dtype']} {f'2^{n.bit_length() - 1}' if n & (n - 1) == 0 else n}"


SETS: dict[str, list[dict[str, Any]]] = {
    "default": [*(problem(1 << e) for e in (16, 20, 24, 28)), problem(1 << 28, "bf16")],
    "quick": [problem(1 << 16), problem(1 << 26)],
    "sizes": [problem(1 << e) for e in range(10, 31, 2)],
}


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1)."""
    torch = device.torch
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[problem["dtype"]]
    place = getattr(device, "place", "cuda")
    return {n: torch.randn(problem["columns"], dtype=dtype, device=place) for n in ("a", "b")}


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """Both ends."""
    ends = [slice(None, _CHECKED), slice(-_CHECKED, None)]
    parts = [(end, arrays["a"][end].double() + arrays["b"][end].double()) for end in ends]
    return Expected(parts, _LIMITS[problem["dtype"]])


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    a, b = arrays["a"], arrays["b"]
    variant = (kernels.ADD, choose(kernels.ADD, problem, arch_of(a))) if a.is_cuda else None
    return Prepared(lambda: fkjit.vector_add(a, b), variant=variant)


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What the public call takes."""
    return kernels.parameters(problem, True, arch)


OP = Op(
    name="vector_add",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    peers=PEERS,
)
