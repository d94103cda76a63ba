"""Attention under Hugging Face's interface: `attn_implementation="fkjit"`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fkjit.errors import ParameterError
from fkjit.ops.attention.forward import attention
from fkjit.ops.op import torch_ops

NAME = "fkjit"
_NOWHERE = (0, 0, 0, 0)  # the shape of a mask that says: causal, and nothing else


def causal_mask(like: Any) -> Any:
    """A mask that transformers hands on as it is, and `attention_forward` knows: to find out that a
    causal mask is needed and nothing else transformers waits for the GPU, and where that cannot be
    (CUDA graphs, torch.compile) makes a mask of all pairs."""
    return like.new_empty(_NOWHERE, dtype=torch_ops.torch_seen().bool)


def register() -> None:
    """Make NAME known to transformers. Its masks are those of "sdpa": without a mask function of
    the same name transformers would make none, and drop padding and windows silently."""
    masks = import_module("transformers.masking_utils")
    models = import_module("transformers.modeling_utils")
    models.AttentionInterface.register(NAME, attention_forward)
    masks.AttentionMaskInterface.register(NAME, masks.sdpa_mask)


def attention_forward(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Any = None, position_bias: Any = None, **_: Any,
) -> tuple[Any, None]:  # fmt: skip
    """What transformers calls: query [B, Hq, Sq, D], key and value [B, Hkv, Sk, D], fp16, bf16 or
    fp32; attention_mask bool (True: seen) or added to scores, [B, 1 | Hq, Sq, Sk], or None.
    s_aux: a sink per head. Windows arrive in the mask.

    Returns: ([B, Sq, Hq, D], None): attention weights are never made.
    Raises ParameterError for dropout and for a position bias; otherwise as `fkjit.attention`.
    """
    if dropout:
        raise ParameterError(
            f"fkjit.models: attention dropout={dropout}; allowed: 0, as in model.eval(), or with "
            "the configuration's attention dropout at 0"
        )
    if position_bias is not None:
        raise ParameterError(
            "fkjit.models: attention with a position_bias; allowed: None, so this model's "
            "attention stays: patch(model, attention=False)"
        )
    if attention_mask is not None and tuple(attention_mask.shape) == _NOWHERE:
        attention_mask = None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    if causal and key.shape[2] > query.shape[2]:  # a static cache that was empty: row i is key i
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    made = attention(
        q, k, v, causal=causal, softmax_scale=scaling, softcap=softcap, sinks=s_aux,
        layout="bshd", deterministic=None, **_mask(attention_mask, key.shape[2]),
    )  # fmt: skip
    return made, None


def _mask(mask: Any, keys: int) -> dict[str, Any]:
    """As `attention` takes it: the last dimension in full and contiguous."""
    if mask is None:
        return {}
    whole = mask[..., :keys]
    if whole.shape[-1] != keys or whole.stride(-1) != 1:
        whole = whole.expand(*whole.shape[:-1], keys).contiguous()
    return {"mask" if whole.dtype is torch_ops.torch_seen().bool else "bias": whole}
