"""The kernel of `fkjit.quantized_attention` that any GPU from sm_80 on has.

A problem is attention's (fkjit/ops/attention/problem.py) with a window, v_codes, code ("int8" or
"fp8"), values ("half", "fp8" or "e5m2"), and weights: what probabilities are rounded to.
Arrays: q, k, v, q_scales, k_scales,
v_scales, shift -> o, lse. Packed sequences: as of `quantize_kernels.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.attention.problem import (
    axes,
    flops,
    grid,
    padded_flops,
    row_strides,
    scalars,
    shape_class,
    split_block,
    window,
)
from fkjit.ops.attention.quantized.quantize_kernels import (
    HEAD_DIMS,
    PACKED,
    ROWS,
    is_packed,
    key_places,
    padded,
)
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import KernelSpec, Param, Params, Problem, SharedLayout, Work, register

VALUES = ("half", "fp8", "e5m2")
PROMOTE = (32, 64)  # keys whose sum leaves the tensor core, where any does
_TILES = ((128, 64), (64, 64), (64, 32))
_NARROW = _TILES[-1]  # of 256 columns beside a V of 16 bits, in 99 KB
_STRIDELESS = (0, 0, 0)


def _illegal(params: Params) -> str | None:
    wide, half = params["head_dim"] == HEAD_DIMS[-1], params["values"] == "half"
    if params["values"] == "e5m2" and params["code"] == "int8":
        return "has values of e4m3 beside q and k of int8"
    if half and "fp8" in (params["code"], params["weights"]):
        return "has values of e4m3 where anything is e4m3"
    if params["weights"] == "half" and params["promote"]:
        return "adds up products of 16 bits in the tensor core"
    if wide and params["promote"] == PROMOTE[-1]:
        return "has registers for sums of 32 keys alone (head_dim=256)"
    if params["promote"] == PROMOTE[0] and params["block"][0] == 128:
        return "has no registers for sums of 32 keys beside those of 128 rows"
    if wide and (params["code"], params["weights"]) == ("fp8", "half"):
        return "has no registers for e4m3 of q and k as 16 bits (head_dim=256); int8 has"
    if (params["block"] == _NARROW) != (wide and half):
        return f"is not a tile for head_dim={params['head_dim']} with such values"
    if params["block"][0] == 128 and wide:
        return "needs more shared memory than most GPUs have (head_dim=256)"
    return None


def _warps(params: Params) -> int:
    """Of 32 rows where output, scores and fragments fit in 255 registers, else of 16."""
    block_q = params["block"][0]
    wide = params["head_dim"] == 64 or (params["head_dim"] == 128 and params["values"] == "half")
    return block_q // (32 if block_q == 128 and wide else 16)


def _score_keys(params: Params) -> int:
    """Of a tile whose scores are in registers at a time: few beside the output of 32 rows."""
    (block_q, block_k), wide = split_block(params["block"]), params["head_dim"] == HEAD_DIMS[1]
    if _warps(params) * 32 != block_q or not wide:
        return block_k
    return 32


def _derive(params: Params) -> dict[str, Any]:
    block_q, block_k = split_block(params["block"])
    return {
        "pair": "i8_pair" if params["code"] == "int8" else "e4m3_pair",
        "v_pair": "e4m3_e5m2" if params["values"] == "e5m2" else "e4m3_pair",
        "v_codes": params["values"] != "half", "p_codes": params["weights"] == "fp8",
        "e5m2": params["values"] == "e5m2",
        "block_q": block_q, "block_k": block_k,
        "num_warps": _warps(params), "scale_keys": ROWS,
        "score_keys": _score_keys(params),
    }  # fmt: skip


def _shared(params: Params) -> SharedLayout:
    """Q, where the output is staged, and two stages of K and V."""
    (block_q, block_k), dim = split_block(params["block"]), params["head_dim"]
    v = block_k * dim * (2 if params["values"] == "half" else 1)
    stages = [(f"{name} stage {i}", size) for i in range(2)
              for name, size in (("K", block_k * dim), ("V", v))]  # fmt: skip
    return [("Q or O", 2 * block_q * dim), *stages, ("scales of Q", 4 * block_q)]


def _features(params: Params) -> frozenset[str]:
    fp8 = set() if params["values"] == "half" else {"fp8_mma"}
    return frozenset({"cp_async", "ldmatrix", "bf16_mma"} | fp8)


def traffic(problem: Problem) -> float:
    """Bytes of codes and scales read once, o and lse written once."""
    half = ITEMSIZE[problem["dtype"]]
    d, dv = problem["head_dim"], problem["head_dim_v"]
    of_q, of_k = (problem["batch"] * problem[f"seqlen_{name}"] for name in "qk")
    if is_packed(problem):
        of_q, of_k = problem["total_q"], problem["total_k"]
    queries = problem["heads_q"] * of_q * (d + half * dv + 8)
    return float(
        queries + problem["heads_kv"] * of_k * (d + dv * (1 if problem["v_codes"] else half))
    )


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name."""
    place, (left, right) = axes(problem), window(problem)
    names = ("q", "k", "v", "q_scales", "k_scales", "v_scales", "shift", "o", "lse")
    return {
        **{name: arrays.get(name) for name in names},
        **scalars(problem), **packed_arguments(problem, arrays),
        "v_strides": _STRIDELESS if problem["v_codes"] else row_strides(place, arrays["v"]),
        "o_strides": row_strides(place, arrays["o"]),
        "window_left": left, "window_right": right,
        # A scale of 0 would turn a masked -inf into NaN.
        "softmax_scale": problem["softmax_scale"] or 1e-30,
    }  # fmt: skip


def packed_arguments(problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Those of packed sequences, and how many places a head's keys have."""
    made: dict[str, Any] = {"v_keys": key_places(problem)}
    if is_packed(problem):
        made |= {name: arrays[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
        made |= {name: problem[name] for name in ("total_q", "total_k")}
    return made


FLASH_CODES = register(
    KernelSpec(
        op="quantized_attention",
        name="flash",
        source="attention/flash_codes.cu",
        entry="attention_flash_codes",
        doc="attention.flash on codes: int8 from sm_80, e4m3 from sm_89 on",
        params=(
            Param("dtype", ("fp16", "bf16"), "element type of o, and of v that is no codes"),
            Param("code", ("int8", "fp8"), "codes of q and k: int8 or e4m3"),
            Param("values", VALUES, "v: 16 bits, e4m3 or e5m2"),
            Param("weights", ("half", "fp8"), "probabilities: 16 bits or e4m3"),
            Param(
                "promote",
                (0, *PROMOTE),
                "keys whose sum is added up in fp32; 0: all in the tensor core",
            ),
            Param("head_dim", HEAD_DIMS, "of q, k, v and o, padded to this in shared memory"),
            PACKED,
            Param("block", _TILES, "query rows and keys of a tile", tunable=True),
        ),
        derive=_derive,
        illegal=_illegal,
        features=_features,
        superseded=lambda params: frozenset({"wgmma"} if params["weights"] == "fp8" else ()),
        shared_layout=_shared,
        block=lambda params: (32 * _warps(params), 1, 1),
        grid=grid,
        arguments=arguments,
        shape_class=shape_class,
        work=Work(flops=flops, bytes=traffic, interpreter_work=padded_flops, interpreter_flops=3e9),
        verification="fkjit.ops.attention.quantized.cases:FLASH_CODES",
    )
)


def weights_of(v_codes: bool, arch: Arch) -> str:
    """What probabilities are rounded to. Tensor cores of data centres since Hopper know mma.sync of
    e4m3 only as that of fp16."""
    return "fp8" if v_codes and not (9, 0) <= arch.capability < (12, 0) else "half"


def choose(problem: Problem, promote: int | None, block: Any, arch: Arch) -> dict[str, Any]:
    """The variant for a problem. ParameterError where this GPU has none."""
    values, weights = problem["values"], problem["weights"]
    params: dict[str, Any] = {
        "dtype": problem["dtype"], "code": problem["code"], "values": values, "weights": weights,
        "promote": promote, "head_dim": padded(problem), "packed": is_packed(problem),
        "block": block,
    }  # fmt: skip
    if weights == "half":
        params["promote"] = 0
    elif promote is None:
        params["promote"] = PROMOTE[0 if params["head_dim"] == HEAD_DIMS[-1] else -1]
    if not arch.features >= _features(params):
        raise ParameterError(
            f"quantized_attention: scheme with {'int8' if values == 'half' else 'e4m3'} on "
            f"{arch.name}; allowed: "
            + ("'int8' from sm_80, others from sm_89 on" if values != "half" else "GPUs from sm_80")
        )
    if block is None:
        legal = FLASH_CODES.legal_values("block", params, arch)
        few = [tile for tile in legal if tile[0] <= max(problem["seqlen_q"], 64)]
        params["block"] = (few or legal or _TILES)[0]
    FLASH_CODES.check(params, arch)
    return params
