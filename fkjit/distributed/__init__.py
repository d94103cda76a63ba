"""Several GPUs on torch.distributed: sequences, experts and products shared out over ranks.

    import torch.distributed as dist
    dist.init_process_group("nccl")
    q, k, v = (fkjit.distributed.shard(x, dist.group.WORLD) for x in (q, k, v))
    o = fkjit.distributed.ring_attention(q, k, v, causal=True)  # gradients included

Messages are torch.distributed's, products fkjit's kernels. See docs/DISTRIBUTED.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "ring_attention": "fkjit.distributed.attention",
    "shard": "fkjit.distributed.order",
    "unshard": "fkjit.distributed.order",
    "positions": "fkjit.distributed.order",
    "shard_lengths": "fkjit.distributed.order",
    "attention_decode": "fkjit.distributed.decode",
    "merge_states": "fkjit.distributed.decode",
    "moe_layer": "fkjit.distributed.moe",
    "column_parallel_linear": "fkjit.distributed.linear",
    "row_parallel_linear": "fkjit.distributed.linear",
}
__all__ = [
    "attention_decode",
    "column_parallel_linear",
    "merge_states",
    "moe_layer",
    "positions",
    "ring_attention",
    "row_parallel_linear",
    "shard",
    "shard_lengths",
    "unshard",
]

if TYPE_CHECKING:
    from fkjit.distributed.attention import ring_attention
    from fkjit.distributed.decode import attention_decode, merge_states
    from fkjit.distributed.linear import column_parallel_linear, row_parallel_linear
    from fkjit.distributed.moe import moe_layer
    from fkjit.distributed.order import positions, shard, shard_lengths, unshard
else:

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        globals()[name] = value = getattr(import_module(_PUBLIC[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
