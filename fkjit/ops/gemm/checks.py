"""Everything that can be wrong with a call of `linear`, and the launch of one that is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from fkjit.arch import Arch
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.gemm import select
from fkjit.ops.gemm.epilogue import ACTIVATIONS, mod_text
from fkjit.ops.gemm.options import LinearOptions
from fkjit.ops.gemm.problem import outputs_of
from fkjit.ops.op.checks import check_dtype, check_flag, check_output, check_same_dtype, check_shape
from fkjit.ops.op.expression import expression
from fkjit.ops.op.op import Launch, Output, Request, arch_of
from fkjit.ops.op.request import Delegate
from fkjit.ops.op.shapes import MAX_GRID, leading_rows, rows_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, ITEMSIZE, View
from fkjit.spec import Problem

CALL = "linear"
WEIGHT_LAYOUTS = ("nk", "kn")
PRECISIONS = ("ieee", "tf32")
MAX_SIZE = 1 << 30  # of m, k and the weight's outputs: a tile more is still an int
_CHUNK = 16  # bytes of a copy that needs aligned rows
_MAX_SCALE = 3e38
_MAX_ROW_BYTES = 1 << 31

Views = Mapping[str, View | None]


class Matrix(NamedTuple):
    """How a kernel sees a matrix: rows that are contiguous, one `stride` from each other."""

    layout: str
    stride: int


# ------------------------------------------------------------------ the call


def check(views: Views, options: LinearOptions, *, copied: Delegate, pre: bool = False) -> Request:
    """Of a call. `copied`: answers it where an array has to be copied first. `pre`: what the
    activation is of is wanted too, for a backward."""
    x = views["x"]
    assert x is not None  # the op has looked
    problem = {**_problem(views, options), "pre": pre}
    shape, wide = (*tuple(x.shape)[:-1], problem["n"]), outputs_of(problem)
    check_vectors(views, wide, shape, problem["out_dtype"])
    outputs = {
        "out": Output(shape, problem["out_dtype"], views["out"]),
        "pre": Output((*shape[:-1], wide), problem["dtype"]) if pre else None,
    }
    inputs = {name: views[name] for name in ("x", "weight", "bias", "residual")}
    if 0 in shape:
        return Request(inputs, outputs, ())
    matrices = _matrices(views, problem, options.weight_layout)
    if matrices is None:
        return Request(inputs, outputs, (), delegate=copied)
    _describe(problem, matrices, views)
    return _launch(inputs, outputs, problem, options)


def _problem(views: Views, options: LinearOptions) -> dict[str, Any]:
    """Sizes, types and what the options say; strides come later (`_describe`)."""
    activation, gate = check_activation(options), check_flag(CALL, "gate", options.gate)
    check_flag(CALL, "deterministic", options.deterministic)
    check_flag(CALL, "save_pre_activation", options.save_pre_activation)
    check_one_of("impl", options.impl, select.IMPLEMENTATIONS)
    check_one_of("weight_layout", options.weight_layout, WEIGHT_LAYOUTS)
    check_one_of("precision", options.precision, PRECISIONS)
    x, weight = views["x"], views["weight"]
    assert x is not None and weight is not None  # the op has looked
    dtype = check_same_dtype(CALL, {"x": x, "weight": weight, "bias": views["bias"]})
    return {
        **_sizes(x, weight, gate, options.weight_layout),
        "dtype": dtype, "out_dtype": out_dtype_of(options.out_dtype, dtype, views),
        "activation": activation, "gate": gate, "scale": check_scale(options.scale),
        "precision": options.precision if dtype == "fp32" else "ieee",
        **{name: views[name] is not None for name in ("bias", "residual")},
    }  # fmt: skip


def _launch(
    inputs: Views, outputs: dict[str, Any], problem: dict[str, Any], options: LinearOptions
) -> Request:
    x = inputs["x"]
    assert x is not None
    if x.device != CPU:
        problem["multiprocessors"] = multiprocessors(x.device)
    _check_tf32(problem, arch_of(x))
    chosen = select.choose(problem, options.impl, options.block, arch_of(x))
    most = problem["m"] * problem["n"]  # blocks
    if most > MAX_GRID and chosen.spec.grid(chosen.params, problem)[0] > MAX_GRID:
        raise ParameterError(
            f"{CALL}: m={problem['m']}, n={problem['n']} make more tiles than a launch can have"
        )
    launch = Launch(chosen.spec, chosen.params, problem)
    return Request(inputs, outputs, (launch,), chosen.workspace, chosen.counters)


# ------------------------------------------------------------------ options


def check_activation(options: LinearOptions) -> str:
    """The kernels' text of what happens to sums; ParameterError for what none does."""
    given, mod, slope = options.activation, options.epilogue_mod, options.epilogue_mod_grad
    if given is not None:
        check_one_of("activation", given, ACTIVATIONS, "None or ")
    if mod is None:
        if slope is not None:
            raise ParameterError(
                f"{CALL}: epilogue_mod_grad is given, but no epilogue_mod that it is of"
            )
        return given or "none"
    if given is not None:
        raise ParameterError(
            f"{CALL}: activation={given!r} and an epilogue_mod are given; write the activation "
            "into the expression"
        )
    return mod_text(
        _expression("epilogue_mod", mod),
        None if slope is None else _expression("epilogue_mod_grad", slope),
    )


def _expression(argument: str, text: Any) -> str:
    example = "x > 0.f ? x * x : 0.f"
    return expression(CALL, argument, text, "x, one number of z = scale * x . weight + bias",
                      example)  # fmt: skip


def check_one_of(name: str, value: Any, allowed: Iterable[str], also: str = "") -> None:
    """ParameterError for any other word."""
    if not isinstance(value, str) or value not in allowed:
        raise ParameterError(f"{CALL}: {name}={value!r} is not {also}one of {', '.join(allowed)}")


def check_scale(scale: Any) -> float:
    """A finite fp32 number; 1 for None."""
    if scale is None:
        return 1.0
    try:
        if isinstance(scale, (str, bytes, bool)) or getattr(scale, "requires_grad", False):
            raise TypeError
        value = float(scale)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(f"{CALL}: scale={scale!r} is not a plain number") from None
    if not abs(value) <= _MAX_SCALE:
        raise ParameterError(f"{CALL}: scale={value} is not a finite fp32 number")
    return value


def out_dtype_of(given: Any, dtype: str, views: Views) -> str:
    """As asked; else that of out or residual, else x's."""
    if given is None:
        others = [view.dtype for name in ("out", "residual") if (view := views[name]) is not None]
        found = others[0] if others else dtype
        return found if found in (dtype, "fp32") else dtype
    if not isinstance(given, str) or given not in (dtype, "fp32"):
        allowed = ", ".join(dict.fromkeys((dtype, "fp32")))
        raise ParameterError(f"{CALL}: out_dtype={given!r} is not one of {allowed} or None")
    return given


def _check_tf32(problem: Problem, arch: Arch) -> None:
    if problem["precision"] == "tf32" and "tf32_mma" not in arch.features:
        raise ParameterError(
            f"{CALL}: precision='tf32' needs tensor cores for tf32 (sm_80 and newer), which "
            f"{arch.name} has not; allowed: precision='ieee'"
        )


# ------------------------------------------------------------------ arrays


def _sizes(x: View, weight: View, gate: bool, layout: str) -> dict[str, int]:
    """m, n and k of arrays that fit each other."""
    named = "[N, K]" if layout == "nk" else "[K, N]"
    if len(weight.shape) != 2 or not x.shape:
        raise ParameterError(
            f"{CALL}: x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}; allowed: x "
            f"[..., K], weight {named}"
        )
    wide, k = weight.shape if layout == "nk" else weight.shape[::-1]
    m = prod(x.shape[:-1])
    if x.shape[-1] != k:
        raise ParameterError(
            f"{CALL}: x has {x.shape[-1]} columns, weight {tuple(weight.shape)} is of {k}; "
            f"allowed: x [..., K], weight {named} (weight_layout={layout!r})"
        )
    if not (1 <= k <= MAX_SIZE and 1 <= wide <= MAX_SIZE and m <= MAX_SIZE):
        raise ParameterError(
            f"{CALL}: m={m}, n={wide}, k={k} (x {tuple(x.shape)}, weight {tuple(weight.shape)}); "
            f"allowed: n and k from 1, each up to {MAX_SIZE:,}"
        )
    if gate and wide % 2:
        raise ParameterError(
            f"{CALL}: gate=True, but weight {tuple(weight.shape)} has {wide} outputs; allowed: an "
            "even number, gate first, then up"
        )
    return {"m": m, "n": wide // 2 if gate else wide, "k": k}


def check_vectors(views: Views, wide: int, shape: tuple[int, ...], out_dtype: str) -> None:
    """bias, residual and out."""
    bias, residual, out = views["bias"], views["residual"], views["out"]
    if bias is not None:
        check_shape(CALL, "bias", bias, (wide,), "the weight's outputs,")
        rows_of(CALL, "bias", bias)
    if residual is not None:
        check_dtype(CALL, "residual", residual, (out_dtype,))
        check_shape(CALL, "residual", residual, shape, "the result's")
    check_output(CALL, out, shape, out_dtype)
    if out is not None:
        rows_of(CALL, "out", out)


def _matrices(views: Views, problem: Problem, layout: str) -> dict[str, Matrix] | None:
    """x, weight, out and residual as kernels see them; None where x or residual must be copied."""
    x, weight = views["x"], views["weight"]
    assert x is not None and weight is not None
    found = {"x": _rows(x, problem["m"], ("mk", "km")), "weight": _weight(weight, layout)}
    for name in ("out", "residual"):
        view = views[name]
        if view is None:
            found[name] = Matrix("mk", problem["n"])
        else:
            found[name] = _rows(view, problem["m"], ("mk", ""))
    made = {name: matrix for name, matrix in found.items() if matrix is not None}
    return made if len(made) == len(found) else None


def _rows(view: View, rows: int, layouts: tuple[str, str]) -> Matrix | None:
    """An array [..., columns], or one whose transpose has contiguous rows; None for any other."""
    columns, step = view.shape[-1], view.strides[-1]
    try:
        _, distance = leading_rows(CALL, "", view)
    except ParameterError:
        return None
    if step == 1 or columns == 1:
        return Matrix(layouts[0], columns if rows == 1 else distance)
    if layouts[1] and (distance == 1 or rows == 1):
        return Matrix(layouts[1], step)
    return None


def _weight(view: View, layout: str) -> Matrix:
    """[outputs, k] as "nk" if its rows are contiguous, as "kn" if its columns are."""
    shape, strides = tuple(view.shape), tuple(view.strides)
    if layout == "kn":
        shape, strides = shape[::-1], strides[::-1]
    (outputs, k), (of_output, of_k) = shape, strides
    if of_k == 1 or k == 1:
        return Matrix("nk", k if outputs == 1 else of_output)
    if of_output == 1 or outputs == 1:
        return Matrix("kn", of_k)
    raise ParameterError(
        f"{CALL}: weight has strides {tuple(view.strides)}; one of its dimensions must be "
        "contiguous: pass a contiguous copy of weight"
    )


def _describe(problem: dict[str, Any], matrices: Mapping[str, Matrix], views: Views) -> None:
    """Layouts, strides, and which rows start on 16-byte boundaries."""
    m, n, k = problem["m"], problem["n"], problem["k"]
    problem["x_layout"], problem["weight_layout"] = (matrices[n].layout for n in ("x", "weight"))
    by_k = problem["weight_layout"] == "nk"
    columns = {
        "x": k if problem["x_layout"] == "mk" else m,
        "weight": k if by_k else outputs_of(problem), "out": n, "residual": n,
    }  # fmt: skip
    counts = {
        "x": m if problem["x_layout"] == "mk" else k,
        "weight": outputs_of(problem) if by_k else k, "out": m, "residual": m,
    }  # fmt: skip
    rows = {}
    for name, matrix in matrices.items():
        problem[f"{name}_stride"] = matrix.stride
        item = ITEMSIZE[problem["dtype" if name in ("x", "weight") else "out_dtype"]]
        if counts[name] > 1:
            _check_distance(name, matrix.stride * item)
        chunk = _CHUNK // item
        rows[name] = _is_aligned(views[name], matrix.stride, columns[name], chunk)
    halves = by_k or n % (_CHUNK // ITEMSIZE[problem["dtype"]]) == 0  # where up begins
    problem["aligned"] = rows["x"] and rows["weight"] and halves
    problem["aligned_out"] = rows["out"] and rows["residual"]


def _check_distance(name: str, step: int) -> None:
    """Kernels count bytes from a row to the next in 32 bits."""
    if abs(step) >= _MAX_ROW_BYTES:
        raise ParameterError(
            f"{CALL}: {name} has rows {step:,} bytes apart; allowed: less than "
            f"{_MAX_ROW_BYTES:,}: pass a contiguous copy of {name}"
        )


def _is_aligned(view: View | None, stride: int, columns: int, chunk: int) -> bool:
    """Whether rows of `columns` elements start on 16-byte boundaries, of `chunk` elements, and are
    whole chunks long. A new array is."""
    if columns % chunk or stride % chunk or stride < columns:
        return False
    return view is None or view.pointer % _CHUNK == 0
