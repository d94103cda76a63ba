"""Mixed batches of `paged_attention`: sequences of one new token and others, whichever they are
when the kernels run. On Hopper one launch does both (attention/mixed/work_items.cuh); elsewhere,
and with what that does not know, decoding's kernel those of one token and prefill's the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fkjit.errors import ParameterError
from fkjit.ops.attention.decode import grid
from fkjit.ops.attention.decode.checks import CPU_SMS, check_aligned
from fkjit.ops.attention.decode.kernels import select
from fkjit.ops.attention.feature_kernels import kernel_with
from fkjit.ops.attention.features import LISTED, ScoreFeatures, parse
from fkjit.ops.attention.kernels_mixed import MIXED_PLAN
from fkjit.ops.attention.kernels_sm90 import COUNTERS, FLASH_SM90
from fkjit.ops.op.op import Launch, Output, Request, arch_of
from fkjit.runtime.interop import View
from fkjit.spec import Problem

_ONE_TOKEN = (0, 1, None)  # axes of packed rows, one of a sequence
_WIDEST_WITH_ARRAYS = 128
_PAGED_ALONE = ScoreFeatures(varlen=True, paged=True, mixed=True).text
_ONE_LAUNCH = ((64, 64), (96, 96), (128, 128))  # padded head dimensions
_BLOCK, _WARP_ROWS, _PANEL = 128, 16, 64
_CPU_BLOCKS = 3  # of one launch where blocks are interpreted
_LEAST_CREWS = 8  # of a grid where heads go abreast: decoding gets whole crews
# What a tile's key costs an SM where one of a single token's KV head costs 1
# (bench/notes/attention_sm90.md).
_TILE_WEIGHT = 0.75


def decodes(call: str, seen: Mapping[str, View], problem: Problem) -> bool:
    """Whether decoding's kernel reads these arrays."""
    wide = max(problem["head_dim"], problem["head_dim_v"]) > _WIDEST_WITH_ARRAYS
    if wide and ("bias" in seen or "mask" in seen):
        return False
    try:
        check_aligned(call, seen)
    except ParameterError:
        return False
    return True


def with_decode(request: Request, table_rows: int) -> Request:
    """A request of prefill whose kernel leaves out sequences of one token, and what makes these.
    Where no sequence has more, that alone."""
    (prefill,) = request.launches
    if _is_for_one(prefill):
        return _one_launch(request, prefill, table_rows)
    seen, problem = request.inputs, prefill.problem
    q = seen["q"]
    assert q is not None  # the op has looked
    text = replace(
        parse(prefill.params["form"]), varlen=True, paged=False, codes="", mixed=False
    ).text
    arch = arch_of(q)
    one = {
        **problem, "axes": _ONE_TOKEN, "seqlen_q": 1, "longest": problem["seqlen_k"],
        "table_rows": table_rows, "split": 0, "causal": False,  # the window has it
    }  # fmt: skip
    spec, params = select(one, arch, text)
    one = grid.on_grid(params, one, one.get("multiprocessors", CPU_SMS), arch)
    size, counters = grid.workspace(params, one)
    launches, outputs = [Launch(spec, params, one)], dict(request.outputs)
    if problem["seqlen_q"] > 1:
        launches.append(prefill)
        if prefill.spec.name == FLASH_SM90.name:
            plan = {"threads": MIXED_PLAN.params[0].values[0]}
            launches.insert(0, Launch(MIXED_PLAN, plan, problem))
            outputs[LISTED] = Output((1 + problem["batch"],), "int32", returned=False)
    return request._replace(
        outputs=outputs, launches=tuple(launches), workspace=size,
        counters=max(request.counters, counters),
    )  # fmt: skip


# ------------------------------------------------------------------ one launch


def _is_for_one(prefill: Launch) -> bool:
    """Whether the kernel of prefill has decoding's part as well: 16-bit pages, windows and sinks,
    two consumers whose tiles have room for decoding's rings."""
    if prefill.spec.name != FLASH_SM90.name or prefill.problem["seqlen_q"] == 1:
        return False
    features, problem = parse(prefill.params["form"]), prefill.problem
    if replace(features, sinks=False).text != _PAGED_ALONE:
        return False
    dims = prefill.params["head_dim"], prefill.params["head_dim_v"]
    return dims in _ONE_LAUNCH and problem["heads_q"] // problem["heads_kv"] <= _WARP_ROWS


def _one_launch(request: Request, prefill: Launch, table_rows: int) -> Request:
    problem = prefill.problem
    form = replace(parse(prefill.params["form"]), mixed=False, together=True).text
    spec = kernel_with(FLASH_SM90, form)
    params = {**prefill.params, "block": _BLOCK, "form": form}
    blocks, heads = problem.get("multiprocessors", _CPU_BLOCKS), problem["heads_kv"]
    slots = 2 * blocks
    more = {
        "table_rows": table_rows, "slots": slots, "tile_weight": _TILE_WEIGHT,
        "abreast": heads if heads * _LEAST_CREWS <= blocks else 1,
    }  # fmt: skip
    width = -(-params["head_dim"] // _PANEL) * _PANEL
    rows = problem["heads_q"] // heads
    return request._replace(
        launches=(Launch(spec, params, {**problem, "blocks": blocks, "together": more}),),
        workspace=4 * slots * rows * (width + 2),
        counters=COUNTERS + min(problem["batch"] * heads, blocks),
    )
