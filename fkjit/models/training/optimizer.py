"""`fkjit.models.patch_optimizer`: the steps of PyTorch's fused AdamW, by a kernel of ours.

PyTorch's kernel takes many parameters in one launch, and moves them at 2.6 TB/s on an H200; ours
takes one in a launch, and moves them at 3.8. What surrounds it stays PyTorch's: state, hooks,
closures, schedulers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fkjit.errors import ArgumentTypeError
from fkjit.ops.elementwise.adamw import Rates, adamw
from fkjit.ops.op import torch_ops

_CALL = "patch_optimizer"
_LISTS = 6  # of PyTorch's _init_group
_UNKNOWN = ("amsgrad", "maximize", "differentiable")


def patch_optimizer(optimizer: Any) -> None:
    """Let a kernel of fkjit's make the steps of an optimizer, in place; twice does no harm.

    Of each parameter's step alone: `state_dict`, hooks, schedulers and closures stay what they are.
    A parameter whose dtype, gradient or moments the kernel does not take is PyTorch's, and all are
    with amsgrad, maximize, a gradient scaler and under torch.compile.

    Args:
        optimizer: a torch.optim.AdamW with fused=True, of parameters in fp16, bf16 or fp32.

    Raises:
        ArgumentTypeError: any other optimizer.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0, fused=True)
        >>> fkjit.models.patch_optimizer(optimizer)
        >>> weight.grad = torch.tensor([1.0, -1.0, 2.0, -2.0])
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.5000, 1.5000, 0.5000, 1.5000])
    """
    torch = torch_ops.torch_seen()
    if torch is None or type(optimizer) is not torch.optim.AdamW:
        raise ArgumentTypeError(
            f"{_CALL}: optimizer is a {type(optimizer).__name__}; allowed: a torch.optim.AdamW"
        )
    if not all(group["fused"] for group in optimizer.param_groups):
        raise ArgumentTypeError(f"{_CALL}: optimizer has fused=False; allowed: fused=True")
    optimizer._init_group = partial(_init_group, optimizer, {})


def _init_group(optimizer: Any, rates: dict[Any, Any], group: Any, *lists: list[Any]) -> bool:
    """PyTorch's collects what a group's step has to change; this one changes what it can at once
    and leaves the others to PyTorch."""
    found: tuple[list[Any], ...] = tuple([] for _ in range(_LISTS))
    has_complex = type(optimizer)._init_group(optimizer, group, *found)
    if not _is_known(optimizer, group):
        for given, own in zip(lists, found, strict=True):
            given.extend(own)
        return has_complex
    torch, ours = torch_ops.torch_seen(), []
    params, grads, firsts, seconds, _, steps = lists
    for each in zip(*found[:4], found[5], strict=True):
        if _fits(each[:4]):
            ours.append(each)
            continue
        for one, own in zip((params, grads, firsts, seconds, steps), each, strict=True):
            one.append(own)
    if ours:
        torch._foreach_add_([each[4] for each in ours], 1)
        _step(group, rates, ours)
    return has_complex


def _is_known(optimizer: Any, group: Any) -> bool:
    scaled = any(getattr(optimizer, n, None) is not None for n in ("grad_scale", "found_inf"))
    plain = all(isinstance(beta, float) for beta in group["betas"])
    said = any(group[name] for name in _UNKNOWN) or not group["fused"]
    compiling = torch_ops.torch_seen().compiler.is_compiling()
    return plain and not (scaled or said or compiling)


def _fits(arrays: tuple[Any, ...]) -> bool:
    """Whether they lie alike, without gaps, in one dtype."""
    torch = torch_ops.torch_seen()
    first = arrays[0]
    if first.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not first.numel():
        return False
    if any(one.dtype is not first.dtype or one.device != first.device for one in arrays):
        return False
    if all(one.is_contiguous() for one in arrays):
        return True
    return _is_dense(first) and all(one.stride() == first.stride() for one in arrays)


def _is_dense(x: Any) -> bool:
    size = 1
    for step, length in sorted(zip(x.stride(), x.shape, strict=True)):
        if length != 1 and step != size:
            return False
        size *= length
    return True


def _step(group: Any, rates: dict[Any, Any], ours: list[tuple[Any, ...]]) -> None:
    torch = torch_ops.torch_seen()
    beta1, beta2 = group["betas"]
    said = Rates(beta1, beta2, group["eps"], group["weight_decay"])
    with torch.no_grad():
        for *arrays, number in ours:
            param, grad, first, second = (
                one.detach().as_strided((one.numel(),), (1,)) for one in arrays
            )
            rate = _rate(group["lr"], rates, param.device)
            adamw(param, grad, first, second, rate, number.view(1), said)


def _rate(rate: Any, rates: dict[Any, Any], device: Any) -> Any:
    """The learning rate as fp32 [1] on a device; filled again where a number has changed."""
    torch = torch_ops.torch_seen()
    if isinstance(rate, torch.Tensor) and rate.device == device:
        return rate.detach().view(1).float()
    rate = float(rate)
    tensor, kept = rates.get(device) or (torch.empty(1, device=device), None)
    if kept != rate:
        rates[device] = (tensor.fill_(rate), rate)
    return tensor
