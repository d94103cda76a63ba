"""fkjit.rope without a GPU: angles, layouts, positions, tables, gradients, refusals."""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fkjit
from fkjit import Llama3Scaling, YarnScaling
from fkjit.errors import ArgumentTypeError, FkjitError, ParameterError
from fkjit.jit.build import quiet
from fkjit.ops.rope.cases import reference
from fkjit.ops.rope.frequencies import fixed_point, frequencies
from fkjit.runtime.interop import numpy_dtype
from tests.core.sampling import one_in

TYPE, VALUE = ArgumentTypeError, ParameterError
LIMITS = {"fp16": 6e-4, "bf16": 4.5e-3, "fp32": 3e-7}  # of the largest element
LAST = 2**31 - 1


def normal(shape, dtype="fp32", seed=0):
    rng = np.random.default_rng([seed, *shape])
    return rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(dtype))


def rope(*args, **options):
    with quiet():
        return fkjit.rope(*args, **options)


def expected(q, at, *, rotary_dim=None, theta=1e4, scaling=None, interleaved=False, inverse=False):
    """q [B, H, S, D] turned in float64 at positions [B, S]."""
    batch, heads, length, dim = q.shape
    problem = {
        "layout": "bhsd", "batch": batch, "length": length, "heads_q": heads, "heads_k": 0,
        "rotary_dim": rotary_dim or dim, "positions": "ids", "start": 0, "theta": theta,
        "scaling": scaling, "interleaved": interleaved, "inverse": inverse,
    }  # fmt: skip
    return reference(problem, {"q": q, "positions": np.asarray(at)})["out_q"]


def assert_near(found, wanted, dtype="fp32"):
    wanted = np.asarray(wanted, np.float64)
    assert found.dtype == numpy_dtype(dtype) and found.shape == wanted.shape
    error = np.abs(found.astype(np.float64) - wanted).max(initial=0.0)
    assert error <= LIMITS[dtype] * np.abs(wanted).max(initial=1.0), error


# ------------------------------------------------------------------ numbers

FAR = np.array([[0, 1, 1000, 999_999, 1_000_000, 16_777_217, LAST - 1, LAST]])


def turn_exactly(x, position, theta):
    """A row of halves, turned with 60 digits."""
    half = len(x) // 2
    found = np.zeros(len(x))
    with localcontext() as context:
        context.prec = 60
        turn = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494")
        for i in range(half):
            angle = float(position * (-Decimal(theta).ln() * 2 * i / len(x)).exp() % turn)
            c, s = np.cos(angle), np.sin(angle)
            u, v = float(x[i]), float(x[half + i])
            found[i], found[half + i] = u * c - v * s, v * c + u * s
    return found


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1.5])
def test_angles_are_exact_at_any_position(theta):
    q = normal((1, 1, 8, 64))
    found = rope(q, None, FAR, theta=theta)
    wanted = [turn_exactly(q[0, 0, i], int(FAR[0, i]), theta) for i in range(8)]
    assert_near(found, np.array(wanted)[None, None])


def test_the_reference_is_right_far_away():
    q = normal((1, 1, 8, 64))
    wanted = np.array([turn_exactly(q[0, 0, i], int(FAR[0, i]), 1e4) for i in range(8)])
    assert np.abs(expected(q, FAR) - wanted).max() < 1e-8


SCALED = [
    Llama3Scaling(),
    Llama3Scaling(32.0, 1.0, 4.0, 8192),
    Llama3Scaling(2.5, 0.5, 30.0, 100),
    Llama3Scaling(1.0),
    Llama3Scaling(1e6, 1.0, 1.5, LAST),
]


@pytest.mark.parametrize("scaling", SCALED, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_llama_scaling_in_the_kernel(scaling, interleaved):
    q = normal((1, 2, 8, 128))
    options = {"theta": 500_000.0, "scaling": scaling, "interleaved": interleaved}
    assert_near(rope(q, None, FAR, **options), expected(q, FAR, **options))


@pytest.mark.parametrize("scaling", SCALED, ids=str)
def test_fixed_point_frequencies_are_the_float_ones(scaling):
    """The kernel's arithmetic in Python's integers."""
    *powers, first, low, high, reduced, slope, shift = fixed_point(128, 5e5, scaling)
    wanted = frequencies(128, 5e5, scaling) / (2 * np.pi)
    for pair in range(64):
        turns = first
        for bit in range(8):
            turns = turns * powers[bit] >> 64 if pair >> bit & 1 else turns
        if turns < high:
            more = ((turns - low << shift) * slope >> 64) * 2 if turns > low else 0
            assert reduced + more < 1 << 64
            turns = turns * (reduced + more) >> 64
        assert abs(turns / 2**64 - float(wanted[pair])) < 1e-16


@one_in(2)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "dims", [(128, 128), (128, 64), (80, 80), (64, 48), (10, 2), (7, 6), (2, 2)]
)
@pytest.mark.parametrize("source", ["fused", "table"])
def test_at_most_twice_as_wrong_as_pytorch(dtype, interleaved, dims, source):
    torch = pytest.importorskip("torch")
    dim, rotary = dims
    q = normal((2, 3, 5, dim), dtype)
    options = {"rotary_dim": rotary, "interleaved": interleaved}
    wanted = expected(q, [[4, 5, 6, 7, 8]] * 2, **options)
    table = fkjit.rope_table(9, rotary) if source == "table" else None
    ours = rope(q, None, 4, table=table, **options).astype(np.float64) - wanted

    x = torch.from_numpy(q.astype(np.float32)).to(getattr(torch, q.dtype.name))
    angle = torch.arange(4, 9)[:, None] * 1e4 ** (-torch.arange(0, rotary, 2) / rotary)
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    one = slice(0, rotary, 2) if interleaved else slice(0, rotary // 2)
    two = slice(1, rotary, 2) if interleaved else slice(rotary // 2, rotary)
    theirs = x.clone()
    theirs[..., one] = x[..., one] * cosine - x[..., two] * sine
    theirs[..., two] = x[..., two] * cosine + x[..., one] * sine
    theirs = theirs.double().numpy() - wanted
    assert np.linalg.norm(ours) <= 2 * np.linalg.norm(theirs)
    assert np.abs(ours).max() <= 2 * np.abs(theirs).max()
    assert np.array_equal(ours[..., rotary:], np.zeros_like(ours[..., rotary:]))


def test_position_zero_changes_nothing():
    q, k = normal((1, 4, 1, 64), "bf16"), normal((1, 2, 1, 64), "bf16", 1)
    a, b = rope(q, k)
    assert np.array_equal(a, q) and np.array_equal(b, k)


def test_inverse_turns_back():
    q = normal((2, 3, 40, 32))
    assert_near(rope(rope(q, None, 70_000), None, 70_000, inverse=True), q)


def test_nan_stays_in_its_pair():
    q = normal((1, 1, 3, 16))
    q[0, 0, 1, 2] = np.nan
    found = np.isnan(rope(q, None, 5))
    assert found[0, 0, 1, [2, 10]].all() and found.sum() == 2


# ------------------------------------------------------------------ shapes, strides, positions


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_any_layout_strides_and_positions(data):
    draw = data.draw
    dtype = draw(st.sampled_from(["fp16", "fp32"]))
    batch, length, heads_q, heads_k = (draw(st.integers(1, n)) for n in (3, 9, 40, 5))
    dim = draw(st.sampled_from([64, 32, 16, 12, 6]))
    rotary = draw(st.sampled_from([dim, dim // 2]))
    rotary -= rotary % 2
    layout = draw(st.sampled_from(["bhsd", "bshd", "thd"]))
    batch = 1 if layout == "thd" else batch
    gap, lead = draw(st.sampled_from([0, 0, 8, 3])), draw(st.sampled_from([0, 0, 8, 1]))

    def array(heads, seed):
        wide = normal((batch, length, heads + 1, dim + gap + lead), dtype, seed)
        part = wide[:, :, :heads, lead : lead + dim]
        return part.transpose(0, 2, 1, 3)  # [B, H, S, D]

    def as_given(x):
        return x if layout == "bhsd" else x.transpose(0, 2, 1, 3)[0 if layout == "thd" else ...]

    q, k = array(heads_q, 0), array(heads_k, 1)
    at = np.random.default_rng(length).integers(0, 10**6, (batch, length))
    kind = draw(st.sampled_from(["integer", "starts", "ids", "one row of ids"]))
    if kind == "starts" and layout != "thd":
        positions, at = at[:, 0].copy(), at[:, :1] + np.arange(length)
    elif kind == "integer":
        positions, at = int(at[0, 0]), np.broadcast_to(at[:1, :1] + np.arange(length), at.shape)
    elif kind == "one row of ids" and layout != "thd":
        positions, at = at[:1], np.broadcast_to(at[:1], at.shape)
    else:
        positions = at[0] if layout == "thd" else at[:, ::-1][:, ::-1]
    if not isinstance(positions, int) and draw(st.booleans()):
        positions = positions.astype(np.int32)
    options = {"rotary_dim": rotary, "interleaved": draw(st.booleans())}
    called = {"layout": layout, **options} if layout == "bshd" else options
    turned = [expected(x, at, **options) for x in (q, k)]
    way = draw(st.sampled_from(["new", "out", "inplace"]))
    if way == "out":
        called |= {"out_q": as_given(array(heads_q, 2)), "out_k": as_given(array(heads_k, 3))}
    found = rope(as_given(q), as_given(k), positions, inplace=way == "inplace", **called)
    for x, mine, wanted in zip((q, k), found, turned, strict=True):
        assert_near(mine, as_given(wanted), dtype)
        if way == "inplace":
            assert np.shares_memory(mine, x)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_positions_that_all_batches_share(layout):
    q, at = normal((3, 2, 5, 16)), np.array([7, 0, 3, 3, 90])
    given = q if layout == "bhsd" else q.swapaxes(1, 2)
    found = rope(given, given, at, layout=layout)
    for one in found:
        one = one if layout == "bhsd" else one.swapaxes(1, 2)
        assert_near(one, expected(q, np.broadcast_to(at, (3, 5))))


def test_a_table_of_16_bits():
    q, table = normal((2, 3, 5, 16)), fkjit.rope_table(40, 16).astype("f2")
    assert np.array_equal(rope(q, None, 9, table=table), rope(q, None, 9, table=table.astype("f4")))


def test_several_tiles_of_tokens_and_pieces_of_heads():
    for layout, shape in (("bhsd", (1, 130, 70, 16)), ("bshd", (1, 70, 130, 16))):
        q = normal(shape, "fp16")
        seen = q if layout == "bhsd" else q.transpose(0, 2, 1, 3)
        wanted = expected(seen, [range(5, 75)])
        found = rope(q, None, 5, layout=layout)
        assert_near(found if layout == "bhsd" else found.transpose(0, 2, 1, 3), wanted, "fp16")


def test_q_and_k_as_slices_of_one_array():
    packed = normal((6, (8 + 2 + 2) * 64), "fp16").reshape(6, 12, 64)
    q, k, v = packed[:, :8], packed[:, 8:10], packed[:, 10:].copy()
    wanted = [expected(x[None].transpose(0, 2, 1, 3), [range(6)]) for x in (q, k)]
    rope(q, k, inplace=True)
    for x, turned in zip((q, k), wanted, strict=True):
        assert_near(x, turned[0].transpose(1, 0, 2), "fp16")
    assert np.array_equal(packed[:, 10:], v)


def test_one_of_the_outputs_given():
    q, k = normal((1, 4, 3, 32)), normal((1, 2, 3, 32), seed=1)
    out = np.full_like(k, np.nan)
    a, b = rope(q, k, 9, out_k=out)
    assert b is out and a is not q
    assert_near(a, expected(q, [range(9, 12)]))
    assert_near(b, expected(k, [range(9, 12)]))


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 2, 0, 8), (2, 0, 3, 8)])
def test_nothing_to_turn(shape):
    q = normal(shape)
    a, b = rope(q, q, 3)
    assert a.shape == b.shape == shape


def test_no_heads_of_q_and_some_of_k():
    k = normal((2, 3, 4, 8))
    a, b = rope(k[:, :0], k, 3)
    assert a.shape == (2, 0, 4, 8)
    assert_near(b, expected(k, [range(3, 7)] * 2))


def test_rows_at_no_position_are_nan_where_they_turn():
    q = normal((1, 2, 5, 8))
    at = np.array([[1, -1, LAST + 1, -(2**40), 2**40 + 1]])
    found = rope(q, None, at, rotary_dim=4)
    assert np.isnan(found[:, :, 1:, :4]).all()
    assert np.array_equal(found[..., 4:], q[..., 4:])
    assert_near(found[:, :, :1], expected(q[:, :, :1], [[1]], rotary_dim=4))
    behind = rope(
        q, None, np.array([[9, 10, -1, 0, 2**33]], np.int64), table=fkjit.rope_table(10, 8)
    )
    assert np.array_equal(np.isnan(behind[0, 0, :, 0]), [False, True, True, False, True])


# ------------------------------------------------------------------ tables


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_table_and_the_kernel_agree_a_million_tokens_away(interleaved):
    table = fkjit.rope_table(1_000_001, 8, theta=5e5, scaling=Llama3Scaling())
    q, at = normal((1, 2, 3, 8)), [[0, 999_999, 1_000_000]]
    wanted = expected(q, at, theta=5e5, scaling=Llama3Scaling(), interleaved=interleaved)
    assert_near(rope(q, None, np.array(at), table=table, interleaved=interleaved), wanted)


def test_yarn_by_its_formulas():
    """DeepSeek's and Qwen's way, written out."""
    dim, theta, factor, context = 64, 10_000.0, 4.0, 512
    plain = theta ** (-np.arange(0, dim, 2) / dim)

    def pair(times):
        return dim * np.log(context / (times * 2 * np.pi)) / (2 * np.log(theta))

    low, high = np.floor(pair(32)), np.ceil(pair(1))
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    turning = plain / factor * ramp + plain * (1 - ramp)
    angle = np.arange(2000)[:, None] * turning
    grown = 0.1 * np.log(factor) + 1
    table = fkjit.rope_table(2000, dim, scaling=YarnScaling(factor, context))
    assert np.abs(table - grown * np.hstack([np.cos(angle), np.sin(angle)])).max() < 1e-6
    assert 0 < low < high < dim // 2 - 1  # all three kinds of pairs are there
    other = fkjit.rope_table(2000, dim, scaling=YarnScaling(factor, context, mscale=0.5))
    assert np.allclose(other * grown, table * 0.5, atol=1e-6)
    blurred = fkjit.rope_table(2000, dim, scaling=YarnScaling(factor, context, truncate=False))
    assert not np.allclose(blurred, table, atol=1e-3)
    q = normal((1, 1, 7, dim))
    u, v = q[..., : dim // 2], q[..., dim // 2 :]
    c, s = (grown * f(angle[40:47]) for f in (np.cos, np.sin))
    wanted = np.concatenate([u * c - v * s, v * c + u * s], -1)
    assert_near(rope(q, None, 40, table=table), wanted)


def test_a_table_may_be_a_slice_with_gaps():
    wide = np.full((50, 40), np.nan, np.float32)
    wide[:, 4:36] = fkjit.rope_table(50, 32)
    q = normal((1, 2, 3, 32), "fp16")
    for lead in (4, 3):
        wide[:, lead : lead + 32] = fkjit.rope_table(50, 32)
        found = rope(q, None, 47, table=wide[:, lead : lead + 32])
        assert_near(found, expected(q, [[47, 48, 49]]), "fp16")


def test_tables_come_in_the_framework_of_an_array():
    torch = pytest.importorskip("torch")
    table = fkjit.rope_table(20, 16, like=torch.zeros(1, dtype=torch.bfloat16))
    assert isinstance(table, torch.Tensor) and table.dtype == torch.float32
    assert np.array_equal(table.numpy(), fkjit.rope_table(20, 16))


# ------------------------------------------------------------------ torch


@pytest.mark.parametrize("source", ["fused", "table"])
@pytest.mark.parametrize("wanted", ["q", "k", "both"])
def test_gradients_are_those_of_the_rotation(source, wanted):
    torch = pytest.importorskip("torch")
    q, k = torch.randn(2, 3, 4, 16), torch.randn(2, 1, 4, 16)
    q.requires_grad_(wanted != "k")
    k.requires_grad_(wanted != "q")
    table = None
    if source == "table":
        table = fkjit.rope_table(60, 16, scaling=YarnScaling(8.0, 64), like=q)
    at = torch.randint(0, 60, (2, 4))
    a, b = rope(q, k, at, table=table, interleaved=True)
    left, right = torch.randn_like(a), torch.randn_like(b)
    ((a * left).sum() + (b * right).sum()).backward()
    for x, turned, gradient in ((q, a, left), (k, b, right)):
        if not x.requires_grad:
            assert x.grad is None
            continue
        # <R x, g> = <x, R' g> for any x, so R' is the gradient
        assert torch.allclose((turned * gradient).sum(), (x * x.grad).sum(), atol=1e-4)
        back = rope(gradient, None, at, table=table, interleaved=True, inverse=True)
        assert torch.equal(x.grad, back)


def test_gradients_of_gradients_and_of_expanded_ones():
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    (first,) = torch.autograd.grad(rope(q, None, 7).square().sum(), q, create_graph=True)
    assert torch.allclose(first, 2 * q, atol=1e-5)
    (second,) = torch.autograd.grad(first.sum(), q)
    assert torch.allclose(second, torch.full_like(q, 2.0), atol=1e-5)
    rope(q, None, 7).sum().backward()
    assert torch.allclose(q.grad, rope(torch.ones(1, 2, 3, 8), None, 7, inverse=True), atol=1e-6)


def test_gradients_are_refused_where_they_would_be_lost():
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    with pytest.raises(VALUE, match="requires grad, and the result is written into a given array"):
        rope(q.clone(), None, inplace=True)
    table = fkjit.rope_table(3, 8, like=q).requires_grad_()
    with pytest.raises(VALUE, match="table requires grad"):
        rope(q, None, table=table)
    with torch.no_grad():
        x = q.clone()
        assert rope(x, None, 5, inplace=True) is x and torch.equal(x, rope(q, None, 5))


# ------------------------------------------------------------------ refusals

Q, K = normal((2, 4, 6, 16)), normal((2, 2, 6, 16))
IDS = np.zeros((2, 6), np.int64)
TABLE = fkjit.rope_table(10, 16)
YARN = YarnScaling(4.0, 4096)

# fmt: off
CALLS = [  # id, arguments, options, error, what the message must say
    ("list", ([1.0],), {}, TYPE, r"q is a builtins\.list"),
    ("dimensions", (Q[0, 0],), {}, VALUE, r"q has shape \(6, 16\); allowed: \[B, H, S, D\]"),
    ("integers", (Q.astype("i4"),), {}, TYPE, "q is int32; allowed: fp16, bf16, fp32"),
    ("dtypes", (Q, K.astype("f2")), {}, TYPE, "k is fp16 but q is fp32"),
    ("k rows", (Q, K[:, :, :5]), {}, VALUE, r"k has shape \(2, 2, 5, 16\); .* \[2, any, 6, 16\]"),
    ("k flat", (Q, K[0]), {}, VALUE, r"k has shape \(2, 6, 16\)"),
    ("k columns", (Q, K[..., :8]), {}, VALUE, r"k has shape \(2, 2, 6, 8\)"),
    ("column stride", (Q[..., ::2],), {}, VALUE, "q has stride 2 in its last dimension"),
    ("out stride", (Q,), {"out_q": normal((2, 4, 6, 32))[..., ::2]}, VALUE, "out_q has stride 2"),
    ("layout", (Q,), {"layout": "hsd"}, VALUE, r"layout='hsd' is not one of \['bhsd', 'bshd'\]"),
    ("odd", (Q,), {"rotary_dim": 7}, VALUE, "rotary_dim=7 is not an even number from 2 to 512"),
    ("wide", (Q,), {"rotary_dim": 18}, VALUE, "rotary_dim=18 is above q's head_dim, 16"),
    ("none", (Q,), {"rotary_dim": 0}, VALUE, "rotary_dim=0 is not an even"),
    ("odd head", (Q[..., :5],), {}, VALUE, "rotary_dim=5 is not an even"),
    ("large head", (normal((1, 1, 1, 514)),), {}, VALUE, "rotary_dim=514 is not an even"),
    ("fraction", (Q,), {"rotary_dim": 8.5}, TYPE, "rotary_dim=8.5 is no integer"),
    ("theta", (Q,), {"theta": 1.0}, VALUE, "theta=1.0 is not a finite number above 1"),
    ("theta text", (Q,), {"theta": "high"}, VALUE, "theta='high' is not a finite number"),
    ("scaling", (Q,), {"scaling": {"factor": 8}}, VALUE, "scaling=.* is not None, a fkjit.Llama3"),
    ("tuple", (Q,), {"scaling": (8.0, 1.0)}, VALUE, "scaling=.* is not None, a fkjit.Llama3"),
    ("factor", (Q,), {"scaling": Llama3Scaling(0.5)}, VALUE, "factor of .* is not a finite number"),
    ("bounds", (Q,), {"scaling": Llama3Scaling(8.0, 4.0, 1.0)}, VALUE, "0 < low_freq_f.* < high"),
    ("context", (Q,), {"scaling": Llama3Scaling(8.0, 1.0, 4.0, 0)}, VALUE, "original_context of"),
    ("yarn", (Q,), {"scaling": YARN}, VALUE, r"is for tables: pass table=fkjit.rope_table\(length"),
    ("both", (Q,), {"scaling": Llama3Scaling(), "table": TABLE}, VALUE, "theta and scaling beside"),
    ("theta too", (Q,), {"theta": 1e4, "table": TABLE}, VALUE, "theta and scaling beside a table"),
    ("table dtype", (Q,), {"table": TABLE.astype("i4")}, TYPE, "table is int32; allowed: fp32"),
    ("table shape", (Q,), {"table": TABLE[0]}, VALUE, r"table has shape \(16,\)"),
    ("table width", (Q,), {"table": TABLE, "rotary_dim": 8}, VALUE, "table has 16 columns, but"),
    ("table stride", (Q,), {"table": TABLE[:, ::2]}, VALUE, "table has stride 2"),
    ("behind", (Q, K, 5), {"table": TABLE}, VALUE, "positions=5 puts .* 5 to 10; allowed: 0 to 9"),
    ("negative", (Q, K, -1), {}, VALUE, "positions=-1 puts 6 rows"),
    ("far", (Q, K, LAST - 4), {}, VALUE, r"allowed: 0 to 2\^31 - 1"),
    ("bool", (Q, K, True), {}, TYPE, r"positions is a builtins\.bool"),
    ("number", (Q, K, 1.5), {}, TYPE, r"positions is a builtins\.float"),
    ("ids dtype", (Q, K, IDS.astype("f4")), {}, TYPE, "positions is fp32; allowed: int32, int64"),
    ("ids short", (Q, K, IDS[:, :3]), {}, VALUE, r"positions has shape \(2, 3\); allowed: \(2,\)"),
    ("ids flat", (Q[0].transpose(1, 0, 2), None, IDS), {}, VALUE, "positions has shape"),
    ("both outs", (Q,), {"inplace": True, "out_q": Q}, VALUE, "inplace=True and out_q or out_k"),
    ("out_k", (Q,), {"out_k": K}, VALUE, "out_k without a k"),
    ("out shape", (Q,), {"out_q": Q[:1]}, VALUE, "out_q has shape"),
    ("overlap", (Q[:1],), {"out_q": Q[:, :4].reshape(-1)[16:400].reshape(1, 4, 6, 16)}, VALUE,
     "out_q overlaps q in memory"),
    ("outs", (Q, Q.copy()), {"out_q": Q, "out_k": Q}, VALUE, "overlaps"),
    ("flag", (Q,), {"interleaved": "yes"}, TYPE, "interleaved='yes' is not True or False"),
]
# fmt: on


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"), [pytest.param(*c[1:], id=c[0]) for c in CALLS]
)
def test_bad_input_gets_one_clear_typed_error(arguments, options, error, message, monkeypatch):
    monkeypatch.setattr("fkjit.ops.op.op.interpret", lambda *_: pytest.fail("something ran"))
    with pytest.raises(error, match=message) as caught:
        fkjit.rope(*arguments, **options)
    assert isinstance(caught.value, FkjitError) and str(caught.value).startswith("rope: ")


def test_bad_tables_get_one_clear_typed_error():
    with pytest.raises(VALUE, match="rope_table: length=-1; allowed: 0 to "):
        fkjit.rope_table(-1, 16)
    with pytest.raises(VALUE, match="rope_table: rotary_dim=15 is not an even number"):
        fkjit.rope_table(5, 15)
    with pytest.raises(VALUE, match="0 < beta_slow < beta_fast"):
        fkjit.rope_table(5, 16, scaling=YarnScaling(4.0, 4096, 1.0, 32.0))
    with pytest.raises(TYPE, match="rope_table: like is a"):
        fkjit.rope_table(5, 16, like="cuda")
    assert fkjit.rope_table(0, 16).shape == (0, 16)


def test_prepare_takes_the_same_arguments_and_checks_them():
    fkjit.prepare("rope", Q, K, 3, inplace=True)
    with pytest.raises(VALUE, match="layout="):
        fkjit.prepare("rope", Q, K, 3, layout="x")


# ------------------------------------------------------------------ heads side by side


def test_rows_of_heads_side_by_side_are_turned_as_they_lie():
    packed, at = normal((7, 6 * 16), "fp16"), np.arange(3, 10, dtype=np.int32)
    q, k = packed[:, : 4 * 16], packed[:, 4 * 16 : 5 * 16]
    wanted = rope(q.reshape(7, 4, 16), k.reshape(7, 1, 16), at)
    found = rope(q, k, at, head_dim=16)
    for one, two in zip(found, wanted, strict=True):
        assert one.shape == (7, two.shape[1] * 16) and np.array_equal(one, two.reshape(7, -1))
    before = packed.copy()
    assert rope(q, k, at, head_dim=16, inplace=True)[1] is k
    assert np.array_equal(q, found[0]) and np.array_equal(packed[:, 80:], before[:, 80:])


@pytest.mark.parametrize(
    ("shape", "head_dim", "error"),
    [((7, 64), 48, VALUE), ((7, 4, 16), 16, VALUE), ((7, 64), 16.0, TYPE), ((7, 64), 0, VALUE)],
)
def test_head_dim_is_checked(shape, head_dim, error):
    with pytest.raises(error, match="head_dim="):
        rope(normal(shape), None, 0, head_dim=head_dim)


def test_columns_apart_are_no_view():
    with pytest.raises(VALUE, match="contiguous"):
        rope(normal((64, 7)).T, None, 0, head_dim=16)
