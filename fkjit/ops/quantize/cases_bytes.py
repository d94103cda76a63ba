"""How the kernels of products of codes with codes are checked."""

from __future__ import annotations

from typing import Any

from fkjit.ops.gemm.cases import TOLERANCE
from fkjit.ops.quantize.cases_linear import inputs, outputs, problem, reference
from fkjit.spec import Params, Verification


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Ragged tiles, a last step of k that is short, more tiles than blocks."""
    rows, outputs_of = params["block"]
    columns = outputs_of // (2 if params["gate"] else 1)
    blocks = params["scales"] == "blocks"
    spans = {"span": "block", "x_span": "group"} if blocks else {"span": "row", "x_span": "row"}
    more = {**spans, "residual": params["residual"], "scale": 0.5}
    even = 128 if blocks and params["gate"] else 1  # outputs that gate has to have
    if scale == "full":
        shapes = ((4096, 4096, 4096), (333, 1280, 7184), (16, 4096, 4096))
        return [problem(params, *shape, **more) for shape in shapes]
    tensor = {"span": "tensor"} if not blocks and params["code"] == "fp8" else {}
    wide = -(-(2 * columns + 24) // even) * even
    few = -(-40 // even) * even
    return [
        problem(params, 21, wide, 128 * 2 + 48, gap=8, multiprocessors=2, **more),
        problem(params, rows + 5, few, 64, bias=False, **{**more, **tensor}),
    ]


BYTES = Verification(
    problems=_problems, inputs=inputs, outputs=outputs, reference=reference,
    tolerance=lambda params: TOLERANCE[params["out_dtype"]],
)  # fmt: skip
