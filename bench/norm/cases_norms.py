"""What the cases of LayerNorm and RMSNorm share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.norm import kernels as kernels
from fkjit.ops.norm.cases import problem as problem_of
from fkjit.runtime.device import multiprocessors
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.kernels import arch_of, launcher
from ..core.op import Arrays, Candidate, Op, Prepared, Refused
from .peers_norms import first

_ROWS = 512  # checked at either end
_CALLS = {"layer_norm": fkjit.layer_norm, "rms_norm": fkjit.rms_norm}


def problem(
    op: str, rows: int, columns: int, residual: bool, dtype: str = "bf16"
) -> dict[str, Any]:
    """Rows without gaps; weight, and bias for LayerNorm."""
    kinds = {"dtype": dtype, "weight_dtype": dtype}
    affine = "both" if op == "layer_norm" else "weight"
    return problem_of(kinds, rows, columns, affine=affine, residual=residual)


def label(p: Problem) -> str:
    """ "bf16 16384x4096 residual"."""
    return f"{p['dtype']} {p['rows']}x{p['columns']}{' residual' if p['residual'] else ''}"


def _sets(op: str) -> dict[str, list[dict[str, Any]]]:
    def both(*shapes: tuple[int, int], dtype: str = "bf16") -> list[dict[str, Any]]:
        return [
            problem(op, *shape, residual, dtype) for shape in shapes for residual in (True, False)
        ]

    peers = [(2048, width) for width in (4096, 8192, 16_384)]
    single = [(1, width) for width in (4096, 8192, 16_384)]
    return {
        "default": both((16_384, 4096), *peers, *single),
        "quick": both((16_384, 4096), (1, 4096)),
        "widths": both(*((1 << 26 >> e, 1 << e) for e in range(6, 17))),
        "fp32": both((16_384, 4096), (2048, 16_384), dtype="fp32"),
        "ragged": both((16_384, 4095), (16_384, 1001)),
    }


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1) rows, weights around 1."""
    torch = device.torch
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[problem["dtype"]]
    place = getattr(device, "place", "cuda")
    shape = (problem["rows"], problem["columns"])

    def normal(*size: int) -> Any:
        return torch.randn(*size, dtype=kind, device=place)

    made = {"x": normal(*shape), "weight": 1 + 0.1 * normal(problem["columns"])}
    if problem["affine"] == "both":
        made["bias"] = normal(problem["columns"])
    return {**made, "residual": normal(*shape)} if problem["residual"] else made


def _expected(centered: bool) -> Callable[[Problem, Arrays], Expected]:
    def expected(problem: Problem, arrays: Arrays) -> Expected:
        """Both ends of the normalised rows."""
        parts = []
        for end in (slice(None, _ROWS), slice(-_ROWS, None)):
            s = arrays["x"][end].double()
            s = s + arrays["residual"][end].double() if problem["residual"] else s
            y = s - s.mean(-1, keepdim=True) if centered else s
            y = y * (y.square().mean(-1, keepdim=True) + problem["eps"]).rsqrt()
            y = y * arrays["weight"].double()
            parts.append((end, y + arrays["bias"].double() if "bias" in arrays else y))
        return Expected(parts, LIMITS[problem["dtype"]])

    return expected


def _choose(op: str) -> Callable[[KernelSpec, Problem, Arch], Params]:
    def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
        """What the public call takes."""
        kinds = {name: problem[name] for name in ("dtype", "weight_dtype")}
        found, free = _chosen(op, problem, arch)
        if found is kernels.ROWS[op] and spec is kernels.WIDE[op]:
            free = {"threads": kernels.WIDE_THREADS}
        elif found is not spec:
            raise ParameterError(f"{op}: {spec.name} is not for {label(problem)}")
        params = {**kinds, "vector": _vector(problem), **free}
        return kernels.parameters(spec, params, problem, arch)

    return choose


def _chosen(op: str, problem: Problem, arch: Arch) -> tuple[KernelSpec, dict[str, Any]]:
    """The kernel and its tile, where nothing was tuned."""
    sizes = problem["dtype"], problem["columns"], problem["rows"]
    return kernels.choose(op, *sizes, _vector(problem), "cluster" in arch.features)


def _vector(problem: Problem) -> bool:
    return problem["columns"] % kernels.size(problem["dtype"]) == 0


def launch(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """With as many blocks as run at once, where a block takes several rows."""
    tile = params.get("tile")
    if tile is not None and kernels.capacity(params["dtype"], tile) < problem["columns"]:
        raise Refused("holds no row as wide as these")
    if tile in kernels.PIPELINED and arrays["x"].is_cuda:
        most = multiprocessors(arrays["x"].get_device()) * kernels.resident(spec.op, tile)
        problem = {**problem, "most": most}
    made = launcher(spec, params, problem, arrays, device)
    return replace(made, output=lambda out: out.view_as(arrays["x"]))


def _ours(op: str) -> Callable[[Problem, Arrays], Prepared]:
    def ours(problem: Problem, arrays: Arrays) -> Prepared:
        """The public call."""
        call, given, variant = _CALLS[op], dict(arrays), None
        if arrays["x"].is_cuda:
            here = arch_of(arrays["x"])
            spec, _ = _chosen(op, problem, here)
            variant = (spec, _choose(op)(spec, problem, here))
        return Prepared(lambda: call(**given, eps=problem["eps"]), first, variant=variant)

    return ours


def operation(op: str, peers: Sequence[Candidate]) -> Op:
    """Of "layer_norm" or "rms_norm"."""
    return Op(
        name=op,
        sets=_sets(op),
        label=label,
        inputs=inputs,
        expected=_expected(op == "layer_norm"),
        ours=_ours(op),
        choose=_choose(op),
        launch=launch,
        peers=peers,
    )
