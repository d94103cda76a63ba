"""Products with quantized weights: decoding with int4 and int8 weights, codes with codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.quantize import cases_linear, kernels_blocks, kernels_bytes, kernels_few, select
from fkjit.ops.quantize.product import is_quantized
from fkjit.ops.quantize.schemes import SCHEMES
from fkjit.runtime.device import multiprocessors
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.kernels import arch_of
from ..core.op import Arrays, Op, Prepared
from .peers_quantized_linear import PEERS

_ROWS = 64  # checked at the end, and as many spread over the rest
_SMS = 132
_WHOLE = {
    spec.name: spec
    for spec in (
        kernels_few.GEMV,
        kernels_few.GEMV_SM90,
        kernels_few.GEMV_DIGITS,
        kernels_few.SKINNY,
        kernels_blocks.WGMMA_BLOCKS,
        kernels_bytes.WGMMA,
        kernels_bytes.MMA,
    )
}


def problem(scheme: str, m: int, k: int, n: int) -> dict[str, Any]:
    """bf16 without an epilogue; in the order of the tables: m x k x n."""
    how = SCHEMES[scheme]
    span = "block" if scheme == "fp8_block" else how.span
    kinds = {"dtype": "bf16", "out_dtype": "bf16", "code": how.code, "activation": "none"}
    made = cases_linear.problem(
        {**kinds, "gate": False}, m, n, k, bias=False, span=span, x_span=how.span
    )
    return {**made, "scheme": scheme}


def label(p: Problem) -> str:
    """ "int4_group M1 K4096 N4096"."""
    return f"{p['scheme']} M{p['m']} K{p['k']} N{p['n']}"


_DECODED = ((4096, 4096), (4096, 14_336), (14_336, 4096), (4096, 28_672))  # k and n of layers
SETS: dict[str, Sequence[Problem]] = {
    "default": [
        *(problem("int4_group", m, 4096, 14_336) for m in (1, 2, 4, 8, 16, 64)),
        *(problem("int8_group", m, 4096, 14_336) for m in (1, 8, 64)),
        *(problem(scheme, 8192, 8192, 8192) for scheme in ("fp8_tensor", "fp8_row", "int8_row")),
        problem("fp8_block", 4096, 7168, 16_384),
    ],
    "quick": [problem("int4_group", 1, 4096, 4096), problem("fp8_row", 4096, 4096, 4096)],
    "decode": [
        problem(scheme, m, k, n)
        for scheme in ("int4_group", "int8_group")
        for k, n in _DECODED
        for m in (1, 2, 4, 8, 16, 32, 64)
    ],
    "square": [
        problem(scheme, size, size, size)
        for scheme in ("fp8_tensor", "fp8_row", "fp8_block", "int8_row")
        for size in (1024, 2048, 4096, 8192)
    ],
}


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1) x, and a weight such that sums are; quantized."""
    torch, p = device.torch, problem
    place = getattr(device, "place", "cuda")
    x = torch.randn(p["m"], p["k"], dtype=torch.bfloat16, device=place)
    plain = torch.randn(p["n"], p["k"], dtype=torch.bfloat16, device=place).div_(math.sqrt(p["k"]))
    weight, scales, _ = fkjit.quantize(plain, p["scheme"], weight=True)
    made = {"weight": _as_bytes(torch, weight), "scales": scales}
    if not is_quantized(p):
        return {**made, "x": x}
    codes, x_scales, _ = fkjit.quantize(x, p["scheme"])
    return {**made, "x": _as_bytes(torch, codes), "x_scales": x_scales}


def _as_bytes(torch: Any, codes: Any) -> Any:
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """Rows of the product of the numbers that codes stand for."""
    import torch

    m, x = problem["m"], arrays["x"]
    weight = fkjit.dequantize(_weight(problem, arrays), "fp32").double()
    if is_quantized(problem):
        x = fkjit.dequantize(_x(problem, arrays), "fp32")
    spread = torch.linspace(0, m - 1, min(m, _ROWS)).long()
    rows = torch.cat([spread, torch.arange(max(0, m - _ROWS), m)]).unique().to(x.device)
    return Expected([(rows, x[rows].double() @ weight.t())], LIMITS["bf16"])


def _weight(problem: Problem, arrays: Arrays) -> fkjit.QuantizedTensor:
    return fkjit.QuantizedTensor(arrays["weight"], arrays["scales"], problem["scheme"])


def _x(problem: Problem, arrays: Arrays) -> Any:
    if not is_quantized(problem):
        return arrays["x"]
    return fkjit.QuantizedTensor(arrays["x"], arrays["x_scales"], problem["scheme"])


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public call, of x that is quantized where the kernel wants it so."""
    x, weight, variant = _x(problem, arrays), _weight(problem, arrays), None
    if arrays["x"].is_cuda:
        found = select.choose(_placed(problem, arrays["x"]), "auto", arch_of(arrays["x"]))
        variant = (found.spec, found.params)
    return Prepared(lambda: fkjit.linear(x, weight), variant=variant)


def _placed(problem: Problem, array: Any) -> Problem:
    if not array.is_cuda:
        return problem
    return {**problem, "multiprocessors": multiprocessors(array.get_device())}


def chosen(problem: Problem, arch: Arch) -> tuple[KernelSpec, Params]:
    """What the public call launches, on a GPU of the size of an H100."""
    made = select.choose({"multiprocessors": _SMS, **problem}, "auto", arch)
    return made.spec, made.params


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What the public call takes of a kernel."""
    return select.choose({"multiprocessors": _SMS, **problem}, spec.name, arch).params


def launch(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """A variant, with the scratch memory that it wants."""
    x, torch = arrays["x"], device.torch
    problem = _placed(problem, x)
    out = torch.empty(problem["m"], problem["n"], dtype=torch.bfloat16, device=x.device)
    named = {**arrays, "out": out}
    if spec.name == "skinny":
        workspace, counters = kernels_few.skinny_scratch(params, problem)
        named["workspace"] = x.new_zeros(max(workspace, 1), dtype=torch.uint8)
        named["counters"] = x.new_zeros(max(counters, 1), dtype=torch.int32)

    def call() -> Any:
        fkjit.launch(spec, params, problem, named)
        return out

    return Prepared(call, variant=(spec, params))


OP = Op(
    name="quantized_linear",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    chosen=chosen,
    launch=launch,
    whole=lambda spec: _WHOLE[spec.name],
    peers=PEERS,
)
