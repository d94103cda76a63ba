"""flash for Hopper with a form of attention rendered in: tensor maps of arrays however they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fkjit.ops import attention_form_problem as forms
from fkjit.ops import attention_hopper as hopper
from fkjit.ops.attention_form import Form, parse
from fkjit.ops.attention_problem import split_block
from fkjit.spec import Arrays, Params, Problem, SharedLayout
from fkjit.tensor_map import TensorMap

# Tiles of each padded head_dim, fastest first: those of attention that leave registers for rules,
# the tallest one only for those that keep the scores' units.
_TALL = (192, 128)
TILES: dict[int, tuple[Any, ...]] = {
    64: (_TALL, 128, (64, 128)),
    96: (128,),
    128: (128, (64, 128), (128, 64)),
    192: ((128, 96), (128, 64)),
    256: ((128, 80), (128, 64)),
}
ALL_TILES = tuple(dict.fromkeys(tile for tiles in TILES.values() for tile in tiles))
_PANEL, _WARP_ROWS = 64, 16
_TAILS = 16  # bytes of the barriers of tiles that are cut
_LEAST_SCALE = 1e-9  # sinks are divided by it, and a sign could not go into q


def derive(params: Params) -> dict[str, Any]:
    """What the template names."""
    return {**hopper.FLASH_SM90.derive(params), **parse(params["form"]).values()}


def illegal(params: Params) -> str | None:
    """Why there is no such variant, or None."""
    dims, form = (params["head_dim"], params["head_dim_v"]), parse(params["form"])
    if dims not in hopper.PAIRS:
        return f"head_dim_v={dims[1]} is not compiled for head_dim={dims[0]}"
    if form.bias or form.mask:
        return "reads no bias and no mask"
    if params["block"] not in tiles(form, dims[0]):
        return f"is not a tile for head_dim={dims[0]}"
    return None


def tiles(form: Form, head_dim: int) -> tuple[Any, ...]:
    """The tiles of a form, fastest first."""
    tall = not (form.softcap or form.score_mod)
    return tuple(tile for tile in TILES[head_dim] if tall or tile != _TALL)


def shared(params: Params) -> SharedLayout:
    """As without a form; packed tiles have barriers of their own for their ends."""
    assert hopper.FLASH_SM90.shared_layout is not None
    *rings, (name, size) = hopper.FLASH_SM90.shared_layout(params)
    return [*rings, (name, size + _TAILS * parse(params["form"]).varlen)]


def shared_bytes(params: Params) -> int:
    """The sum of `shared`."""
    return sum(size for _, size in shared(params))


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name; q, k, v and o as tensor maps, and o as it is for ragged ends."""
    block_q, block_k = split_block(params["block"])
    boxes = {"q": block_q, "k": block_k, "v": block_k, "o": _WARP_ROWS}
    return {
        **forms.arguments(params, problem, arrays),
        **{f"{name}_map": _map(problem, arrays[name], rows) for name, rows in boxes.items()},
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


def takes(problem: Problem, views: Mapping[str, Any], form: Form, block: Any) -> bool:
    """Whether TMA can read q, k and v and the kernel wants the problem: as without a form
    (`attention_hopper.takes`), no bias or mask, and a scale well above 0."""
    axes = tuple(axis for axis in problem["axes"][:3] if axis is not None)
    return (
        not (form.bias or form.mask)
        and problem["dtype"] != "fp32"
        and problem["softmax_scale"] > _LEAST_SCALE
        and all(0 not in view.shape for view in views.values())
        and hopper.takes(problem, views, axes, None)
        and (block is None or block in tiles(form, dims(problem)[0]))
    )


def dims(problem: Problem) -> tuple[int, int]:
    """The head dimensions that a problem's are padded to."""
    return hopper.padded_dims(problem["head_dim"], problem["head_dim_v"])


def tile(problem: Problem, form: Form, head_dim: int) -> Any:
    """The tile of a problem: the fastest, or fewer queries where it would leave SMs idle."""
    usual = hopper.tile({**problem, "causal": problem["window"][1] == 0}, head_dim)
    legal = tiles(form, head_dim)
    return usual if usual in legal else legal[0]


def problems(params: Params, scale: str) -> Sequence[Problem]:
    """Those of every form; the small ones on a GPU of two SMs, so that blocks go on."""
    more = {"multiprocessors": 2} if scale == "small" else {}
    return [{**problem, **more} for problem in forms.problems(params, scale)]


def outputs(params: Params, problem: Problem) -> Arrays:
    """o, lse and the counter that blocks draw their work from."""
    return {**forms.outputs(params, problem), "counters": np.zeros(hopper.COUNTERS, np.uint32)}
