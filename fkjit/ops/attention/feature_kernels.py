"""Attention's kernels with score features: three of kernels.py and kernels_sm90.py, whose templates
have the features rendered in."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from fkjit.ops.attention.features import SHIPPED, SHIPPED_SM90, parse
from fkjit.ops.attention.kernels import FLASH, FLASH_FP32, PAIRS_FLASH, TILES_WIDEST
from fkjit.ops.attention.kernels_sm90 import FEATURE_TILES, FLASH_SM90
from fkjit.ops.attention.shapes import WIDEST
from fkjit.spec import KernelSpec, Param, Params, register

_FORM = "what the kernel does beside causal attention; any other form is compiled when called"
_TILES = (16, 32, 64, (64, 16), (64, 32), (32, 16))
_TILES_SM90 = tuple(dict.fromkeys(tile for tiles in FEATURE_TILES.values() for tile in tiles))
# What is compiled ahead of each kernel: one tile, where the sweep meets every line of the code.
_SHOWN = {"head_dim": 64, "head_dim_v": 64, "block": 32, "aligned": True}
_SHOWN_MORE: dict[str, dict[str, tuple[Any, ...]]] = {
    "flash": {"dtype": ("bf16",), "form": SHIPPED},
    "flash_fp32": {"dtype": ("fp32",), "form": (SHIPPED[0], SHIPPED[-1])},
    "flash_sm90": {"dtype": ("bf16",), "block": ((64, 128),), "form": SHIPPED_SM90},
}
# Tiles by padded head_dim, fastest first (bench/NOTES.md), where scores meet numbers of none, one
# or several arrays, whose addresses and values take registers; the band of keys and the rules take
# those of a warp's second 16 rows.
_WIDE = {**dict.fromkeys((32, 64, 96, 128), (64, (64, 32), 32, 16)), WIDEST: TILES_WIDEST}
_PREFERENCE: tuple[dict[int, tuple[Any, ...]], ...] = (
    {**_WIDE, 192: (64, (64, 32), 32, 16), 256: ((64, 32), 32, 16)},
    {**_WIDE, **dict.fromkeys((192, 256), ((64, 32), 32, 16))},
    {
        **dict.fromkeys((32, 64, 96, 128), ((64, 32), 32, 16)),
        **dict.fromkeys((192, 256), ((64, 16), 16)),
        WIDEST: TILES_WIDEST[-1:],
    },
)
_FP32_TILES = (64, (64, 32), 32, 16)  # one fewer for each array
_ONE, _SEVERAL = 1, 2


def _arrays(params: Params) -> int:
    """Arrays that scores meet: none, one, or several; bytes one by one are as bad as two."""
    features = parse(params["form"])
    bytewise = features.mask and not features.mask_paired and params["head_dim"] > 128
    count = bool(features.bias) + features.mask + bytewise + len(features.arrays)
    return min(count, _SEVERAL)


def _derive_flash(params: Params) -> dict[str, Any]:
    usual = FLASH.derive(params)
    kept = usual["q_in_registers"] and _arrays(params) <= _ONE
    return {**usual, "q_in_registers": kept, **parse(params["form"]).values()}


def _illegal_flash(params: Params) -> str | None:
    dims, block = (params["head_dim"], params["head_dim_v"]), params["block"]
    if dims not in PAIRS_FLASH:
        return f"head_dim_v={dims[1]} is not compiled for head_dim={dims[0]}"
    if not params["aligned"] and block not in (16, 32, TILES_WIDEST[-1]):
        return "copies whole 16-byte chunks, and these rows do not start on 16-byte boundaries"
    if block not in _PREFERENCE[_arrays(params)][dims[0]]:
        return f"needs more registers than there are, or is never the fastest (head_dim={dims[0]})"
    return None


def _illegal_fp32(params: Params) -> str | None:
    if parse(params["form"]).paged:
        return "does not read keys in pages; allowed: fp16 and bf16 on GPUs from sm_80"
    if params["block"] not in _FP32_TILES[_arrays(params) :]:
        return "needs more registers than a thread has"
    alike = {"fp16": "bf16"}  # in what GPUs without its tensor cores have room for
    return FLASH_FP32.illegal({**params, "dtype": alike.get(params["dtype"], params["dtype"])})


def _only_shown(spec: KernelSpec) -> KernelSpec:
    """The same, with few of its variants."""
    shown = {name: (value,) for name, value in _SHOWN.items()} | _SHOWN_MORE[spec.name]
    fewer = [replace(param, values=shown[param.name]) for param in spec.params]
    return replace(spec, params=tuple(fewer))


def _with_features(base: KernelSpec, **more: Any) -> KernelSpec:
    return replace(
        base,
        op="attention_form",
        doc=f"{base.name} with windows, biases, packed sequences …: what its form says",
        verification="fkjit.ops.attention.cases:FEATURES",
        **more,
    )


def _params(base: KernelSpec, name: str, values: tuple[Any, ...]) -> tuple[Param, ...]:
    """Those of a kernel without features, with other values for one of them, and the features."""
    own = [
        replace(p, values=values) if p.name == name else p
        for p in base.params
        if p.name != "optimistic"  # follows from the features
    ]
    return (*own, Param("form", SHIPPED, _FORM))


def _derive_fp32(params: Params) -> dict[str, Any]:
    return {**FLASH_FP32.derive(params), **parse(params["form"]).values()}


_SPECS = {
    "flash": _with_features(
        FLASH, derive=_derive_flash, illegal=_illegal_flash, params=_params(FLASH, "block", _TILES),
    ),
    "flash_fp32": _with_features(
        FLASH_FP32, derive=_derive_fp32, illegal=_illegal_fp32,
        params=_params(FLASH_FP32, "dtype", ("fp32", "bf16", "fp16")),
        superseded=lambda params: frozenset(() if params["dtype"] == "fp32" else {"bf16_mma"}),
    ),
    "flash_sm90": replace(
        _with_features(FLASH_SM90, params=_params(FLASH_SM90, "block", _TILES_SM90)),
        verification="fkjit.ops.attention.cases:FEATURES_SM90",
    ),
}  # fmt: skip
FLASH_FORMS, FLASH_FP32_FORMS, FLASH_SM90_FORMS = (
    register(_only_shown(spec)) for spec in _SPECS.values()
)


@lru_cache(maxsize=1024)
def kernel_with(base: KernelSpec, form: str) -> KernelSpec:
    """FLASH, FLASH_FP32 or FLASH_SM90 with the features of a text; every variant of it is legal
    that `base` has registers for."""
    spec = _SPECS[base.name]
    return replace(spec, params=(*spec.params[:-1], Param("form", (form,), _FORM)))


def feature_tiles(spec: KernelSpec, fixed: Params) -> tuple[Any, ...]:
    """The tiles of a kernel with score features, fastest first."""
    if spec.name == "flash_fp32":
        return _FP32_TILES[_arrays(fixed) :]
    return _PREFERENCE[_arrays(fixed)][fixed["head_dim"]]
