"""fkjit.grouped_linear and fkjit.moe_layer with e4m3 weights on a CPU, by Hopper's kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fkjit
from fkjit.errors import ParameterError
from fkjit.jit.build import quiet
from fkjit.settings import settings
from tests.core.sampling import one_in
from tests.gemm.kit import FLOOR
from tests.grouped.kit import arrays, by_choice, choices, grouped, layer, layer_arrays


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(
        "fkjit.jit.build.settings", lambda: replace(settings(), target="compute_90a")
    )


def codes(weight):
    with quiet():
        return fkjit.quantize(weight, "fp8_block", weight=True)


def numbers(quantized):
    with quiet():
        return fkjit.dequantize(quantized, "fp32").double()


@one_in(2)
@pytest.mark.parametrize(("gate", "n"), [(True, 128), (False, 128)])
def test_the_product_of_what_codes_stand_for(gate, n, hopper):
    ids = choices(20, 3, 1)
    groups = grouped(ids, 3)
    x, weight, bias = arrays(20, 3, n, 144, "bf16", gate)
    quantized, said = codes(weight), {"activation": "silu" if gate else None, "gate": gate}
    assert quantized.scales.shape == (3, weight.shape[1] // 128, 2)
    with quiet():
        rows = fkjit.quantize(fkjit.moe_permute(x, groups), "fp8_block")
        y = fkjit.grouped_linear(rows, quantized, groups, bias, **said)
        again = fkjit.grouped_linear(x, quantized, groups, bias, gather=True, **said)
        tokens = fkjit.quantize(x, "fp8_block")
    place = groups.inverse.long()
    assert torch.equal(y[place], again[place]) and y.dtype == torch.bfloat16
    expected = by_choice(numbers(tokens), numbers(quantized), bias.double(), ids, **said)
    assert (y[place] - expected).abs().max() <= FLOOR["bf16"] * max(1.0, expected.abs().max())


def test_codes_of_the_result(hopper):
    """Those that quantize would give the result, if that were not rounded to bf16 before."""
    ids = choices(20, 2, 1)
    groups = grouped(ids, 2)
    x, weight, bias = arrays(20, 2, 128, 144, "bf16", True)
    quantized, said = codes(weight), {"activation": "silu", "gate": True, "gather": True}
    with quiet():
        made = fkjit.grouped_linear(x, quantized, groups, bias, out_scheme="fp8_block", **said)
        y = fkjit.grouped_linear(x, quantized, groups, bias, **said).double()
        down = fkjit.grouped_linear(made, codes(weight[:, :, :128].contiguous()), groups)
    assert made.scheme == "fp8_block" and made.scales.shape == (y.shape[0], 1)
    place = groups.inverse.long().view(-1)
    found, y, scales = (a[place] for a in (numbers(made), y, made.scales.double()))
    step = torch.maximum(y.abs() / 14, scales * 2**-9)
    assert ((found - y).abs() <= step).all()  # half a step of 3 bits, and bf16's rounding
    most = y.abs().amax(1, keepdim=True) / 448
    assert ((scales - most).abs() <= 0.005 * most).all() and down.shape == (made.shape[0], 256)


def test_a_layer(hopper):
    x, logits, up, down = layer_arrays(20, 4, 128, 128, "bf16")
    with quiet():
        y = fkjit.moe_layer(x, logits, codes(up), codes(down), 2)
    expected = layer(x.double(), logits.double(), up.double(), down.double(), 2)
    assert (y - expected).norm() <= 0.1 * expected.norm()  # codes have 4 bits of fraction


_X, _WEIGHT, _BIAS = arrays(8, 4, 128, 128, "bf16")
_IDS = choices(8, 4, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"impl": "stream"}, "impl='stream'"),
        ({"weight_layout": "kn"}, "weight_layout='kn'"),
        ({"block": (64, 64)}, "block="),
        ({"gate": True}, "a multiple of 128"),
        ({"scheme": "int8_row"}, "quantized by 'int8_row'"),
        ({"precision": "short"}, "precision='short'"),
        ({"weight": False}, "weight=True"),
        ({"x": True, "scheme": "fp8_row"}, "x is quantized by 'fp8_block'"),
        ({"bias": _BIAS[:, :3]}, "bias has shape"),
        ({"target": "compute_80"}, "needs wgmma"),
        ({"out_scheme": "fp8_row"}, "out_scheme='fp8_row'"),
        ({"out_scheme": "fp8_block"}, "gate=False"),
    ],
)
def test_bad_input(change, words, monkeypatch):
    given, target = dict(change), change.get("target", "compute_90a")
    given.pop("target", None)
    monkeypatch.setattr("fkjit.jit.build.settings", lambda: replace(settings(), target=target))
    with quiet():
        weight = fkjit.quantize(
            _WEIGHT, given.pop("scheme", "fp8_block"), weight=given.pop("weight", True)
        )
        x = fkjit.quantize(_X, "fp8_block") if given.pop("x", False) else _X
    groups = grouped(_IDS, 4)
    with pytest.raises(ParameterError, match=f"grouped_linear: .*{words}"), quiet():
        fkjit.grouped_linear(x, weight, groups, given.pop("bias", None), gather=True, **given)
