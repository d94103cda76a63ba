"""Which attention kernel, and which of its variants, a problem gets."""

from __future__ import annotations

from typing import Any

from fkjit import tuning
from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.attention import kernels_sm90 as hopper
from fkjit.ops.attention.kernels import (
    FLASH,
    FLASH_FP32,
    FLASH_SM75,
    HEAD_DIMS,
    NAIVE,
    PAIRS,
    SIMT_DIMS,
    TILED,
)
from fkjit.ops.attention.problem import split_block
from fkjit.spec import KernelSpec, Params, Problem

_WARPS = 8  # two a scheduler: one computes its softmax while the other keeps the tensor cores busy
_RESERVED = 1024  # bytes of shared memory that the system takes of each block

# Preferred tiles by padded head_dim, fastest first (bench/NOTES.md); the first is taken of which
# enough warps fit on an SM, else the first.
_PREFERENCE: dict[str, dict[int, tuple[Any, ...]]] = {
    "flash": {
        **dict.fromkeys((32, 64), (128, (128, 64), 64, 32, 16)),
        **dict.fromkeys((96, 128), ((128, 64), (128, 48), (64, 32), 64, 32, 16)),
        **dict.fromkeys((192, 256), ((128, 64), (64, 32), 64, 32, 16)),
    },
    "flash_sm75": {
        **dict.fromkeys((32, 64), ((128, 64), 64, (64, 32), 32, 16)),
        **dict.fromkeys((96, 128, 192, 256), (64, (64, 32), 32, 16)),
    },
    "flash_fp32": dict.fromkeys(SIMT_DIMS, (64, (64, 32), 32, 16)),
    "tiled": dict.fromkeys(SIMT_DIMS, (64, 32, 16)),
}


def implementation(impl: str, dtype: str, arch: Arch, hopper_takes: bool = False) -> KernelSpec:
    """The kernel of an implementation for a dtype on an architecture; "auto" is flash.

    `hopper_takes`: whether these arrays and this problem suit TMA (`attention_hopper.takes`).
    """
    if impl in ("naive", "tiled"):
        return NAIVE if impl == "naive" else TILED
    if dtype != "fp32" and hopper_takes and hopper.suits(arch):
        return hopper.FLASH_SM90
    if dtype != "fp32" and arch.features >= FLASH.features({}):
        return FLASH
    return FLASH_SM75 if dtype == "fp16" else FLASH_FP32


def parameters(
    spec: KernelSpec, problem: Problem, block: Any, aligned: bool, arch: Arch
) -> dict[str, Any]:
    """The variant for a problem: its dtype, padded head dimensions, the tile asked for or chosen.

    ParameterError when the tile is not legal here.
    """
    names = [param.name for param in spec.params]
    if "block" not in names and block is not None:
        raise ParameterError(
            f"attention: block={block}: impl={spec.name!r} has no tiles; omit block"
        )
    fixed: dict[str, Any] = {"dtype": problem["dtype"]}
    if "head_dim" in names:
        dims = padded_dims(spec, problem["head_dim"], problem["head_dim_v"])
        fixed |= dict(zip(("head_dim", "head_dim_v"), dims, strict=True))
    if "aligned" in names:
        fixed["aligned"] = aligned
    if "block" in names:
        fixed |= choose_tile(spec, fixed, problem, arch, block)
    params = {name: fixed[name] for name in names}
    spec.check(params, arch)
    return params


def padded_dims(spec: KernelSpec, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The cheapest compiled pair that holds these head dimensions."""
    compiled = next(param.values for param in spec.params if param.name == "head_dim")
    if spec is hopper.FLASH_SM90:
        return hopper.padded_dims(head_dim, head_dim_v)
    fitting = [
        pair
        for pair in PAIRS
        if pair[0] >= head_dim and pair[1] >= head_dim_v and {*pair} <= {*compiled}
        and (pair[0] == pair[1] or compiled is HEAD_DIMS)
    ]  # fmt: skip
    return min(fitting, key=sum)


def choose_tile(
    spec: KernelSpec, fixed: Params, problem: Problem, arch: Arch, block: Any
) -> dict[str, Any]:
    """The tile asked for, else the one for this problem on this GPU: found by `fkjit tune`,
    else by the preferences above, no taller than the queries need."""
    tuned = None if block is not None else tuning.lookup(spec, fixed, problem, arch)
    if tuned is not None:
        return tuned
    if spec is hopper.FLASH_SM90:  # one block an SM, of warpgroups that hide each other's waiting
        return hopper.tile(problem, fixed["head_dim"], block)
    return {"block": _block(spec, fixed, problem, arch) if block is None else block}


def _block(spec: KernelSpec, fixed: Params, problem: Problem, arch: Arch) -> Any:
    legal = spec.legal_values("block", {**fixed, "block": None}, arch)
    if not legal:  # say why
        spec.check({**fixed, "block": 16}, arch)
    order = [b for b in _PREFERENCE[spec.name][fixed["head_dim"]] if b in legal] or legal
    rows = max(16, 1 << (max(problem["seqlen_q"], 1) - 1).bit_length())
    order = [b for b in order if split_block(b)[0] <= rows] or order

    def fills_an_sm(block: Any) -> bool:
        params = {**fixed, "block": block}
        blocks = arch.shared_per_sm // (spec.shared_bytes(params) + _RESERVED)
        return blocks * spec.block(params)[0] // 32 >= _WARPS

    tall = [b for b in order if split_block(b)[0] > 16]  # 16 rows use each key too few times
    return next(filter(fills_an_sm, tall), order[0])
