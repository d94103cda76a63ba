"""`fkjit.models.linear_cross_entropy`: the head's product and the loss, some rows at a time.

Logits of all tokens are the largest array of a training step: 8k tokens of a vocabulary of 128k are
4 GB in fp32, and their gradient as much again. Here a chunk of rows has its logits, loss and
gradients before the next one begins, so that no more than one chunk is ever there.

Source of the idea: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training".
"""

from __future__ import annotations

from typing import Any

from fkjit.arguments import one_of, shown, whole
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.gemm.call import linear
from fkjit.ops.op import torch_ops
from fkjit.ops.op.autograd import Differentiable, Tensors

_CALL = "linear_cross_entropy"
_ELEMENTS = 1 << 26  # of a chunk's logits, where nothing is said: 256 MB in fp32
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
        chunk: rows at a time; default: as many as make logits of 256 MB.

    Returns:
        The loss, fp32 [], with gradients of x and weight. They are made together with the loss, as
        far as x and weight require them; that of the weight is added up in fp32. Logits are fp32,
        their gradient is rounded to x's dtype once.

    Raises:
        ParameterError: shapes, an unknown reduction. ArgumentTypeError: no tensors, mixed dtypes.
        Targets out of range are PyTorch's error.
    """
    _check(x, weight, target)
    one_of(_CALL, "reduction", reduction, _REDUCTIONS)
    vocabulary = weight.shape[0]
    rows = max(1, _ELEMENTS // vocabulary) if chunk is None else whole(_CALL, "chunk", chunk, 1)
    records = torch_ops.torch_seen().is_grad_enabled()
    wanted = (records and x.requires_grad, records and weight.requires_grad)
    options = (int(ignore_index), reduction == "mean", rows, *wanted)
    return _LOSS((x, weight, target), options)[0]


def _check(x: Any, weight: Any, target: Any) -> None:
    torch = torch_ops.torch_seen()
    for name, array in (("x", x), ("weight", weight), ("target", target)):
        if torch is None or not isinstance(array, torch.Tensor):
            raise ArgumentTypeError(
                f"{_CALL}: {name} is a {type(array).__name__}; allowed: torch tensors"
            )
    if x.dtype is not weight.dtype or not x.dtype.is_floating_point:
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


def _forward(inputs: Tensors, options: Any) -> tuple[Tensors, Tensors]:
    """The loss, and the gradients for a gradient of 1."""
    torch = torch_ops.torch_seen()
    x, weight, target = (array.detach() for array in inputs)
    ignored, mean, rows, of_x, of_weight = options
    counts = target != ignored
    scale = 1.0 / counts.sum() if mean else torch.ones((), device=x.device)
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x) if of_x else None
    dweight = torch.zeros(weight.shape, device=x.device) if of_weight else None
    for begin in range(0, x.shape[0], rows):
        span = slice(begin, begin + rows)
        part, gradient = _chunk(x[span], weight, target[span], counts[span], of_x or of_weight)
        loss += part
        if gradient is None:
            continue
        gradient = gradient.mul_(scale).to(x.dtype)
        if dx is not None:
            linear(gradient, weight, weight_layout="kn", out=dx[span])
        if dweight is not None:
            linear(gradient.t(), x[span], weight_layout="kn", residual=dweight, out=dweight)
    if dweight is not None:
        dweight = dweight.to(weight.dtype)
    return (loss * scale,), (dx, dweight)


def _chunk(x: Any, weight: Any, target: Any, counts: Any, wanted: bool) -> tuple[Any, Any]:
    """(sum of the losses, gradient of the logits in fp32) of some rows."""
    logits = linear(x, weight, out_dtype="fp32")
    at = target.where(counts, 0)[:, None]
    lse = logits.logsumexp(-1, keepdim=True)
    loss = ((lse - logits.gather(-1, at))[:, 0] * counts).sum()
    if not wanted:
        return loss, None
    gradient = logits.sub_(lse).exp_()
    gradient.scatter_add_(-1, at, gradient.new_full(at.shape, -1.0))
    return loss, gradient.mul_(counts[:, None])


def _backward(saved: Tensors, gradients: Tensors, needed: Tensors, options: Any) -> Tensors:
    found = (
        None if made is None or not wanted else made * gradients[0].to(made.dtype)
        for made, wanted in zip(saved, needed[:2], strict=True)
    )
    return (*found, None)


_LOSS = Differentiable("LinearCrossEntropy", _forward, _backward)
