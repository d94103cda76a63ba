"""`fkjit.distributed.moe_layer`: a mixture of experts of which each rank has some.

    rows of tokens, by expert     all-to-all     local experts' products     all-to-all     sums
    chunk 0   | dispatch 0 |                | products 0 |  combine 0 |
    chunk 1                | dispatch 1 |                | products 1 |  combine 1 |

A row travels for each choice of a token (`routes.py`). A chunk's messages are under way
while the other chunks are multiplied, in the backward as well.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from fkjit.arguments import one_of, whole
from fkjit.distributed.agree import agree
from fkjit.distributed.codes import E4m3
from fkjit.distributed.exchange import Routed
from fkjit.distributed.groups import Group, check_tensors, eager, group_of
from fkjit.distributed.routes import Routes, capped, exact
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
_MOST_CHUNKS, _MOST_ROWS = 64, 1 << 27


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
    max_rows: int | None = None,
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
        max_rows: None: exactly the routed rows travel, and the host waits once for their numbers,
            which torch's all-to-all asks for. A number: room for so many rows of a chunk from each
            rank to each other; nothing waits for the host, and a CUDA graph can have the call, but
            a rank's choices beyond it, those of its last experts there, are left out, as beyond a
            capacity. tokens / chunks * top_k is room for all.
        timeout: as in `ring_attention`.
        The others: as in `fkjit.moe_layer`; the shared expert runs while rows are under way.

    Returns:
        [tokens, H] in x's dtype. Gradients as of `fkjit.moe_layer`; those of the router and the
        shared expert are of this rank's tokens: add up all ranks'.

    Raises:
        ParameterError: experts that are no multiple of the ranks, options. PeerError: a rank has
        stopped. The others as `fkjit.moe_layer`.

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
    if max_rows is not None:
        max_rows = whole(_CALL, "max_rows", max_rows, 1, _MOST_ROWS)
    _check(x, logits, w_gate_up, w_down, group, (chunks, max_rows or 0))
    weights, ids = moe_route(
        logits.detach(), top_k, scoring=scoring, renormalize=renormalize, bias=bias,
        num_groups=num_groups, topk_groups=topk_groups,
        routed_scaling_factor=routed_scaling_factor,
    )  # fmt: skip
    if logits.requires_grad:
        weights = weights_of(logits, ids, scoring, renormalize, routed_scaling_factor)
    expert = Expert(w_gate_up, w_down, activation, block_size, save_pre_activation)
    way = Way(group, chunks, dispatch, max_rows)
    parts = _parts(x, ids, weights, int(logits.shape[-1]), way)
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
    most: int | None


class Expert(NamedTuple):
    """Local experts, of rows that are theirs."""

    w_gate_up: Any
    w_down: Any
    activation: str
    block_size: int
    save_pre_activation: bool

    def __call__(self, rows: Any, ids: Any) -> Any:
        """Results of rows, in their order. ids: int32, the local expert of each; 0 for others'."""
        groups = moe_regroup(ids.view(-1, 1), self.w_gate_up.shape[0], self.block_size)
        hidden = grouped_linear(
            moe_permute(rows, groups), self.w_gate_up, groups, activation=self.activation,
            gate=True, save_pre_activation=self.save_pre_activation,
        )  # fmt: skip
        return moe_combine(grouped_linear(hidden, self.w_down, groups), groups)


class Part:
    """Some of the tokens, on their way to experts and back."""

    def __init__(self, x: Any, weights: Any, way: Way, routes: Routes) -> None:
        self.x, self.weights, self.routes = x, weights, routes
        codec = E4m3(x.shape[1]) if way.dispatch == "e4m3" else None
        self.there = Routed(way.group, routes.going, routes.coming, codec)
        self.back = Routed(way.group, routes.coming, routes.going)
        self.rows: Any = None

    def send(self) -> None:
        self.rows = self.there.started(moe_permute(self.x, self.routes.groups))

    def compute(self, expert: Expert) -> None:
        made = expert(self.there.arrived(self.rows), self.routes.ids)
        self.rows = self.back.started(made)

    def sums(self) -> Any:
        return moe_combine(self.back.arrived(self.rows), self.routes.groups, self.weights)


def _parts(x: Any, ids: Any, weights: Any, experts: int, way: Way) -> list[Part]:
    pieces = [[a.contiguous() for a in x.tensor_split(way.chunks)] for x in (x, ids, weights)]
    groups = [moe_regroup(chunk, experts) for chunk in pieces[1]]
    found = exact(way.group, groups) if way.most is None else capped(way.group, groups, way.most)
    return [Part(pieces[0][n], pieces[2][n], way, one) for n, one in enumerate(found)]


def _check(x: Any, logits: Any, up: Any, down: Any, group: Group, said: tuple[int, int]) -> None:
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
    agree(
        group, "experts, sizes, chunks and max_rows", (*up.shape, *said, x.dtype.itemsize), x.device
    )
