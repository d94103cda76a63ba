"""Products with few rows of x, in the interpreter: every epilogue, the same bits every time, how k
is shared out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import fkjit
from fkjit.jit.build import quiet
from fkjit.ops.gemm import cases
from fkjit.ops.gemm.cases_small import GEMV as GEMV_CASES
from fkjit.ops.gemm.cases_small import SKINNY as SKINNY_CASES
from fkjit.ops.gemm.epilogue import ACTIVATIONS, kernel_for, mod_text
from fkjit.ops.gemm.kernels_small import GEMV, SKINNY, TOKENS, skinny_scratch, split
from fkjit.settings import settings
from tests.core.sampling import one_in

PLAIN = {"activation": "none", "gate": False}
SPECS = {"gemv": GEMV, "skinny": SKINNY}


def first_variant(spec, **fixed):
    return next(p for p in spec.variants() if fixed.items() <= p.items())


def run(spec, params, problem, seed=0):
    """The arrays after a launch, and what they should hold."""
    rng = np.random.default_rng(seed)
    inputs = spec.verification.inputs(params, problem, rng)
    arrays = {**inputs, **spec.verification.outputs(params, problem)}
    with quiet():
        fkjit.launch(spec, params, problem, arrays)
    return arrays, spec.verification.reference(problem, inputs)


def assert_right(spec, params, problem):
    arrays, expected = run(spec, params, problem)
    for name, of_name in expected.items():
        finite = np.isfinite(of_name)
        found = np.asarray(arrays[name], np.float64)
        assert np.array_equal(np.isfinite(found), finite), name
        bound = spec.verification.tolerance(params) * max(1.0, np.abs(of_name[finite]).max())
        assert np.abs(found[finite] - of_name[finite]).max() <= bound, name


@one_in(4)
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("name", SPECS)
def test_every_activation_with_and_without_a_gate(name, layout, activation, gate):
    given = {**PLAIN, "activation": activation, "gate": gate, "weight_layout": layout}
    params = first_variant(SPECS[name], dtype="bf16", out_dtype="bf16", **given)
    assert_right(SPECS[name], params, SPECS[name].verification.problems(params, "small")[0])


@pytest.mark.parametrize("name", SPECS)
def test_a_callers_expression(name, monkeypatch):
    text = mod_text("x > 0.f ? x : 0.125f * x")
    monkeypatch.setitem(cases._VALUES, text, lambda z: np.where(z > 0, z, 0.125 * z))
    spec = kernel_for(SPECS[name], text)
    params = first_variant(spec, dtype="fp16", out_dtype="fp16", gate=False)
    assert_right(spec, params, spec.verification.problems(params, "small")[0])


@pytest.mark.parametrize("name", SPECS)
def test_nothing_of_an_epilogue(name):
    params = first_variant(SPECS[name], dtype="bf16", out_dtype="fp32", **PLAIN)
    assert_right(SPECS[name], params, cases.problem(params, 3, 40, 136, bias=False))


@pytest.mark.parametrize("m", range(1, 9))
def test_each_number_of_rows(m):
    for dtype, layout in itertools.product(("bf16", "fp32"), ("nk", "kn")):
        params = first_variant(GEMV, dtype=dtype, out_dtype=dtype, weight_layout=layout, **PLAIN)
        assert_right(GEMV, params, cases.problem(params, m, 40, 200))


@pytest.mark.parametrize("parts", [1, 2, 5, 9])
def test_k_in_more_parts_than_there_is_k(parts):
    params = first_variant(SKINNY, aligned=True, **PLAIN)
    assert_right(SKINNY, params, cases.problem(params, 9, 40, 200, split=parts))


@pytest.mark.parametrize("cluster", [2, 4, 8])
def test_blocks_of_a_cluster_share_k(cluster, monkeypatch):
    """Also where some of them have none of it."""
    monkeypatch.setattr(
        "fkjit.jit.build.settings", lambda: replace(settings(), target="compute_90a")
    )
    params = {
        **first_variant(SKINNY, dtype="bf16", out_dtype="bf16", aligned=True, **PLAIN),
        "tokens": 16, "tile": (32, 256, 4), "cluster": cluster,
    }  # fmt: skip
    for m, n, k in ((13, 40, 1288), (1, 8, 8)):
        problem = cases.problem(params, m, n, k)
        assert SKINNY.grid(params, problem) == (-(-n // 32), cluster, 1)
        assert skinny_scratch(params, problem) == (0, 0)
        assert_right(SKINNY, params, problem)


def test_the_same_bits_every_time():
    params = first_variant(SKINNY, dtype="bf16", out_dtype="fp32", aligned=True, **PLAIN)
    problem = cases.problem(params, 16, 72, 1000, split=4)
    once, again = (run(SKINNY, params, problem)[0]["out"] for _ in range(2))
    assert np.array_equal(once, again)


def test_infinite_weights_stay_in_their_own_outputs():
    for spec in SPECS.values():
        params = first_variant(spec, dtype="bf16", out_dtype="bf16", weight_layout="nk", **PLAIN)
        problem = cases.problem(params, 2, 24, 72)
        inputs = spec.verification.inputs(params, problem, np.random.default_rng(1))
        cases.seen(problem, "weight", inputs["weight"])[7, 71] = np.inf
        arrays = {**inputs, **spec.verification.outputs(params, problem)}
        fkjit.launch(spec, params, problem, arrays)
        out = cases.seen(problem, "out", arrays["out"]).astype(np.float32)
        assert np.isinf(out[:, 7]).all() and np.isfinite(np.delete(out, 7, axis=1)).all()


@pytest.mark.parametrize(
    ("m", "n", "k", "parts"),
    [(64, 16384, 4096, 1), (16, 8192, 8192, 2), (16, 1024, 4096, 8), (16, 64, 64, 1)],
)
def test_k_is_shared_out_so_that_one_wave_fills_the_gpu(m, n, k, parts):
    tokens = next(size for size in TOKENS if m <= size)
    params = first_variant(SKINNY, tokens=tokens, tile=(64, 64, 4), **PLAIN)
    problem = {**cases.problem(params, m, n, k), "multiprocessors": 132}
    assert split(params, problem) == parts
    blocks = SKINNY.grid(params, problem)
    assert blocks == (-(-n // 64), parts, 1)
    size, counters = skinny_scratch(params, problem)
    assert (size, counters) == (
        (4 * blocks[0] * parts * tokens * 64, blocks[0]) if parts > 1 else (0, 0)
    )


def test_a_problem_may_say_how_many_parts():
    params = first_variant(SKINNY, **PLAIN)
    assert split(params, {**cases.problem(params, 16, 8192, 8192), "split": 3}) == 3


def test_cases_have_ragged_edges_and_several_parts():
    for spec, found in ((GEMV, GEMV_CASES), (SKINNY, SKINNY_CASES)):
        for params in spec.variants():
            first = found.problems(params, "small")[0]
            outputs = params["tile"][0]
            assert first["n"] > outputs and first["n"] % outputs and first["residual"]
