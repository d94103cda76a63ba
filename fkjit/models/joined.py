"""Weights that are multiplied together, in one array: of q, k and v, of gate and up.

The modules keep their parameters, whose data become views of that array: names, a state_dict, an
optimizer and gradients stay what they are, and nothing is there twice. GPT-2's weights, which it
keeps [inputs, outputs], become views of [outputs, inputs].

Whoever gives a parameter other data (`model.to`, a deep copy) parts it from the others again;
`as_one` then finds nothing, and `join` puts them together once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fkjit.ops.op import torch_ops

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def join(model: Any) -> None:
    """Put together what is apart: one module at a time, so that one module's weights are there
    twice meanwhile."""
    torch = torch_ops.torch_seen()
    with torch.inference_mode(False), torch.no_grad():
        for module in model.modules():
            for parts in groups(module):
                _join([part.weight for part in parts])
                _join([part.bias for part in parts])
            if is_conv1d(module) and module.weight.stride(0) != 1:
                module.weight.data = module.weight.data.t().contiguous().t()


def part(model: Any) -> None:
    """Give each parameter an array of its own, as it was before `join`."""
    for module in model.modules():
        for parts in groups(module):
            for one in parts:
                _own(one.weight)
                _own(one.bias)
        if is_conv1d(module):
            _own(module.weight)


def groups(module: Any) -> Iterator[Sequence[Any]]:
    """nn.Linear modules among `module`'s own that have one input, and all a bias or none."""
    linear = torch_ops.torch_seen().nn.Linear
    for names in TOGETHER:
        parts = [module._modules.get(name) for name in names]
        if not all(type(one) is linear for one in parts):
            continue
        kinds = {(one.in_features, one.bias is None, one.weight.dtype, one.weight.device)
                 for one in parts}  # fmt: skip
        if len(kinds) == 1:
            yield parts


def is_conv1d(module: Any) -> bool:
    """Whether it is GPT-2's product, whose weight is [inputs, outputs]."""
    kind = type(module)
    return kind.__module__ == "transformers.pytorch_utils" and kind.__name__ == "Conv1D"


def as_one(parts: Sequence[Any]) -> Any:
    """Tensors of one width as one, rows below each other, where that is how they lie in one
    storage; None otherwise. It has no gradient."""
    if any(one is None for one in parts):
        return None
    first = parts[0].detach()
    storage, at = first.untyped_storage().data_ptr(), first.data_ptr()
    for one in parts:
        if one.data_ptr() != at or one.untyped_storage().data_ptr() != storage:
            return None
        if one.dtype != first.dtype or not one.is_contiguous():
            return None
        at += one.numel() * one.element_size()
    rows = sum(one.shape[0] for one in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def places(parameters: Sequence[Any]) -> list[Any]:
    """Of each parameter where its numbers lie, their dtype and their device."""
    return [(one.data_ptr(), one.dtype, one.device) for one in parameters]


def _join(parameters: list[Any]) -> None:
    if parameters[0] is None or as_one(parameters) is not None:
        return
    torch = torch_ops.torch_seen()
    together = torch.cat([one.data for one in parameters])
    rows = [one.shape[0] for one in parameters]
    for one, view in zip(parameters, together.split(rows), strict=True):
        one.data = view


def _own(parameter: Any) -> None:
    if parameter is not None:
        data = parameter.data
        whole = data.untyped_storage().nbytes() == data.numel() * data.element_size()
        if not (whole and data.is_contiguous()):
            torch = torch_ops.torch_seen()
            parameter.data = data.clone(memory_format=torch.contiguous_format)
