"""`fkjit.linear` of a `QuantizedTensor`: weights of codes, and x of codes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

from fkjit.arguments import shown
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.gemm.checks import (
    CALL,
    check_activation,
    check_one_of,
    check_scale,
    check_vectors,
)
from fkjit.ops.gemm.options import LinearOptions
from fkjit.ops.op.casts import contiguous as contiguous_copy
from fkjit.ops.op.checks import check_dtype, check_flag
from fkjit.ops.op.node import Node, of_dtype
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.ops.op.shapes import rows_of
from fkjit.ops.quantize import kernels_few, select
from fkjit.ops.quantize.call import (
    checked_parts,
    dequantize,
    prepare_dequantize,
    prepared_codes,
    quantize,
)
from fkjit.ops.quantize.product import EVEN
from fkjit.ops.quantize.schemes import (
    WIDTH,
    QuantizedTensor,
    Scheme,
    as_e4m3,
    dtype_name,
    parts,
)
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, ITEMSIZE, View, empty, view

_HALVES = ("bf16", "fp16")
_NAMES = {"bfloat16": "bf16", "float16": "fp16"}
CODED = "fp8_block"  # the scheme of results that are codes
_CHUNK = 16  # bytes of a load, and of a lane's codes
_OF_X = {"fp8_tensor": "fp8_row", "fp8_row": "fp8_row", "fp8_block": "fp8_block",
         "int8_row": "int8_row"}  # fmt: skip
_MAY_BE = {
    "fp8_tensor": ("fp8_tensor", "fp8_row"), "fp8_row": ("fp8_tensor", "fp8_row"),
    "fp8_block": ("fp8_block",), "int8_row": ("int8_row",),
}  # fmt: skip
_INPUTS = ("x", "x_scales", "weight", "scales", "bias", "residual")


class ProductOptions(NamedTuple):
    """What a call says besides its arrays."""

    scheme: str
    x_scheme: str | None  # None: x is no codes
    dtype: str  # of bias, and of x that is no codes
    activation: Any = None
    gate: Any = False
    scale: Any = None
    out_dtype: Any = None
    epilogue_mod: Any = None
    epilogue_mod_grad: Any = None
    impl: Any = "auto"
    precision: Any = "ieee"  # "short": of e4m3, sums of all of k by tensor cores
    coded: bool = False  # whether the result is codes


def linear(
    plain: Callable[..., Any], weight: Any, x: Any, bias: Any, residual: Any, out: Any,
    options: LinearOptions, out_scheme: Any = None,
) -> Any:  # fmt: skip
    """`fkjit.linear` with such a weight. `plain`: the same call, for weights of numbers."""
    if out_scheme is not None:
        check_out_scheme(out_scheme, weight, residual, out, options)
        inputs, said = _call(weight, x, bias, None, None, options, True)
        codes, scales = _OP(inputs, (None, None), said)
        return QuantizedTensor(as_e4m3(codes), scales, CODED)
    if _is_too_long(weight, x, options):
        named = {**options._asdict(), "residual": residual, "out": out}
        return plain(x, dequantize(weight, _half(x)), bias, **named)
    inputs, said = _call(weight, x, bias, residual, out, options)
    return _OP(inputs, (out, None), said)


def prepare(
    plain: Callable[..., None], weight: Any, x: Any, bias: Any, residual: Any, out: Any,
    options: LinearOptions, out_scheme: Any = None,
) -> None:  # fmt: skip
    """As `fkjit.linear.prepare`. `plain`: the same, for weights of numbers."""
    coded = out_scheme is not None
    if coded:
        check_out_scheme(out_scheme, weight, residual, out, options)
    elif _is_too_long(weight, x, options):
        dtype = _half(x)
        prepare_dequantize(weight, dtype)
        numbers = empty(view(x, CALL, "x"), weight.shape, dtype)
        named = {**options._asdict(), "residual": residual, "out": out}
        return plain(x, numbers, bias, **named)
    scheme = parts(CALL, "weight", weight).scheme
    if not isinstance(x, tuple) and scheme in _OF_X:
        x = prepared_codes(x, _OF_X[scheme])
    inputs, said = _call(weight, x, bias, residual, out, options, coded)
    _OP.prepare([*inputs, out, None], said)


def check_out_scheme(
    out_scheme: Any, weight: Any, residual: Any, out: Any, options: LinearOptions
) -> None:
    """ParameterError unless the kernel can make codes of what it has summed."""
    if out_scheme != CODED:
        raise ParameterError(
            f"{CALL}: out_scheme={shown(out_scheme)}; allowed: None, or {CODED!r} of a weight "
            f"quantized by {CODED!r} with gate=True. A scale of a whole row is known when all its "
            "columns are summed, which are other blocks' tiles: fkjit.quantize_gated of gate and up"
        )
    scheme = weight[2] if isinstance(weight, tuple) and len(weight) == 3 else None
    others = {"residual": residual, "out": out, "out_dtype": options.out_dtype}
    given = ", ".join(name for name, value in others.items() if value is not None)
    if scheme != CODED or options.gate is not True or given:
        weights = f"of {scheme}" if scheme else "of numbers"
        raise ParameterError(
            f"{CALL}: out_scheme={CODED!r} with a weight {weights}, gate={options.gate!r}"
            f"{' and ' * bool(given)}{given}; allowed: a weight quantized by {CODED!r}, gate=True, "
            "no residual, out or out_dtype"
        )


def _is_too_long(weight: Any, x: Any, options: LinearOptions) -> bool:
    """Whether x has more rows than the kernels of 16-bit x take, which then is no longer about the
    weight's bytes: it is dequantized."""
    grouped = weight[2:] in (("int8_group",), ("int4_group",)) and options.impl == "auto"
    shape = tuple(getattr(x, "shape", ()))
    return grouped and not isinstance(x, tuple) and prod(shape[:-1]) > kernels_few.SKINNY_ROWS


def _half(x: Any) -> str:
    """fkjit's name of a 16-bit dtype."""
    found = _NAMES.get(dtype_name(x), "")
    if not found:
        raise ArgumentTypeError(
            f"{CALL}: x is {dtype_name(x) or type(x).__name__}; allowed: {', '.join(_HALVES)} with "
            "a quantized weight, or a QuantizedTensor"
        )
    return found


def _call(
    weight: Any, x: Any, bias: Any, residual: Any, out: Any, options: LinearOptions,
    coded: bool = False,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """The op's inputs and options."""
    _refuse_others(options)
    codes, scales, scheme = parts(CALL, "weight", weight)
    grouped = scheme not in _OF_X
    if isinstance(x, tuple):
        dtype, given = _dtype_beside(bias, residual, out, options), parts(CALL, "x", x)
        _check_schemes(scheme, given.scheme)
    elif grouped:
        dtype, given = _half(x), QuantizedTensor(_contiguous(x), None, "")
    else:
        dtype, given = _half(x), parts(CALL, "x", quantize(x, _OF_X[scheme]))
    said = ProductOptions(
        scheme, given.scheme or None, dtype, options.activation, options.gate, options.scale,
        options.out_dtype, options.epilogue_mod, options.epilogue_mod_grad, options.impl,
        options.precision, coded,
    )  # fmt: skip
    return (given.data, given.scales, codes, scales, bias, residual), tuple(said)


def _contiguous(x: Any) -> Any:
    """x, or a copy. torch.compile traces a tensor's own method, but no look at sys.modules."""
    return x.contiguous() if hasattr(x, "contiguous") else contiguous_copy(CALL, "x", x)


def _refuse_others(options: LinearOptions) -> None:
    usual = LinearOptions()
    for name in ("block", "weight_layout"):
        if getattr(options, name) != getattr(usual, name):
            raise ParameterError(
                f"{CALL}: {name}={getattr(options, name)!r} with a quantized weight; allowed: "
                f"{getattr(usual, name)!r}"
            )


def _check_schemes(scheme: str, of_x: str) -> None:
    allowed = _MAY_BE.get(scheme, ())
    if of_x not in allowed:
        raise ParameterError(
            f"{CALL}: x is quantized by {of_x!r}, weight by {scheme!r}; allowed: "
            + (f"x by {' or '.join(allowed)}" if allowed else "x of 16 bits")
        )


def _dtype_beside(bias: Any, residual: Any, out: Any, options: LinearOptions) -> str:
    """Of bias and result, where x is codes."""
    if options.out_dtype in _HALVES:
        return options.out_dtype
    found = [_NAMES.get(dtype_name(array)) for array in (bias, residual, out)]
    return next((name for name in found if name), "bf16")


# ------------------------------------------------------------------ the op


def _check(views: Mapping[str, View | None], options: ProductOptions) -> Request:
    problem = _problem(views, options)
    x = views["x"]
    assert x is not None
    wide = problem["n"] * (2 if problem["gate"] else 1)
    shape = (*tuple(x.shape)[:-1], problem["n"])
    bias = views["bias"]
    if bias is not None:
        check_dtype(CALL, "bias", bias, (options.dtype,))
    check_vectors(views, wide, shape, problem["out_dtype"])
    inputs = {name: views[name] for name in _INPUTS}
    outputs: dict[str, Output | None]
    outputs = {"out": Output(shape, problem["out_dtype"], views["out"]), "out_scales": None}
    if options.coded:
        scales = (*shape[:-1], -(-problem["n"] // WIDTH))
        outputs = {"out": Output(shape, "uint8"), "out_scales": Output(scales, "fp32")}
    if 0 in shape:
        return Request(inputs, outputs, ())
    _describe(problem, views)
    if x.device != CPU:
        problem["multiprocessors"] = multiprocessors(x.device)
    chosen = select.choose(problem, options.impl, arch_of(x))
    launch = Launch(chosen.spec, chosen.params, problem)
    return Request(inputs, outputs, (launch,), *chosen.scratch)


def _problem(views: Mapping[str, View | None], options: ProductOptions) -> dict[str, Any]:
    x, weight, scales = views["x"], views["weight"], views["scales"]
    assert x is not None and weight is not None and scales is not None
    how, (wide, k) = _weight(weight, scales, options.scheme)
    gate = check_flag(CALL, "gate", options.gate)
    if gate and wide % 2:
        raise ParameterError(f"{CALL}: gate=True, but weight has {wide} outputs; allowed: even")
    x_span = _check_x(x, views["x_scales"], options)
    if tuple(x.shape)[-1:] != (k,):
        raise ParameterError(
            f"{CALL}: x has shape {tuple(x.shape)}, weight is of {k} columns; allowed: x [..., {k}]"
        )
    if k % EVEN[how.code] or k == 0:
        raise ParameterError(
            f"{CALL}: k={k} with weight of {options.scheme}; allowed: a multiple of "
            f"{EVEN[how.code]}: pad x and weight with zeros before quantizing"
        )
    return {
        "m": prod(x.shape[:-1]), "n": wide // 2 if gate else wide, "k": k, "dtype": options.dtype,
        "out_dtype": _out_dtype(options, views), "code": how.code, "span": how.span,
        "x_span": x_span, "gate": gate, "scale": check_scale(options.scale),
        "activation": check_activation(_as_linear(options)), "short": _is_short(options),
        "coded": options.coded,
        **{name: views[name] is not None for name in ("bias", "residual")},
    }  # fmt: skip


def _is_short(options: ProductOptions) -> bool:
    """Whether sums of e4m3 may stay in tensor cores."""
    short = options.scheme in ("fp8_tensor", "fp8_row")
    check_one_of("precision", options.precision, ("ieee", "short") if short else ("ieee",))
    return options.precision == "short"


def _as_linear(options: ProductOptions) -> LinearOptions:
    return LinearOptions(
        activation=options.activation, epilogue_mod=options.epilogue_mod,
        epilogue_mod_grad=options.epilogue_mod_grad,
    )  # fmt: skip


def _weight(weight: View, scales: View, scheme: str) -> tuple[Scheme, tuple[int, int]]:
    how, shape = checked_parts(CALL, "weight", weight, scales, scheme)
    if len(shape) != 2 or 0 in shape:
        raise ParameterError(f"{CALL}: weight has shape {shape}; allowed: [N, K]")
    if scheme == "fp8_block" and how.span != "block":
        raise ParameterError(
            f"{CALL}: weight has scales {tuple(scales.shape)}, one for 128 columns of a row; "
            'allowed: one for 128 by 128: quantize(weight, "fp8_block", weight=True)'
        )
    return how, (shape[0], shape[1])


def _check_x(x: View, x_scales: View | None, options: ProductOptions) -> str:
    """What shares a scale of x; "" where x is no codes. Scales of a group are of x's dtype."""
    if options.x_scheme is None:
        check_dtype(CALL, "x", x, (options.dtype,))
        return ""
    assert x_scales is not None
    return checked_parts(CALL, "x", x, x_scales, options.x_scheme)[0].span


def _out_dtype(options: ProductOptions, views: Mapping[str, View | None]) -> str:
    """As asked; else that of out or residual, else x's."""
    dtype, given = options.dtype, options.out_dtype
    if given is None:
        others = [view.dtype for name in ("out", "residual") if (view := views[name]) is not None]
        return others[0] if others and others[0] in (dtype, "fp32") else dtype
    if not isinstance(given, str) or given not in (dtype, "fp32"):
        raise ParameterError(f"{CALL}: out_dtype={given!r} is not one of {dtype}, fp32 or None")
    return given


def _describe(problem: dict[str, Any], views: Mapping[str, View | None]) -> None:
    """Strides, and what has to lie on boundaries."""
    x, scales = views["x"], views["scales"]
    assert x is not None and scales is not None
    quantized = views["x_scales"] is not None
    problem["aligned_scales"] = scales.pointer % _CHUNK == 0
    for name in ("x", "out", "residual"):
        view = views[name]
        columns = problem["k" if name == "x" else "n"]
        problem[f"{name}_stride"] = columns if view is None else rows_of(CALL, name, view)[2]
    if not quantized and scales.dtype != problem["dtype"]:
        raise ArgumentTypeError(
            f"{CALL}: weight.scales is {scales.dtype} but x is {problem['dtype']}; quantize the "
            "weight in x's dtype"
        )
    item = 1 if quantized else ITEMSIZE[problem["dtype"]]
    row_bytes = problem["x_stride"] * item if problem["m"] > 1 else 0
    for name, places in (("x", (x.pointer, row_bytes)), ("weight", (_pointer(views, "weight"),))):
        if any([place % _CHUNK for place in places]):
            raise ParameterError(
                f"{CALL}: {name} has rows that do not start on {_CHUNK}-byte boundaries; pass a "
                f"copy of {name}"
            )


def _pointer(views: Mapping[str, View | None], name: str) -> int:
    view = views[name]
    assert view is not None
    return view.pointer


def _fake(
    x: Any, x_scales: Any, weight: Any, scales: Any, bias: Any, residual: Any, *options: Any
) -> list[Any]:
    said = ProductOptions(*options)
    wide = weight.shape[0]
    shape = (*x.shape[:-1], wide // 2 if said.gate else wide)
    if said.coded:
        return [x.new_empty(shape), of_dtype(x, (*shape[:-1], -(-shape[-1] // WIDTH)), "fp32")]
    if said.out_dtype is None and residual is not None:
        return [residual.new_empty(shape)]
    return [of_dtype(x, shape, said.out_dtype or said.dtype)]


def _no_gradient(inputs: Any, outputs: Any, options: Any) -> Any:
    arrays = zip(_INPUTS, inputs, strict=False)
    names = [name for name, array in arrays if getattr(array, "requires_grad", False)]
    raise ParameterError(
        f"{CALL}: {', '.join(names)} requires grad, but a product with a quantized weight has no "
        "backward; call it under torch.no_grad() or pass detached tensors"
    )


_OPTIONS = (
    "str scheme, str? x_scheme, str dtype, str? activation, bool gate, float? scale, "
    "str? out_dtype, str? epilogue_mod, str? epilogue_mod_grad, str impl, "
    "str precision, bool coded=False"
)
_OP = Op(
    CALL, inputs=_INPUTS, outputs=("out", "out_scales"), check=_check, options=ProductOptions,
    optional=("x_scales", "bias", "residual"), in_place=(("out", "residual"),),
    node=Node(_fake, _OPTIONS, None, "quantized_linear"), autograd=_no_gradient,
)  # fmt: skip
