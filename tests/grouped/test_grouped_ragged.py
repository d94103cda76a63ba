"""Tiles of as many rows as experts have, on a CPU: products of numbers and of codes by rows."""

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

RAGGED, SHORT = {"impl": "ragged"}, {"precision": "short"}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(
        "fkjit.jit.build.settings", lambda: replace(settings(), target="compute_90a")
    )


def _codes(weight):
    with quiet():
        return fkjit.quantize(weight, "fp8_row")


def _numbers(codes):
    with quiet():
        return fkjit.dequantize(codes, "fp32").double()


@one_in(2)
@pytest.mark.parametrize(("how", "gate"), [("even", True), ("first", False)])
def test_the_product_of_each_expert(how, gate):
    """Places of experts are a multiple of 16; all tokens on one expert fill a tile and a half."""
    tokens, n = 240 if how == "first" else 40, 72
    ids = choices(tokens, 3, 1, how)
    groups = grouped(ids, 3, 16)
    x, weight, bias = arrays(tokens, 3, n, 96, "bf16", gate)
    said = {"activation": "silu" if gate else None, "gate": gate}
    with quiet():
        y = fkjit.grouped_linear(x, weight, groups, bias, gather=True, **said, **RAGGED)
        again = fkjit.grouped_linear(x, weight, groups, bias, gather=True, **said, **RAGGED)
    place = groups.inverse.long()
    assert torch.equal(y[place], again[place])
    expected = by_choice(x.double(), weight.double(), bias.double(), ids, **said)
    assert (y[place] - expected).abs().max() <= FLOOR["bf16"] * max(1.0, expected.abs().max())


def test_the_product_of_what_codes_stand_for():
    """Codes of tokens are carried to their places, and give what codes of places give."""
    ids = choices(40, 3, 1)
    groups = grouped(ids, 3, 16)
    x, weight, bias = arrays(40, 3, 64, 144, "bf16", True)
    quantized, said = _codes(weight), {"activation": "silu", "gate": True, **SHORT}
    tokens = _codes(x)
    with quiet():
        rows = fkjit.quantize(fkjit.moe_permute(x, groups), "fp8_row")
        y = fkjit.grouped_linear(rows, quantized, groups, bias, **said)
        again = fkjit.grouped_linear(tokens, quantized, groups, bias, gather=True, **said)
    place = groups.inverse.long()
    assert torch.equal(y[place], again[place]) and y.dtype == torch.bfloat16
    expected = by_choice(
        _numbers(tokens), _numbers(quantized), bias.double(), ids, activation="silu", gate=True
    )
    # Tensor cores keep 13 bits of sums of e4m3.
    assert (y[place] - expected).abs().max() <= FLOOR["bf16"] * max(1.0, expected.abs().max())


@one_in(4)
@pytest.mark.parametrize("said", [RAGGED, SHORT, {}], ids=["numbers", "short", "promoted"])
def test_a_layer(said):
    """Codes with short sums, and with sums promoted every 512 of k."""
    x, logits, up, down = layer_arrays(20, 4, 64, 64, "bf16")
    sides = (up, down) if said is RAGGED else (_codes(up), _codes(down))
    with quiet():
        y = fkjit.moe_layer(x, logits, *sides, 2, **said)
    expected = layer(x.double(), logits.double(), up.double(), down.double(), 2)
    assert (y - expected).norm() <= (0.01 if said is RAGGED else 0.1) * expected.norm()


_X, _WEIGHT, _ = arrays(8, 4, 64, 64, "bf16")
_IDS = choices(8, 4, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block": (64, 64)}, "block=\\(64, 64\\)"),
        ({"weight_layout": "kn", "gate": True}, "impl='ragged' does not take"),
        ({"block_size": 8}, "a multiple of 16"),
        ({"precision": "short"}, "precision='short'"),
        ({"codes": True}, "a multiple of 64"),
        ({"codes": True, "precision": "exact"}, "precision='exact'"),
        ({"codes": True, "precision": "short", "impl": "mma"}, "impl='mma'"),
        ({"codes": True, "precision": "short", "block": (128, 128)}, "block=\\(128, 128\\)"),
        ({"codes": True, "precision": "short", "out_scheme": "fp8_block"}, "out_scheme="),
        ({"codes": True, "precision": "short", "n": 60}, "a multiple of 8"),
    ],
)
def test_bad_input(change, words):
    given = {"impl": "auto" if change.get("codes") else "ragged", **change}
    weight = _WEIGHT[:, : given.pop("n", 64)].contiguous()
    weight = _codes(weight) if given.pop("codes", False) else weight
    groups = grouped(_IDS, 4, given.pop("block_size", 16))
    with pytest.raises(ParameterError, match=f"grouped_linear: .*{words}"), quiet():
        fkjit.grouped_linear(_X, weight, groups, gather=True, **given)
