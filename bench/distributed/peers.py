"""What others do with the same arrays, and rings that do not overlap."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fkjit
from fkjit.distributed.exchange import shift
from fkjit.distributed.groups import group_of
from fkjit.distributed.order import chunks_of, in_order
from fkjit.distributed.ring import flat, parts
from fkjit.distributed.tiles import tiles

Call = Callable[[], Any]


def naive_ring(q: Any, k: Any, v: Any) -> Any:
    """Zigzag, causal: each step multiplies, then merges two partial results, then sends."""
    group = group_of("naive ring")
    own, size = chunks_of("zigzag", group.rank, group.size), group.size
    state, kv = None, flat(k, v)
    for step in range(size):
        theirs = chunks_of("zigzag", (group.rank - step) % size, size)
        (tile,) = tiles(own, theirs, q.shape[2] // 2, (None, 0))
        keys, values = parts(kv, k.shape, v.shape)
        rows, where = slice(*tile.q), slice(*tile.k)
        o, lse = fkjit.attention(
            q[:, :, rows], keys[:, :, where], values[:, :, where], causal=tile.causal,
            return_lse=True,
        )  # fmt: skip
        if state is None:
            state = o, lse
        else:
            merged = fkjit.merge_states(state[0][:, :, rows], state[1][:, :, rows], o, lse)
            state[0][:, :, rows], state[1][:, :, rows] = merged
        if step + 1 < size:
            kv = shift(group, kv).wait()
    assert state is not None
    return state[0]


def gathered(q: Any, k: Any, v: Any, attend: Callable[..., Any]) -> Any:
    """NCCL's all-gather of keys and values, then attention of each chunk with those up to it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    both = torch.stack([k, v])
    room = both.new_empty(size, *both.shape)
    dist.all_gather_into_tensor(room.view(-1), both.view(-1))
    keys, values = in_order(room, "zigzag", 3).unbind(0)
    length = q.shape[2] // 2
    found = []
    for place, chunk in enumerate(chunks_of("zigzag", rank, size)):
        end = (chunk + 1) * length
        rows = q[:, :, place * length : (place + 1) * length]
        found.append(attend(rows, keys[:, :, :end], values[:, :, :end]))
    return torch.cat(found, 2)


def torch_attend(q: Any, k: Any, v: Any) -> Any:
    """PyTorch's, aligned to the bottom right."""
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(q.shape[2], k.shape[2])
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # type: ignore[arg-type]


def fkjit_attend(q: Any, k: Any, v: Any) -> Any:
    return fkjit.attention(q, k, v, causal=True)


def torch_context_parallel(q: Any, k: Any, v: Any, stack: ExitStack) -> Call:
    """PyTorch's own, with its load balancing. q, k, v: of the whole sequence; KV heads are
    repeated, as it knows no groups. The context stays open until `stack` closes, so that no other
    call of PyTorch's attention may follow."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    group = q.shape[1] // k.shape[1]
    buffers = [q.clone(), *(x.repeat_interleave(group, 1) for x in (k, v))]
    mesh = init_device_mesh(q.device.type, (dist.get_world_size(),))
    stack.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]))
    rows = [x.detach().requires_grad_() for x in buffers]  # buffers are resized when it closes

    def call() -> Any:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*rows, is_causal=True)

    return call


def grouped_mm_layer(x: Any, logits: Any, up: Any, down: Any, top_k: int) -> Any:
    """Experts of ranks by PyTorch alone: sort, all-to-all, grouped_mm, all-to-all, sum."""
    size, here = dist.get_world_size(), up.shape[0]
    weights, ids = logits.softmax(-1).topk(top_k)
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=size * here)
    came = torch.empty_like(counts)
    dist.all_to_all_single(came, counts)
    going, coming = torch.stack([counts, came]).view(2, size, here).sum(2).tolist()
    rows = x[order // top_k]
    theirs = x.new_empty(sum(coming), x.shape[1])
    dist.all_to_all_single(theirs, rows, coming, going)
    experts = torch.arange(here, device=x.device).repeat(size).repeat_interleave(came)
    sort = experts.argsort(stable=True)
    ends = came.view(size, here).sum(0).cumsum(0).to(torch.int32)
    gate, value = torch._grouped_mm(theirs[sort], up.mT, ends).chunk(2, -1)
    made = torch._grouped_mm(F.silu(gate) * value, down.mT, ends)
    back = torch.empty_like(made)
    back[sort] = made
    home = torch.empty_like(rows)
    dist.all_to_all_single(home, back, going, coming)
    out = torch.zeros_like(x)
    return out.index_add_(0, order // top_k, home * weights.flatten()[order, None].to(x.dtype))


def gathered_product(x: Any, weight: Any) -> Any:
    """An all-gather of rows, then PyTorch's product."""
    room = x.new_empty(dist.get_world_size() * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(room, x)
    return room @ weight.t()


def scattered_product(x: Any, weight: Any) -> Any:
    """PyTorch's product, then a reduce-scatter."""
    whole = x @ weight.t()
    out = whole.new_empty(whole.shape[0] // dist.get_world_size(), whole.shape[1])
    dist.reduce_scatter_tensor(out, whole)
    return out
