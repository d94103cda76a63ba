"""The portable products beyond what is compiled ahead: each layout with each alignment, sizes that
cut tiles in every way, and which variant a shape gets."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import fkjit
from fkjit.arch import arch
from fkjit.jit.build import quiet
from fkjit.ops.gemm import cases, select
from fkjit.ops.gemm.cost import Shape
from fkjit.ops.gemm.kernels_mma import FMA, FMA_ALL, MMA, MMA_ALL, TILES
from fkjit.settings import settings
from tests.core.sampling import one_in
from tests.core.sweep_kit import check_numbers

LAYOUTS = tuple(itertools.product(("mk", "km"), ("nk", "kn")))
MMA_PARAMS = {
    "dtype": "bf16", "out_dtype": "bf16", "activation": "none", "gate": False, "residual": False,
    "pre": False, "mma_k": 16,
}  # fmt: skip
FMA_PARAMS = {
    "dtype": "fp32", "activation": "none", "gate": False, "residual": False, "pre": False,
    "block": (64, 64, 16), "long_k": False, "split": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def ampere(monkeypatch):
    monkeypatch.setattr(
        "fkjit.jit.build.settings", lambda: replace(settings(), target="compute_80")
    )


def check(spec, params, *sizes, **given):
    assert spec.illegal(params) is None
    with quiet(), fkjit.sanitize(race=True):
        check_numbers(spec, params, cases.problem(params, *sizes, **given), np.copy, np.asarray)


@one_in(4)
@pytest.mark.parametrize(("x_layout", "weight_layout"), LAYOUTS)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("gate", [False, True])
def test_every_layout_of_16_bits(x_layout, weight_layout, aligned, gate):
    block = (64, 128, 64) if aligned else (128, 128, 32)
    layout = {"x_layout": x_layout, "weight_layout": weight_layout}
    params = {**MMA_PARAMS, **layout, "aligned": aligned, "gate": gate, "block": block}
    sizes = (72, 136, 136) if aligned else (67, 131, 77)
    check(MMA_ALL, params, *sizes)


@one_in(4)
@pytest.mark.parametrize(("x_layout", "weight_layout"), LAYOUTS)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("gate", [False, True])
def test_every_layout_of_fp32(x_layout, weight_layout, aligned, gate):
    layout = {"x_layout": x_layout, "weight_layout": weight_layout}
    params = {**FMA_PARAMS, **layout, "aligned": aligned, "gate": gate}
    check(FMA_ALL, params, *((68, 72, 40) if aligned else (67, 71, 37)))


@pytest.mark.parametrize("k", [8, 64, 72, 128, 184, 200])
def test_a_ring_that_is_never_full_and_one_that_ends_anywhere(k):
    layout = {"x_layout": "mk", "weight_layout": "nk", "aligned": True}
    check(MMA_ALL, {**MMA_PARAMS, **layout, "block": (64, 64, 64)}, 64, 64, k)
    check(FMA_ALL, {**FMA_PARAMS, **layout}, 64, 64, k // 2)


@pytest.mark.parametrize("columns", [8, 40, 100, 127])
def test_rows_of_out_that_end_inside_a_chunk(columns):
    """Strides that keep rows on their boundaries; NaN between the rows stays."""
    layout = {"x_layout": "mk", "weight_layout": "kn", "aligned": True}
    strides = {"weight_stride": 128, "out_stride": 136, "residual_stride": 136}
    params = {**MMA_PARAMS, **layout, "block": (64, 128, 64)}
    check(MMA_ALL, params, 20, columns, 64, **strides)
    check(FMA_ALL, {**FMA_PARAMS, **layout}, 20, columns, 32, **strides)


@pytest.mark.parametrize("out_stride", [71, 74, 76])
def test_rows_of_out_need_no_boundaries(out_stride):
    layout = {"x_layout": "mk", "weight_layout": "nk", "aligned": True}
    strides = {"out_stride": out_stride, "residual_stride": out_stride}
    check(MMA_ALL, {**MMA_PARAMS, **layout, "block": (64, 64, 64)}, 20, 69, 64, **strides)
    check(FMA_ALL, {**FMA_PARAMS, **layout}, 20, 69, 32, **strides)
    as_fp32 = {**MMA_PARAMS, **layout, "block": (64, 64, 64), "out_dtype": "fp32"}
    check(MMA_ALL, as_fp32, 20, 69, 64, **strides)


def test_the_same_bits_each_time():
    params = {**MMA_PARAMS, "x_layout": "mk", "weight_layout": "nk", "aligned": True}
    params["block"] = (64, 64, 64)
    problem = cases.problem(params, 70, 72, 200)
    inputs = cases.inputs(params, problem, np.random.default_rng(1))
    found = []
    for _ in range(2):
        arrays = {**inputs, **cases.outputs(params, problem)}
        with quiet():
            fkjit.launch(MMA_ALL, params, problem, arrays)
        found.append(arrays["out"].tobytes())
    assert found[0] == found[1]


def test_what_is_compiled_ahead_is_legal():
    for shown, legal in ((MMA, MMA_ALL), (FMA, FMA_ALL)):
        variants = list(shown.variants())
        assert variants and all(legal.illegal(params) is None for params in variants)
    assert {params["block"] for params in MMA.variants()} >= set(TILES)


def shape(m, n, k, dtype="bf16", **given):
    made = {
        "m": m, "n": n, "k": k, "dtype": dtype, "out_dtype": dtype, "x_layout": "mk",
        "weight_layout": "nk", "activation": "none", "gate": False, "aligned": True,
        "aligned_out": True, "residual": False, "pre": False, "sms": 132,
        "precision": "ieee", **given,
    }  # fmt: skip
    return Shape(*[made[name] for name in Shape._fields])


@pytest.mark.parametrize(
    ("sizes", "block"),
    [
        ((8192, 8192, 8192), (128, 256, 64)),
        ((512, 4096, 4096), (64, 128, 64)),
        ((64, 1024, 1024), (64, 64, 64)),
    ],
)
def test_small_products_get_small_tiles(sizes, block):
    assert select.best(shape(*sizes), "mma", None, arch("sm_80"))[1]["block"] == block


def test_tiles_fit_a_gpu_with_little_shared_memory():
    """And there is room for as many blocks beside each other as the estimate takes for granted."""
    gpu = arch("sm_89")
    _, params = select.best(shape(8192, 8192, 8192), "mma", None, gpu)
    blocks = 2 if MMA_ALL.block(params)[0] == 128 else 1
    assert blocks * MMA_ALL.shared_bytes(params) <= gpu.shared_per_sm


def test_up_that_begins_inside_a_chunk_is_not_copied_in_chunks():
    gated = {"gate": True, "activation": "silu", "weight_layout": "kn"}
    for n, aligned in ((1028, False), (1032, True)):
        found = select.best(shape(512, n, 512, **gated), "mma", None, arch("sm_80"))
        assert found[1]["aligned"] is aligned


def test_fp32_is_exact_by_default_and_on_every_gpu():
    for name in ("sm_75", "sm_80", "sm_90a"):
        found = select.best(shape(2048, 3000, 1024, "fp32"), "auto", None, arch(name))
        assert found[0] == "fma"
