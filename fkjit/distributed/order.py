"""Which tokens of a sequence a rank has: `shard`, `unshard`, `positions`.

A sequence is cut into chunks of one length. "contiguous" gives each of P ranks one of P chunks,
"zigzag" two of 2 P, the first and the last, the second and the second to last …, so that each rank
has as much to do under a causal mask:

    contiguous   | 0 | 1 | 2 | 3 |              zigzag   | 0 | 1 | 2 | 3 | 3 | 2 | 1 | 0 |

On a mesh of two dimensions (ring, heads) the ring's shards are cut once more, "contiguous".
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

from fkjit.arguments import one_of
from fkjit.distributed.exchange import all_gather
from fkjit.distributed.groups import Group, check_tensors, eager, group_of, is_mesh
from fkjit.errors import ParameterError

LAYOUTS = ("zigzag", "contiguous")


def chunk_count(layout: str, size: int) -> int:
    return 2 * size if layout == "zigzag" else size


def chunks_of(layout: str, rank: int, size: int) -> tuple[int, ...]:
    """The chunks that a rank has, in its order, which is the sequence's."""
    return (rank, 2 * size - 1 - rank) if layout == "zigzag" else (rank,)


def owner_of(layout: str, chunk: int, size: int) -> tuple[int, int]:
    """(rank, place among its chunks) of a chunk."""
    if layout == "zigzag" and chunk >= size:
        return 2 * size - 1 - chunk, 1
    return chunk, 0


def chunk_length(call: str, length: int, layout: str, local: bool, size: int) -> int:
    """Of `length` tokens of a whole sequence, or of a rank's. ParameterError for an uneven one."""
    one_of(call, "layout", layout, LAYOUTS)
    count = len(chunks_of(layout, 0, size)) if local else chunk_count(layout, size)
    if length % count:
        whose = "a rank's" if local else "a sequence's"
        raise ParameterError(
            f"{call}: {length} tokens are {whose}; allowed: a multiple of {count} "
            f"(layout={layout!r}, {size} ranks): pad the sequence"
        )
    return length // count


# ------------------------------------------------------------------ public


@eager
def shard(
    x: Any, group: Any = None, *, layout: str = "zigzag", dim: int = -2, cu_seqlens: Any = None
) -> Any:
    """This rank's tokens of x, which has all of them, in the order that `ring_attention` wants.

    Args:
        x: a torch tensor, the same on every rank; tokens along `dim`: q, k and v [B, H, S, D] have
            them in -2, token ids [B, S] in 1.
        group: a ProcessGroup, a DeviceMesh of one dimension, one of two (ring, heads), or None.
        layout: "zigzag" or "contiguous".
        cu_seqlens: of packed sequences [B + 1]: each is shared out over all ranks. Read by the
            host.

    Returns:
        A new tensor with 1 / ranks of x's tokens; it has a gradient.

    Raises:
        ParameterError: a length that is no multiple of the number of chunks, a layout.
    """
    call = "shard"
    check_tensors(call, x=x)
    groups = _nested(call, group)
    if cu_seqlens is not None:
        found = _packed_index(call, groups, layout, cu_seqlens.tolist())
        if int(cu_seqlens[-1]) != x.shape[dim]:
            raise ParameterError(
                f"{call}: x has {x.shape[dim]} tokens, cu_seqlens ends with {int(cu_seqlens[-1])}"
            )
    else:
        found = _index(call, groups, layout, x.shape[dim])
    return x.index_select(dim, sys.modules["torch"].tensor(found, device=x.device))


@eager
def unshard(x: Any, group: Any = None, *, layout: str = "zigzag", dim: int = -2) -> Any:
    """All tokens in their order, of x with this rank's of them: what `shard` took apart.

    The same on every rank; without a gradient. Messages: one all-gather a dimension of the mesh.
    Packed sequences one by one.
    """
    call = "unshard"
    check_tensors(call, x=x)
    groups = _nested(call, group)
    for place, one in reversed(list(enumerate(groups))):
        own = layout if place == 0 else "contiguous"
        chunk_length(call, x.shape[dim], own, True, one.size)
        x = in_order(all_gather(one, x.detach()).wait(), own, dim % x.dim())
    return x


def in_order(gathered: Any, layout: str, dim: int) -> Any:
    """[ranks, …] with a rank's tokens along `dim` (of one rank's) as one array of all tokens."""
    size = gathered.shape[0]
    per_rank = len(chunks_of(layout, 0, size))
    pieces = [rank.chunk(per_rank, dim) for rank in gathered.unbind(0)]
    owners = (owner_of(layout, chunk, size) for chunk in range(chunk_count(layout, size)))
    return sys.modules["torch"].cat([pieces[rank][place] for rank, place in owners], dim)


@eager
def positions(length: int, group: Any = None, *, layout: str = "zigzag", device: Any = None) -> Any:
    """int64 [length / ranks]: the places in the sequence of this rank's tokens, for RoPE."""
    found = _index("positions", _nested("positions", group), layout, length)
    return sys.modules["torch"].tensor(found, device=device)


@eager
def shard_lengths(cu_seqlens: Any, group: Any = None, *, layout: str = "zigzag") -> Any:
    """cu_seqlens of this rank's parts of packed sequences; read by the host.

    ParameterError for a sequence that ranks cannot have equal parts of.
    """
    call = "shard_lengths"
    groups, ends = _nested(call, group), cu_seqlens.tolist()
    _packed_index(call, groups, layout, ends)
    ranks = 1
    for one in groups:
        ranks *= one.size
    return cu_seqlens // ranks


# ------------------------------------------------------------------ indices


def _nested(call: str, given: Any) -> list[Group]:
    """The groups that a sequence is cut for, one after the other."""
    if is_mesh(given) and given.ndim == 2:
        return [group_of(call, given.get_group(axis)) for axis in range(2)]
    return [group_of(call, given)]


def _index(call: str, groups: list[Group], layout: str, length: int) -> list[int]:
    found = list(range(length))
    for place, group in enumerate(groups):
        own = layout if place == 0 else "contiguous"
        size = chunk_length(call, len(found), own, False, group.size)
        chunks = chunks_of(own, group.rank, group.size)
        found = [found[c * size + i] for c in chunks for i in range(size)]
    return found


def _packed_index(call: str, groups: list[Group], layout: str, ends: list[int]) -> list[int]:
    found = ((start, _index(call, groups, layout, end - start)) for start, end in pairwise(ends))
    return [start + i for start, index in found for i in index]
