"""What the cases of products share: problems, arrays, the reference, how ours is called.

A problem has the words of the kernels' specs (fkjit/ops/gemm/problem.py), so that the products of a
backward are problems as well: dx has its weight as [k, n], dweight both operands transposed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.gemm import cases, select
from fkjit.ops.gemm.candidates import CANDIDATES
from fkjit.ops.gemm.problem import outputs_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.kernels import arch_of
from ..core.op import Arrays, Prepared

_ROWS = 64  # checked at the end, and as many spread over the rest
_CHUNK = 16  # bytes
_SMS = 132
_TF32_LIMIT = 1e-3  # of an error, as accuracy.LIMITS


def problem(
    m: int, k: int, n: int, *, dtype: str = "bf16", activation: str = "none", gate: bool = False,
    x_layout: str = "mk", weight_layout: str = "nk", bias: bool = False, residual: bool = False,
    precision: str = "ieee",
) -> dict[str, Any]:  # fmt: skip
    """One product of contiguous arrays. In the order of the tables: m x k x n."""
    kinds = {
        "dtype": dtype, "x_layout": x_layout, "weight_layout": weight_layout,
        "activation": activation, "gate": gate,
    }  # fmt: skip
    made = cases.problem(kinds, m, n, k, bias=bias, residual=residual, precision=precision)
    return {**made, **_alignment(made)}


def _alignment(p: Problem) -> dict[str, bool]:
    """Whether all rows of an operand, and of out, are whole 16-byte pieces."""
    chunk, chunk_out = (_CHUNK // ITEMSIZE[p[name]] for name in ("dtype", "out_dtype"))
    by_k = p["weight_layout"] == "nk"
    operands = (p["x_stride"], p["weight_stride"], chunk if by_k else p["n"])
    outputs = (p["out_stride"], p["residual_stride"])
    return {
        "aligned": all(size % chunk == 0 for size in operands),
        "aligned_out": all(size % chunk_out == 0 for size in outputs),
    }


def is_tf32(p: Problem) -> bool:
    """Whether fp32 may be rounded to tf32."""
    return p.get("precision", "ieee") == "tf32"


def label(p: Problem) -> str:
    """ "bf16 M4096 K768 N3072 bias gelu_tanh"; "tf32" for fp32 that may be rounded to it; layouts
    where they are not nn.Linear's."""
    words = ["tf32" if is_tf32(p) else p["dtype"], f"M{p['m']}", f"K{p['k']}", f"N{p['n']}"]
    words += [p[name] for name in ("x_layout", "weight_layout") if p[name] in ("km", "kn")]
    words += [name for name in ("bias", "gate") if p[name]]
    words += [p["activation"]] if p["activation"] != "none" else []
    return " ".join([*words, *(["residual"] if p["residual"] else [])])


# ------------------------------------------------------------------ arrays


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1) x, bias and residual; a weight such that sums are N(0, 1)."""
    torch, p = device.torch, problem
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[p["dtype"]]
    place = getattr(device, "place", "cuda")

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, dtype=kind, device=place)

    m, n, k, wide = p["m"], p["n"], p["k"], outputs_of(p)
    weight = normal(wide, k) if p["weight_layout"] == "nk" else normal(k, wide)
    made = {
        "x": normal(m, k) if p["x_layout"] == "mk" else normal(k, m),
        "weight": weight.mul_(1 / math.sqrt(k)),
    }
    made |= {"bias": normal(wide)} if p["bias"] else {}
    return {**made, "residual": normal(m, n)} if p["residual"] else made


def operands(problem: Problem, arrays: Arrays) -> tuple[Any, Any]:
    """(x [m, k], weight [outputs, k]): views of the arrays, whatever their layouts."""
    x, weight = arrays["x"], arrays["weight"]
    return (
        x if problem["x_layout"] == "mk" else x.t(),
        weight if problem["weight_layout"] == "nk" else weight.t(),
    )


def activated(functional: Any, activation: str, z: Any) -> Any:
    """An activation by PyTorch, in z's dtype."""
    if activation in ("gelu", "gelu_tanh"):
        return functional.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")
    return z if activation == "none" else getattr(functional, activation)(z)


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """The last rows, and rows spread over the rest: tiles of all blocks."""
    import torch

    functional, (x, weight) = torch.nn.functional, operands(problem, arrays)
    m, n = problem["m"], problem["n"]
    spread = torch.linspace(0, m - 1, min(m, _ROWS)).long()
    rows = torch.cat([spread, torch.arange(max(0, m - _ROWS), m)]).unique().to(x.device)
    z = x[rows].double() @ weight.double().t() * problem["scale"]
    z = z + arrays["bias"].double() if problem["bias"] else z
    y = activated(functional, problem["activation"], z[:, :n])
    y = y * z[:, n:] if problem["gate"] else y
    y = y + arrays["residual"][rows].double() if problem["residual"] else y
    limit = _TF32_LIMIT if is_tf32(problem) else LIMITS[problem["dtype"]]
    return Expected([(rows, y)], limit)


# ------------------------------------------------------------------ ours


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    x, weight = operands(problem, arrays)
    bias, residual = arrays.get("bias"), arrays.get("residual")
    activation = None if problem["activation"] == "none" else problem["activation"]
    gate, variant = problem["gate"], None
    precision = problem.get("precision", "ieee")
    if x.is_cuda:
        chosen = _chosen("auto", _placed(problem, x), arch_of(x))
        variant = (chosen.spec, chosen.params)

    def call() -> Any:
        return fkjit.linear(
            x, weight, bias, activation=activation, gate=gate, residual=residual,
            precision=precision,
        )  # fmt: skip

    return Prepared(call, variant=variant)


def _chosen(impl: str, problem: Problem, arch: Arch) -> Any:
    return select.choose(problem, impl, None, arch)


def _placed(problem: Problem, array: Any) -> Problem:
    """The problem on an array's device."""
    if not array.is_cuda:
        return problem
    return {**problem, "multiprocessors": multiprocessors(array.get_device())}


def chosen(problem: Problem, arch: Arch) -> tuple[KernelSpec, Params]:
    """What the public call launches, on a GPU of the size of an H100."""
    made = _chosen("auto", {"multiprocessors": _SMS, **problem}, arch)
    return made.spec, made.params


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What the public call takes of a kernel, on a GPU of the size of an H100."""
    return _chosen(spec.name, {"multiprocessors": _SMS, **problem}, arch).params


def whole(spec: KernelSpec) -> KernelSpec:
    """The kernel with all variants that calls take."""
    return CANDIDATES[spec.name].spec


def launch(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """A variant, with the scratch memory that it wants."""
    x = arrays["x"]
    problem = _placed(problem, x)
    out = x.new_empty(problem["m"], problem["n"])
    workspace, counters = CANDIDATES[spec.name].scratch(params, problem)
    named = {**arrays, "out": out}
    named |= {"workspace": x.new_zeros(workspace, dtype=device.torch.uint8)} if workspace else {}
    named |= {"counters": x.new_zeros(counters, dtype=device.torch.int32)} if counters else {}

    def call() -> Any:
        fkjit.launch(spec, params, problem, named)
        return out

    return Prepared(call, variant=(spec, params))


def every(problems: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each problem once, in order."""
    return list({label(p): p for p in problems}.values())
