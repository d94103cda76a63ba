"""What the cases of the norms' gradients share: dx, dweight and dbias of rows that were saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.norm import kernels_backward as kernels
from fkjit.ops.norm.call import gradient
from fkjit.ops.norm.kernels import capacity, size
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.op import Arrays, Candidate, Op, Prepared, Refused
from . import cases_norms
from .peers_norms import first

_ROWS = 256  # checked at either end


def problem(
    op: str, rows: int, columns: int, residual: bool = True, dtype: str = "bf16"
) -> dict[str, Any]:
    """Of a forward: with a residual there is a gradient of the stream it returned as well."""
    return cases_norms.problem(op, rows, columns, residual, dtype)


def _sets(op: str) -> dict[str, list[dict[str, Any]]]:
    shapes = [(16_384, 1024), (16_384, 4096), (8192, 8192), (4096, 16_384)]
    made = [problem(op, *shape) for shape in shapes] + [problem(op, 16_384, 4096, False)]
    return {"default": made, "quick": [problem(op, 16_384, 4096)]}


def _inputs(op: str) -> Callable[[Problem, Any], Arrays]:
    def inputs(problem: Problem, device: Any) -> Arrays:
        """Fresh N(0, 1) rows and gradients, and the statistics that a forward would save."""
        given = cases_norms.inputs({**problem, "residual": False}, device)
        x, torch = given["x"], device.torch
        wide = x.float()
        mean = wide.mean(-1) if op == "layer_norm" else None
        spread = wide.square() if mean is None else (wide - mean[:, None]).square()
        made = {**given, "dy": torch.randn_like(x)}
        made |= {} if mean is None else {"mean": mean}
        made |= {"dsum": torch.randn_like(x)} if problem["residual"] else {}
        return {**made, "rstd": (spread.mean(-1) + problem["eps"]).rsqrt()}

    return inputs


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """Both ends of dx."""
    parts = []
    for end in (slice(None, _ROWS), slice(-_ROWS, None)):
        x, dy = (arrays[name][end].double() for name in ("x", "dy"))
        rstd = arrays["rstd"][end, None].double()
        g = dy * arrays["weight"].double()
        centered = x - arrays["mean"][end, None].double() if "mean" in arrays else x
        h = centered * rstd
        dx = g - h * (g * h).mean(-1, keepdim=True)
        dx = (dx - g.mean(-1, keepdim=True) if "mean" in arrays else dx) * rstd
        parts.append((end, dx + arrays["dsum"][end].double() if "dsum" in arrays else dx))
    return Expected(parts, LIMITS[problem["dtype"]])


def _ours(op: str) -> Callable[[Problem, Arrays], Prepared]:
    def ours(problem: Problem, arrays: Arrays) -> Prepared:
        """What autograd calls; all gradients are wanted."""
        given, call = _given(arrays), gradient(op)
        wanted = (True, op == "layer_norm")
        return Prepared(lambda: call(given, (None,) * 5, wanted), first)

    return ours


def _given(arrays: Arrays) -> tuple[Any, ...]:
    names = ("dy", "dsum", "x", "weight", "mean", "rstd", "weight")
    return tuple(arrays.get(name) for name in names)


def _choose(op: str) -> Callable[[KernelSpec, Problem, Arch], Params]:
    def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
        """What the gradients take."""
        kinds: dict[str, Any] = {name: problem[name] for name in ("dtype", "weight_dtype")}
        kinds["vector"] = problem["columns"] % size(problem["dtype"]) == 0
        tile = kernels.tile(op, kinds, problem, arch)
        if tile is None:
            raise ParameterError(f"{spec.id} is not for {cases_norms.label(problem)}")
        return {**kinds, "tile": tile}

    return choose


def _launch(op: str) -> Callable[..., Prepared]:
    def launch(
        spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
    ) -> Prepared:
        """All launches with this tile: the more blocks it has, the more parts are added."""
        if capacity(params["dtype"], params["tile"]) < problem["columns"]:
            raise Refused("holds no row as wide as these")
        given, call = _given(arrays), gradient(op, params["tile"])
        wanted = (True, op == "layer_norm")
        return Prepared(lambda: call(given, (None,) * 5, wanted), first, variant=(spec, params))

    return launch


def operation(op: str, peers: Sequence[Candidate]) -> Op:
    """Of "layer_norm" or "rms_norm"."""
    return Op(
        name=f"{op}_backward",
        sets=_sets(op),
        label=cases_norms.label,
        inputs=_inputs(op),
        expected=expected,
        ours=_ours(op),
        choose=_choose(op),
        launch=_launch(op),
        peers=peers,
        kernel=kernels.BACKWARD[op].id,
    )
