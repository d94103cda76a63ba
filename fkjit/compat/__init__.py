"""Attention under the names and argument orders of others, so that swapping an import is enough.

    from fkjit.compat import scaled_dot_product_attention, flash_attn_func, flash_attn_with_kvcache

For torch tensors. What fkjit has no kernel for (dropout) is refused with a ParameterError that
names the argument, never left out silently.
"""

from __future__ import annotations

from fkjit.compat.flash import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from fkjit.compat.kvcache import flash_attn_with_kvcache
from fkjit.compat.sdpa import scaled_dot_product_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "scaled_dot_product_attention",
]
