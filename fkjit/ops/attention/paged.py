"""`paged_attention` for any number of new tokens: packed queries against keys in pages.

The forward kernels of `attention_varlen` with another way to their keys (attention/pages.cuh).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fkjit.errors import ParameterError
from fkjit.ops.attention.features import (
    CASTS,
    FEATURE_ARRAYS,
    LISTED,
    PACKED_ENDS,
    PAGES,
    SCALES,
    SLOTS,
)
from fkjit.ops.attention.options import PagedOptions
from fkjit.ops.attention.paged_checks import check_pages
from fkjit.ops.op import torch_ops
from fkjit.ops.op.casts import casting
from fkjit.ops.op.node import Node, of_dtype
from fkjit.ops.op.op import Op
from fkjit.runtime import interop

_CALL = "paged_attention"
_MODS = PagedOptions._fields.index("score_mod")
# The kernels have an argument for cu_seqlens_k, which there is none of.
ARRAYS = ("q", "k", "v", *PACKED_ENDS, *PAGES, *FEATURE_ARRAYS, *SCALES)
_INPUTS = len(ARRAYS) + len(SLOTS)


def _fake(q: Any, k: Any, v: Any, *rest: Any) -> list[Any]:
    said = PagedOptions(*rest[_INPUTS - 3 :])  # PyTorch leaves defaults out
    o = q.new_empty((*q.shape[:2], v.shape[3]))
    return [o, of_dtype(q, (q.shape[1], q.shape[0]), "fp32")] if said.return_lse else [o]


def _packed(*options: Any) -> tuple[Any, ...]:
    """A graph has no score_mod."""
    if len(options) > _MODS and options[_MODS]:
        raise ParameterError(f"{_CALL}: score_mod is given; not supported under torch.compile")
    said = PagedOptions(*options[:_MODS])
    window, block = said.window, said.block
    if window is not None:
        window = [-1 if side is None else side for side in window]
    if block is not None:
        block = list(block) if isinstance(block, (tuple, list)) else [block]
    return tuple(said._replace(window=window, block=block)[:_MODS])


def _unpacked(*options: Any) -> tuple[Any, ...]:
    said = PagedOptions(*options)
    window = None if said.window is None else tuple(said.window)
    block = said.block
    if block is not None:
        block = block[0] if len(block) == 1 else tuple(block)
    return tuple(said._replace(window=window, block=block))


attend_pages = Op(
    _CALL,
    inputs=(*ARRAYS, *SLOTS),
    outputs=("o", "lse", LISTED),
    check=casting(lambda: attend_pages, check_pages, CASTS),
    options=PagedOptions,
    optional=("cu_seqlens_k", "rows", *FEATURE_ARRAYS, *SCALES, *SLOTS),
    node=Node(
        _fake,
        "SymInt max_seqlen_q, str layout, bool causal, float? softmax_scale, int[]? block, "
        "bool return_lse, int[]? window, float? softcap, bool mixed=False",
        None, "paged_attention_packed", _packed, _unpacked,
    ),
    lengths=1,
    autocast=1,
)  # fmt: skip


def uniform_ends(q: Any, batch: int, tokens: int) -> Any:
    """[batch + 1] int32 beside q: where sequences of so many tokens end."""
    last, torch = batch * tokens + 1, torch_ops.torch_seen()
    if torch is not None and isinstance(q, torch.Tensor):
        return torch.arange(0, last, tokens, dtype=torch.int32, device=q.device)
    kind = interop.view(q, _CALL, "q").kind
    if kind not in ("numpy", "cupy"):
        raise ParameterError(
            f"{_CALL}: q has {tokens} tokens a sequence; allowed: up to 16, or packed queries with "
            "cu_seqlens_q and max_seqlen_q"
        )
    return import_module(kind).arange(0, last, tokens, dtype="int32")
