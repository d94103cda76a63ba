"""The loss of rows of logits and its gradient, for `fkjit.models.linear_cross_entropy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.op.checks import FLOATS, check_output
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.runtime.interop import ITEMSIZE, View
from fkjit.spec import KernelSpec, Param, Params, Problem, Work, register, size_class
from fkjit.tuning import tuned

_CALL = "cross_entropy"
EVEN = 8  # columns of a row are a multiple of it


def cross_entropy(logits: Any, target: Any, factor: Any, columns: int, gradient: Any = None) -> Any:
    """fp32 [rows]: the losses of rows of logits; their gradients go into `gradient`.

    Args:
        logits: fp32 [rows, wide], contiguous, wide a multiple of 8.
        target: int64 [rows], from 0 up to `columns`.
        factor: fp32 [rows], of the gradients.
        columns: of a row that are logits; the gradient of the others is 0.
        gradient: [rows, wide], contiguous, fp16, bf16 or fp32; None: it is not wanted.
    """
    return _OP((logits, target, factor), (None, gradient), (columns,))


def _check(views: Mapping[str, View | None], columns: int) -> Request:
    """Arrays are our own."""
    logits, gradient = views["logits"], views["gradient"]
    assert logits is not None
    rows, wide = logits.shape
    dtype = "fp32" if gradient is None else gradient.dtype
    check_output(_CALL, gradient, (rows, wide), dtype, "gradient")
    assert wide % EVEN == 0 and 0 < columns <= wide
    problem = {"rows": rows, "columns": columns, "wide": wide, "dtype": dtype,
               "gradient": gradient is not None}  # fmt: skip
    params = tuned(ROWS, {"dtype": dtype, **_TUNED}, problem, arch_of(logits))
    outputs = {"loss": Output((rows,), "fp32"),
               "gradient": gradient and Output((rows, wide), dtype, gradient, False)}  # fmt: skip
    launches = (Launch(ROWS, params, problem),) if rows else ()
    return Request({name: views[name] for name in _INPUTS}, outputs, launches)


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: arrays.get(name) for name in (*_INPUTS, "loss", "gradient")}
    return {**named, "columns": problem["columns"], "wide": problem["wide"]}


def _traffic(problem: Problem) -> float:
    """Logits once, and the gradient: what the second time finds in L2 depends on the GPU."""
    each = ITEMSIZE["fp32"] + problem["gradient"] * ITEMSIZE[problem["dtype"]]
    return float(problem["rows"] * problem["wide"] * each)


_INPUTS = ("logits", "target", "factor")
_TUNED: dict[str, Any] = {"threads": 512, "unroll": 4}

ROWS = register(
    KernelSpec(
        op=_CALL,
        name="rows",
        source="reduce/cross_entropy.cu",
        entry="cross_entropy",
        pdl=True,
        doc="cross-entropy of rows of logits, and their gradient",
        params=(
            Param("dtype", FLOATS, "element type of the gradient"),
            Param("threads", (256, 512, 1024), "threads of a row", tunable=True),
            Param("unroll", (2, 4), "16-byte accesses of a thread under way", tunable=True),
        ),
        block=lambda params: (params["threads"], 1, 1),
        grid=lambda params, problem: (problem["rows"], 1, 1),
        arguments=_arguments,
        shape_class=lambda p: {"rows": size_class(p["rows"], 1 << 14), "wide": p["wide"]},
        work=Work(flops=lambda p: 4.0 * p["rows"] * p["columns"], bytes=_traffic),
        verification="fkjit.ops.reduce.cases_cross_entropy:ROWS",
    )
)

_OP = Op(_CALL, inputs=_INPUTS, outputs=("loss", "gradient"), check=_check)
