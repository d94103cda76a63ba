"""Mixed batches of `paged_attention`: sequences of one new token by decoding's kernel, others by
that of prefill, whichever they are when the kernels run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fkjit.errors import ParameterError
from fkjit.ops.attention.decode import grid
from fkjit.ops.attention.decode.checks import CPU_SMS, check_aligned
from fkjit.ops.attention.decode.kernels import select
from fkjit.ops.attention.features import LISTED, parse
from fkjit.ops.attention.kernels_mixed import MIXED_PLAN
from fkjit.ops.attention.kernels_sm90 import FLASH_SM90
from fkjit.ops.op.op import Launch, Output, Request, arch_of
from fkjit.runtime.interop import View
from fkjit.spec import Problem

_ONE_TOKEN = (0, 1, None)  # axes of packed rows, one of a sequence
_WIDEST_WITH_ARRAYS = 128


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
