"""`fkjit.grouped_linear` of a `QuantizedTensor`: e4m3 with scales of blocks or rows, on Hopper."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from fkjit import tuning
from fkjit.errors import ParameterError
from fkjit.ops.gemm.epilogue import kernel_for
from fkjit.ops.grouped import checks
from fkjit.ops.grouped.kernels_codes import BLOCKS_ALL, CODES_ALL
from fkjit.ops.grouped.kernels_ragged import EVEN, RAGGED_ALL
from fkjit.ops.grouped.options import CALL, Views
from fkjit.ops.moe.groups import MoeGroups
from fkjit.ops.moe.permute import moe_permute
from fkjit.ops.op.checks import check_dtype
from fkjit.ops.op.node import Node, of_dtype
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.ops.quantize.call import checked_parts, prepared_codes, quantize
from fkjit.ops.quantize.schemes import WIDTH, QuantizedTensor, as_e4m3, dtype_name, parts
from fkjit.runtime import interop
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View

SCHEME, ROWS = "fp8_block", "fp8_row"
_SMALL, _LARGE, _MANY_ROWS = (128, 128), (192, 128), 640  # rows of an expert
_WIDE, _FEW_ROWS = (128, 256), 64  # with scales of blocks
_INPUTS = ("x", "x_scales", "weight", "scales", "bias", "residual", "offsets")
_NAMES = {"bfloat16": "bf16", "float16": "fp16"}
_EVEN, _EIGHT = 16, 8  # what k is a multiple of, and columns of out


class CodesOptions(NamedTuple):
    """What a call says besides its arrays: as `GroupedOptions`; coded: whether the result is codes;
    dtype: of bias, and of a result that is not."""

    block_size: int
    activation: Any = None
    gate: Any = False
    block: Any = None
    impl: Any = "auto"
    weight_layout: Any = "nk"
    coded: bool = False
    dtype: str = "bf16"
    scheme: str = SCHEME
    precision: Any = "ieee"


class Rows(NamedTuple):
    """x of a call: numbers or codes; gather: a row of it is a token's."""

    x: Any
    gather: bool


def call(rows: Rows, weight: Any, groups: MoeGroups, bias: Any, options: tuple[Any, ...]) -> Any:
    """The product of rows that are quantized here, unless they are codes already. `options`: those
    of CodesOptions up to coded, and precision."""
    given = rows.x if isinstance(rows.x, tuple) else quantize(rows.x, _scheme(weight))
    if rows.gather:
        given = _permuted(given, groups)
    inputs, said = _bound(rows.x, given, weight, groups, bias, options)
    made = _OP(inputs, (), said)
    return QuantizedTensor(as_e4m3(made[0]), made[1], SCHEME) if said.coded else made


def prepare(
    rows: Rows, weight: Any, groups: MoeGroups, bias: Any, options: tuple[Any, ...]
) -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    given = rows.x if isinstance(rows.x, tuple) else prepared_codes(rows.x, _scheme(weight))
    if rows.gather:
        given = _permuted(given, groups, prepared=True)
    _OP.prepare(*_bound(rows.x, given, weight, groups, bias, options))


def _scheme(weight: Any) -> str:
    """Of rows of x for this weight."""
    scheme = parts(CALL, "weight", weight).scheme
    if scheme not in (SCHEME, ROWS):
        raise ParameterError(
            f"{CALL}: weight is quantized by {scheme!r}; allowed: {SCHEME!r}, {ROWS!r}"
        )
    return scheme


def _permuted(codes: Any, groups: MoeGroups, *, prepared: bool = False) -> QuantizedTensor:
    """A row of codes and its scales for each place: zeros where nobody is."""
    data, scales, scheme = parts(CALL, "x", codes)
    if len(data.shape) != 2 or data.shape[1] % _EVEN:
        raise ParameterError(
            f"{CALL}: x has codes {tuple(data.shape)}; allowed: [tokens, K] with gather=True, K a "
            f"multiple of {_EVEN}"
        )
    words = _viewed(data, "fp32")
    each = scales if len(scales.shape) == 2 else scales.reshape(-1, 1)
    if not prepared:
        rows, by = moe_permute(words, groups), moe_permute(each, groups)
        return QuantizedTensor(_viewed(rows, "uint8"), by.reshape(-1, *scales.shape[1:]), scheme)
    places = int(groups.sorted_token_ids.shape[0])
    for part in (words, each):
        moe_permute.prepare(part, groups)  # type: ignore[attr-defined]
    seen = interop.view(scales, CALL, "x.scales")
    return QuantizedTensor(
        interop.empty(seen, (places, data.shape[1]), "uint8"),
        interop.empty(seen, (places, *scales.shape[1:]), "fp32"), scheme,
    )  # fmt: skip


def _viewed(array: Any, dtype: str) -> Any:
    """The same bytes as elements of another dtype."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return array.view(interop.torch_dtype(dtype))
    return array.view(interop.numpy_dtype(dtype))


def _bound(
    x: Any, given: Any, weight: Any, groups: MoeGroups, bias: Any, options: tuple[Any, ...]
) -> tuple[tuple[Any, ...], CodesOptions]:
    """The op's inputs and options."""
    of_x, of_weight = parts(CALL, "x", given), parts(CALL, "weight", weight)
    scheme = _scheme(weight)
    if of_x.scheme != scheme:
        raise ParameterError(f"{CALL}: x is quantized by {of_x.scheme!r}; allowed: {scheme!r}")
    dtype = _NAMES.get(dtype_name(bias if isinstance(x, tuple) else x), "bf16")
    arrays = (of_x.data, of_x.scales, of_weight.data, of_weight.scales, bias, None)
    *named, precision = options
    said = CodesOptions(*named, dtype=dtype, scheme=scheme, precision=precision)
    return (*arrays, groups.offsets), said


def _check(views: Views, said: CodesOptions) -> Request:
    x, weight = views["x"], views["weight"]
    x_scales, scales = views["x_scales"], views["scales"]
    assert x is not None and weight is not None and x_scales is not None and scales is not None
    checks.check_options(said)
    for name, allowed in (("weight_layout", ("nk",)), ("impl", ("auto", "wgmma"))):
        if (given := getattr(said, name)) not in allowed:
            raise ParameterError(
                f"{CALL}: {name}={given!r} of a quantized weight is not one of {', '.join(allowed)}"
            )
    _check_codes(x, x_scales, weight, scales, said)
    sizes = checks.sizes_of(x, weight, said)
    _check_sizes(sizes, said)
    bias, wide = views["bias"], sizes["n"] * (2 if said.gate else 1)
    if bias is not None:
        check_dtype(CALL, "bias", bias, (said.dtype,))
    checks.check_bias(bias, sizes["experts"], wide)
    least = EVEN if said.precision == "short" else checks.LEAST_BLOCK
    checks.check_groups(views["offsets"], sizes["m"], sizes["experts"], said.block_size, least)
    problem: dict[str, Any] = {
        **sizes, "dtype": said.dtype, "out_dtype": said.dtype, "groups": "ROWS",
        "block_size": said.block_size, "activation": said.activation or "none", "gate": said.gate,
        "scale": 1.0, "bias": bias is not None, "residual": False, "x_stride": sizes["k"],
        "out_stride": sizes["n"], "residual_stride": sizes["n"], "coded": said.coded,
        "codes": True, "pre": False, "weight_layout": "nk", "short": said.precision == "short",
        "scales": "rows" if said.scheme == ROWS else "blocks",
    }  # fmt: skip
    shape, scales_of = (sizes["m"], sizes["n"]), (sizes["m"], sizes["n"] // WIDTH)
    outputs = {
        "out": Output(shape, "uint8" if said.coded else said.dtype),
        "out_scales": Output(scales_of, "fp32") if said.coded else None,
    }
    inputs = {name: views[name] for name in _INPUTS}
    if not sizes["m"]:
        return Request(inputs, outputs, ())
    if x.device != CPU:
        problem["multiprocessors"] = multiprocessors(x.device)
    return Request(inputs, outputs, (_launch(problem, said.block, x),))


def _check_codes(x: View, x_scales: View, weight: View, scales: View, said: CodesOptions) -> None:
    """Of x a scale for 128 columns of a row, of weight one for 128 by 128; or of rows of both."""
    spans = ("row", "row") if said.scheme == ROWS else ("group", "block")
    for name, data, own, span in zip(
        ("x", "weight"), (x, weight), (x_scales, scales), spans, strict=True
    ):
        how, _ = checked_parts(CALL, name, data, own, said.scheme)
        if how.span != span:
            raise ParameterError(
                f"{CALL}: {name} has scales {tuple(own.shape)}; allowed: "
                f"quantize({name}, {SCHEME!r}{', weight=True' if span == 'block' else ''})"
            )
    allowed = ("ieee", "short") if said.scheme == ROWS else ("ieee",)
    if said.precision not in allowed:
        raise ParameterError(
            f"{CALL}: precision={said.precision!r} of a weight quantized by {said.scheme!r}; "
            f"allowed: {', '.join(map(repr, allowed))}"
        )


def _check_sizes(sizes: dict[str, int], said: CodesOptions) -> None:
    if sizes["k"] % _EVEN:
        raise ParameterError(
            f"{CALL}: k={sizes['k']} of codes; allowed: a multiple of {_EVEN}: pad x and weight "
            "with zeros before quantizing"
        )
    if said.coded and (not said.gate or said.dtype != "bf16" or said.scheme != SCHEME):
        raise ParameterError(
            f"{CALL}: out_scheme={SCHEME!r} with gate={said.gate}, {said.dtype} and "
            f"{said.scheme}; allowed: gate=True, x and bias of bf16, a weight by {SCHEME!r}"
        )
    if said.precision == "short" and sizes["n"] % _EIGHT:
        raise ParameterError(
            f"{CALL}: {sizes['n']} columns of out with precision='short'; allowed: a multiple of "
            f"{_EIGHT}"
        )
    if said.scheme == SCHEME and said.gate and sizes["n"] % WIDTH:
        raise ParameterError(
            f"{CALL}: gate=True with {SCHEME} and {sizes['n']} columns; allowed: a multiple of "
            f"{WIDTH}, so that gate and up have scales of their own"
        )


def _tile(problem: dict[str, Any]) -> tuple[int, int]:
    """Of sums in fp32; measured on an H200 at 256 and 1,024 rows an expert."""
    rows = problem["m"] / problem["experts"] - problem["block_size"]
    if problem["scales"] == "blocks":
        return _SMALL if rows <= _FEW_ROWS and not problem["coded"] else _WIDE
    return _LARGE if rows >= _MANY_ROWS and not problem["gate"] else _SMALL


def _launch(problem: dict[str, Any], block: Any, x: View) -> Launch:
    of_ieee = BLOCKS_ALL if problem["scales"] == "blocks" else CODES_ALL
    all_of = RAGGED_ALL if problem["short"] else of_ieee
    spec, arch = kernel_for(all_of, problem["activation"]), arch_of(x)
    tiles = next(p.values for p in spec.params if p.name == "block")
    usual = tiles[0] if problem["short"] else _tile(problem)
    tile = usual if block is None else tuple(block)
    params = {p.name: {**problem, "block": tile}[p.name] for p in spec.params}
    if tile not in tiles or spec.illegal(params) is not None:
        legal = [t for t in tiles if spec.illegal({**params, "block": t}) is None]
        raise ParameterError(f"{CALL}: block={block!r} of a quantized weight is not one of {legal}")
    if spec.why_not(params, arch) is not None:
        raise ParameterError(
            f"{CALL}: a weight of fp8 needs wgmma, which {arch.name} has not; allowed: "
            "fkjit.dequantize(weight) in its place, or with CPU arrays FKJIT_TARGET=compute_90a"
        )
    tuned = params if block is not None else tuning.tuned(spec, params, problem, arch)
    return Launch(spec, tuned, problem)


def _fake(x: Any, x_scales: Any, weight: Any, scales: Any, bias: Any, *rest: Any) -> list[Any]:
    said = _unpacked(*rest[2:])
    shape = (x.shape[0], weight.shape[1] // 2 if said.gate else weight.shape[1])
    if not said.coded:
        return [of_dtype(x, shape, said.dtype)]
    return [x.new_empty(shape), of_dtype(x, (shape[0], shape[1] // WIDTH), "fp32")]


def _packed(*options: Any) -> tuple[Any, ...]:
    """Options as the operator's schema has them: a tile is a list."""
    said = CodesOptions(*options)
    return tuple(said._replace(block=None if said.block is None else list(said.block)))


def _unpacked(*options: Any) -> CodesOptions:
    said = CodesOptions(*options)
    return said._replace(block=None if said.block is None else tuple(said.block))


_OP = Op(
    f"{CALL} (codes)", inputs=_INPUTS, outputs=("out", "out_scales"), check=_check,
    options=CodesOptions, optional=("bias", "residual"),
    node=Node(
        _fake,
        "int block_size, str? activation, bool gate, int[]? block, str impl, str weight_layout, "
        "bool coded, str dtype, str scheme, str precision", None, "grouped_linear_codes",
        _packed, _unpacked,
    ),
)  # fmt: skip
