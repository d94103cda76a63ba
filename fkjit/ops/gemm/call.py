"""`fkjit.linear` and `fkjit.gelu_linear`: products with the epilogue in them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

from fkjit.errors import CompileError
from fkjit.ops.gemm.checks import CALL, check
from fkjit.ops.gemm.options import LinearOptions
from fkjit.ops.op import torch_ops
from fkjit.ops.op.autograd import autograd_of
from fkjit.ops.op.casts import contiguous
from fkjit.ops.op.expression import does_not_compile
from fkjit.ops.op.node import Node, of_dtype
from fkjit.ops.op.op import Op


def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    gate: bool = False,
    residual: Any = None,
    scale: float | None = None,
    out: Any = None,
    out_dtype: str | None = None,
    block: int | tuple[int, ...] | None = None,
    impl: str = "auto",
    deterministic: bool = True,
    weight_layout: str = "nk",
    epilogue_mod: str | None = None,
    epilogue_mod_grad: str | None = None,
    save_pre_activation: bool = True,
    precision: str = "ieee",
    out_scheme: str | None = None,
) -> Any:
    """activation(scale * x weightᵀ + bias) + residual, in one kernel, fp32 accumulation.

    Args:
        x: [..., K]: fp16, bf16 or fp32; torch, CuPy, NumPy or any DLPack array. Leading dimensions
            of any strides: rows at no one distance are copied first.
        weight: [N, K] as nn.Linear has it, or [K, N] with weight_layout="kn"; of x's dtype, one of
            its dimensions contiguous. Or a `QuantizedTensor` of [N, K]: see below.
        bias: [N], contiguous, of x's dtype.
        activation: "gelu" (exact), "gelu_tanh", "silu", "relu", or None.
        gate: weight and bias hold gate and, behind it, up, N each; the result is
            activation(gate) * up, as in SwiGLU (activation="silu") and GeGLU.
        residual: [..., N], added after the activation; of the result's dtype.
        scale: a number; default 1.
        out: where the result is written, rows at one distance. It may be residual; any other
            overlap is refused.
        out_dtype: of the result: x's dtype or "fp32"; default: that of out or residual, else x's.
        block: the tile, as the kernel names it; default: the fastest by estimate or measurement.
        impl: the kernel, "auto" or by name: "wgmma" (Hopper), "mma" (tensor cores), "skinny" (up
            to 128 rows), "gemv" (up to 8 rows), "fma" (exact fp32), "tiled" (for reading).
        deterministic: False would allow sums in any order where that is faster. No kernel does so
            today: results have the same bits at every call either way.
        weight_layout: "nk" or "kn".
        epilogue_mod: in place of an activation, an expression of CUDA of x, the sum with scale and
            bias, compiled into the kernel: "x > 0.f ? x * x : 0.f".
        epilogue_mod_grad: its derivative, an expression of x; without it the call has no gradients.
        save_pre_activation: keep for gradients what the activation is of; False: compute it again.
        precision: of fp32 products, also those of gradients. "ieee": exact. "tf32": x and weight
            may be rounded to tf32 (10 bits of fraction, to nearest) for tensor cores, sums stay
            fp32. A product of two numbers is then off by up to 2^-10 of itself, a sum of k of them
            by some 2^-11.6 of the root of the sum of their squares, as with PyTorch's "high".
            Where an exact kernel is as fast (few rows), it is taken. Other dtypes: no effect.
        out_scheme: "fp8_block" (Hopper), of a weight quantized by it with gate=True: the result is
            quantized in the kernel, from its fp32 sums, for a product with such a weight.

    Returns:
        [..., N] in x's framework (`out` if given); with out_scheme a QuantizedTensor. With torch it
        has gradients of x, weight, bias and residual, by the same kernels.

    Raises:
        ParameterError: shapes, strides, options or overlaps that are not as above; "tf32" on a GPU
            that has none (before sm_80).
        ArgumentTypeError: not arrays, other or mixed dtypes. DeviceError: mixed devices.
        CaptureError: first call of a geometry under CUDA graph capture; see `fkjit.prepare`.

    A weight that `fkjit.quantize` made is multiplied as its codes are. With "int8_group" and
    "int4_group" x is fp16 or bf16, of the dtype that the weight had; up to 64 rows codes become
    numbers in registers, for more rows the whole weight does first. With "fp8_tensor", "fp8_row",
    "fp8_block" (weight=True) and "int8_row" x is quantized, too: by this call (a scale for a row,
    or 128 of its columns), or before it (then x is a QuantizedTensor). fp8 needs sm_89 or newer.
    There is no gradient, and weight_layout and block stay as they are by default. precision="short"
    ("fp8_tensor", "fp8_row") leaves sums over all of k to tensor cores: on Hopper 13 bits of
    fraction in place of fp32 after each 512 of k, and faster.

    Rows that start on 16-byte boundaries, of a multiple of 16 bytes, are fastest. torch.autocast
    casts x, weight and bias, as for nn.Linear. To torch.compile the call is one operator,
    torch.ops.fkjit.linear.

    Example:
        >>> x, weight = np.ones((2, 32), np.float16), np.ones((16, 32), np.float16)
        >>> float(fkjit.linear(x, weight, activation="relu").max())
        32.0
    """
    options = (
        activation, gate, scale, out_dtype, block, impl, deterministic, weight_layout,
        epilogue_mod, epilogue_mod_grad, save_pre_activation, precision,
    )  # fmt: skip
    if isinstance(weight, tuple):  # a QuantizedTensor, which has products of its own
        # A statement: torch.compile traces no import_module.
        from fkjit.ops.quantize import linear as quantized

        said = LinearOptions(*options)
        return quantized.linear(linear, weight, x, bias, residual, out, said, out_scheme)
    if out_scheme is not None:
        _refuse_codes(out_scheme, weight, residual, out, options)
    if epilogue_mod is None:
        return _LINEAR((x, weight, bias, residual), (out, None), options)
    return _explained(_LINEAR, epilogue_mod, (x, weight, bias, residual), (out, None), options)


def _refuse_codes(out_scheme: Any, weight: Any, residual: Any, out: Any, options: Any) -> None:
    from fkjit.ops.quantize.linear import check_out_scheme

    check_out_scheme(out_scheme, weight, residual, out, LinearOptions(*options))


def gelu_linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """GeLU(x weightᵀ + bias) with the tanh form, in one kernel: `linear`'s "gelu_tanh".

    Example:
        >>> x, weight = np.ones((2, 32), np.float16), np.zeros((16, 32), np.float16)
        >>> float(fkjit.gelu_linear(x, weight).max())
        0.0
    """
    return linear(x, weight, bias, activation="gelu_tanh")


def gated_with_pre(x: Any, weight: Any, activation: str) -> tuple[Any, Any]:
    """(activation(gate) * up, gate | up) of x and a weight that holds both, without gradients: a
    node of autograd of its own has them."""
    said = LinearOptions(activation=activation, gate=True)
    return _WITH_PRE((x, weight, None, None), (), tuple(said))


def _explained(act: Callable[..., Any], mod: Any, *args: Any) -> Any:
    """What `act` returns; what NVRTC has against an epilogue_mod as a ParameterError."""
    try:
        return act(*args)
    except CompileError as error:
        if mod is None:
            raise
        raise does_not_compile(CALL, "epilogue_mod", mod, error) from error


class _Copied:
    """A call of `op` whose x or residual has rows at no one distance: with contiguous copies."""

    op: Op

    def __call__(self, inputs: Any, outputs: Any, options: Any) -> Any:
        return self.op(self._copies(inputs), outputs, options)

    def prepare(self, inputs: Any, options: Any) -> None:
        self.op.prepare(self._copies(inputs), options)

    def _copies(self, inputs: Any) -> tuple[Any, ...]:
        x, weight, bias, residual = inputs
        return contiguous(CALL, "x", x), weight, bias, contiguous(CALL, "residual", residual)


# ------------------------------------------------------------------ the op, and its gradients

_OPTIONS = (
    "str? activation, bool gate, float? scale, str? out_dtype, int[]? block, str impl, "
    "bool deterministic, str weight_layout, str? epilogue_mod, str? epilogue_mod_grad, "
    "bool save_pre_activation, str precision='ieee'"
)


def _fake(x: Any, weight: Any, bias: Any, residual: Any, *options: Any) -> list[Any]:
    said = LinearOptions(*options)
    wide = weight.shape[0 if said.weight_layout == "nk" else 1]
    shape = (*x.shape[:-1], wide // 2 if said.gate else wide)
    if said.out_dtype is not None:
        return [of_dtype(x, shape, said.out_dtype)]
    return [(x if residual is None else residual).new_empty(shape)]


def _fake_with_pre(x: Any, weight: Any, bias: Any, residual: Any, *options: Any) -> list[Any]:
    wide = weight.shape[0 if LinearOptions(*options).weight_layout == "nk" else 1]
    return [*_fake(x, weight, bias, residual, *options), x.new_empty((*x.shape[:-1], wide))]


def _packed(*options: Any) -> tuple[Any, ...]:
    """Options as the operator's schema has them: a tile is a list."""
    said = LinearOptions(*options)
    tile = [said.block] if isinstance(said.block, int) else said.block and list(said.block)
    return tuple(said._replace(block=tile))


def _unpacked(*options: Any) -> tuple[Any, ...]:
    said = LinearOptions(*options)
    tile = said.block and (said.block[0] if len(said.block) == 1 else tuple(said.block))
    return tuple(said._replace(block=tile))


def _op(pre: bool, node: Node, autograd: Callable[..., Any] | None = None) -> Op:
    copied = _Copied()
    copied.op = Op(
        CALL, inputs=("x", "weight", "bias", "residual"), outputs=("out", "pre"),
        check=partial(check, copied=copied, pre=pre), options=LinearOptions,
        optional=("bias", "residual"), in_place=(("out", "residual"),), autocast=3,
        node=node, autograd=autograd,
    )  # fmt: skip
    return copied.op


def _with_gradients(inputs: Any, outputs: Any, options: Any) -> Any:
    return _differentiable()(inputs, outputs, options)


@lru_cache(maxsize=1)
def _differentiable() -> Callable[..., Any]:
    return autograd_of(CALL, import_module(_AUTOGRAD).differentiable(_LINEAR, _WITH_PRE))


_AUTOGRAD = "fkjit.ops.gemm.autograd"  # imported where a gradient is wanted
_LINEAR = _op(False, Node(_fake, _OPTIONS, 1, None, _packed, _unpacked), _with_gradients)
_WITH_PRE = _op(
    True, Node(_fake_with_pre, _OPTIONS, 2, "linear_with_pre", _packed, _unpacked)
)  # fmt: skip

# ------------------------------------------------------------------ prepare

_SIGNATURE = inspect.signature(linear)


def _prepare(*args: Any, **named: Any) -> None:
    """Compile and load what the call with the same arguments needs, without running it; where an
    input requires grad, what its gradients need as well.

    Call it before capturing a CUDA graph, or to pay the first-call cost early. Checks and raises as
    the call does; nothing to do for CPU arrays.
    """
    bound = _SIGNATURE.bind(*args, **named)
    bound.apply_defaults()
    given = bound.arguments
    inputs = tuple(given[name] for name in _LINEAR.inputs)
    coded = given.pop("out_scheme")
    options = tuple(value for name, value in given.items() if name not in _LINEAR.names)
    if isinstance(given["weight"], tuple):
        x, weight, bias, residual = inputs
        from fkjit.ops.quantize import linear as quantized

        said = LinearOptions(*options)
        return quantized.prepare(_prepare, weight, x, bias, residual, given["out"], said, coded)
    if coded is not None:
        _refuse_codes(coded, given["weight"], given["residual"], given["out"], options)
    if torch_ops.wants_grad(inputs):
        act, arrays = partial(import_module(_AUTOGRAD).prepare, _LINEAR, _WITH_PRE), inputs
    else:
        act, arrays = _LINEAR.prepare, (*inputs, given["out"])
    _explained(act, given["epilogue_mod"], arrays, options)


def _prepare_gelu(x: Any, weight: Any, bias: Any = None) -> None:
    """As `linear.prepare`."""
    _prepare(x, weight, bias, activation="gelu_tanh")


linear.prepare = _prepare  # type: ignore[attr-defined]
gelu_linear.prepare = _prepare_gelu  # type: ignore[attr-defined]
