"""`fkjit.layer_norm` and `fkjit.rms_norm`: rows normalised, with the residual added before."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fkjit.ops.norm.checks import check, check_gradient
from fkjit.ops.norm.kernels import Tile
from fkjit.ops.op import torch_ops
from fkjit.ops.op.autograd import Differentiable, Tensors, as_tuple, autograd_of
from fkjit.ops.op.casts import as_fp32, contiguous
from fkjit.ops.op.node import Node, like, of_dtype
from fkjit.ops.op.op import Op


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    residual: Any = None,
    *,
    weight_offset: float = 0.0,
    out: Any = None,
    sum: Any = None,
) -> Any:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in one pass.

    Args:
        x: fp16, bf16 or fp32 [..., columns]: torch, CuPy, NumPy or any DLPack array. Rows are
            contiguous; where they are at no one distance from each other, as the heads of a packed
            projection, they are copied first. Up to 2^24 columns; rows of up to 65,536
            (fp16, bf16) or 32,768 (fp32) stay in registers on GPUs with clusters, half as many on
            others, and wider ones are read twice.
        weight, bias: [columns], contiguous, of x's dtype or both fp32; None: 1 and 0.
        eps: added to the variance, which is divided by `columns`.
        residual: as x; then s = x + residual is normalised and returned, the new residual stream.
        weight_offset: added to weight, in fp32: 1 for Gemma's, which keeps weight - 1.
        out: where the result is written; of x's shape and dtype, rows as x's. It may be x or
            residual; any other overlap is refused.
        sum: where s is written, as out; residual for a residual stream in one place.

    Returns:
        The normalised rows, in x's dtype and framework (`out` if given); with a residual
        (rows, s). What is normalised is s as returned, rounded to x's dtype, as in PyTorch when the
        sum is made before the norm: y = layer_norm(s), whoever made s. Statistics are fp32. With
        torch it has gradients of x, residual, weight and bias, the same bits at every call.

    Raises:
        ParameterError: shapes, strides, eps or overlaps that are not as above.
        ArgumentTypeError: not arrays, other or mixed dtypes. DeviceError: mixed devices.
        CaptureError: first call of a geometry under CUDA graph capture; see `fkjit.prepare`.

    Rows that start on 16-byte boundaries, of a multiple of 16 bytes, are fastest.

    Example:
        >>> x = np.array([[1, 2, 3, 4, 5, 6, 7, 8]], np.float32)
        >>> fkjit.layer_norm(x).round(2)
        array([[-1.53, -1.09, -0.65, -0.22,  0.22,  0.65,  1.09,  1.53]],
              dtype=float32)
    """
    return _LAYER((x, weight, bias, residual), (out, sum, None, None), (eps, weight_offset))


def rms_norm(
    x: Any, weight: Any = None, eps: float = 1e-6, residual: Any = None, *,
    weight_offset: float = 0.0, out: Any = None, sum: Any = None,
) -> Any:  # fmt: skip
    """x / sqrt(mean of x^2 + eps) * weight over the last dimension, in one pass.

    The arguments and what is returned are those of `layer_norm`, which also subtracts the mean.

    Example:
        >>> fkjit.rms_norm(np.array([[1, 7]], np.float32)).round(2)  # rms is 5
        array([[0.2, 1.4]], dtype=float32)
    """
    return _RMS((x, weight, None, residual), (out, sum, None, None), (eps, weight_offset))


# Of both calls, as the kernels name them: RMSNorm has no bias and no mean.
_INPUTS = ("x", "weight", "bias", "residual")
_OUTPUTS = ("out", "sum", "mean", "rstd")
_OPTIONS = "float eps, float weight_offset=0.0"


def _op(op: str) -> Op:
    """The public call, which leaves the statistics away."""
    copied = _Copied()
    copied.op = Op(
        op,
        inputs=_INPUTS,
        outputs=_OUTPUTS,
        check=check(op, False, copied),
        optional=_INPUTS[1:],
        in_place=(("out", "x"), ("out", "residual"), ("sum", "x"), ("sum", "residual")),
        autograd=autograd_of(op, _differentiable(op)),
        node=Node(_fake, _OPTIONS, None),
    )
    return copied.op


class _Copied:
    """A call of `op` with contiguous copies of rows, and the whole weight in fp32."""

    op: Op

    def __call__(self, inputs: Any, outputs: Any, options: Any) -> Any:
        made = as_tuple(self.op(*self._copies(inputs, options)))
        outputs = (*outputs, *(None,) * len(made))
        for given, own in zip(outputs, made, strict=False):
            if given is not None:
                given[...] = own
        named = [own if out is None else out for own, out in zip(made, outputs, strict=False)]
        return named[0] if len(named) == 1 else tuple(named)

    def prepare(self, inputs: Any, options: Any) -> None:
        copies, _, plain = self._copies(inputs, options)
        self.op.prepare(copies, plain)

    def _copies(self, inputs: Any, options: Any) -> tuple[Any, Any, Any]:
        (x, weight, bias, residual), (eps, offset) = inputs, (*options, 0.0)[:2]
        if offset:
            weight, bias = as_fp32(weight) + offset, as_fp32(bias)
        rows = contiguous(self.op.name, "x", x), contiguous(self.op.name, "residual", residual)
        return (rows[0], weight, bias, rows[1]), (None,) * len(_OUTPUTS), (eps, 0.0)


def _fake(
    x: Any, weight: Any, bias: Any, residual: Any, eps: float, weight_offset: float = 0.0
) -> list[Any]:
    return [like(x)] if residual is None else [like(x), like(x)]


@lru_cache(maxsize=2)
def _with_statistics(op: str) -> Op:
    """The forward of a training step: mean (of LayerNorm) and rstd come behind the results."""
    count = 2 if op == "layer_norm" else 1

    def fake(x: Any, *rest: Any) -> list[Any]:
        return [*_fake(x, *rest), *(of_dtype(x, x.shape[:-1], "fp32") for _ in range(count))]

    copied = _Copied()
    copied.op = Op(
        op, inputs=_INPUTS, outputs=_OUTPUTS, check=check(op, True, copied), optional=_INPUTS[1:],
        node=Node(fake, _OPTIONS, None, f"{op}_with_statistics"),
    )  # fmt: skip
    return copied.op


@lru_cache(maxsize=16)
def gradient(op: str, tile: Tile | None = None) -> Op:
    """dx, dweight and dbias out of dy, the residual stream's gradient and what was saved.

    `like`: weight or bias, for their dtype. `tile`: of the backward's, in place of the chosen one.
    """
    return Op(
        f"{op} (backward)",
        inputs=("dy", "dsum", "x", "weight", "mean", "rstd", "like"),
        outputs=("dx", "dweight", "dbias", "dweight_parts", "dbias_parts"),
        check=check_gradient(op, tile),
        optional=("dsum", "weight", "mean", "like"),
        node=None if tile else Node(
            _fake_gradient, "bool of_weight, bool of_bias", None, f"{op}_backward"
        ),
    )  # fmt: skip


def _fake_gradient(
    dy: Any, dsum: Any, x: Any, weight: Any, mean: Any, rstd: Any, alike: Any,
    of_weight: bool, of_bias: bool,
) -> list[Any]:  # fmt: skip
    return [like(x), *(like(alike) for _ in range(of_weight + of_bias))]


def norm_and_stream(x: Any, weight: Any, bias: Any, eps: float, op: str) -> tuple[Any, Any]:
    """(the norm of x, x) of torch tensors, by "rms_norm" or "layer_norm": what goes on with the
    residual stream x takes the second one, and its gradient is added by the norm's own kernel."""
    if torch_ops.compiling() or not torch_ops.wants_grad((x, weight, bias)):
        act = rms_norm(x, weight, eps) if op == "rms_norm" else layer_norm(x, weight, bias, eps)
        return act, x
    return _streamed(op)((x, weight, bias, None), (eps, 0.0))


@lru_cache(maxsize=2)
def _streamed(op: str) -> Differentiable:
    return _differentiable(op, stream=True)


def _differentiable(op: str, stream: bool = False) -> Differentiable:
    """The statistics of the forward are what the backward starts from. stream: x is a result, too,
    without a residual."""

    def forward(inputs: Tensors, options: Any) -> tuple[Tensors, Tensors]:
        x, weight, bias, residual = inputs
        made = _with_statistics(op)(inputs, (), options)
        rstd, mean = made[-1], made[-2] if op == "layer_norm" else None
        results = made[: 1 if residual is None else 2]
        seen = x if residual is None else results[1]
        if stream:
            results = (*results, x)
        return results, (seen, weight, bias, mean, rstd)

    def backward(saved: Tensors, gradients: Tensors, needed: Tensors, options: Any) -> Tensors:
        x, weight, bias, mean, rstd = saved
        of_x, of_weight, of_bias, of_residual = needed
        if x.numel() == 0:  # no rows, and sums of nothing
            alike = zip((x, weight, bias, x), needed, strict=True)
            return tuple(a.new_zeros(a.shape) if wanted else None for a, wanted in alike)
        dy, dsum = (*gradients, None)[:2]
        x, dy = x.contiguous(), x.new_zeros(x.shape) if dy is None else dy.contiguous()
        dsum = None if dsum is None else dsum.contiguous()
        _, offset = (*options, 0.0)[:2]  # operators leave out what has its default
        seen = weight.float() + offset if weight is not None and offset else weight
        inputs = (dy, dsum, x, seen, mean, rstd, bias if seen is None else seen)
        dx, *rest = as_tuple(gradient(op)(inputs, (), (of_weight, of_bias)))
        dweight = rest.pop(0) if of_weight else None
        return dx if of_x else None, dweight, *(rest or [None]), dx if of_residual else None

    return Differentiable("Norm", forward, backward)


_LAYER, _RMS = _op("layer_norm"), _op("rms_norm")
layer_norm.prepare = _LAYER.preparing(layer_norm)  # type: ignore[attr-defined]
rms_norm.prepare = _RMS.preparing(rms_norm)  # type: ignore[attr-defined]
