"""flash_sm90, attention's backward for Hopper, with a form rendered in: a band of keys, a soft cap
or ALiBi slopes, packed sequences. Sinks are in lse alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from fkjit.arch import Arch
from fkjit.ops.attention.backward import feature_kernels as portable
from fkjit.ops.attention.backward import feature_problem as forms
from fkjit.ops.attention.backward import kernels as plain
from fkjit.ops.attention.backward import kernels_sm90 as hopper
from fkjit.ops.attention.backward import mask_bits as masks
from fkjit.ops.attention.backward import problem as shared
from fkjit.ops.attention.features import Form, parse
from fkjit.ops.op.op import Launch, arch_of
from fkjit.runtime.interop import ITEMSIZE
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Arrays, Dim3, KernelSpec, Param, Params, Problem, SharedLayout, register

_BASE = hopper.FLASH_SM90
_BLOCK_K, _PANEL = 128, 64
_RAGGED_ROWS = 128  # templates/attention/backward_sm90/tensor_rows.cuh
_NOTE_BYTES = 2 * 16  # keys of two pieces
_LEAST_CAP = 1.0  # derivatives come from probabilities of 16 bits: beside it they are off by little
# What is compiled ahead, of one head dimension each; every other form when it is first called.
MASKS = False  # whether masks are taken: their numbers have been seen in the interpreter alone
SHOWN = {Form(alibi=True, mask=True).text: 64, Form(softcap=True, varlen=True).text: 128}
_FORM = "what it does beside causal attention"


def _derive(params: Params) -> dict[str, Any]:
    values = {**parse(params["form"]).values(), "seqlen_q": "seqlen_q", "seqlen_k": "seqlen_k"}
    # Rules for scores take registers.
    ahead = {"lse_ahead": 0, "delta_ahead": 0} if params["head_dim"] > 64 else {}
    usual, spared = _BASE.derive(params), _spared(params)
    fewer = {spared: usual[spared] - 1} if spared else {}
    if spared == "q_stages":  # a tile of Q must be free before the next one's dK is multiplied
        fewer["ds_shared"] = False
    return {**usual, **ahead, **values, **fewer}


def _spared(params: Params) -> str:
    """Stages of what are fewer by one, so that bits of a mask have room."""
    if not parse(params["form"]).mask or (params["head_dim"] > 64 and not params["deterministic"]):
        return ""
    return "q_stages" if params["head_dim"] > 64 else "dq_stages"


def _shared(params: Params) -> SharedLayout:
    """As without a form; bits of a mask with what rows bring along, and more notes."""
    assert _BASE.shared_layout is not None
    bits = _BLOCK_K * hopper.BLOCK_Q[params["head_dim"]] // 8 * parse(params["form"]).mask
    *parts, (name, size) = _BASE.shared_layout(params)
    left_out = {"": "", "q_stages": "Q stage 2", "dq_stages": "dQ stage 1"}[_spared(params)]
    found = [(n, of + bits * n.startswith("rows")) for n, of in parts if n != left_out]
    return [*found, (name, size + _NOTE_BYTES)]


def _abreast(params: Params, problem: Problem) -> int:
    """Heads whose blocks of keys are drawn in turns, where dq has an order (see
    templates/attention/backward_sm90/features_schedule.cuh): several times as many blocks as run at
    a time, but what L2 has room for; and so that there is an even number of such sections."""
    blocks = -(-problem["seqlen_k"] // _BLOCK_K)
    heads = problem["heads_kv"] * problem["batch"]
    enough = 256 // params["head_dim"] * problem.get("multiprocessors", hopper.SMS)
    pairs = max(1, round(heads * blocks / enough / 2))
    return -(-heads // (2 * pairs))


def _grid(params: Params, problem: Problem) -> Dim3:
    """One block an SM, or fewer where there is less to do."""
    blocks = -(-problem["seqlen_k"] // _BLOCK_K)
    works = blocks * problem["heads_kv"] * problem["batch"]
    return (min(works, problem.get("multiprocessors", hopper.SMS)), 1, 1)


def _map(problem: Problem, arrays: Mapping[str, Any], name: str, rows: int) -> TensorMap:
    """In boxes of `rows` rows and one panel of columns."""
    size = ITEMSIZE[problem["dtype"]]
    array = arrays[name]
    batch, heads, row = (step * size for step in forms.strides(problem, name, array))
    count, head_count, length, columns = shared.shape(problem, name)
    box = (_PANEL, rows, 1, 1)
    if "total_q" not in problem:
        steps = (row, heads, batch)
        return TensorMap(array, problem["dtype"], (columns, length, head_count, count), steps, box)
    dims = (columns, _RAGGED_ROWS, head_count, array.shape[0] + 1)
    return TensorMap(
        array, problem["dtype"], dims, (row, heads, row), box, origin=-_RAGGED_ROWS * row
    )


def _bits_strides(params: Params, problem: Problem) -> tuple[int, int, int]:
    has = parse(params["form"]).mask
    return masks.strides(hopper.BLOCK_Q[params["head_dim"]], problem) if has else (0, 0, 0)


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    boxes = hopper.boxes(params)
    return {
        **forms.arguments(params, problem, arrays),
        **{f"{name}_map": _map(problem, arrays, name, rows) for name, rows in boxes.items()},
        **{name: arrays[name] for name in ("dk", "dv", "counters") if name in arrays},
        **{f"{name}_strides": forms.strides(problem, name, arrays[name]) for name in ("dk", "dv")},
        **{name: problem[name] for name in ("head_dim", "head_dim_v")},
        "mask_bits": arrays.get("mask_bits"),
        "mask_bits_strides": _bits_strides(params, problem),
        "rounds": _abreast(params, problem),
        "seqlen_q": problem["seqlen_q"],
        "seqlen_k": problem["seqlen_k"],
    }


def _problems(params: Params, scale: str) -> Sequence[Problem]:
    """Windows, keys that nobody sees, rows that see none; packed with an empty sequence; the small
    ones on GPUs of two SMs."""
    block_q, form = hopper.BLOCK_Q[params["head_dim"]], parse(params["form"])
    few, many = (1, 3) if scale == "small" else (5, 17)
    base = {
        "dtype": params["dtype"], "head_dim": params["head_dim"], "head_dim_v": params["head_dim"],
        "heads_q": 2, "heads_kv": 1, "causal": False, "score_scalars": {},
        "softcap": 2.0 * form.softcap,
        "bias_shape": (1, 1, 1), "softmax_scale": params["head_dim"] ** -0.5,
        "sum_columns": params["head_dim"], "multiprocessors": 2 if scale == "small" else 132,
        "deterministic": params["deterministic"],
    }  # fmt: skip
    long, short = many * block_q - 3, few * 128 + 5
    if form.varlen:
        lengths = ((5, 0, long, 9), (40, 130, short, 0))
        total_q, total_k = (sum(of) + 3 for of in lengths)  # rows behind the last sequence
        more = {
            "batch": 4, "lengths": lengths, "total_q": total_q, "total_k": total_k,
            "axes": forms.forward.PACKED_AXES, "seqlen_q": long, "seqlen_k": short,
        }  # fmt: skip
        return [{**base, **more, "window": (long, 0)}]
    more = {"batch": 1, "axes": (0, 1, 2, 3)}
    return [
        {**base, **more, "seqlen_q": sq, "seqlen_k": sk, "window": band, "mask_shape": (1, 1, sq)}
        for sq, sk, band in ((long, short, (70, 0)), (40, 2 * short, (50, 6)))
    ]


def _inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """NaN behind the last sequence, and in rows that nobody may look at; bits of a mask."""
    made = forms.inputs({**params, "head_dim_v": params["head_dim"]}, problem, rng)
    if "mask" in made:
        block_q = hopper.BLOCK_Q[params["head_dim"]]
        made["mask_bits"] = masks.bits(block_q, problem, made["mask"])
    if "total_q" in problem:
        for side, names in zip("qk", (("q", "dout"), ("k", "v")), strict=True):
            for name in names:
                made[name][made[f"cu_seqlens_{side}"][-1] :] = np.nan
    return made


def _turns(problem: Problem) -> np.ndarray:
    """As the kernel for rows leaves them: something where there is no row of a sequence."""
    found = forms.padded(problem, 7.0 * ("total_q" in problem))
    ends = {"cu_seqlens_q": np.cumsum((0, *problem["lengths"][0]))} if "lengths" in problem else {}
    for b, length in enumerate(problem["lengths"][0] if ends else ()):
        none = np.zeros((problem["heads_q"], length))
        forms.store_rows(problem, ends, found, b, none, 0.0)
    return found[..., :: plain.TURN_ROWS]


def _outputs(params: Params, problem: Problem) -> Arrays:
    """Of packed arrays zeros, as rows of no sequence, or of one without the other's, are left."""
    made = forms.outputs(params, {**problem, "alibi_batches": 1})
    packed = "total_q" in problem
    found = {name: np.full_like(made[name], 0 if packed else np.nan) for name in ("dk", "dv")}
    found["counters"] = np.zeros(hopper.COUNTERS, np.uint32)
    if params["deterministic"]:
        found["turns"] = _turns(problem).astype(np.uint32)
    start = np.nan if params["deterministic"] and not packed else 0
    return found | {"dq_sum": hopper.sums(params, problem, start)}


def _reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    found = forms.reference(problem, arrays)
    made = {name: found[name] for name in ("dk", "dv")}
    if problem["deterministic"]:
        made["turns"] = _turns(problem)
    sums = np.zeros((*shared.rows_shape(problem), problem["sum_columns"]))
    for b, queries, _ in forms.sequences(problem, arrays):
        rows = found["dq"][queries] / problem["softmax_scale"]
        rows = rows.swapaxes(0, 1) if "total_q" in problem else rows
        first = forms.first_row(problem, arrays, b)
        own = sums[0 if "total_q" in problem else b]
        own[:, first : first + rows.shape[1], : rows.shape[2]] = rows
    return made | {"dq_sum": plain.fragments(sums)}


FLASH_SM90 = replace(
    _BASE,
    op=portable.OP,
    params=(*_BASE.params, Param("form", tuple(SHOWN), _FORM)),
    derive=_derive,
    shared_layout=_shared,
    shared_bytes=lambda params: sum(size for _, size in _shared(params)),
    grid=_grid,
    shape_class=forms.shape_class,
    problems=_problems,
    inputs=_inputs,
    outputs=_outputs,
    arguments=_arguments,
    reference=_reference,
)
register(
    replace(
        FLASH_SM90,
        illegal=lambda params: (
            None if SHOWN[params["form"]] == params["head_dim"] else "is not compiled ahead"
        ),
        params=tuple(
            replace(param, values=("bf16",)) if param.name == "dtype" else param
            for param in FLASH_SM90.params
        ),
    )
)


@lru_cache(maxsize=1024)
def kernel(form: str) -> KernelSpec:
    """The kernel with any form."""
    return replace(FLASH_SM90, params=(*_BASE.params, Param("form", (form,), _FORM)))


def takes(problem: Problem, views: Mapping[str, Any], form: str, rows: Launch, arch: Arch) -> bool:
    """Whether TMA can read the arrays and the kernel knows the form."""
    aligned = bool(rows.params["aligned"])
    one = parse(form)
    if (one.softcap and one.alibi) or one.bias or one.score_mod:
        return False
    if one.mask and (one.varlen or not MASKS):  # which sequence a tile is of is not noted
        return False
    if one.softcap and problem["softcap"] < _LEAST_CAP:
        return False
    if "strides" in problem:
        return hopper.takes(problem, aligned, arch)
    strides = {name: (1, *views[name].strides[1::-1]) for name in shared.GIVEN}
    return hopper.takes({**problem, "strides": strides}, aligned, arch)


def in_order(problem: Problem, deterministic: bool) -> bool:
    """Whether blocks add to dq in order: also where any would do, if there is a band of keys. Then
    nobody waits (see _abreast), and sums are not set to 0 before."""
    bounds = max(problem["seqlen_q"], problem["seqlen_k"])
    return deterministic or min(problem["window"]) < bounds


def launches(
    views: Mapping[str, Any], form: str, rows: Launch, problem: dict[str, Any],
    wanted: tuple[str, ...], deterministic: bool,
) -> list[Launch]:  # fmt: skip
    """What rows bring along, then dk, dv and dq, or sums of dq first; none where other kernels are
    to do it."""
    summed = {"q", "k"} <= set(wanted) and "alibi_slopes" not in wanted
    if not summed or not takes(problem, views, form, rows, arch_of(views["q"])):
        return []
    dtype, dim = problem["dtype"], hopper.padded_dim(problem) or 0
    problem["sum_columns"] = dim
    ordered = in_order(problem, deterministic)
    if ordered:
        problem["turn_rows"] = plain.TURN_ROWS
    params = {"dtype": dtype, "head_dim": dim, "deterministic": ordered, "form": form}
    dq = portable.PACKED_DQ if "total_q" in problem else plain.DQ
    bits = []
    if views["mask"] is not None:
        tile = hopper.BLOCK_Q[dim]
        problem["mask_shape"] = masks.own_shape(views["mask"])
        problem["bits_shape"] = masks.shape(tile, problem)
        bits = [Launch(masks.MASK, {"block_q": tile}, problem)]
    zeros = 0 if ordered else dim  # in order the first one to come stores
    return [
        *bits,
        Launch(rows.spec, rows.params, {**problem, "sum_columns": zeros}),
        Launch(kernel(form), params, problem),
        Launch(dq, {"dtype": dtype}, problem),
    ]


def counters(launches: Sequence[Launch]) -> int:
    """How many a call needs."""
    return hopper.COUNTERS * any(launch.spec.name == _BASE.name for launch in launches)
