"""The loss of rows of logits and its gradient, for `fkjit.models.linear_cross_entropy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.arch import Arch
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
    spec, params = _chosen(problem, arch_of(logits))
    outputs = {"loss": Output((rows,), "fp32"),
               "gradient": gradient and Output((rows, wide), dtype, gradient, False)}  # fmt: skip
    launches = (Launch(spec, params, problem),) if rows else ()
    return Request({name: views[name] for name in _INPUTS}, outputs, launches)


def _chosen(problem: Problem, arch: Arch) -> tuple[KernelSpec, dict[str, Any]]:
    """The smallest cluster that holds a row; a block that reads it twice where there is none."""
    fits = [tile for tile in _TILES if problem["wide"] <= _capacity(tile)]
    if fits and "cluster" in arch.features:
        fixed = {"dtype": problem["dtype"], "tile": min(fits, key=_capacity)}
        return HELD, tuned(HELD, fixed, problem, arch)
    return ROWS, tuned(ROWS, {"dtype": problem["dtype"], **_TUNED}, problem, arch)


def _capacity(tile: tuple[int, int, int]) -> int:
    """Columns of a row at most."""
    threads, vectors, cluster = tile
    return threads * vectors * cluster * 4


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: arrays.get(name) for name in (*_INPUTS, "loss", "gradient")}
    return {**named, "columns": problem["columns"], "wide": problem["wide"]}


def _traffic(problem: Problem) -> float:
    """Logits once, and the gradient: what the second time finds in L2 depends on the GPU."""
    each = ITEMSIZE["fp32"] + problem["gradient"] * ITEMSIZE[problem["dtype"]]
    return float(problem["rows"] * problem["wide"] * each)


_INPUTS = ("logits", "target", "factor")
_TUNED: dict[str, Any] = {"threads": 512, "unroll": 4}
# Threads of a block, accesses of each, blocks of a row.
_TILES = ((256, 4, 1), (512, 8, 1), (512, 8, 2), (512, 8, 4), (512, 8, 8))

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

HELD = register(
    KernelSpec(
        op=_CALL,
        name="held",
        source="reduce/cross_entropy_held.cu",
        entry="cross_entropy_held",
        pdl=True,
        doc="the same of rows that a cluster's registers hold, read once",
        params=(
            Param("dtype", FLOATS, "element type of the gradient"),
            Param("tile", _TILES, "(threads, accesses of each, blocks) of a row", tunable=True),
        ),
        derive=lambda params: dict(
            zip(("threads", "vectors", "cluster"), params["tile"], strict=True)
        ),
        features=lambda params: frozenset({"cluster"}),
        block=lambda params: (params["tile"][0], 1, 1),
        grid=lambda params, problem: (problem["rows"] * params["tile"][2], 1, 1),
        arguments=_arguments,
        shape_class=lambda p: {"rows": size_class(p["rows"], 1 << 14), "wide": p["wide"]},
        work=Work(flops=lambda p: 4.0 * p["rows"] * p["columns"], bytes=_traffic),
        verification="fkjit.ops.reduce.cases_cross_entropy:HELD",
    )
)

_OP = Op(_CALL, inputs=_INPUTS, outputs=("loss", "gradient"), check=_check)
