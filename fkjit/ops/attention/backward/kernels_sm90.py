"""flash_sm90, attention's backward for Hopper (sm_90a): TMA and wgmma, dk, dv and sums of dq.

Of score features it takes a band of keys, a soft cap or ALiBi slopes, a bias in 16 bits or a mask,
and packed sequences; sinks are in lse alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from fkjit.arch import Arch
from fkjit.ops.attention.backward import problem
from fkjit.ops.attention.backward.kernels_preprocess import CASES, OP
from fkjit.ops.attention.backward.problem import Options
from fkjit.ops.attention.backward.schedule_sm90 import grid, is_several, order
from fkjit.ops.attention.backward.tiles import BLOCK_K_SM90 as BLOCK_K
from fkjit.ops.attention.backward.tiles import WIDE_SM90, block_q_sm90, is_paired
from fkjit.ops.attention.features import ScoreFeatures, parse
from fkjit.ops.attention.problem import shape_class
from fkjit.runtime.interop import ITEMSIZE, View
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import KernelSpec, Param, Params, Problem, SharedLayout, Work

# What products are padded to, where warpgroups have keys of their own.
HEAD_DIMS = tuple(dim for dim, keys in BLOCK_K.items() if keys == 128)
COUNTERS = 1
_PANEL = 64
_K_STAGES, _Q_STAGES, _DO_STAGES, _DS_STAGES = 2, 3, 2, 2
_BARRIER_BYTES = 320 + 8 * 48 + 48
_NOTE_BYTES = 2 * 16  # keys of two work items
_RAGGED_ROWS = 128  # templates/attention/backward_sm90/tensor_rows.cuh
_ONE = ("1", "1.", "1.0", "1.f", "1.0f")  # derivatives of a score_mod that only adds
_LEAST_CAP = 1.0  # derivatives come from probabilities of 16 bits: beside it they are off by little


def width(head_dim: int) -> int:
    """Columns of sums of dq, and of tiles: whole panels, of which products leave some."""
    return -(-head_dim // _PANEL) * _PANEL


def _features(params: Params) -> ScoreFeatures | None:
    return parse(params["form"]) if "form" in params else None


def is_curved(features: ScoreFeatures) -> bool:
    """Whether a score_mod does more than add, so that its derivative is asked for."""
    return bool(features.score_mod) and features.score_mod_grad.strip() not in _ONE


# ------------------------------------------------------------------ the variant


def _derive(params: Params) -> dict[str, Any]:
    return {
        "block_q": block_q_sm90(params),
        **dict.fromkeys(("form", "varlen", "softcap", "alibi", "bias", "mask"), False),
        **{"bias_address": "nullptr", "bias_dtype": "float", "dbias": False, "dbias_sums": False},
        "has_mod": False,
        "curved": False,
        "q_stages": _Q_STAGES,
        "do_stages": _DO_STAGES,
        "dq_stages": _dq_stages(params),
        "main_registers": 208,
        "dq_registers": 64,
        "copy_registers": 32,
        "direct": _direct(params),
        **_operands(params),
        **_feature_values(params),
    }


def _operands(params: Params) -> dict[str, Any]:
    """Where dK takes dS from: with more bytes through shared memory dV is under way while dS is
    made, which is worth it where dq goes that way in order. And how much a lane has registers to
    read early."""
    if params["head_dim"] > 96:
        ahead = (6, 8) if params["deterministic"] else (8, 2)
    else:
        ahead = (8, 8)
    return {
        "ds_shared": params["deterministic"],
        **dict(zip(("lse_ahead", "delta_ahead"), ahead, strict=True)),
    }


def _feature_values(params: Params) -> dict[str, Any]:
    """Template values in place of those without features: rules for scores take registers."""
    features = _features(params)
    if features is None:
        return {}
    values = {**features.values(), "seqlen_q": "seqlen_q", "seqlen_k": "seqlen_k"}
    values["curved"] = is_curved(features)
    if params["head_dim"] > 64 or features.bias:
        values |= {"lse_ahead": 0, "delta_ahead": 0}
    if features.bias:
        values["bias_address"] = "&bias_map"
    own = features.dbias and not features.dbias_sums
    values["bias_batch"] = ", const int bias_batch" if own else ""
    stages = _stages(params)
    values |= stages
    if (
        stages["q_stages"] < _Q_STAGES
    ):  # a tile of Q must be free before the next one's dK is multiplied
        values["ds_shared"] = False
    return values


def _stages(params: Params) -> dict[str, int]:
    """Tiles of Q and parts of dq in shared memory: fewer where a bias or a mask needs the room."""
    stages, features = {"q_stages": _Q_STAGES, "dq_stages": _dq_stages(params)}, _features(params)
    if features is None or not (features.bias or features.mask):
        return stages
    if params["head_dim"] > 64:
        stages["q_stages"] -= params["deterministic"]
    else:
        stages["dq_stages"] -= 1
        stages["q_stages"] -= bool(features.bias)
    return stages


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
    """K twice, V, rings of Q and dO, of dS, of dq, a tile of a bias, a ring of lse_log2 and delta
    with the bits of a mask; the mbarriers with what is noted of tiles."""
    d, block_q = width(params["head_dim"]), block_q_sm90(params)
    block_k, features = BLOCK_K[params["head_dim"]], _features(params)
    stages = _stages(params)
    bits = block_k * block_q // 8 if features is not None and features.mask else 0
    bias = int(features is not None and bool(features.bias))
    rings = (
        ("K", 2 * block_k * d, _K_STAGES), ("V", 2 * block_k * d, 1),
        ("Q", 2 * block_q * d, stages["q_stages"]), ("dO", 2 * block_q * d, _DO_STAGES),
        ("dS", 2 * block_k * block_q, _DS_STAGES),
        ("dQ", 64 * 64 * 4, stages["dq_stages"]),
        ("bias", 2 * block_k * block_q, bias),
        ("rows", 8 * block_q + bits, _DO_STAGES),
    )  # fmt: skip
    return [
        *((f"{name} stage {i}", size) for name, size, count in rings for i in range(count)),
        ("mbarriers", barrier_bytes(features is not None)),
    ]


def barrier_bytes(features: bool) -> int:
    """Of the mbarriers and of what is noted of tiles, with score features also of work items."""
    return _BARRIER_BYTES + _NOTE_BYTES * features


# ------------------------------------------------------------------ arguments


def rows_map(one: Problem, arrays: Mapping[str, Any], name: str, rows: int) -> TensorMap:
    """In boxes of `rows` rows and one panel of columns. Of packed arrays it begins before the first
    row, so that a box ends where a sequence does."""
    size, array = ITEMSIZE[one["dtype"]], arrays[name]
    batch, heads, row = (step * size for step in problem.strides(one, name, array))
    count, head_count, length, columns = problem.shape(one, name)
    box = (_PANEL, rows, 1, 1)
    if "total_q" not in one:
        steps = (row, heads, batch)
        return TensorMap(array, one["dtype"], (columns, length, head_count, count), steps, box)
    dims = (columns, _RAGGED_ROWS, head_count, array.shape[0] + 1)
    return TensorMap(array, one["dtype"], dims, (row, heads, row), box, origin=-_RAGGED_ROWS * row)


def arguments(params: Params, one: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    block_q, block_k = block_q_sm90(params), BLOCK_K[params["head_dim"]]
    features, boxes = _features(params), {"q": block_q, "dout": block_q, "k": block_k, "v": block_k}
    masked = features is not None and features.mask
    return {
        **problem.arguments(params, one, arrays),
        **{f"{name}_map": rows_map(one, arrays, name, rows) for name, rows in boxes.items()},
        **{name: arrays[name] for name in ("counters",) if name in arrays},
        "mask_bits": arrays.get("mask_bits"),
        "mask_bits_strides": problem.bits_strides(block_q, one) if masked else (0, 0, 0),
        "rounds": order(params, one),
        "bias_map": _bias_map(one, arrays["bias"], features.bias, block_q)
        if features is not None and features.bias else None,
    }  # fmt: skip


def _bias_map(one: Problem, bias: Any, dtype: str, rows: int) -> TensorMap:
    """In boxes of `rows` rows and one panel of keys; a dimension that is broadcast has a stride of
    0."""
    sizes = tuple(one[name] for name in ("seqlen_k", "seqlen_q", "heads_q", "batch"))
    steps = [step if n > 1 else 0 for step, n in zip(bias.strides[:3], bias.shape[:3], strict=True)]
    return TensorMap(bias, dtype, sizes, tuple(steps[::-1]), (_PANEL, rows, 1, 1))


# ------------------------------------------------------------------ when it is taken


def takes(
    one: Problem, options: Options, aligned: bool, arch: Arch, bias: View | None = None
) -> bool:
    """Whether the kernel knows the score features and suits the problem, and TMA can read the
    arrays: rows on 16-byte boundaries, no dimension repeated by a stride of 0 but of a bias."""
    if padded_dims(one) is None or one["dtype"] == "fp32" or not aligned:
        return False
    if not arch.features >= FLASH_SM90.features({}) or not _suits(one, options):
        return False
    if options.features and not _knows(parse(options.features), one):
        return False
    if is_wide(one) and not _knows_wide(parse(options.features), options.wanted):
        return False
    if bias is not None and not _is_aligned(bias):
        return False
    of = slice("total_q" in one, 3)  # packed arrays have no batches
    steps = [
        (step, extent)
        for name in ("q", "k", "v", "dout")
        for step, extent in zip(
            one["strides"][name][of], problem.shape(one, name)[:3][of], strict=True
        )
    ]
    return all(n == 1 or 0 < step < 2**40 // ITEMSIZE[one["dtype"]] for step, n in steps)


def _suits(one: Problem, options: Options) -> bool:
    """Enough queries for it to pay, a positive scale (signs could not go into q), and gradients of
    what it makes."""
    if prod(one[name] for name in problem.SIZES) == 0 or one["seqlen_q"] <= 32:
        return False
    return {"q", "k"} <= set(options.wanted) and one["softmax_scale"] > 0


def _knows(features: ScoreFeatures, one: Problem) -> bool:
    if features.softcap and (features.alibi or features.bias):
        return False
    mod = features.score_mod  # whose place is noted where it is dense
    if mod and (features.varlen or features.softcap or features.alibi or features.mask):
        return False
    if features.bias and is_curved(features):
        return False
    if features.bias == "fp32" or (features.bias and features.mask):  # there is no room
        return False
    return not features.softcap or one["softcap"] >= _LEAST_CAP


def _knows_wide(features: ScoreFeatures, wanted: tuple[str, ...]) -> bool:
    """There is no room for a tile of a bias, and gradients of slopes are made up to 128."""
    return not (features.bias or features.score_mod or "alibi_slopes" in wanted)


def _is_aligned(bias: View) -> bool:
    """Whether its rows start on 16-byte boundaries."""
    size = ITEMSIZE[bias.dtype]
    pairs = zip(bias.strides[:3], bias.shape[:3], strict=True)
    return not (bias.pointer % 16 or any(n > 1 and step * size % 16 for step, n in pairs))


def padded_dims(one: Problem) -> dict[str, int] | None:
    """The compiled head dimensions that hold those of a problem, as parameters, or None."""
    d, dv = one["head_dim"], one["head_dim_v"]
    same = next((dim for dim in HEAD_DIMS if max(d, dv) <= dim), None)
    if same is not None:
        return {"head_dim": same}
    pairs = (pair for pair in WIDE_SM90 if d <= pair[0] and dv <= pair[1])
    found = min(pairs, key=sum, default=None)
    return found and {"head_dim": found[0], "head_dim_v": found[1]}


def is_wide(one: Problem) -> bool:
    """Whether the kernel for head dimensions above 128 is the one that would take a problem."""
    return padded_dims(one) not in [None, *({"head_dim": dim} for dim in HEAD_DIMS)]


def in_order(one: Problem, options: Options) -> bool:
    """Whether blocks add to dq in order: also where any would do, if there is a band of keys. Then
    nobody waits (see _abreast), and sums are not set to 0 before. Without features, where there are
    more blocks than SMs: causal ones are shared out more evenly in order (heads that share keys
    make longer work items, of which there are few), and those of 192 columns were 2 to 9 % faster.
    Thread blocks that come in pairs know no other way."""
    dims = padded_dims(one) or {}
    if options.deterministic or is_paired({**dims, "deterministic": True}):
        return True
    if options.features:  # a score_mod finds more registers in order, and a wide one's soft cap
        banded, features = (
            min(one["window"]) < max(one["seqlen_q"], one["seqlen_k"]),
            parse(options.features),
        )
        return banded or bool(features.score_mod) or (features.softcap and is_wide(one))
    params = {**dims, "deterministic": False}
    several = is_several(params, one)
    shared = one["causal"] and one["heads_q"] > one["heads_kv"] and not is_wide(one)
    return several and (shared or dims.get("head_dim_v") == 192)


FLASH_SM90 = KernelSpec(
    op=OP,
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
    grid=grid,
    cooperative=True,  # blocks wait for one another where they add to dq in order
    shape_class=shape_class,
    arguments=arguments,
    work=Work(flops=problem.flops, bytes=problem.traffic, interpreter_flops=2e9),
    verification=f"{CASES}_sm90:FLASH_SM90",
)
