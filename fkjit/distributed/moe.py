"""`fkjit.distributed.moe_layer`: a mixture of experts of which each rank has some.

    rows of tokens, by expert     all-to-all     local experts' products     all-to-all     sums
    chunk 0   | dispatch 0 |                | products 0 |  combine 0 |
    chunk 1                | dispatch 1 |                | products 1 |  combine 1 |

Exactly the routed rows travel: one for each choice of a token. A chunk's messages are under way
while the other chunks are multiplied, in the backward as well.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from fkjit.arguments import one_of, whole
from fkjit.distributed.agree import agree
from fkjit.distributed.codes import E4m3
from fkjit.distributed.exchange import Routed, all_to_all
from fkjit.distributed.groups import Group, check_tensors, eager, group_of
from fkjit.errors import ParameterError
from fkjit.ops.gemm.call import linear
from fkjit.ops.grouped.call import grouped_linear
from fkjit.ops.grouped.kernels import LEAST_BLOCK
from fkjit.ops.moe.combine import moe_combine
from fkjit.ops.moe.gradient import weights_of
from fkjit.ops.moe.permute import moe_permute
from fkjit.ops.moe.regroup import moe_regroup
from fkjit.ops.moe.route import moe_route
from fkjit.types import Scoring

_CALL = "moe_layer"
_MOST_CHUNKS = 64


@eager
def moe_layer(
    x: Any,
    router_logits: Any,
    w_gate_up: Any,
    w_down: Any,
    top_k: int,
    *,
    ep_group: Any = None,
    router_weight: Any = None,
    activation: str = "silu",
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    bias: Any = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
    shared_gate_up: Any = None,
    shared_down: Any = None,
    block_size: int = LEAST_BLOCK,
    save_pre_activation: bool = True,
    chunks: int = 2,
    dispatch: str = "same",
    timeout: float | None = None,
) -> Any:
    """`fkjit.moe_layer` of this rank's tokens, with experts that ranks share out.

    Args:
        x: [tokens, H]: this rank's tokens, torch; ranks may have different numbers of them.
        router_logits: [tokens, E], of all experts, or None with `router_weight` [E, H].
        w_gate_up: [E / ranks, 2 I, H], this rank's experts: rank r has those from r * E / ranks on.
        w_down: [E / ranks, H, I].
        top_k: experts of a token. No capacity: every choice is computed.
        ep_group: a ProcessGroup, a DeviceMesh of one dimension, or None: all ranks.
        chunks: parts of the tokens whose messages and products overlap; the same on every rank.
        dispatch: "same": rows travel in x's dtype; "e4m3": to the experts as fp8 codes with a scale
            for 128 columns. Results and gradients come back in x's dtype, and the gradient is
            that of rows that were not rounded.
        timeout: as in `ring_attention`.
        The others: as in `fkjit.moe_layer`; the shared expert runs while rows are under way.

    Returns:
        [tokens, H] in x's dtype. Gradients as of `fkjit.moe_layer`; those of the router and the
        shared expert are of this rank's tokens: add up all ranks'.

    Raises:
        ParameterError: experts that are no multiple of the ranks, options. PeerError: a rank has
        stopped. The others as `fkjit.moe_layer`.

    The host waits once, for the numbers of rows, which torch's all-to-all asks for: no CUDA graph.
    torch.compile ends its graph at the call.
    """
    check_tensors(_CALL, x=x, w_gate_up=w_gate_up, w_down=w_down, router_logits=router_logits)
    group = group_of(_CALL, ep_group, timeout)
    if (router_logits is None) == (router_weight is None):
        raise ParameterError(f"{_CALL}: give router_logits or router_weight, one of the two")
    if (shared_gate_up is None) != (shared_down is None):
        raise ParameterError(f"{_CALL}: shared_gate_up and shared_down are given together or not")
    logits = linear(x, router_weight) if router_logits is None else router_logits
    chunks = whole(_CALL, "chunks", chunks, 1, _MOST_CHUNKS)
    one_of(_CALL, "dispatch", dispatch, ("same", "e4m3"))
    _check(x, logits, w_gate_up, w_down, group, chunks)
    weights, ids = moe_route(
        logits.detach(), top_k, scoring=scoring, renormalize=renormalize, bias=bias,
        num_groups=num_groups, topk_groups=topk_groups,
        routed_scaling_factor=routed_scaling_factor,
    )  # fmt: skip
    if logits.requires_grad:
        weights = weights_of(logits, ids, scoring, renormalize, routed_scaling_factor)
    expert = Expert(w_gate_up, w_down, activation, block_size, save_pre_activation)
    parts = _parts(x, ids, weights, expert, Way(group, chunks, dispatch))
    for part in parts:
        part.send()
    shared = None
    if shared_gate_up is not None:
        shared = linear(x, shared_gate_up, activation=activation, gate=True)
    for part in parts:
        part.compute(expert)
    out = sys.modules["torch"].cat([part.sums() for part in parts])
    return out if shared is None else linear(shared, shared_down, residual=out)


class Way(NamedTuple):
    group: Group
    chunks: int
    dispatch: str


class Expert(NamedTuple):
    """Local experts, of rows that are theirs."""

    w_gate_up: Any
    w_down: Any
    activation: str
    block_size: int
    save_pre_activation: bool

    def __call__(self, rows: Any, counts: Any) -> Any:
        """Results of rows that lie by source rank and local expert, counts [ranks, experts] of
        them, on the device; in the same order."""
        torch, (size, here) = sys.modules["torch"], counts.shape
        own = torch.arange(here, dtype=torch.int32, device=rows.device).repeat(size)
        ids = torch.repeat_interleave(own, counts.flatten(), output_size=rows.shape[0])
        groups = moe_regroup(ids.unsqueeze(1), here, self.block_size)
        hidden = grouped_linear(
            moe_permute(rows, groups), self.w_gate_up, groups, activation=self.activation,
            gate=True, save_pre_activation=self.save_pre_activation,
        )  # fmt: skip
        return moe_combine(grouped_linear(hidden, self.w_down, groups), groups)


class Part:
    """Some of the tokens, on their way to experts and back."""

    def __init__(
        self, x: Any, groups: Any, weights: Any, way: Way, counts: list[int], into: list[int],
        came: Any,
    ) -> None:  # fmt: skip
        """counts[rank] rows go there, into[rank] come from there: came [ranks, local experts]."""
        self.x, self.groups, self.weights, self.came = x, groups, weights, came
        codec = E4m3(x.shape[1]) if way.dispatch == "e4m3" else None
        self.there = Routed(way.group, counts, into, codec)
        self.back = Routed(way.group, into, counts)
        self.rows: Any = None

    def send(self) -> None:
        self.rows = self.there.started(moe_permute(self.x, self.groups))

    def compute(self, expert: Expert) -> None:
        made = expert(self.there.arrived(self.rows), self.came)
        self.rows = self.back.started(made)

    def sums(self) -> Any:
        return moe_combine(self.back.arrived(self.rows), self.groups, self.weights)


def _parts(x: Any, ids: Any, weights: Any, expert: Expert, way: Way) -> list[Part]:
    """The chunks; ranks tell one another how many rows each of their experts gets."""
    torch, size, here = sys.modules["torch"], way.group.size, expert.w_gate_up.shape[0]
    pieces = [[a.contiguous() for a in x.tensor_split(way.chunks)] for x in (x, ids, weights)]
    groups = [moe_regroup(chunk, size * here) for chunk in pieces[1]]
    counts = torch.stack([one.counts.view(size, here) for one in groups], 1)
    came = all_to_all(way.group, counts).wait()  # [ranks, chunks, local experts]
    going, coming = torch.stack([counts, came]).sum(3).tolist()  # where the host waits
    return [
        Part(
            pieces[0][n], groups[n], pieces[2][n], way, [rank[n] for rank in going],
            [rank[n] for rank in coming], came[:, n],
        )
        for n in range(way.chunks)
    ]  # fmt: skip


def _check(x: Any, logits: Any, up: Any, down: Any, group: Group, chunks: int) -> None:
    """What no part of the layer sees; each looks at its own arguments."""
    experts, here = int(logits.shape[-1]), int(up.shape[0])
    if experts != here * group.size:
        raise ParameterError(
            f"{_CALL}: router_logits are of {experts} experts, w_gate_up is of {here} on each of "
            f"{group.size} ranks; allowed: {experts} / {group.size}"
        )
    if up.dim() != 3 or tuple(down.shape) != (here, up.shape[2], up.shape[1] // 2):
        raise ParameterError(
            f"{_CALL}: w_gate_up {tuple(up.shape)}, w_down {tuple(down.shape)}; allowed: "
            "[E / ranks, 2 I, H] and [E / ranks, H, I]"
        )
    if x.dim() != 2 or x.shape[1] != up.shape[2] or logits.shape[0] != x.shape[0]:
        raise ParameterError(
            f"{_CALL}: x {tuple(x.shape)}, router_logits {tuple(logits.shape)}, w_gate_up "
            f"{tuple(up.shape)}; allowed: [tokens, H], [tokens, E] and [E / ranks, 2 I, H]"
        )
    agree(group, "experts, sizes and chunks", (*up.shape, chunks, x.dtype.itemsize), x.device)
