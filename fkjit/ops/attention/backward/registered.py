"""The kernels of attention's backward that are compiled ahead, swept and listed, in this order.

With score features a kernel on tensor cores has a variant with all of them; any other is compiled
when it is first called. The kernels in fp32 are made of the same rules, and of products that the
sweep has seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fkjit.ops.attention.backward.features import (
    SHOWN,
    SHOWN_SEEDED,
    SHOWN_SLOPES_SM90,
    SHOWN_SM90,
    SHOWN_WIDE_SM90,
)
from fkjit.ops.attention.backward.kernels import (
    DKDV,
    DKDV_DQ,
    DKDV_ORDERED,
    DQ,
    with_features,
)
from fkjit.ops.attention.backward.kernels_bias import DBIAS, DBIAS_SUM, HEADS, ZEROS
from fkjit.ops.attention.backward.kernels_fp32 import DKDV_FP32, DQ_FP32
from fkjit.ops.attention.backward.kernels_preprocess import POSTPROCESS, PREPROCESS
from fkjit.ops.attention.backward.kernels_slopes_sm90 import SLOPES_SM90
from fkjit.ops.attention.backward.kernels_sm90 import FLASH_SM90
from fkjit.ops.attention.backward.kernels_wide_sm90 import FLASH_WIDE_SM90
from fkjit.ops.attention.backward.mask_bits import MASK
from fkjit.ops.attention.backward.tiles import tiles
from fkjit.spec import KernelSpec, register


def _narrowed(spec: KernelSpec, **values: Any) -> KernelSpec:
    """The same with these values of parameters alone."""
    params = (replace(p, values=values.get(p.name, p.values)) for p in spec.params)
    return replace(spec, params=tuple(params))


def _shown(base: KernelSpec, *texts: str) -> KernelSpec:
    """A kernel with score features, in bf16 and head dimension 64."""
    return _narrowed(
        with_features(base, texts[0]), dtype=("bf16",), head_dim=(64,), head_dim_v=(64,),
        aligned=(True,), tile=tiles(base.name, 64, texts[0])[:1], form=texts,
    )  # fmt: skip


def _shown_slopes_sm90() -> KernelSpec:
    spec = with_features(SLOPES_SM90, SHOWN_SLOPES_SM90)
    return _narrowed(spec, dtype=("bf16",), head_dim=(64, 128))


def _shown_sm90() -> KernelSpec:
    spec = _narrowed(with_features(FLASH_SM90, "window"), dtype=("bf16",), form=tuple(SHOWN_SM90))
    return replace(
        spec,
        illegal=lambda params: (
            None if SHOWN_SM90[params["form"]] == params["head_dim"] else "is not compiled ahead"
        ),
    )


def _shown_wide_sm90() -> KernelSpec:
    spec = with_features(FLASH_WIDE_SM90, SHOWN_WIDE_SM90)
    dims = {"head_dim": (256,), "head_dim_v": (256,)}
    return _narrowed(spec, dtype=("bf16",), deterministic=(True,), **dims)


for _spec in (
    PREPROCESS, DKDV, DKDV_DQ, DKDV_ORDERED, POSTPROCESS, DQ,
    DKDV_FP32, DQ_FP32, FLASH_SM90, FLASH_WIDE_SM90,
    _shown(DKDV, SHOWN, SHOWN_SEEDED), _shown(DQ, SHOWN, SHOWN_SEEDED), _shown(DBIAS, SHOWN),
    HEADS, DBIAS_SUM, ZEROS, MASK, _shown_sm90(), _shown_wide_sm90(),
    _shown_slopes_sm90(),
):  # fmt: skip
    register(_spec)
