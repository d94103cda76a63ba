"""Which kernel of `fkjit.quantized_attention` a problem gets, and which variant of it."""

from __future__ import annotations

from typing import Any

from fkjit.arch import Arch
from fkjit.ops.attention.kernels_sm90 import MAX_SHARED
from fkjit.ops.attention.quantized import kernels
from fkjit.ops.attention.quantized.kernels import FLASH_CODES, weights_of
from fkjit.ops.attention.quantized.kernels_sm90 import FLASH_CODES_SM90, PROMOTE, TILES
from fkjit.ops.attention.quantized.quantize_kernels import is_packed, padded
from fkjit.runtime.interop import ITEMSIZE, View
from fkjit.spec import KernelSpec, Problem

INTERVALS = tuple(dict.fromkeys((*kernels.PROMOTE, *PROMOTE)))  # of any GPU's kernel
_INTERVAL = 512  # keys: a third of a per cent where values add up, far below what e4m3 costs
_SMALL_ROWS = 128  # of a tile
_MANY_QUERIES, _MANY_CAUSAL = 3072, 2048  # from which on greater ones are faster
_MAX_STEP = 2**40  # bytes
_LEAST_SCALE = 1e-9  # a sign could not go into q


def variant(
    problem: dict[str, Any], v: View, promote: int | None, block: Any, arch: Arch
) -> tuple[KernelSpec, dict[str, Any]]:
    """The kernel and its parameters. ParameterError where this GPU has none."""
    block = (block, block) if isinstance(block, int) else block  # as tiles are named here
    if takes(problem, v, promote, block, arch):
        return FLASH_CODES_SM90, choose_sm90(problem, promote, block, arch)
    problem["weights"] = weights_of(problem["v_codes"], arch)
    return FLASH_CODES, kernels.choose(problem, promote, block, arch)


def takes(problem: Problem, v: View, promote: int | None, block: Any, arch: Arch) -> bool:
    """Whether Hopper's kernel does: TMA can read a v that is no codes, the scale is positive, and
    what was asked for is one of its tiles and intervals."""
    if "wgmma" not in arch.features or arch.shared_per_block < MAX_SHARED:
        return False
    if problem["seqlen_k"] < 1 or not problem["softmax_scale"] > _LEAST_SCALE:
        return False
    if promote not in (None, 0, *PROMOTE):
        return False
    if block is not None and block not in TILES[padded(problem)]:
        return False
    return problem["v_codes"] or _is_mappable(v)


def _is_mappable(v: View) -> bool:
    steps = [step for step, n in zip(v.strides[:-1], v.shape[:-1], strict=True) if n > 1]
    size = ITEMSIZE[v.dtype]
    aligned = all(step * size % 16 == 0 and 0 < step * size < _MAX_STEP for step in steps)
    return aligned and v.strides[-1] == 1 and v.pointer % 16 == 0


def choose_sm90(problem: Problem, promote: int | None, block: Any, arch: Arch) -> dict[str, Any]:
    """The variant for a problem: the fastest tile that has it. ParameterError where none has."""
    if promote is None:
        promote = _INTERVAL if problem["v_codes"] else 0
    params: dict[str, Any] = {
        "dtype": problem["dtype"], "code": problem["code"], "head_dim": padded(problem),
        "values": problem["values"], "promote": promote, "packed": is_packed(problem),
    }  # fmt: skip
    made = [{**params, "block": tile}
            for tile in ([block] if block is not None else _fastest(problem))]  # fmt: skip
    chosen = next((each for each in made if FLASH_CODES_SM90.illegal(each) is None), made[0])
    FLASH_CODES_SM90.check(chosen, arch)
    return chosen


def _fastest(problem: Problem) -> list[tuple[int, int]]:
    """Tiles, fastest first: few queries want small ones."""
    tiles = TILES[padded(problem)]
    causal = problem["window"][1] == 0
    if problem["seqlen_q"] >= (_MANY_CAUSAL if causal else _MANY_QUERIES):
        return list(tiles)
    return sorted(tiles, key=lambda tile: (tile[0] > _SMALL_ROWS, tile[1]))
