"""flash-attn's functions of dense and packed sequences by their names."""

from __future__ import annotations

from typing import Any

from fkjit.compat.arguments import NO_WINDOW, check_tensors, explained, refuse, window_of
from fkjit.errors import ParameterError
from fkjit.ops.attention.decode.call import paged_attention
from fkjit.ops.attention.forward import attention, attention_varlen
from fkjit.ops.op.checks import check_flag

_DENSE, _VARLEN = "flash_attn_func", "flash_attn_varlen_func"
_QKV, _ENDS = ("q", "k", "v", "alibi_slopes"), ("cu_seqlens_q", "cu_seqlens_k", "block_table")


@explained(_DENSE, _QKV)
def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_func.

    Args:
        q: [B, Sq, Hq, D]; k, v: [B, Sk, Hkv, D]; fp16 or bf16 (and fp32).
        dropout_p: 0 alone. softmax_scale: default 1 / sqrt(D).
        causal, window_size (left, right; -1: without a bound): aligned to the bottom right.
        softcap: 0 is without. alibi_slopes: fp32 [Hq] or [B, Hq].
        deterministic: of gradients. The result is always the same to the bit, and so are gradients
            where torch.use_deterministic_algorithms(True) was called.
        return_attn_probs: also return the log-sum-exp and None, for the probabilities that the
            original gives for tests.

    Returns: o [B, Sq, Hq, D], or (o, lse fp32 [B, Hq, Sq], None). Raises as `fkjit.attention`.

    Example:
        >>> q, k, v = torch.ones(3, 1, 8, 2, 32, dtype=torch.float16)  # [batch, length, heads, dim]
        >>> fkjit.compat.flash_attn_func(q, k, v, causal=True, window_size=(4, 0)).shape
        torch.Size([1, 8, 2, 32])
    """
    check_tensors(_DENSE, q=q, k=k, v=v)
    refuse(_DENSE, dropout_p=(dropout_p, 0.0))
    check_flag(_DENSE, "return_attn_probs", return_attn_probs)
    window = window_of(_DENSE, window_size)
    made = attention(
        q, k, v, causal=causal, softmax_scale=softmax_scale, layout="bshd",
        return_lse=return_attn_probs, window=window, softcap=softcap or None,
        alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    return (*made, None) if return_attn_probs else made


@explained(_VARLEN, (*_QKV, *_ENDS))
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """flash_attn.flash_attn_varlen_func.

    Args:
        q: [total_q, Hq, D]; k, v: [total_k, Hkv, D]; fp16 or bf16 (and fp32).
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32 on the device: where sequences begin and end.
        max_seqlen_q, max_seqlen_k: at least the longest lengths.
        block_table: [B, pages] int32 on the device: then k and v are pages [blocks, page, Hkv, D],
            page a power of two up to 256, of which sequence i has as many tokens as cu_seqlens_k
            says; no gradients. The others: as flash_attn_func.

    Returns: o [total_q, Hq, D], or (o, lse fp32 [Hq, total_q], None). Raises as
        `fkjit.attention_varlen`.
    """
    check_tensors(_VARLEN, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    refuse(_VARLEN, dropout_p=(dropout_p, 0.0))
    check_flag(_VARLEN, "return_attn_probs", return_attn_probs)
    window = window_of(_VARLEN, window_size)
    if block_table is not None:
        made = paged_attention(
            q, (k, v), block_table, cu_seqlens_k[1:] - cu_seqlens_k[:-1], cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, causal=causal, softmax_scale=softmax_scale,
            return_lse=return_attn_probs, window=window, softcap=softcap or None,
            alibi_slopes=alibi_slopes,
        )  # fmt: skip
        return (*made, None) if return_attn_probs else made
    made = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal,
        softmax_scale=softmax_scale, return_lse=return_attn_probs, window=window,
        softcap=softcap or None, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    return (*made, None) if return_attn_probs else made


def flash_attn_qkvpacked_func(qkv: Any, *args: Any, **options: Any) -> Any:
    """flash_attn.flash_attn_qkvpacked_func: `flash_attn_func` of qkv [B, S, 3, H, D], which is not
    copied. The other arguments, what it returns and raises: as there."""
    return flash_attn_func(
        *_unpacked("flash_attn_qkvpacked_func", "qkv", qkv, 5, 3), *args, **options
    )


def flash_attn_kvpacked_func(q: Any, kv: Any, *args: Any, **options: Any) -> Any:
    """flash_attn.flash_attn_kvpacked_func: `flash_attn_func` of kv [B, Sk, 2, Hkv, D]."""
    return flash_attn_func(
        q, *_unpacked("flash_attn_kvpacked_func", "kv", kv, 5, 2), *args, **options
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """flash_attn.flash_attn_varlen_qkvpacked_func: `flash_attn_varlen_func` of qkv
    [total, 3, H, D], whose sequences have as many keys as queries."""
    q, k, v = _unpacked("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options
    )


def flash_attn_varlen_kvpacked_func(
    q: Any, kv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *args: Any, **options: Any
) -> Any:
    """flash_attn.flash_attn_varlen_kvpacked_func: `flash_attn_varlen_func` of kv
    [total_k, 2, Hkv, D]."""
    k, v = _unpacked("flash_attn_varlen_kvpacked_func", "kv", kv, 4, 2)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, *args, **options)


def _unpacked(call: str, name: str, packed: Any, dims: int, parts: int) -> Any:
    """The tensors that lie side by side in the third dimension from the end."""
    check_tensors(call, **{name: packed})
    if packed.is_nested or packed.dim() != dims or packed.shape[-3] != parts:
        shape = "nested" if packed.is_nested else tuple(packed.shape)
        heads = "3, H, D" if parts == 3 else "2, Hkv, D"
        raise ParameterError(
            f"{call}: {name} has shape {shape}; allowed: "
            f"[{'B, S' if dims == 5 else 'total'}, {heads}]"
        )
    return packed.unbind(-3)
