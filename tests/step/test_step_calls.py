"""Launches of fused decode steps through their calls, on the CPU: against the calls they replace,
and what they refuse."""

from __future__ import annotations

import pytest

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from fkjit.ops.step.call import Norm, fits, normed_append, normed_linear

torch = pytest.importorskip("torch", reason="needs torch")

K, DIM, HEADS_Q, HEADS_KV = 64, 16, 4, 2
WIDE = (HEADS_Q + 2 * HEADS_KV) * DIM


def arrays(rows: int, n: int, layer_norm: bool):
    """x, weight, bias, and the norm, fp16."""
    made = torch.Generator().manual_seed(rows)
    x, weight, bias, factor, shift = (
        torch.randn(shape, generator=made).mul_(scale).add_(mean).half()
        for shape, scale, mean in (
            ((rows, K), 2.0, 1.0), ((n, K), K**-0.5, 0.0), ((n,), 1.0, 0.0), ((K,), 0.2, 1.0),
            ((K,), 0.2, 0.0),
        )
    )  # fmt: skip
    return x, weight, bias, Norm(factor, shift if layer_norm else None, 1e-5)


def normalised(x, norm):
    if norm.bias is None:
        return fkjit.rms_norm(x, norm.weight, norm.eps)
    return fkjit.layer_norm(x, norm.weight, norm.bias, norm.eps)


def alike(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=4e-3)


@pytest.mark.parametrize(
    "rows, layer_norm, said",
    [(1, False, {"activation": "silu", "gate": True}), (5, True, {"activation": "gelu_tanh"})],
)
def test_a_norm_and_a_product_in_one(rows, layer_norm, said):
    x, weight, bias, norm = arrays(rows, 80, layer_norm)
    with quiet():
        found = normed_linear(x, weight, bias, norm, **said)
        alike(found, fkjit.linear(normalised(x, norm), weight, bias, **said))


@pytest.mark.parametrize("turning", [True, False])
def test_norm_product_rope_and_append_in_one(turning):
    """Three tokens of which one has no slot, in the second layer of a cache."""
    x, weight, bias, norm = arrays(3, WIDE, not turning)
    slots = torch.tensor([9, -1, 4], dtype=torch.int32)
    positions, table = torch.tensor([0, 7, 30]), torch.from_numpy(fkjit.rope_table(32, DIM))

    def cache():
        return fkjit.PagedKVCache(
            2, page_size=8, num_kv_heads=HEADS_KV, head_dim=DIM, dtype=torch.float16, device="cpu",
            num_layers=2, max_sequences=1, max_length=16, framework="torch",
        )  # fmt: skip

    one, other = cache(), cache()
    for each in (one, other):
        for pages in each.planes[1].arrays[:2]:
            pages.zero_()
    with quiet():
        found = normed_append(
            x, weight, bias, norm, one, slots, positions if turning else None,
            table if turning else None, heads_q=HEADS_Q, layer=1,
        )  # fmt: skip
        heads = fkjit.linear(normalised(x, norm), weight, bias).view(3, -1, DIM)
        q, k, v = heads.split((HEADS_Q, HEADS_KV, HEADS_KV), 1)
        if turning:
            q = fkjit.rope_kv_append(q, k, v, other, slots, positions, table=table, layer=1)
        else:
            fkjit.kv_append(k, v, other, slots, layer=1)
    alike(found, q)
    for made, wanted in zip(one.planes[1].arrays[:2], other.planes[1].arrays[:2], strict=True):
        assert wanted.any()
        alike(made, wanted)


def test_what_fits():
    assert fits(8, 2048, 64, "silu", True) and fits(1, 768, 64, "gelu_tanh", False)
    assert not fits(9, 2048, 64, "silu", True)
    assert not fits(1, 2048, 40, "silu", True)
    assert not fits(1, 2044, 64, "silu", True)
    assert not fits(8, 8192, 64, "silu", True)
    assert not fits(1, 2048, 64, "relu", True)


def test_what_is_refused():
    x, weight, bias, norm = arrays(2, 80, False)
    wide, uneven = x.repeat(5, 1), torch.zeros(2, 68).half()[:, :64]
    for error, match, given in [
        (ParameterError, r"x has shape \(2, 64\), weight \(80, 56\)", (x, weight[:, :56], bias)),
        (ParameterError, r"x has shape \(10, 64\); allowed: up to 8 rows", (wide, weight, bias)),
        (ParameterError, "bias has shape", (x, weight, bias[:4])),
        (ParameterError, "rows 68 elements apart", (uneven, weight, bias)),
        (ArgumentTypeError, "x is fp32", (x.float(), weight, bias)),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            normed_linear(given[0], given[1], given[2], norm)
    with pytest.raises(ParameterError, match="activation='relu', gate=True has no kernel"):
        normed_linear(x, weight, bias, norm, activation="relu", gate=True)
    pages = torch.zeros(2, 8, HEADS_KV, DIM).half(), torch.zeros(2, 8, HEADS_KV, DIM).half()
    slots = torch.zeros(2, dtype=torch.int32)
    said = {"heads_q": HEADS_Q, "layer": 0}
    with pytest.raises(
        ParameterError, match="weight has 80 rows; allowed: 4 \\+ 2 \\* 2 heads of 16"
    ):
        normed_append(x, weight, bias, norm, pages, slots, None, None, **said)
    x, weight, bias, norm = arrays(2, WIDE, False)
    with pytest.raises(ParameterError, match="positions and table; allowed: both, or neither"):
        normed_append(x, weight, bias, norm, pages, slots, slots, None, **said)
