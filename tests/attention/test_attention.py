"""fkjit.attention without a GPU: the same kernels in the interpreter, and every refusal."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fkjit
from fkjit.arch import DEFAULT_ARCHS, arch
from fkjit.errors import (
    ArgumentTypeError,
    DeviceError,
    InterpreterError,
    ParameterError,
)
from fkjit.jit.build import quiet
from fkjit.ops.attention import problem as attention_problem
from fkjit.ops.attention import select as choice
from fkjit.runtime import interop
from fkjit.settings import settings as fkjit_settings
from tests.attention.kit import assert_close, normal, reference
from tests.core.sampling import one_in


def run(q, k, v, **options):
    with quiet():
        return fkjit.attention(q, k, v, **options)


@one_in(2)
@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("causal", [False, True])
def test_every_implementation_agrees_with_float64(impl, dtype, causal):
    q, k, v = (
        normal((2, 4, 37, 40), dtype),
        normal((2, 2, 53, 40), dtype, 1),
        normal((2, 2, 53, 24), dtype, 2),
    )
    o, lse = run(q, k, v, causal=causal, impl=impl, return_lse=True)
    assert o.dtype == q.dtype
    assert_close(o, lse, *reference(q, k, v, causal), dtype)


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_any_shape_stride_and_dtype(data):
    def pick(*values):
        return data.draw(st.sampled_from(values))

    dtype, causal, layout = pick("fp16", "bf16"), data.draw(st.booleans()), pick("bhsd", "bshd")
    group, hkv, batch = pick(1, 2, 3), pick(1, 2), pick(1, 2)
    sq, sk = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 70))
    d, dv = data.draw(st.integers(1, 64)), data.draw(st.integers(1, 64))
    pad, seed = pick(0, 1, 8), data.draw(st.integers(0, 1000))

    def array(heads, rows, columns, salt):
        """[B, H, S, D], a view into a wider array, in memory order of the layout."""
        if layout == "bhsd":
            return normal((batch, heads, rows, columns + pad), dtype, seed + salt)[..., :columns]
        wide = normal((batch, rows, heads, columns + pad), dtype, seed + salt)[..., :columns]
        return wide.transpose(0, 2, 1, 3)

    q, k, v = array(group * hkv, sq, d, 0), array(hkv, sk, d, 1), array(hkv, sk, dv, 2)
    order = (0, 1, 2, 3) if layout == "bhsd" else (0, 2, 1, 3)
    o, lse = run(
        *(x.transpose(order) for x in (q, k, v)), causal=causal, layout=layout, return_lse=True
    )
    assert_close(o.transpose(order), lse, *reference(q, k, v, causal), dtype)


def test_inputs_are_not_written():
    q, k, v = (normal((1, 2, 20, 32), "fp16", i) for i in range(3))
    before = [x.copy() for x in (q, k, v)]
    run(q, k, v, softmax_scale=-0.3)
    assert all(np.array_equal(x, y) for x, y in zip((q, k, v), before, strict=True))


@pytest.mark.parametrize("scale", [-0.25, 0.0, 2.0])
@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_any_finite_scale(scale, impl):
    q, k, v = (normal((1, 2, 33, 64), "fp16", i) for i in range(3))
    o, lse = run(q, k, v, softmax_scale=scale, causal=True, impl=impl, return_lse=True)
    assert_close(o, lse, *reference(q, k, v, True, scale), "fp16")


@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_rows_without_keys_are_zero_with_lse_minus_infinity(impl):
    q, k = normal((1, 2, 9, 32)), normal((1, 2, 4, 32), seed=1)
    o, lse = run(q, k, k, causal=True, impl=impl, return_lse=True)
    assert not o[:, :, :5].any() and np.isneginf(lse[:, :, :5]).all()
    assert np.isfinite(lse[:, :, 5:]).all() and o[:, :, 5:].any()
    o, lse = run(q, k[:, :, :0], k[:, :, :0], impl=impl, return_lse=True)
    assert not o.any() and np.isneginf(lse).all()


def test_the_causal_mask_is_aligned_to_the_bottom_right():
    q, k, v = normal((1, 1, 3, 32)), normal((1, 1, 5, 32), seed=1), normal((1, 1, 5, 32), seed=2)
    full = run(q[:, :, 2:], k, v)
    assert np.array_equal(run(q, k, v, causal=True)[:, :, 2:], full)
    assert_close(run(q, k, v, causal=True), None, *reference(q, k, v, True), "fp16")


def test_empty_batches_heads_and_queries_give_empty_outputs():
    q, k = normal((2, 4, 6, 32)), normal((2, 2, 8, 32))
    for a, b in ((q[:0], k[:0]), (q[:, :, :0], k), (q[:, :0], k)):
        o, lse = run(a, b, b, return_lse=True)
        assert o.shape == a.shape and lse.shape == a.shape[:3] and o.size == 0


def test_every_legal_tile_gives_the_same_result():
    q, k, v = (
        normal((1, 2, 70, 64)),
        normal((1, 1, 150, 64), seed=1),
        normal((1, 1, 150, 64), seed=2),
    )
    expected = reference(q, k, v, True)
    for block in (16, 32, 64, 128, (128, 64), (32, 32), [128, 64]):
        o, lse = run(q, k, v, causal=True, block=block, return_lse=True)
        assert_close(o, lse, *expected, "fp16")


@pytest.mark.parametrize("value", [1e-30, 1e-46, 1e-300, -1e-46])
def test_scales_too_small_for_fp32_are_as_good_as_zero(value):
    q, k, v = (normal((1, 2, 20, 64), "fp16", i) for i in range(3))
    o = run(q, k, v, causal=True, softmax_scale=value)
    assert np.array_equal(o, run(q, k, v, causal=True, softmax_scale=0))


def test_numpy_scalars_are_numbers_and_flags():
    q, k, v = (normal((1, 2, 20, 64), "fp16", i) for i in range(3))
    plain = run(q, k, v, causal=True, block=32, softmax_scale=0.25)
    options = {"causal": np.bool_(True), "block": np.int64(32), "softmax_scale": np.float32(0.25)}
    assert np.array_equal(plain, run(q, k, v, **options))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", [*DEFAULT_ARCHS, "sm_121a"])
def test_every_head_dimension_has_a_tile_on_every_architecture(name, dtype, aligned):
    dims = itertools.product(
        (1, 32, 33, 65, 96, 97, 128, 129, 192, 193, 256), (1, 64, 128, 192, 256)
    )
    for (head_dim, head_dim_v), impl in itertools.product(dims, ("flash", "tiled", "naive")):
        problem = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, "seqlen_q": 999}
        spec = choice.implementation(impl, dtype, arch(name))
        params = choice.parameters(spec, problem, None, aligned, arch(name))
        assert spec.why_not(params, arch(name)) is None


@pytest.mark.parametrize("target", ["80", "8.0", "sm_80", "compute_80", "90a", "sm_75"])
def test_any_spelling_of_a_target_serves_the_interpreter(target, monkeypatch):
    monkeypatch.setattr(
        "fkjit.jit.build.settings", lambda: replace(fkjit_settings(), target=target)
    )
    q, k, v = (normal((1, 1, 20, 64), "fp16", i) for i in range(3))
    assert_close(run(q, k, v), None, *reference(q, k, v), "fp16")


@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_nan_keys_make_nan_rows_in_output_and_lse(impl):
    q, k, v = (normal((1, 1, 20, 64), "fp16", i) for i in range(3))
    k[0, 0, 3, 5] = np.nan
    o, lse = run(q, k, v, causal=True, impl=impl, return_lse=True)
    assert np.isfinite(o[:, :, :3]).all() and np.isfinite(lse[:, :, :3]).all()
    assert np.isnan(o[:, :, 3:]).all() and np.isnan(lse[:, :, 3:]).all()


def test_huge_scores_and_one_dominating_key():
    q, k, v = (normal((1, 1, 20, 64), "fp16", i) for i in range(3))
    o, lse = run(q * 60, k * 60, v, return_lse=True)
    assert_close(o, lse, *reference(q * 60, k * 60, v), "fp16")


def test_a_maximum_that_keeps_growing_is_followed():
    """Keys sorted so that each tile raises the maximum: every rescaling runs."""
    q = np.ones((1, 1, 16, 32), np.float16)
    k = np.sort(normal((1, 1, 256, 32)), axis=2)[:, :, ::-1] * 3
    v = normal((1, 1, 256, 32), seed=1)
    o, lse = run(q, k, v, block=16, return_lse=True, softmax_scale=1.0)
    assert_close(o, lse, *reference(q, k, v, False, 1.0), "fp16")


class TestTorch:
    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch", reason="needs torch")

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_cpu_tensors_come_back_as_cpu_tensors(self, torch, dtype):
        q, k, v = (
            torch.randn(1, 2, 30, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)
        )
        q, k, v = (x.to(getattr(torch, dtype)) for x in (q, k, v))
        o, lse = run(q, k, v, causal=True, return_lse=True)
        assert isinstance(o, torch.Tensor) and o.dtype == q.dtype and lse.dtype == torch.float32
        expected = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), is_causal=True
        )
        bound = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6}[dtype]
        assert (o.double() - expected).abs().max().item() <= bound

    def test_fake_tensors_give_fake_results(self, torch):
        q = torch.randn(1, 1, 4, 32, dtype=torch.float16)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = mode.from_tensor(q)
            for features in ({}, {"window": (3, 0)}):
                o, lse = run(fake, fake, fake, return_lse=True, **features)
                assert type(o) is type(lse) is type(fake) and o.shape == q.shape
                assert lse.shape == (1, 1, 4) and lse.dtype == torch.float32

    def test_tensors_without_memory_are_refused(self, torch):
        q = torch.randn(1, 1, 4, 32, dtype=torch.float16)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = mode.from_tensor(q)
        with pytest.raises(ArgumentTypeError, match="q is a FakeTensor without memory of its own"):
            interop.view(fake, "attention", "q")
        with pytest.raises(ArgumentTypeError, match="v is a lazily negated"):
            run(q, q, torch._neg_view(q))

    def test_frameworks_are_not_mixed(self, torch):
        q = torch.randn(1, 1, 4, 32, dtype=torch.float16)
        with pytest.raises(ArgumentTypeError, match="k is a numpy array but q is a torch array"):
            run(q, q.numpy(), q)

    def test_tensors_of_other_devices_and_layouts_are_refused(self, torch):
        q = torch.empty(1, 1, 4, 32, dtype=torch.float16, device="meta")
        with pytest.raises(DeviceError, match=r"q is a .* tensor on meta"):
            run(q, q, q)


def test_any_dlpack_array_on_the_cpu_comes_back_in_kind():
    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

        def __array_namespace__(self):
            return Namespace

    class Namespace:
        @staticmethod
        def from_dlpack(array):
            return Foreign(np.from_dlpack(array))

    q, k, v = (normal((1, 2, 20, 32), "fp16", i) for i in range(3))
    o = run(*(Foreign(x) for x in (q, k, v)))
    assert isinstance(o, Foreign)
    assert np.array_equal(o.array, run(q, k, v))


def test_bf16_of_a_framework_whose_dlpack_numpy_does_not_know_comes_back_in_kind():
    class Like:  # a JAX array on the CPU
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            raise BufferError("Unsupported dtype in DLTensor.")

        def __dlpack_device__(self):
            return (1, 0)

        def __array__(self, dtype=None, copy=None):
            return self.array

        def __array_namespace__(self):
            return SimpleNamespace(asarray=Like)

    q, k, v = (normal((1, 1, 20, 32), "bf16", i) for i in range(3))
    o = run(*(Like(x) for x in (q, k, v)))
    assert isinstance(o, Like) and o.array.dtype.name == "bfloat16"
    assert np.array_equal(o.array.view("u2"), run(q, k, v).view("u2"))
    other = Like(q.astype(np.complex64))
    with pytest.raises(
        ArgumentTypeError, match="cannot be taken through DLPack: Unsupported dtype"
    ):
        run(other, other, other)


def test_what_jax_traces_is_refused_with_what_to_do():
    module = "jax._src.interpreters.partial_eval"
    tracer = type("DynamicJaxprTracer", (), {"__module__": module})()
    with pytest.raises(ArgumentTypeError, match=r"q is traced by JAX .* call it outside jit"):
        run(tracer, tracer, tracer)


def test_a_refused_tile_says_how_much_shared_memory_is_missing():
    problem = {"head_dim": 128, "head_dim_v": 128, "seqlen_q": 4096, "dtype": "fp16"}
    message = (
        r"attention: block=128 needs 163,840 bytes of shared memory; sm_120a has 101,376 "
        r"\(legal here: 16, 32, 64"
    )
    with pytest.raises(ParameterError, match=message):
        choice.parameters(choice.FLASH, problem, 128, True, arch("sm_120a"))


def test_work_of_minutes_is_refused_with_an_estimate(monkeypatch):
    q = np.zeros((8, 32, 4096, 64), np.float16)
    with pytest.raises(
        InterpreterError, match=r"would take about [\d,]+ s .*INTERPRETER_LIMIT=inf"
    ):
        run(q, q, q)


@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_the_flops_of_the_spec_are_those_of_visible_pairs(impl):
    for sq, sk, causal in ((5, 9, True), (9, 5, True), (4, 4, True), (3, 7, False), (6, 5, True)):
        problem = {
            "batch": 2, "heads_q": 3, "seqlen_q": sq, "seqlen_k": sk, "causal": causal,
            "head_dim": 16, "head_dim_v": 8,
        }  # fmt: skip
        visible = np.tri(sq, sk, sk - sq).sum() if causal else sq * sk
        assert attention_problem.flops(problem) == 2 * 3 * visible * 2 * (16 + 8)
