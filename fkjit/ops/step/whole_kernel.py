"""The kernel of a whole decode step.

A problem has m (sequences), layers, hidden, mlp, vocabulary, heads_q, heads_kv, head_dim, dtype,
norm ("rms" or "layer"), rope, activation, gate, eps, splits, blocks, advance, logits_stride,
table_rows, max_sequences, max_pages, and of the cache num_pages, page_size, plane (elements of a
layer's keys) and pages (elements from page to page, head to head, token to token).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from fkjit.errors import ParameterError
from fkjit.ops.gemm import epilogue
from fkjit.ops.step.whole_maps import tensor_maps
from fkjit.runtime.interop import ITEMSIZE, NULL
from fkjit.runtime.tensor_map import MapTable
from fkjit.spec import KernelSpec, Param, Params, Problem, Work, register

ROWS = (1, 2, 4, 8)  # there is room for
HEAD_DIMS, GROUPS = (64, 128, 16, 32), (4, 1, 2, 3, 6, 7, 8)
WARPS, FETCHERS = 8, 2  # that compute; that fetch
ROW_GAP = 8  # elements between rows, as templates/step/gathered_rows.cuh has it
_PRODUCT = 40  # bytes of a Product of templates/step/layers.cuh
CODED_COLUMNS = (512, 256)  # of a ring for codes
_TILE_ROWS = 16  # of a weight in a stage
_PLACES = 8  # of tiles whose sums wait to be added up
_BLOCK_BYTES = 226 << 10  # of shared memory, 1 KB for barriers left out
# Columns of a stage, stages, of which under way.
RINGS = (
    (512, 12, 3),
    (512, 11, 3),
    (512, 10, 3),
    (512, 9, 3),
    (512, 8, 3),
    (768, 8, 2),
    (768, 7, 2),
    (768, 6, 2),
    (768, 5, 2),
    (768, 4, 2),
    (256, 8, 2),
    (256, 5, 2),
)
Ring = tuple[int, int, int]
_SMALL = RINGS[-1]
_ROOMS = (25, 8, 12, 16, 28, 42, 56, 74, 88, 140)  # KB for rows, and what is beside them
_ASIDE = (8, 1, 2, 4, 6, 12, 20)  # KB of that beside the rows

_PARAMS = (
    Param("dtype", ("bf16", "fp16"), "element type of weights, stream and cache"),
    Param("norm", ("rms", "layer"), "RMSNorm or LayerNorm"),
    Param("rope", (True, False), "whether q and k turn by their positions"),
    *epilogue.PARAMS,
    Param("codes", (False, True), "whether layers' weights are codes of int4"),
    Param("head_dim", HEAD_DIMS, "columns of a head"),
    Param("group", GROUPS, "query heads of a key head"),
    Param("own", GROUPS, "of those in a work item of attention: one or all"),
    Param("most", ROWS, "sequences there is room for"),
    Param("room", _ROOMS, "KB of shared memory for their rows and what is beside them"),
    Param("aside", _ASIDE, "KB of that for the list of products and a norm's weights"),
    Param("ring", RINGS, "columns of a stage, stages, of which under way",
          tunable=True),
)  # fmt: skip


def ring_shared(ring: Ring, codes: bool) -> int:
    """Bytes of a ring's stages."""
    columns, stages, *_ = ring
    return stages * _TILE_ROWS * (2 * columns + (columns // 16 if codes else 0))


def ring_fits(ring: Ring, codes: bool, space: int) -> bool:
    """Whether a ring has room in so many bytes, and whole groups of codes."""
    return ring_shared(ring, codes) <= space and not (codes and ring[0] not in CODED_COLUMNS)


def _scratch(head_dim: int, own: int) -> int:
    """Bytes that attention has in shared memory."""
    return 4 * (own * head_dim + head_dim + WARPS * own * (head_dim + 2)) + 16


def _beside_rows(norm: str, hidden: int, layers: int) -> int:
    """Bytes of the list of products and a norm's weights."""
    products = -(-_PRODUCT * (4 * layers + 1) // 16) * 16
    return products + 2 * hidden * (2 if norm == "layer" else 1)


def aside_for(norm: str, hidden: int, layers: int) -> int | None:
    """KB for the list of products and a norm's weights; None where there is no room."""
    needed = _beside_rows(norm, hidden, layers)
    return next((room for room in sorted(_ASIDE) if room << 10 >= needed), None)


def room_for(most: int, widest: int, head_dim: int, own: int, aside: int) -> int | None:
    """KB for so many rows, and what is beside them; None where there is no room."""
    needed = max(2 * most * (widest + ROW_GAP), _scratch(head_dim, own)) + (aside << 10)
    return next((room for room in sorted(_ROOMS) if room << 10 >= needed), None)


def beside_digits(columns: int) -> int:
    """Elements that a row of digits (templates/step/row_digits.cuh) has beside those of a row."""
    return ROW_GAP + 8 * -(-columns // 512)


def extra_rows(norm: str, most: int) -> int:
    """Beside those of sequences: a LayerNorm's weight and bias, where a product has columns."""
    return 2 if norm == "layer" and most <= 6 else 0


def ring_bytes(norm: str, most: int, room: int) -> int:
    """That the ring may have, beside the rows and the warps' sums."""
    rows = most + extra_rows(norm, most)
    return _BLOCK_BYTES - (room << 10) - _PLACES * WARPS * 4 * _TILE_ROWS * rows


def exchange_places(p: Problem) -> tuple[int, ...]:
    """Words of 32 bits before each array of what passes between blocks, and in all; the first word
    counts launches."""
    m, dim = p["m"], p["head_dim"]
    heads = p["heads_q"] + 2 * p["heads_kv"]
    arrays = (
        2 * m * heads * dim, 2 * m * p["heads_q"] * p["splits"] * (dim + 2), m * p["hidden"],
        m * p["heads_q"] * dim, m * p["mlp"], 2 * m * p["blocks"],
    )  # fmt: skip
    return tuple(accumulate((-(-one // 4) * 4 for one in arrays), initial=4))


def _derive(params: Params) -> dict[str, Any]:
    names = ("columns", "stages", "flight")
    return {
        **epilogue.values(params["activation"]), "centered": params["norm"] == "layer",
        "warps": WARPS, **dict(zip(names, params["ring"], strict=True)),
    }  # fmt: skip


def _arguments(params: Params, p: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    needed = _beside_rows(params["norm"], p["hidden"], p["layers"])
    if needed > params["aside"] << 10:
        raise ParameterError(
            f"decode_step: aside={params['aside']} KB of shared memory, which hold "
            f"{params['aside'] << 10} bytes; hidden={p['hidden']} and layers={p['layers']} take "
            f"{needed}"
        )
    names = ("m", "layers", "hidden", "mlp", "vocabulary", "heads_q", "heads_kv", "splits")
    model = (
        p["plane"], *(p[name] for name in names), *p["pages"], p["page_size"].bit_length() - 1,
        p["max_sequences"], p["max_pages"], p["table_rows"], p["logits_stride"],
        p["advance"], p["head_coded"], *exchange_places(p)[:-1], p["eps"],
        p["head_dim"] ** -0.5,
    )  # fmt: skip
    made: dict[str, Any] = dict.fromkeys(("position_embedding", "norm_bias", "table"))
    if arrays.get("maps") is None or arrays["maps"] is NULL:
        offsets = p.get("offsets", arrays["table_of_layers"])
        made["maps"] = MapTable(tuple(tensor_maps(p, offsets, arrays, params["ring"][0])))
        arrays = {name: array for name, array in arrays.items() if name != "maps"}
    return {**made, **arrays, "model": model}


def weights_of(p: Problem) -> int:
    """Elements of all products."""
    dim = p["head_dim"]
    heads = (2 * p["heads_q"] + 2 * p["heads_kv"]) * dim
    layer = p["hidden"] * (heads + p["mlp"] * (3 if p["gate"] else 2))
    return p["layers"] * layer + p["vocabulary"] * p["hidden"]


def _illegal(params: Params) -> str | None:
    if (params["activation"], params["gate"]) not in epilogue.SHIPPED:
        return "has no such epilogue"
    if params["codes"] and params["ring"][0] not in CODED_COLUMNS:
        return "has parts of stages without whole groups of codes"
    if params["own"] not in (1, params["group"]):
        return "has items of neither one query head nor all of a key head"
    if params["room"] - params["aside"] << 10 < _scratch(params["head_dim"], params["own"]):
        return "has no room for attention"
    space = ring_bytes(params["norm"], params["most"], params["room"])
    if ring_shared(params["ring"], params["codes"]) > space:
        return "has more stages than there is room for"
    return None


# What is compiled ahead: the two models of the documentation, one sequence; and small ones for the
# interpreter.
_LLAMA = ("bf16", "rms", True, "silu", True, False, 64, 4, 1)
_GPT2 = ("bf16", "layer", False, "gelu_tanh", False, False, 64, 1, 1)
_AHEAD = tuple(
    dict(zip((param.name for param in _PARAMS), said, strict=True))
    for said in (
        (*_LLAMA, 1, 25, 8, RINGS[0]), (*_GPT2, 1, 16, 6, RINGS[5]),
        ("fp16", "rms", True, "silu", True, False, 16, 2, 2, 2, 12, 1, _SMALL),
        ("bf16", "layer", False, "gelu_tanh", False, False, 16, 1, 1, 1, 8, 2, _SMALL),
        ("bf16", "rms", True, "silu", True, True, 32, 4, 4, 2, 16, 1, _SMALL),
        ("fp16", "rms", True, "silu", True, True, 32, 4, 4, 2, 16, 1, _SMALL),
    )
)  # fmt: skip
FIELDS: dict[str, Any] = {
    "op": "decode_step",
    "name": "whole",
    "source": "step/whole.cu",
    "entry": "step_whole",
    "doc": "a decode step of up to eight sequences in one launch",
    "params": _PARAMS,
    "cooperative": True,
    "derive": _derive,
    "features": lambda params: frozenset({"wgmma"}),  # Hopper: tried nowhere else
    "shared_bytes": lambda params: (
        (params["room"] << 10) + ring_shared(params["ring"], params["codes"])
    ),
    "block": lambda params: (32 * (WARPS + (4 if params["own"] > 1 else FETCHERS)), 1, 1),
    "grid": lambda params, p: (p["blocks"], 1, 1),
    "arguments": _arguments,
    "shape_class": lambda p: {"m": p["m"], "hidden": p["hidden"], "layers": p["layers"]},
    "work": Work(
        flops=lambda p: 2.0 * p["m"] * weights_of(p),
        bytes=lambda p: float(ITEMSIZE[p["dtype"]] * weights_of(p)),
        interpreter_flops=2e7,
    ),
    "verification": "fkjit.ops.step.whole_cases:WHOLE",
}
KERNEL = KernelSpec(**FIELDS, illegal=_illegal)  # every variant that a call may take
register(KernelSpec(**FIELDS, illegal=_illegal, ahead=_AHEAD))
