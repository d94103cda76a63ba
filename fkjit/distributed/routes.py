"""Which rows travel from rank to rank in a mixture of experts, and whose they are there.

`exact`: the routed rows, by destination and expert; the host reads how many. `capped`: as much room
for each rank, whatever is routed; nothing is read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from fkjit.distributed.exchange import all_to_all
from fkjit.distributed.groups import Group
from fkjit.ops.moe.groups import MoeGroups


class Routes(NamedTuple):
    """groups: places of the choices among the rows that leave. going, coming: rows to and from each
    rank, None: as many each. ids: int32, the local expert of each row that comes; as many as there
    are experts here: nobody's."""

    groups: MoeGroups
    going: list[int] | None
    coming: list[int] | None
    ids: Any


def exact(group: Group, groups: Sequence[MoeGroups]) -> list[Routes]:
    """Of each chunk. groups: its choices by expert, without padding."""
    torch, counts = sys.modules["torch"], _counts(group, groups)
    came = all_to_all(group, counts).wait()  # [ranks, chunks, local experts]
    going, coming = torch.stack([counts, came]).sum(3).tolist()  # where the host waits
    size, _, here = counts.shape
    own = torch.arange(here, dtype=torch.int32, device=counts.device).repeat(size)
    found = []
    for n, one in enumerate(groups):
        there, into = ([rank[n] for rank in rows] for rows in (going, coming))
        ids = torch.repeat_interleave(own, came[:, n].flatten(), output_size=sum(into))
        found.append(Routes(one, there, into, ids))
    return found


def capped(group: Group, groups: Sequence[MoeGroups], most: int) -> list[Routes]:
    """Of each chunk: `most` rows to each rank, the first ones by expert; the others' places are
    -1, as those of choices that are dropped."""
    torch, counts = sys.modules["torch"], _counts(group, groups)
    ends = counts.cumsum(2).clamp(max=most)  # of each expert's rows, where they arrive
    came = all_to_all(group, ends).wait()
    size, _, here = counts.shape
    places = torch.arange(most, device=counts.device).repeat(size, 1)
    found = []
    for n, one in enumerate(groups):
        ids = torch.searchsorted(came[:, n].contiguous(), places, right=True, out_int32=True)
        found.append(Routes(_with_room(one, size, here, most), None, None, ids.flatten()))
    return found


def _counts(group: Group, groups: Sequence[MoeGroups]) -> Any:
    """[ranks, chunks, local experts]"""
    rows = [one.counts.view(group.size, -1) for one in groups]
    return sys.modules["torch"].stack(rows, 1)


def _with_room(one: MoeGroups, size: int, here: int, most: int) -> MoeGroups:
    """The same choices, by rank, each with `most` places."""
    torch = sys.modules["torch"]
    begins = one.offsets[::here].contiguous()  # of the ranks' rows, and the end of all
    rank = torch.bucketize(one.inverse, begins[1:], right=True).clamp(max=size - 1)
    place = one.inverse - begins[rank]
    inverse = (rank * most + place).where(place < most, -1).to(torch.int32)
    offsets = torch.arange(size + 1, dtype=torch.int32, device=inverse.device) * most
    room = inverse.new_empty(size * most)
    return MoeGroups(
        sorted_token_ids=room, expert_ids=room, num_tokens_post_padded=offsets[-1:],
        inverse=inverse, offsets=offsets, counts=begins.diff().clamp(max=most),
    )  # fmt: skip
