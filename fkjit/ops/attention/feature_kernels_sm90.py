"""flash for Hopper with a form of attention rendered in: tensor maps of arrays however they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fkjit.ops.attention import feature_problem as forms
from fkjit.ops.attention import kernels_sm90 as hopper
from fkjit.ops.attention.features import ScoreFeatures, parse
from fkjit.ops.attention.problem import grid, split_block
from fkjit.runtime.interop import ITEMSIZE
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Arrays, Params, Problem, SharedLayout

# Tiles of each padded head_dim: those of attention that leave registers for rules.
TILES: dict[int, tuple[Any, ...]] = {
    64: ((256, 64), (192, 128), 128, (64, 128)),
    96: (128,),
    128: (128, (192, 80), (64, 128), (128, 64)),
    192: ((128, 96), (128, 64)),
    256: ((128, 80), (128, 64)),
}
_MOD_ROWS = 128  # at most, beside what a score_mod may hold in registers
_MOD_HEAD_DIM = 192  # at most, beside a bias or a mask as well
ALL_TILES = tuple(dict.fromkeys(tile for tiles in TILES.values() for tile in tiles))
_PANEL, _WARP_ROWS, _ROW_BYTES = 64, 16, 128
# Tiles beside which those of a bias or a mask have room, in whole panels.
_ARRAY_TILES: dict[int, tuple[Any, ...]] = {
    **dict.fromkeys((64, 96, 128), (128, (64, 128))), **dict.fromkeys((192, 256), ((128, 64),)),
}  # fmt: skip
_STAGES = ((2, 2), (1, 2), (1, 1))  # of Q, and of bias and mask
_MORE_BARRIERS = 16 + 16 * 2  # bytes: of tiles that are cut, of bias and mask
_LEAST_SCALE = 1e-9  # sinks are divided by it, and a sign could not go into q


def derive(params: Params) -> dict[str, Any]:
    """What the template names."""
    q_stages, score_stages = _stages(params) or (1, 1)
    return {
        **hopper.FLASH_SM90.derive(_as_dense(params)),
        **parse(params["form"]).values(),
        "q_stages": q_stages,
        "score_stages": score_stages,
    }


def _as_dense(params: Params) -> dict[str, Any]:
    """With what attention without a form has besides. Scores to which rules were applied could not
    be multiplied again as they were."""
    form, head_dim = parse(params["form"]), params["head_dim"]
    ruled = form.softcap or form.alibi or form.score_mod or form.bias or form.mask
    optimistic = hopper.ways(head_dim, params["block"])[0] and not ruled
    return {**params, "optimistic": optimistic}


def illegal(params: Params) -> str | None:
    """Why there is no such variant, or None."""
    dims, form = (params["head_dim"], params["head_dim_v"]), parse(params["form"])
    if dims not in hopper.PAIRS:
        return f"head_dim_v={dims[1]} is not compiled for head_dim={dims[0]}"
    if params["block"] not in tiles(form, dims[0]):
        return f"is not a tile for head_dim={dims[0]}"
    if _stages(params) is None:
        return "has no shared memory left for a bias or a mask"
    return None


def tiles(form: ScoreFeatures, head_dim: int) -> tuple[Any, ...]:
    """The tiles of a form, fastest first."""
    if form.bias or form.mask:
        crowded = form.varlen and form.arrays  # addresses of all these have no registers
        wide = form.score_mod and head_dim > _MOD_HEAD_DIM
        return () if crowded or wide else _ARRAY_TILES.get(head_dim, ())
    most = _MOD_ROWS if form.score_mod else 256
    return tuple(tile for tile in TILES[head_dim] if split_block(tile)[0] <= most)


def _stages(params: Params) -> tuple[int, int] | None:
    """How many tiles of Q, and of bias and mask, have room; None where not even one has."""
    fitting = (s for s in _STAGES if sum(n for _, n in _parts(params, *s)) <= hopper.MAX_SHARED)
    return next(fitting, None)


def _parts(params: Params, q_stages: int, score_stages: int) -> list[tuple[str, int]]:
    """As without a form; then tiles of bias and mask; and more barriers."""
    *rings, (name, size) = hopper.parts(_as_dense(params), q_stages)
    form, (block_q, block_k) = parse(params["form"]), split_block(params["block"])
    score = block_q * block_k * (ITEMSIZE.get(form.bias, 0) + form.mask)
    scores = [(f"scores stage {stage}", score) for stage in range(score_stages) if score]
    return [*rings, *scores, (name, size + _MORE_BARRIERS)]


def shared(params: Params) -> SharedLayout:
    """Rings of Q, K, V, bias and mask, and the mbarriers."""
    return _parts(params, *(_stages(params) or (1, 1)))


def shared_bytes(params: Params) -> int:
    """The sum of `shared`."""
    return sum(size for _, size in shared(params))


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name; q, k, v and o as tensor maps, and o as it is for ragged ends."""
    block_q, block_k = split_block(params["block"])
    form = parse(params["form"])
    boxes = {"q": block_q, "k": block_k, "v": block_k, "o": _WARP_ROWS}
    return {
        **forms.arguments(params, problem, arrays),
        **{f"{name}_map": _map(problem, arrays[name], rows) for name, rows in boxes.items()},
        **{
            f"{name}_map": _score_map(problem, arrays[name], dtype, (block_q, block_k))
            for name, dtype in (("bias", form.bias), ("mask", "u8" if form.mask else ""))
            if dtype
        },
        **{name: arrays[name] for name in ("counters",) if name in arrays},
        "batch": problem["batch"],
        "section_heads": hopper.section_heads(problem),
    }


def _map(problem: Problem, array: Any, rows: int) -> TensorMap:
    """[batch, head, row, column] in boxes of `rows` rows and one panel of columns; packed arrays
    are one batch."""
    axes = problem["axes"][:3]
    shape = [1 if axis is None else array.shape[axis] for axis in axes]
    steps = [0 if axis is None else array.strides[axis] for axis in axes]
    return TensorMap(
        array, problem["dtype"], (array.shape[-1], *shape[::-1]), tuple(steps[::-1]),
        (_PANEL, rows, 1, 1), writable=rows == _WARP_ROWS,
    )  # fmt: skip


def _score_map(problem: Problem, array: Any, dtype: str, block: tuple[int, int]) -> TensorMap:
    """[batch, head, row, key] of a bias or a mask, in boxes of a tile's rows and up to 128 bytes of
    keys; a dimension that is broadcast has a stride of 0."""
    if dtype == "u8" and isinstance(array, np.ndarray):
        array = array.view(np.uint8)  # of bools
    rows, keys = block
    size = ITEMSIZE.get(dtype, 1)
    row_bytes = min(keys * size, _ROW_BYTES)
    sizes = [problem[name] for name in ("batch", "heads_q", "seqlen_q", "seqlen_k")]
    steps = [step if n > 1 else 0 for step, n in zip(array.strides, array.shape[:3], strict=False)]
    return TensorMap(
        array, dtype, tuple(sizes[::-1]), tuple(steps[::-1]), (row_bytes // size, rows, 1, 1),
        swizzle=f"{row_bytes}B",
    )  # fmt: skip


def takes(problem: Problem, views: Mapping[str, Any], form: ScoreFeatures, block: Any) -> bool:
    """Whether TMA can read the arrays and the kernel wants the problem: as without a form
    (`attention_hopper.takes`), and a scale well above 0."""
    axes = tuple(axis for axis in problem["axes"][:3] if axis is not None)
    return (
        problem["dtype"] != "fp32"
        and all(_mappable(views[name]) for name in ("bias", "mask") if name in views)
        and problem["softmax_scale"] > _LEAST_SCALE
        and all(0 not in view.shape for view in views.values())
        and hopper.takes(problem, {name: views[name] for name in ("q", "k", "v")}, axes, None)
        and _has_tile(problem, form, block)
    )


def _mappable(view: Any) -> bool:
    """Whether TMA can read a bias or a mask: rows on 16-byte boundaries."""
    size = ITEMSIZE.get(view.dtype, 1)
    apart = [step * size for step, n in zip(view.strides[:3], view.shape[:3], strict=True) if n > 1]
    return not view.pointer % 16 and all(0 <= step < 2**40 and step % 16 == 0 for step in apart)


def _has_tile(problem: Problem, form: ScoreFeatures, block: Any) -> bool:
    """Whether this one is compiled for the form, or any."""
    fixed = {"dtype": problem["dtype"], "form": form.text}
    fixed |= dict(zip(("head_dim", "head_dim_v"), dims(problem), strict=True))
    return bool(_legal(fixed)) if block is None else block in _legal(fixed)


def _legal(fixed: Params) -> list[Any]:
    """The tiles that are compiled, fastest first."""
    order = tiles(parse(fixed["form"]), fixed["head_dim"])
    return [tile for tile in order if illegal({**fixed, "block": tile}) is None]


def dims(problem: Problem) -> tuple[int, int]:
    """The head dimensions that a problem's are padded to."""
    return hopper.padded_dims(problem["head_dim"], problem["head_dim_v"])


def tile(problem: Problem, fixed: Params) -> Any:
    """The tile of a problem: attention's, of rows as long as the window lets them be."""
    left, right = problem["window"]
    keys = min(problem["seqlen_k"], left + right + 1)
    dense = {**problem, "seqlen_k": keys, "causal": right == 0}
    usual, legal = hopper.tile(dense, fixed["head_dim"])["block"], _legal(fixed)
    return usual if usual in legal else legal[0]


def counters(params: Params, problem: Problem) -> int:
    """How many a launch needs: none where each tile has a block of its own."""
    drawn = grid(params, problem)[0] > hopper.FLASH_SM90.grid(params, problem)[0]
    return hopper.COUNTERS if drawn else 0


def text(form: ScoreFeatures) -> str:
    """The form as this kernel compiles it: TMA does not care for pairs."""
    return replace(form, bias_paired=False, mask_paired=False).text


def problems(params: Params, scale: str) -> Sequence[Problem]:
    """Those of every form, rows of a bias or a mask in whole 16 bytes; the small ones on a GPU of
    two SMs, so that blocks go on."""
    form, found = parse(params["form"]), []
    for problem in forms.problems(params, scale):
        keys = problem["seqlen_k"]
        wide = -(-keys // 16) * 16 if form.bias or form.mask else keys
        more = {"multiprocessors": 2} if scale == "small" else {}
        found.append({**problem, "seqlen_k": wide, **more})
    return found


def outputs(params: Params, problem: Problem) -> Arrays:
    """o, lse and the counter that blocks draw their work from."""
    return {**forms.outputs(params, problem), "counters": np.zeros(hopper.COUNTERS, np.uint32)}
