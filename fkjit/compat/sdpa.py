"""PyTorch's attention by its name."""

from __future__ import annotations

from typing import Any

from fkjit.compat.arguments import check_tensors, explained, refuse
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.attention.forward import attention
from fkjit.ops.op import torch_ops
from fkjit.ops.op.checks import check_flag

_CALL = "scaled_dot_product_attention"


@explained(_CALL, ("query", "key", "value", "attn_mask"))
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention.

    Args:
        query: [B, Hq, Sq, D] or [Hq, Sq, D]; key and value the same with Sk rows, Dv columns of
            value. fp16, bf16 or fp32.
        attn_mask: bool (a key is seen where it is True) or floating (added to scores), of any shape
            that broadcasts to [B, Hq, Sq, Sk]; or a torch.nn.attention.bias.CausalBias, either
            way; not beside is_causal. A row that sees no key is 0.
        dropout_p: 0 alone.
        is_causal: query i sees keys up to i: aligned to the top left, as in PyTorch.
        scale: default 1 / sqrt(D).
        enable_gqa: whether key and value may have fewer heads.

    Returns: o, as query with Dv columns. Raises as `fkjit.attention`.

    Example:
        >>> q, k, v = torch.ones(3, 1, 2, 8, 32, dtype=torch.float16)  # [batch, heads, length, dim]
        >>> fkjit.compat.scaled_dot_product_attention(q, k, v, is_causal=True).shape
        torch.Size([1, 2, 8, 32])
    """
    check_tensors(_CALL, query=query, key=key, value=value)
    refuse(_CALL, dropout_p=(dropout_p, 0.0))
    check_flag(_CALL, "is_causal", is_causal)
    if attn_mask is not None and is_causal:
        raise ParameterError(f"{_CALL}: attn_mask and is_causal=True; allowed: one of them")
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.dim() not in (3, 4):
            raise ParameterError(f"{_CALL}: {name} has {array.dim()} dimensions; allowed: 3 or 4")
    if query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise ParameterError(
            f"{_CALL}: query has {query.shape[-3]} heads, key {key.shape[-3]}; allowed with "
            "enable_gqa=True"
        )
    q, k, v = (x if x.dim() == 4 else x.unsqueeze(0) for x in (query, key, value))
    variant = getattr(attn_mask, "variant", None)  # of a torch.nn.attention.bias.CausalBias
    if getattr(variant, "name", "") == "LOWER_RIGHT":
        made = attention(q, k, v, causal=True, softmax_scale=scale, deterministic=None)
    elif getattr(variant, "name", "") == "UPPER_LEFT":
        made = _causal(q, k, v, scale)
    elif attn_mask is not None:
        made = attention(q, k, v, softmax_scale=scale, **_mask(attn_mask, k.shape[2]))
    elif is_causal:
        made = _causal(q, k, v, scale)
    else:
        made = attention(q, k, v, softmax_scale=scale, deterministic=None)
    return made if query.dim() == 4 else made.squeeze(0)


def _mask(attn_mask: Any, keys: int) -> dict[str, Any]:
    """As `attention` takes it: four dimensions, the last in full and contiguous."""
    check_tensors(_CALL, attn_mask=attn_mask)
    if not (attn_mask.dtype.is_floating_point or attn_mask.dtype is torch_ops.torch_seen().bool):
        raise ArgumentTypeError(
            f"{_CALL}: attn_mask is {attn_mask.dtype}; allowed: torch.bool, floating"
        )
    whole = attn_mask[(None,) * (4 - attn_mask.dim())] if attn_mask.dim() < 4 else attn_mask
    if whole.shape[-1] != keys or whole.stride(-1) != 1:
        whole = whole.expand(*whole.shape[:-1], keys).contiguous()
    return {"mask" if whole.dtype is torch_ops.torch_seen().bool else "bias": whole}


def _causal(q: Any, k: Any, v: Any, scale: float | None) -> Any:
    """Aligned to the top left: keys past the queries are seen by none, queries past the keys see
    them all."""
    rows = min(q.shape[2], k.shape[2])
    k, v = k[:, :, :rows], v[:, :, :rows]
    made = attention(q[:, :, :rows], k, v, causal=True, softmax_scale=scale, deterministic=None)
    if rows == q.shape[2]:
        return made
    rest = attention(q[:, :, rows:], k, v, softmax_scale=scale, deterministic=None)
    return torch_ops.torch_seen().cat((made, rest), 2)
