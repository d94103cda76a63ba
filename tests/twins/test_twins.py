"""Triton twins in Triton's interpreter: one for every operation, and right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.attention.cases_attention import OP, problem
from bench.core import twins
from bench.core.catalog import operations
from bench.core.op import Refused
from fkjit import ops
from fkjit.spec import registered
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
from tests.twins.kit import assert_right, interpreter, normal  # noqa: E402, F401

ops.load()
OURS = sorted({spec.op for spec in registered() if spec.root is None})
ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------ the registry


def test_every_operation_has_a_twin_or_a_reason():
    assert twins.unaccounted(OURS) == []
    assert twins.unaccounted([*OURS, "shift"]) == ["shift"]


def test_the_reasons_are_of_operations_that_are_there_and_have_no_twin(monkeypatch):
    assert set(twins.MISSING) <= set(OURS) - set(twins.names())
    monkeypatch.setitem(twins.MISSING, "scale", "it would say nothing that a copy does not")
    assert twins.unaccounted([*OURS, "scale"]) == []


def test_the_suite_has_the_twin_beside_the_peers():
    (twin,) = [peer for peer in operations()["attention"].peers if peer.kind == "twin"]
    assert (twin.name, twin.package) == ("triton", "triton")
    assert twins.twin("scale") is None


def test_a_twin_imports_triton_only_when_it_is_prepared():
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from bench.core.catalog import operations\n"
        "(twin,) = [p for p in operations()['attention'].peers if p.kind == 'twin']\n"
        "print(twin.missing())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "not installed (no module triton)\n", done.stderr


# ------------------------------------------------------------------ attention


@pytest.fixture
def attention(interpreter):  # noqa: F811
    from bench.attention.triton_attention import attention

    return attention


SHAPES = [  # B, Hq, Hkv, Sq, Sk, D, Dv, causal; tiles are 16 queries by 32 keys
    (1, 1, 1, 32, 64, 64, 64, False),
    (2, 2, 1, 20, 50, 64, 64, True),  # fewer queries than keys, grouped
    (1, 2, 1, 50, 37, 32, 32, True),  # the first rows see nothing
    (1, 1, 1, 40, 40, 40, 72, True),
    (1, 1, 1, 20, 70, 96, 96, False),
    (1, 1, 1, 33, 65, 77, 51, True),  # rows that no descriptor takes
    (1, 1, 1, 20, 40, 192, 128, True),
    (1, 1, 1, 18, 33, 256, 256, False),
    (3, 2, 2, 1, 129, 128, 128, True),
    (1, 1, 1, 17, 1, 16, 16, False),
    (1, 2, 2, 20, 20, 1, 1, False),
]


@one_in(2)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_errs_at_most_twice_as_much_as_pytorch(attention, shape, dtype):
    b, hq, hkv, sq, sk, d, dv, causal = shape
    sizes = ((hq, sq, d), (hkv, sk, d), (hkv, sk, dv))
    q, k, v = (normal(b, h, s, w, dtype=dtype, seed=i) for i, (h, s, w) in enumerate(sizes))
    assert_right(attention(q, k, v, causal=causal, return_lse=True), q, k, v, causal)


@pytest.mark.parametrize("skip", [0, 1])
def test_attention_takes_any_strides(attention, skip):
    packed = normal(2, 20, 3, 2, 32 + skip)[..., skip:]  # [B, S, 3, H, D]; one off: misaligned
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    assert_right(attention(q, k, v, causal=True, return_lse=True), q, k, v, True)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_attention_takes_any_scale(attention, scale):
    q, k, v = (normal(1, 1, 40, 32, dtype="fp32", seed=i) for i in range(3))
    found = attention(q, k, v, causal=True, softmax_scale=scale, return_lse=True)
    assert_right(found, q, k, v, True, scale)


def test_attention_without_keys_or_queries(attention):
    q = normal(2, 2, 20, 32)
    none = q[:, :, :0]
    o, lse = attention(q, none, none, return_lse=True)
    assert not o.any() and torch.isneginf(lse).all()
    assert attention(none, q, q).shape == (2, 2, 0, 32)
    assert attention(q[:0], q[:0], q[:0]).shape == (0, 2, 20, 32)


def test_the_suite_finds_the_twin_right_and_a_wrong_mask_wrong(attention):
    given = problem(1, 4, 20, 32, True, "fp16", heads_kv=2)
    names = (("heads_q", "seqlen_q"), ("heads_kv", "seqlen_k"), ("heads_kv", "seqlen_k"))
    shapes = [(given["batch"], given[h], given[s], given["head_dim"]) for h, s in names]
    arrays = {name: normal(*shapes[i], seed=i) for i, name in enumerate("qkv")}
    expected, twin = OP.expected(given, arrays), twins.twin("attention")
    assert twin is not None
    right = twin.prepare(given, arrays)
    assert expected.judge(right.output(right.call())).why_wrong() is None
    unmasked = twin.prepare({**given, "causal": False}, arrays)
    assert "wrong result" in str(expected.judge(unmasked.call()).why_wrong())


# ------------------------------------------------------------------ vector_add


@pytest.fixture
def vector_add(interpreter):  # noqa: F811
    from bench.elementwise.triton_vector_add import vector_add

    return vector_add


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("shape", [(1,), (3, 256), (5, 7, 11), (0, 4)], ids=str)
def test_vector_add_rounds_once(vector_add, shape, dtype):
    a, b = (normal(*shape, dtype=dtype, seed=i) for i in range(2))
    out = vector_add(a, b)
    assert out.dtype == a.dtype and torch.equal(out, (a.float() + b.float()).to(a.dtype))


def test_vector_add_refuses_gaps(vector_add):
    twin = twins.twin("vector_add")
    assert twin is not None
    a, given = normal(600, dtype="fp32"), {"rows": 2, "columns": 300}
    assert torch.equal(twin.prepare(given, {"a": a, "b": a}).call(), 2 * a)
    for x, y, sizes in (
        (a, a, {"rows": 2, "columns": 200}),
        (a[::2], a[::2], given),
        (a, a[1:], given),
    ):
        with pytest.raises(Refused, match="without gaps"):
            twin.prepare(sizes, {"a": x, "b": y})
