"""Routing tokens to experts."""

from __future__ import annotations

from typing import Any

from fkjit.gallery.ladder import Ladder, Picture, Sizes, Step
from fkjit.ops.moe import cases

_BLOCK = 64  # rows of a tile of the products that follow


def problem(step: Step, sizes: Sizes, multiprocessors: int) -> dict[str, Any]:
    """A softmax over all experts, without a bias; every expert is here."""
    tokens, experts, top_k = sizes["tokens"], sizes["experts"], sizes["top_k"]
    route = cases.route_problem("fp32", tokens, experts, top_k)
    if step.kernel == "moe_route.lanes":
        return route
    group = cases.group_problem(tokens, top_k, experts, _BLOCK, sizes["blocks"])
    return {**route, **group} if step.kernel == "moe_route_and_regroup.grid" else group


LADDER = Ladder(
    name="moe",
    title="MoE routing",
    about="32,768 tokens choose 2 of 64 experts each, and their choices are sorted by expert, "
    "padded to the tiles of the products. All of it takes a few microseconds, so launches count.",
    sizes={"tokens": 32_768, "experts": 64, "top_k": 2, "blocks": 128},
    small={"tokens": 200, "experts": 64, "top_k": 2, "blocks": 3},
    problem=problem,
    free={"tokens": 1},
    steps=(
        Step(
            "a warp for each token",
            "moe_route.lanes",
            {"dtype": "fp32", "tile": (32, 32), "plain": False, "threads": 128},
            "A warp reads a token's logits once, finds its greatest ones by shuffles, and their "
            "weights in the same kernel. There is room for 1024 experts; 64 leave most of it idle.",
            pictures=(Picture("tiling", "topk_ids"),),
        ),
        Step(
            "four lanes for each token",
            "moe_route.lanes",
            {"dtype": "fp32", "tile": (4, 16), "plain": False, "threads": 128},
            "Four lanes with 16 logits each: eight tokens a warp, two rounds of shuffles in place "
            "of five.",
            pictures=(Picture("tiling", "topk_ids"),),
        ),
        Step(
            "constants for plain problems",
            "moe_route.lanes",
            {"dtype": "fp32", "tile": (4, 16), "plain": True, "threads": 128},
            "Softmax of one group without a bias is compiled in, so that nothing of it is asked at "
            "run time.",
        ),
        Step(
            "choices sorted by expert",
            "moe_regroup.grid",
            {"ids": "int32", "tile": (512, 64)},
            "The second launch: blocks count their choices, add them up in L2, and each places its "
            "own, in order, so that tokens of an expert lie together.",
            pictures=(Picture("tiling", "sorted_token_ids"),),
        ),
        Step(
            "both in one launch",
            "moe_route_and_regroup.grid",
            {"dtype": "fp32", "tile": (4, 16), "plain": True, "threads": 512},
            "One cooperative launch routes and sorts: choices never leave the block between the "
            "two, and what blocks know of each other are sums that meet in L2.",
            pictures=(Picture("tiling", "sorted_token_ids"),),
        ),
    ),
)
