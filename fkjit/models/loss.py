"""`fkjit.models.linear_cross_entropy`: the head's product and the loss, some rows at a time.

Logits of all tokens are the largest array of a training step: 8k tokens of a vocabulary of 128k are
4 GB in fp32, and their gradient as much again. Here a chunk of rows has its loss and gradients
before the next one begins. What a chunk leaves to its two products of gradients is the logits'
gradient, 16 bits each; logits in fp32 are there for a part of its rows at a time. So chunks can be
large, which they should: each reads and writes the weight's gradient in fp32.

Beside the products it is passes over logits that take time. A kernel goes over them twice and
writes their gradient at once (fkjit/ops/reduce/cross_entropy.py), with the mean's factor unless
that is fp16.

Source of the idea: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training".
"""

from __future__ import annotations

from typing import Any

from fkjit.arguments import one_of, shown, whole
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.models.modules import floating
from fkjit.ops.elementwise.scale_gradient import scale_gradient
from fkjit.ops.gemm.call import linear
from fkjit.ops.op import torch_ops
from fkjit.ops.op.autograd import Differentiable, Tensors, is_last
from fkjit.ops.reduce.cross_entropy import EVEN, cross_entropy

_CALL = "linear_cross_entropy"
_GRADIENTS = 1 << 30  # of a chunk's logits at most, where nothing is said: 2 GiB in 16 bits
_LOGITS = 1 << 27  # those that are there in fp32: 512 MiB
_TILE = 256  # rows are shared out by as many as products take at a time
_REDUCTIONS = ("mean", "sum")


def linear_cross_entropy(
    x: Any,
    weight: Any,
    target: Any,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Any:
    """torch.nn.functional.cross_entropy(x weightᵀ, target), without all logits in memory.

    Args:
        x: [tokens, hidden], weight: [vocabulary, hidden]: torch tensors of one dtype, fp16, bf16 or
            fp32, rows contiguous.
        target: [tokens] int64, from 0 up to the vocabulary, or ignore_index: no part of the loss.
        reduction: "mean" over the targets that count, or "sum".
        chunk: rows at a time; default: as many as make a gradient of the logits of up to 2 GiB
            in 16 bits. Beside it are up to 512 MiB of logits, and, where there are more chunks than
            one and in fp16, the weight's gradient in fp32.

    Returns:
        The loss, fp32 [], with gradients of x and weight. They are made together with the loss, as
        far as x and weight require them; that of the weight is added up in fp32. Logits are fp32,
        their gradient is rounded to x's dtype once.

    A target out of range makes the loss NaN; so does a mean over no target, whose gradients are 0.

    Raises:
        ParameterError: shapes, an unknown reduction. ArgumentTypeError: no tensors, mixed dtypes.
    """
    _check(x, weight, target)
    one_of(_CALL, "reduction", reduction, _REDUCTIONS)
    even = _shared_out(x.shape[0], weight.shape[0], _GRADIENTS)
    rows = even if chunk is None else whole(_CALL, "chunk", chunk, 1)
    records = torch_ops.torch_seen().is_grad_enabled()
    wanted = (records and x.requires_grad, records and weight.requires_grad)
    ignored = whole(_CALL, "ignore_index", ignore_index, -(1 << 63), (1 << 63) - 1)
    options = (ignored, reduction == "mean", rows, *wanted)
    return _LOSS((x, weight, target), options)[0]


def _check(x: Any, weight: Any, target: Any) -> None:
    torch = torch_ops.torch_seen()
    for name, array in (("x", x), ("weight", weight), ("target", target)):
        if torch is None or not isinstance(array, torch.Tensor):
            raise ArgumentTypeError(
                f"{_CALL}: {name} is a {type(array).__name__}; allowed: torch tensors"
            )
    if x.dtype is not weight.dtype or not floating(x, weight):
        raise ArgumentTypeError(
            f"{_CALL}: x is {x.dtype}, weight {weight.dtype}; allowed: one of fp16, bf16, fp32 for "
            "both"
        )
    if target.dtype is not torch.int64:
        raise ArgumentTypeError(f"{_CALL}: target is {target.dtype}; allowed: torch.int64")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ParameterError(
            f"{_CALL}: x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}; allowed: "
            "[tokens, hidden] and [vocabulary, hidden]"
        )
    if tuple(target.shape) != (x.shape[0],):
        raise ParameterError(
            f"{_CALL}: target has shape {shown(tuple(target.shape))}; allowed: ({x.shape[0]},)"
        )
    for name, array in (("x", x), ("weight", weight)):
        if array.stride(1) != 1:
            raise ParameterError(
                f"{_CALL}: {name} has stride {array.stride(1)} in its last dimension; allowed: 1, "
                f"as {name}.contiguous() has"
            )


def _shared_out(rows: int, vocabulary: int, most: int) -> int:
    """Rows of a part, where each has up to so many logits: all nearly alike, of whole tiles."""
    largest = max(most // max(vocabulary, 1) // _TILE, 1) * _TILE
    parts = max(-(-rows // largest), 1)
    return max(-(-rows // (parts * _TILE)), 1) * _TILE


def _forward(inputs: Tensors, options: Any) -> tuple[Tensors, Tensors]:
    """The loss, and the gradients for a gradient of 1."""
    torch = torch_ops.torch_seen()
    x, weight, target = (array.detach() for array in inputs)
    ignored, mean, rows, of_x, of_weight = options
    kept = target != ignored
    count = kept.sum() if mean else torch.ones((), device=x.device)
    scale = 1.0 / count.clamp(min=1)  # where no target counts gradients are 0, as PyTorch's
    narrow = x.dtype is torch.float16  # a mean's gradients of logits would be below all numbers
    factors = kept.float() if narrow else kept * scale
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    dx, dweight = torch.empty_like(x) if of_x else None, None
    padded, once = _padded(weight), x.shape[0] <= rows and not narrow
    for begin in range(0, x.shape[0], rows):
        span = slice(begin, begin + rows)
        at = target[span].where(kept[span], 0)
        gradient = x.new_empty(at.shape[0], padded.shape[0]) if of_x or of_weight else None
        found = _losses(x[span], padded, at, factors[span], weight.shape[0], gradient)
        loss += found.where(kept[span], 0).sum()
        if dx is not None:
            linear(gradient, padded, weight_layout="kn", out=dx[span])
        if of_weight:
            dweight = _added(dweight, gradient, x[span], once)
        del gradient  # before there is another one
    if dx is not None and narrow:
        dx.mul_(scale)
    if of_weight:
        dweight = _rounded(dweight, scale if narrow else None, weight)
    return (loss / count,), (dx, dweight)


def _padded(weight: Any) -> Any:
    """With rows of zeros behind it, where logits would not start on 16-byte boundaries: a copy of
    the weight costs less than products of such rows."""
    more = -weight.shape[0] % EVEN
    return torch_ops.torch_seen().nn.functional.pad(weight, (0, 0, 0, more)) if more else weight


def _losses(x: Any, weight: Any, at: Any, factors: Any, vocabulary: int, gradient: Any) -> Any:
    """fp32 [rows], for the targets at. Into `gradient`, where there is one, goes that of the
    logits, times the rows' factors."""
    found = []
    rows = _shared_out(x.shape[0], vocabulary, _LOGITS)
    for begin in range(0, x.shape[0], rows):
        span = slice(begin, begin + rows)
        logits = linear(x[span], weight, out_dtype="fp32")
        part = None if gradient is None else gradient[span]
        found.append(cross_entropy(logits, at[span], factors[span], vocabulary, part))
        del logits  # before there are others
    return torch_ops.torch_seen().cat(found)


def _added(total: Any, gradient: Any, x: Any, once: bool) -> Any:
    """gradientᵀ x in fp32, added to the total, if there is one, by the product itself. once: there
    is no other chunk, and it is rounded at once."""
    if total is None:
        out_dtype = None if once else "fp32"
        return linear(gradient.t(), x, weight_layout="kn", out_dtype=out_dtype)
    return linear(gradient.t(), x, weight_layout="kn", residual=total, out=total)


def _rounded(total: Any, scale: Any, weight: Any) -> Any:
    """The rows of `weight`, in its dtype, scaled where there is a scale; of no tokens, zeros."""
    torch = torch_ops.torch_seen()
    if total is None:
        return torch.zeros_like(weight)
    rows = total[: weight.shape[0]]
    return (rows if scale is None else rows.mul_(scale)).to(weight.dtype)


def _backward(saved: Tensors, gradients: Tensors, needed: Tensors, options: Any) -> Tensors:
    """Those of the forward pass times the loss's own, in place where this is the last time."""
    torch = torch_ops.torch_seen()
    found = [made if wanted else None for made, wanted in zip(saved, needed[:2], strict=True)]
    there = [made for made in found if made is not None]
    if not is_last():
        factor = gradients[0].to(there[0].dtype) if there else None
        scaled = iter(torch._foreach_mul(there, factor) if there else ())
        return (*(None if made is None else next(scaled) for made in found), None)
    for made in there:
        scale_gradient(made.view(-1), gradients[0].view(1))
    return (*found, None)


_LOSS = Differentiable("LinearCrossEntropy", _forward, _backward)
