"""A call of `fkjit.models`: attention of one new token of each sequence to its pages, in a decode
step whose launches under way write neither tables nor positions nor keys before the new ones. So
first keys are asked for before the previous kernel is over (PDL). Lengths are no use: the step's
first launch counts the new tokens in them. No part of the public API.

The kernel is decoding's (`kernels_cu/attention/decode.cu`). Sequences of a step are about as long
as one another, so a grid of as many blocks as there are key heads of sequences, or a multiple, cuts
few of them: no parts to be merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fkjit.arch import Arch
from fkjit.ops.attention.decode import grid, kernels
from fkjit.ops.attention.decode.checks import ARRAYS, CPU_SMS, Options, check_paged
from fkjit.ops.kv.planes import planes
from fkjit.ops.op.checks import check_dtype, check_shape
from fkjit.ops.op.op import Launch, Op, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View
from fkjit.spec import Param, Params, Problem, register

# By head_dim: the fastest in steps of Llama-3.2-1B and GPT-2 with more key heads of sequences for
# each SM than the first number, up to the second; else the last one: (warps, keys of a step, steps
# in a ring, blocks of an SM), and blocks of each head.
_ANY = float("inf")
_CHOICES: dict[int, tuple[tuple[float, float, kernels.Tile, int], ...]] = {
    64: (
        (0.9, 1.0, (8, 32, 2, 1), 1), (1.3, 1.6, (8, 16, 2, 2), 1), (3.7, 4.0, (4, 16, 3, 4), 1),
        (5.5, 6.0, (2, 32, 2, 6), 1), (0.0, _ANY, (4, 32, 2, 3), 0),
    ),
    128: ((0.0, _ANY, (8, 16, 2, 1), 0),),
}  # fmt: skip
HEAD_DIMS = tuple(_CHOICES)
_TILES = tuple(dict.fromkeys(tile for rows in _CHOICES.values() for *_, tile, _ in rows))


def _illegal(params: Params) -> str | None:
    if params["tile"] not in [tile for *_, tile, _ in _CHOICES[params["head_dim"]]]:
        return "is never the fastest tile"
    return None


_PARAMS = (
    Param("dtype", ("bf16", "fp16"), "of all arrays"),
    Param("storage", ("same",), "k and v: the same dtype"),
    Param("head_dim", HEAD_DIMS, "of q, k, v and o"),
    Param("rows", kernels.ROWS[:1], "of a tile: query heads of a KV head"),
    Param("tile", _TILES, "warps, keys of a step, steps in a ring, blocks of an SM", tunable=True),
    Param("early", (True,), "first keys come before the previous kernel is over"),
)
SETTLED = register(
    replace(
        kernels.SPLIT, op="settled_attention", params=_PARAMS, illegal=_illegal,
        doc="a new token of each sequence against its pages, which no launch under way writes",
        verification="fkjit.ops.attention.decode.settled_cases:SETTLED",
    )
)  # fmt: skip


def settled_attention(q: Any, cache: Any, rows: Any, positions: Any, layer: int) -> Any:
    """`paged_attention` of q [batch, heads_q, head_dim] with the cache's own tables. positions:
    int32 [batch], of the new tokens: how many keys come before each of them.
    ParameterError, ArgumentTypeError: as that."""
    held = planes("settled_attention", cache, layer, None)
    arrays = (q, *held.arrays[:2], cache.page_table, positions, rows, None, None)
    return _OP(arrays, (), (held.layout,))


def prepare(q: Any, pages: tuple[Any, Any], page_table: Any, positions: Any, rows: Any) -> None:
    """Compile and load what `settled_attention` needs of a cache with these pages and table."""
    _OP.prepare((q, *pages, page_table, positions, rows), ("nhd",))


def fits(head_dim: int, group: int) -> bool:
    """Whether it takes heads of these sizes. group: query heads of a key head."""
    return head_dim in HEAD_DIMS and group <= kernels.ROWS[0]


def choice(problem: Problem, sms: int) -> tuple[kernels.Tile, int]:
    """The tile, and blocks of each key head of a sequence; 0: those that fill the GPU once."""
    heads = problem["batch"] * problem["heads_kv"] / sms
    dim = next(one for one in HEAD_DIMS if one >= problem["head_dim"])
    return next((tile, each) for least, most, tile, each in _CHOICES[dim] if least <= heads <= most)


def _on_grid(params: Params, problem: Problem, each: int, sms: int, arch: Arch) -> Problem:
    blocks = each * problem["batch"] * grid.heads(params, problem)
    if 0 < blocks <= sms * grid.blocks_of_an_sm(params, arch):
        return {**problem, "blocks": blocks}
    return grid.on_grid(params, problem, sms, arch)


def _check(views: Mapping[str, View | None], layout: str) -> Request:
    q, table, positions = (views[name] for name in ("q", "page_table", "seq_lens"))
    assert q is not None and table is not None and positions is not None
    check_dtype("settled_attention", "positions", positions, ("int32",))
    check_shape("settled_attention", "positions", positions, q.shape[:1], "[batch], here")
    by_row = positions._replace(shape=table.shape[:1])  # as lengths are
    request = check_paged({**{n: views[n] for n in ARRAYS}, "seq_lens": by_row}, Options(layout))
    if not request.launches:
        return request
    (launch,) = request.launches
    sms = CPU_SMS if q.device == CPU else multiprocessors(q.device)
    tile, each = choice(launch.problem, sms)
    params = {**launch.params, "tile": tile, "early": True}
    problem = _on_grid(params, launch.problem, each, sms, arch_of(q))
    size, counters = grid.workspace(params, problem)
    inputs = {name: request.inputs.get(name) for name in ARRAYS} | {"seq_lens": positions}
    made = (Launch(SETTLED, params, problem),)
    return request._replace(inputs=inputs, launches=made, workspace=size, counters=counters)


_OP = Op(
    "settled_attention", inputs=ARRAYS, outputs=("o", "lse"), check=_check,
    optional=ARRAYS[6:],  # scales, which there are none of
)  # fmt: skip
