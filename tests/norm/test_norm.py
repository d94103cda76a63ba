"""fkjit.layer_norm and fkjit.rms_norm without a GPU: numbers, rows of all kinds, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.errors import ArgumentTypeError, FkjitError, ParameterError  # noqa: E402
from fkjit.ops.norm import kernels as kernels  # noqa: E402
from tests.core.sampling import one_in  # noqa: E402
from tests.norm.kit import DTYPES, OPS, assert_right, double, norm, normal, theirs  # noqa: E402

TYPE, VALUE = ArgumentTypeError, ParameterError


# ------------------------------------------------------------------ numbers

SHAPES = [(3, 64), (2, 3, 77), (5, 256), (1, 1000), (9, 1024), (2, 2047), (3, 2048), (2, 4104),
          (1, 8192), (2, 12_288)]  # fmt: skip


@one_in(3, dtype=DTYPES, shape=SHAPES, op=OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_errs_at_most_twice_as_much_as_pytorch(op, shape, dtype):
    x = normal(*shape, dtype=dtype, mean=0.5)
    weight, bias = (normal(shape[-1], dtype=dtype, seed=i) for i in (1, 2))
    exact = theirs(op, *double(x, weight, bias))
    peer = theirs(op, x, weight, bias)
    assert_right(norm(op, x, weight, bias), exact, peer, dtype)


@pytest.mark.parametrize("given", [(), ("weight",), ("bias",), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_weight_and_bias_are_optional_and_may_be_wider_than_x(given, wide):
    x = normal(4, 520, dtype="bf16")
    made = {n: normal(520, dtype="fp32" if wide else "bf16", seed=len(n)) for n in given}
    exact = theirs("layer_norm", *double(x, made.get("weight"), made.get("bias")))
    found = norm("layer_norm", x, **made)
    assert_right(found, exact, exact.bfloat16(), "bf16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_the_residual_stream_is_what_is_normalised(op, dtype):
    """y is the norm of s as it is returned, whoever made s: to the bit."""
    x, residual = (normal(5, 1024, dtype=dtype, seed=i) for i in range(2))
    weight = normal(1024, dtype=dtype, seed=3)
    y, s = norm(op, x, weight, residual=residual)
    assert torch.equal(s, x + residual) and torch.equal(y, norm(op, s, weight))


@pytest.mark.parametrize("columns", [40_000, 65_536])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("op", OPS)
def test_rows_that_no_block_holds(op, dtype, columns):
    x, residual = (normal(2, columns, dtype=dtype, seed=i, mean=1.0) for i in range(2))
    y, s = norm(op, x, residual=residual)
    assert torch.equal(s, x + residual)
    assert_right(y, theirs(op, s.double()), theirs(op, s), dtype)


@pytest.mark.parametrize("columns", [96, 1001, 4096, 20_000])
@pytest.mark.parametrize("value", [0.0, 0.1, -3e4, 1e30])
def test_rows_of_one_value_have_no_variance(value, columns):
    x = torch.full((3, columns), value)
    bias = normal(columns)
    assert torch.equal(norm("layer_norm", x, None, bias), bias.expand(3, -1))


@pytest.mark.parametrize("scale", [1e-18, 1e-6, 1.0, 1e6, 1e17])
@pytest.mark.parametrize("op", OPS)
def test_any_scale(op, scale):
    x = normal(3, 1500) * scale
    found = norm(op, x, eps=0.0)
    assert_right(found, theirs(op, x.double(), eps=0.0), theirs(op, x, eps=0.0), "fp32")


@pytest.mark.parametrize("offset", [10.0, 1e4, -3e5])
def test_a_large_mean_costs_no_digits(offset):
    x = normal(4, 3000) + offset
    found = norm("layer_norm", x)
    exact = theirs("layer_norm", x.double())
    assert (found.double() - exact).abs().max() < 4e-6 + 6e-8 * abs(offset)


def test_a_first_element_far_from_all_others_costs_few():
    """It is what distances are taken from."""
    x = normal(3, 4000)
    x[:, 0] = 1e5
    found = norm("layer_norm", x)
    exact = theirs("layer_norm", x.double())
    assert ((found.double() - exact).abs() / exact.abs().amax(-1, True)).max() < 2e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("columns", [100, 2048, 9000])
@pytest.mark.parametrize("op", OPS)
def test_nan_and_infinities_stay_in_their_row(op, columns, bad):
    x = normal(6, columns)
    clean = norm(op, x)
    x[2, columns // 2] = bad
    found, expected = norm(op, x), theirs(op, x)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], clean[others])
    assert torch.equal(found[2].isnan(), expected[2].isnan())
    assert torch.equal(found[2].nan_to_num(), expected[2].nan_to_num())


def test_fp16_at_its_limits():
    """Sums of squares are beyond fp16, and so is a sum with the residual."""
    x = normal(2, 512, dtype="fp16") * 2e4
    assert_right(norm("rms_norm", x), theirs("rms_norm", x.double()), theirs("rms_norm", x), "fp16")
    y, s = norm("rms_norm", x.clamp_min(5e4), residual=x.clamp_min(5e4))
    assert s.isinf().all() and y.isnan().all()


# ------------------------------------------------------------------ rows of all kinds


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_any_width_and_distance_of_rows(data):
    """Slices of wider arrays; out may be given, or be x or the residual. Gaps stay as they are."""
    op, dtype = data.draw(st.sampled_from(OPS)), data.draw(st.sampled_from(list(DTYPES)))
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 700))
    if data.draw(st.booleans()):
        columns = -(-columns // 8) * 8

    def array(seed):
        start, gap = (data.draw(st.sampled_from([0, 0, 1, 8])) for _ in range(2))
        whole = normal(rows, start + columns + gap, dtype=dtype, seed=seed)
        return whole, whole[:, start : start + columns]

    (x_whole, x), (r_whole, residual), (o_whole, out) = (array(seed) for seed in range(3))
    residual = data.draw(st.sampled_from([None, residual]))
    target = data.draw(st.sampled_from([None, out, x, residual]))
    weight = normal(columns, dtype=dtype, seed=5) if data.draw(st.booleans()) else None
    s = x.clone() if residual is None else x + residual
    expected = norm(op, s, weight)
    wholes = [x_whole, r_whole, o_whole]
    before = [whole.clone() for whole in wholes]
    made = norm(op, x, weight, residual=residual, out=target)
    y, stream = made if residual is not None else (made, s)
    assert torch.equal(stream, s)
    if target is not None:
        assert y is target
    if op == "rms_norm" or columns > 1:  # one element has a variance of rounding alone
        assert torch.allclose(y.float(), expected.float(), rtol=1e-2, atol=1e-5)
    for view, whole, old in zip((x, residual, out), wholes, before, strict=True):
        if target is not None and view is target:
            mask = torch.ones_like(whole, dtype=torch.bool)
            begin = view.storage_offset() - whole.storage_offset()
            mask[:, begin : begin + columns] = False
            assert torch.equal(whole[mask], old[mask])
        else:
            assert torch.equal(whole, old)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0,), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_nothing_at_all(op, shape):
    x = torch.empty(shape)
    assert norm(op, x).shape == shape
    y, s = norm(op, x, residual=x)
    assert y.shape == s.shape == shape


def test_leading_dimensions_and_arrays_of_numpy():
    x = normal(2, 3, 4, 80)
    expected = norm("layer_norm", x)
    flat = norm("layer_norm", x[1, 2, 3])
    assert flat.shape == (80,) and torch.equal(flat, expected[1, 2, 3])
    found = norm("layer_norm", x.numpy())
    assert isinstance(found, np.ndarray) and np.array_equal(found, expected.numpy())


SPREAD = {
    "heads of a packed projection": lambda x: x[:, :, :3],
    "some of them from the second on": lambda x: x[:, 1:4, 1:3],
    "transposed": lambda x: x.transpose(0, 2)[:2],
    "backwards in no dimension": lambda x: x.transpose(1, 2)[:, ::2, 1:],
    "one row a batch": lambda x: x[:, 2],
    "in four dimensions": lambda x: x[:, :4].unflatten(1, (2, 2))[:, :, :1, ::2],
    "repeated": lambda x: x[:1, :1].expand(3, 4, *x.shape[2:]),
}


@one_in(3, op=OPS, dtype=("bf16", "fp32"), what=tuple(SPREAD))
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("what", SPREAD)
def test_rows_of_any_strides(op, dtype, what):
    """x, residual and what is written each in strides of their own, and rows in between untouched;
    the same bits as of contiguous copies, which they are of."""
    x, other = (SPREAD[what](normal(3, 5, 6, 72, dtype=dtype, seed=i)) for i in (1, 2))
    weight = normal(72, dtype=dtype, seed=3)
    expected = norm(op, x.contiguous(), weight)
    assert torch.equal(norm(op, x, weight), expected)
    whole = torch.full((*x.shape[:-2], x.shape[-2] + 2, 72), 7.0, dtype=x.dtype)
    out = whole[..., 1:-1, :]
    assert norm(op, x, weight, out=out) is out and torch.equal(out, expected)
    assert (whole[..., 0, :] == 7).all() and (whole[..., -1, :] == 7).all()
    y, s = norm(op, x.contiguous(), weight, residual=other.contiguous())
    found = norm(op, x, weight, residual=other, out=out)
    assert torch.equal(found[0], y) and torch.equal(found[1], s)


@pytest.mark.parametrize("op", OPS)
def test_a_residual_stream_in_one_place(op):
    x, residual = normal(6, 80), normal(6, 80, seed=1)
    expected = norm(op, x, residual=residual)
    stream = residual.clone()
    y, s = norm(op, x, residual=stream, out=x, sum=stream)
    assert y is x and s is stream
    assert torch.equal(y, expected[0]) and torch.equal(s, expected[1])
    with pytest.raises(ParameterError, match="sum is given without a residual"):
        norm(op, x, sum=stream)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("columns", [80, 70_000])
def test_a_weight_of_which_one_is_missing(op, columns):
    """weight_offset, which rounds nothing: in bf16 1 + weight would."""
    x, weight = normal(2, columns, dtype="bf16"), normal(columns, dtype="bf16", seed=1) / 64
    found = norm(op, x, weight, weight_offset=1.0)
    expected = theirs(op, x.double(), weight.double() + 1)
    assert_right(found, expected, theirs(op, x, weight + 1), "bf16")
    with pytest.raises(ParameterError, match=r"weight_offset=1\.0; allowed"):
        norm(op, x, weight_offset=1)


# ------------------------------------------------------------------ choices

ARCH_KINDS = [(vector, clusters) for vector in (True, False) for clusters in (True, False)]


@pytest.mark.parametrize(("vector", "clusters"), ARCH_KINDS)
@pytest.mark.parametrize("rows", [1, 2048, 16_384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width_has_a_legal_variant(dtype, rows, vector, clusters):
    widths = [1, 63, 64, 255, 256, 1024, 1032, 4096, 8192, 16_384, 32_768, 65_536, 100_000]
    for columns in widths:
        spec, tuned = kernels.choose("rms_norm", dtype, columns, rows, vector, clusters)
        params = {"dtype": dtype, "weight_dtype": dtype, "vector": vector, **tuned}
        assert spec.why_not(params) is None
        if spec.name == "rows":
            assert kernels.capacity(dtype, tuned["tile"]) >= columns
            assert clusters or tuned["tile"][2] == 1


def test_single_rows_get_more_threads_than_many():
    def tile(columns, rows):
        return kernels.choose("rms_norm", "bf16", columns, rows, True, True)[1]["tile"]

    assert tile(4096, 1) == (256, 2, 1) and tile(4096, 16_384) == (128, 4, 1)
    assert tile(8192, 1) == (512, 2, 1) and tile(8192, 2048) == (256, 4, 1)
    assert tile(16_384, 1) == (512, 1, 4) and tile(16_384, 64) == (512, 4, 1)


# ------------------------------------------------------------------ refusals

X = normal(4, 64)
W = normal(64)
REFUSALS = [
    ({"x": X.double()}, TYPE, "x is fp64; allowed: fp16, bf16, fp32"),
    ({"x": 3.0}, TYPE, "x is a builtins.float"),
    ({"x": torch.tensor(1.0)}, VALUE, r"x has shape \(\)"),
    ({"x": X.t()}, VALUE, "x has stride 64 in its last dimension"),
    ({"residual": normal(4, 32)}, VALUE, r"residual has shape \(4, 32\); allowed: x's \(4, 64\)"),
    ({"residual": X.half()}, TYPE, "residual is fp16 but x is fp32"),
    ({"weight": normal(32)}, VALUE, r"weight has shape \(32,\); allowed: the width of x \(64,\)"),
    ({"weight": normal(1, 64)}, VALUE, r"weight has shape \(1, 64\)"),
    ({"weight": W.half()}, TYPE, "weight is fp16; allowed: fp32"),
    ({"x": X.half(), "weight": W.bfloat16()}, TYPE, "weight is bf16; allowed: fp16, fp32"),
    ({"x": X.half(), "weight": W, "bias": W.half()}, TYPE, "bias is fp16 but weight is fp32"),
    ({"weight": normal(128)[::2]}, VALUE, "weight has stride 2"),
    ({"weight": W.numpy()}, TYPE, "weight is a numpy array but x is a torch array"),
    ({"eps": "small"}, TYPE, "eps='small' is not a plain number"),
    ({"eps": None}, TYPE, "eps=None is not a plain number"),
    ({"eps": -1e-5}, VALUE, "eps=-1e-05 is not a finite number from 0"),
    ({"eps": float("nan")}, VALUE, "eps=nan"),
    ({"eps": float("inf")}, VALUE, "eps=inf"),
    ({"out": normal(4, 65)}, VALUE, r"out has shape \(4, 65\); allowed: the result's \(4, 64\)"),
    ({"out": X.half()}, TYPE, "out is fp16; allowed: fp32"),
    ({"out": normal(1, 64).expand(4, 64)}, VALUE, "out .* share memory"),
    ({"out": X[:, :1].expand(4, 64)}, VALUE, "share memory"),
    ({"weight": W, "out": W.view(1, 64), "x": X[:1]}, VALUE, "out overlaps weight in memory"),
]


@pytest.mark.parametrize(("changed", "kind", "message"), REFUSALS, ids=[r[2] for r in REFUSALS])
def test_what_is_wrong_is_said(changed, kind, message):
    arguments = {"x": X, **changed}
    with pytest.raises(kind, match=f"^layer_norm: .*{message}"):
        norm("layer_norm", arguments.pop("x"), **arguments)
    if "bias" not in changed:
        arguments = {"x": X, **changed}
        with pytest.raises(kind, match=f"^rms_norm: .*{message}"):
            norm("rms_norm", arguments.pop("x"), **arguments)


def test_shifted_overlaps_are_refused():
    buffer = normal(5, 64)
    with pytest.raises(ParameterError, match="out overlaps x in memory; only the very same"):
        norm("rms_norm", buffer[:4], out=buffer[1:])
    assert issubclass(ParameterError, FkjitError)


def test_read_only_outputs_are_refused():
    out = np.zeros((4, 64), np.float32)
    out.flags.writeable = False
    with pytest.raises(ParameterError, match="out is read-only"):
        fkjit.layer_norm(X.numpy(), out=out)


def test_preparing_takes_the_same_arguments():
    fkjit.prepare("layer_norm", X, W, W, residual=X)
    fkjit.prepare("rms_norm", X, W, 1e-6, out=X)
    with pytest.raises(ParameterError, match="weight has shape"):
        fkjit.prepare("rms_norm", X, normal(32))
