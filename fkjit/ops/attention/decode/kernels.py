"""The kernel of decoding, plain and with score features rendered in: which variants are compiled,
and which one takes a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fkjit import tuning
from fkjit.arch import Arch
from fkjit.ops.attention.decode import grid
from fkjit.ops.attention.decode.problem import flops, rows, shape_class, traffic
from fkjit.ops.attention.features import EXAMPLE_ARGS, EXAMPLE_MOD, NOT_PACKED, ScoreFeatures, parse
from fkjit.ops.kv.problem import STORAGES
from fkjit.spec import KernelSpec, Param, Params, Problem, Work, register
from fkjit.symbolic import decision

HEAD_DIMS = (64, 128, 256)  # what rows are padded to
ROWS = (16, 64)  # of a tile: query heads of a KV head times new tokens

Tile = tuple[int, int, int, int]  # warps, keys of a step, steps in a ring, blocks of an SM
# By bytes of a key's element, head_dim, rows; fastest first. The last one fits GPUs with 99 KB.
_TILES: dict[tuple[int, int, int], tuple[Tile, ...]] = {
    (2, 64, 16): ((4, 32, 2, 3),),
    (2, 128, 16): ((8, 16, 2, 1), (4, 16, 2, 2)),
    (2, 256, 16): ((4, 16, 2, 1), (2, 16, 2, 1)),
    (2, 64, 64): ((4, 32, 3, 2),),
    (2, 128, 64): ((4, 32, 3, 2),),
    (1, 64, 16): ((4, 32, 3, 3),),
    (1, 128, 16): ((8, 32, 2, 1), (4, 32, 2, 2)),
    (1, 256, 16): ((4, 32, 2, 1), (2, 16, 3, 1)),
    (1, 64, 64): ((4, 32, 5, 2),),
    (1, 128, 64): ((4, 32, 5, 2),),
}
_ALL_TILES = tuple(dict.fromkeys(tile for tiles in _TILES.values() for tile in tiles))

_FORM = "score features beside causal attention; others are compiled when called"
_ALL = ScoreFeatures(True, True, "fp16", True, True, False, True, False, EXAMPLE_MOD, EXAMPLE_ARGS)
# Of score features, what is compiled ahead: with it the sweep meets all of the code.
SHIPPED = (ScoreFeatures().text, _ALL.text)
_SHOWN = {"dtype": ("bf16",), "storage": ("same", "int8"), "head_dim": (64,), "form": SHIPPED}
_SHOWN_ROWS = {"same": 16, "int8": 64}


def _features(params: Params) -> ScoreFeatures | None:
    return parse(params["form"]) if "form" in params else None


def _tiles(params: Params) -> tuple[Tile, ...]:
    """Those that are compiled, fastest first."""
    return _TILES.get((grid.stored_bytes(params), params["head_dim"], params["rows"]), ())


def _derive(params: Params) -> dict[str, Any]:
    """Further values of the template."""
    warps, keys, stages, min_blocks = params["tile"]
    features, widest = _features(params), 128
    if features and params["rows"] > 16 and (features.bias or features.mask or features.score_mod):
        widest = 64
    return {
        "kept": {"same": params["dtype"], "fp8": "e4m3", "int8": "i8"}[params["storage"]],
        **{"num_warps": warps, "keys": keys, "stages": stages, "min_blocks": min_blocks},
        "q_in_registers": params["head_dim"] <= widest,
        "early": params.get("early", False),
        "early_lengths": ", -1, nullptr, seqlen_q" if params.get("early") else "",
        **({"form": False, **NOT_PACKED} if features is None else features.values()),
    }


def _illegal(params: Params) -> str | None:
    """Why a variant is not compiled, or None."""
    features, tiles = _features(params), _tiles(params)
    if features and params["head_dim"] > 128 and (features.bias or features.mask):
        return "bias and mask need registers that head_dim above 128 does not leave"
    if not tiles:
        return f"rows={params['rows']} needs more shared memory than most GPUs have"
    return None if params["tile"] in tiles else "is never the fastest tile"


def _illegal_shown(params: Params) -> str | None:
    if params["rows"] != _SHOWN_ROWS[params["storage"]]:
        return "is compiled when it is first called"
    return _illegal(params)


SPLIT = register(
    KernelSpec(
        op="attention_decode",
        name="split",
        source="attention/decode.cu",
        entry="attention_decode",
        pdl=True,
        doc="new tokens against all keys, in pages or not, shared out evenly; one launch",
        params=(
            Param("dtype", ("bf16", "fp16"), "element type of q and o"),
            Param("storage", STORAGES, "k and v: the same dtype, or quantized to e4m3 or int8"),
            Param("head_dim", HEAD_DIMS, "of q, k, v and o, padded to this"),
            Param("rows", ROWS, "of a tile: query heads of a KV head times new tokens"),
            Param(
                "tile", _ALL_TILES, "warps, keys of a step, steps in a ring, blocks of an SM",
                tunable=True,
            ),
        ),
        derive=_derive,
        illegal=_illegal,
        features=lambda params: frozenset({"cp_async", "ldmatrix", "bf16_mma"}),
        shared_layout=grid.shared_layout,
        block=lambda params: (32 * params["tile"][0], 1, 1),
        grid=lambda params, problem: (problem["blocks"], 1, 1),
        arguments=grid.arguments,
        shape_class=shape_class,
        work=Work(
            flops=flops, bytes=traffic, interpreter_flops=1.5e9, interpreter_work=grid.padded_flops
        ),
        verification="fkjit.ops.attention.decode.cases:SPLIT",
    )
)  # fmt: skip
_WITH_FEATURES = replace(
    SPLIT,
    op="decode_form",
    doc="decoding with score features: windows, soft caps, biases …",
    params=(*SPLIT.params, Param("form", SHIPPED, _FORM)),
)
_FEW = tuple(replace(p, values=_SHOWN.get(p.name, p.values)) for p in _WITH_FEATURES.params)
SPLIT_FEATURES = register(replace(_WITH_FEATURES, illegal=_illegal_shown, params=_FEW))


@lru_cache(maxsize=1024)
def kernel(features: str = "") -> KernelSpec:
    """The kernel with these score features, as text; "": plain. Every variant is legal that is
    without them."""
    if not features:
        return SPLIT
    form = Param("form", (features,), _FORM)
    return replace(_WITH_FEATURES, params=(*SPLIT.params, form))


def select(
    problem: Problem, arch: Arch, features: str = ""
) -> tuple[KernelSpec, Mapping[str, Any]]:
    """The kernel and the variant for a problem. ParameterError where there is none on `arch`."""
    few = rows(problem) <= ROWS[0]
    dim = max(problem["head_dim"], problem["head_dim_v"])
    spec, params = _default(problem["dtype"], problem["storage"], dim, few, features, arch)
    if problem.get("split"):  # results may not depend on the batch, whose size is in the class
        return spec, params
    return spec, tuning.tuned(spec, params, problem, arch)


@decision(1024)
def _default(
    dtype: str, storage: str, dim: int, few: bool, features: str, arch: Arch
) -> tuple[KernelSpec, Params]:
    """What a problem takes where nothing was tuned for it."""
    padded = next(size for size in HEAD_DIMS if dim <= size)
    fixed = {
        **{"dtype": dtype, "storage": storage, "head_dim": padded},
        "rows": ROWS[0] if few or padded == HEAD_DIMS[-1] else ROWS[1],
        **({"form": features} if features else {}),
    }
    spec, tiles = kernel(features), _tiles(fixed)
    fitting = [tile for tile in tiles if spec.why_not({**fixed, "tile": tile}, arch) is None]
    params = {**fixed, "tile": (fitting or tiles)[0]}
    spec.check(params, arch)
    return spec, params
