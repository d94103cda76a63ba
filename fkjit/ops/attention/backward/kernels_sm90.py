"""flash_sm90, attention's backward for Hopper (sm_90a): TMA and wgmma, dk, dv and sums of dq."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from fkjit.arch import Arch
from fkjit.ops.attention import problem as forward
from fkjit.ops.attention.backward import kernels as portable
from fkjit.ops.attention.backward import problem as shared
from fkjit.ops.op.op import Launch
from fkjit.runtime.interop import ITEMSIZE
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Arrays, Dim3, KernelSpec, Param, Params, Problem, SharedLayout, register

HEAD_DIMS = (64, 128)  # what products are padded to
COUNTERS = 1
_BLOCK_K, _PANEL = 128, 64
BLOCK_Q = {64: 128, 128: 64}  # S^T and dK of a warpgroup in registers together
_K_STAGES, _Q_STAGES, _DO_STAGES, _DS_STAGES = 2, 3, 2, 2
SMS = 132  # of an H100 or H200, where a problem does not say
_BARRIER_BYTES = 320 + 8 * 48 + 48


def _derive(params: Params) -> dict[str, Any]:
    return {
        "block_q": BLOCK_Q[params["head_dim"]],
        **dict.fromkeys(("form", "varlen", "softcap", "alibi", "mask"), False),
        "q_stages": _Q_STAGES,
        "do_stages": _DO_STAGES,
        "dq_stages": _dq_stages(params),
        "main_registers": 208,
        "dq_registers": 64,
        "copy_registers": 32,
        "direct": _direct(params),
        **_operands(params),
    }


def _operands(params: Params) -> dict[str, Any]:
    """Where dK takes dS from: with more bytes through shared memory dV is under way while dS is
    made, which is worth it where dq goes that way in turns. And how much a lane has registers to
    read early."""
    if params["head_dim"] > 64:
        ahead = (6, 8) if params["deterministic"] else (8, 2)
    else:
        ahead = (8, 8)
    return {
        "ds_shared": params["deterministic"],
        **dict(zip(("lse_ahead", "delta_ahead"), ahead, strict=True)),
    }


def _direct(params: Params) -> bool:
    """Whether dq goes from registers to L2: fewer bytes through shared memory, more instructions,
    which is worth it where tiles have few queries."""
    return params["head_dim"] > 64 and not params["deterministic"]


def _dq_stages(params: Params) -> int:
    """Parts of dq in shared memory, as many as there is room for."""
    if _direct(params):
        return 0
    return 1 if params["head_dim"] > 64 else 2


def _shared(params: Params) -> SharedLayout:
    """K twice, V, rings of Q and dO, of dS, of dq, of lse_log2 and delta; the mbarriers."""
    d, block_q = params["head_dim"], BLOCK_Q[params["head_dim"]]
    rings = (
        ("K", 2 * _BLOCK_K * d, _K_STAGES), ("V", 2 * _BLOCK_K * d, 1),
        ("Q", 2 * block_q * d, _Q_STAGES), ("dO", 2 * block_q * d, _DO_STAGES),
        ("dS", 2 * _BLOCK_K * block_q, _DS_STAGES),
        ("dQ", 64 * 64 * 4, _dq_stages(params)),
        ("rows", 8 * block_q, _DO_STAGES),
    )  # fmt: skip
    return [
        *((f"{name} stage {i}", size) for name, size, count in rings for i in range(count)),
        ("mbarriers", _BARRIER_BYTES),
    ]


def _heads(problem: Problem) -> int:
    return problem["heads_kv"] * problem["batch"]


def _blocks(problem: Problem) -> int:
    return -(-problem["seqlen_k"] // _BLOCK_K)


def _teams(problem: Problem, rounds: int) -> int:
    """How many heads are under way at once where each takes its blocks in so many rounds."""
    members = -(-_blocks(problem) // rounds)
    return min(problem.get("multiprocessors", SMS) // members, _heads(problem))


def _rounds(params: Params, problem: Problem) -> int:
    """In how many rounds a team of thread blocks goes through a head, where dq has an order (see
    attention/backward_sm90/schedule.cuh): few, as heads under way at once share L2, but two tiles
    between two that come to one, of those that are nearly the fastest by count of blocks."""
    blocks, heads = _blocks(problem), _heads(problem)
    enough = 2 * BLOCK_Q[params["head_dim"]] // _BLOCK_K

    def time(rounds: int) -> int:
        each = -(-heads // _teams(problem, rounds))
        return -(-each // 2) * rounds * (blocks + 1) if problem["causal"] else each * rounds

    legal = [rounds for rounds in range(1, blocks + 1) if _teams(problem, rounds) > 0]
    best = min(map(time, legal))
    near = [rounds for rounds in legal if 20 * time(rounds) <= 21 * best]
    return next((rounds for rounds in near if rounds >= enough), near[-1])


def _grid(params: Params, problem: Problem) -> Dim3:
    """One block an SM, or fewer where there is less to do, or no room for another team."""
    if params["deterministic"]:
        rounds = _rounds(params, problem)
        return (_teams(problem, rounds) * -(-_blocks(problem) // rounds), 1, 1)
    works = _blocks(problem) * _heads(problem)
    return (min(works, problem.get("multiprocessors", SMS)), 1, 1)


def _map(problem: Problem, arrays: Mapping[str, Any], name: str, rows: int) -> TensorMap:
    """[batch, head, row, column] in boxes of `rows` rows and one panel of columns."""
    size = ITEMSIZE[problem["dtype"]]
    batch, heads, count, columns = shared.shape(problem, name)
    steps = tuple(step * size for step in shared.strides(problem, name, arrays))
    return TensorMap(
        arrays[name],
        problem["dtype"],
        (columns, count, heads, batch),
        steps[::-1],
        (_PANEL, rows, 1, 1),
    )


def boxes(params: Params) -> dict[str, int]:
    """Rows of the boxes that an array is loaded in."""
    block_q = BLOCK_Q[params["head_dim"]]
    return {"q": block_q, "dout": block_q, "k": _BLOCK_K, "v": _BLOCK_K}


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    rounds = {"rounds": _rounds(params, problem)} if params["deterministic"] else {}
    return {
        **{
            f"{name}_map": _map(problem, arrays, name, rows) for name, rows in boxes(params).items()
        },
        **{name: arrays[name] for name in ("dk", "dv")},
        **{f"{name}_strides": shared.strides(problem, name, arrays) for name in ("dk", "dv")},
        **{name: problem[name] for name in ("head_dim", "head_dim_v")},
        **{name: arrays.get(name) for name in ("lse_log2", "delta", "dq_sum", "turns")},
        **{name: arrays[name] for name in ("counters",) if name in arrays},
        "batch": problem["batch"],
        **shared.scalars(problem),
        **rounds,
    }


def takes(problem: Problem, aligned: bool, arch: Arch) -> bool:
    """Whether TMA can read the arrays and the kernel suits the problem: rows on 16-byte boundaries,
    no dimension repeated by a stride of 0, a positive scale (signs could not go into q), and enough
    queries for it to pay."""
    if padded_dim(problem) is None or problem["dtype"] == "fp32" or not aligned:
        return False
    if not arch.features >= FLASH_SM90.features({}):
        return False
    if prod(problem[name] for name in shared.SIZES) == 0 or problem["seqlen_q"] <= 32:
        return False
    steps = [
        (step, extent)
        for name in ("q", "k", "v", "dout")
        for step, extent in zip(
            problem["strides"][name], shared.shape(problem, name)[:3], strict=True
        )
    ]
    legal = all(n == 1 or 0 < step < 2**40 // ITEMSIZE[problem["dtype"]] for step, n in steps)
    return legal and problem["softmax_scale"] > 0


def padded_dim(problem: Problem) -> int | None:
    """The compiled head dimension that holds those of a problem, or None."""
    larger = max(problem["head_dim"], problem["head_dim_v"])
    return next((padded for padded in HEAD_DIMS if larger <= padded), None)


def launches(
    problem: Problem, deterministic: bool
) -> tuple[tuple[Launch, ...], dict[str, tuple[int, ...]]]:
    """The kernels of a call, and the shapes of what they hand on beside lse_log2 and delta."""
    dtype, dim = problem["dtype"], padded_dim(problem) or 0
    scratch: dict[str, tuple[int, ...]] = {"dq_sum": (*shared.rows_shape(problem), dim)}
    if deterministic:
        scratch["turns"] = turns_shape(problem)
    params = {"dtype": dtype, "head_dim": dim, "deterministic": deterministic}
    zeros = {**problem, "sum_columns": 0 if deterministic else dim}
    made = (
        Launch(portable.ROWS, {"dtype": dtype, "aligned": True}, zeros),
        Launch(FLASH_SM90, params, problem),
        Launch(portable.DQ, {"dtype": dtype}, {**problem, "sum_columns": dim}),
    )
    return made, scratch


def turns_shape(problem: Problem) -> tuple[int, ...]:
    *more, rows = shared.rows_shape(problem)
    return (*more, rows // portable.TURN_ROWS)


def _problems(params: Params, scale: str) -> Sequence[Problem]:
    """Those of the kernels that add up dq; the small ones on GPUs of two and of many SMs."""
    block_q = BLOCK_Q[params["head_dim"]]
    made = {**params, "head_dim_v": params["head_dim"], "aligned": True}
    found = shared.problems(block_q, _BLOCK_K, made, scale)
    more = {"sum_columns": params["head_dim"], "deterministic": params["deterministic"]}
    if scale == "small":
        found[1] |= {"seqlen_q": 2 * block_q - 3, "seqlen_k": 2 * _BLOCK_K + 1}
        return [{**found[0], **more, "multiprocessors": 2}, {**found[1], **more}]
    return [{**problem, **more} for problem in found]


def _outputs(params: Params, problem: Problem) -> Arrays:
    made = shared.outputs(("dk", "dv"))(params, problem)
    if not params["deterministic"]:
        return made | {
            "dq_sum": sums(params, problem, 0),
            "counters": np.zeros(COUNTERS, np.uint32),
        }
    turns = np.zeros(turns_shape(problem), np.uint32)
    return made | {"dq_sum": sums(params, problem, np.nan), "turns": turns}


def sums(params: Params, problem: Problem, start: float) -> np.ndarray:
    """dq_sum before the kernel: `start`, which may be poison, but for rows of no tile."""
    made = np.full((*shared.rows_shape(problem), problem["sum_columns"]), start, np.float32)
    made[..., _round_up(problem["seqlen_q"], BLOCK_Q[params["head_dim"]]) :, :] = 0
    return made


def _round_up(length: int, step: int) -> int:
    return -(-length // step) * step


def _reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    found = shared.reference(problem, arrays)
    rows = shared.rows_padded(problem) - problem["seqlen_q"]
    columns = problem["sum_columns"] - problem["head_dim"]
    dq = np.pad(found["dq"] / problem["softmax_scale"], ((0, 0), (0, 0), (0, rows), (0, columns)))
    made = {"dk": found["dk"], "dv": found["dv"], "dq_sum": portable.fragments(dq)}
    return made | ({"turns": np.zeros(turns_shape(problem))} if problem["deterministic"] else {})


FLASH_SM90 = register(
    KernelSpec(
        op=portable.OP,
        name="flash_sm90",
        source="attention/backward_sm90.cu",
        entry="attention_flash_backward_sm90",
        doc="dk, dv and sums of dq for Hopper: TMA, wgmma, a warpgroup for dq",
        params=(
            Param("dtype", ("fp16", "bf16"), "element type of q, k, v, dout, dk and dv"),
            Param("head_dim", HEAD_DIMS, "of all arrays, padded to this in shared memory"),
            Param("deterministic", (True, False), "blocks add to dq in a fixed order"),
        ),
        derive=_derive,
        features=lambda params: frozenset({"wgmma"}),
        shared_layout=_shared,
        block=lambda params: (512, 1, 1),
        grid=_grid,
        cooperative=True,  # blocks wait for one another where they add to dq in turn
        flops=shared.flops,
        bytes=shared.traffic,
        shape_class=forward.shape_class,
        interpreter_flops=2e9,
        problems=_problems,
        inputs=shared.inputs,
        outputs=_outputs,
        arguments=_arguments,
        reference=_reference,
        tolerance=shared.tolerance,
    )
)
