"""fkjit.moe_layer on a CPU: numbers and gradients beside experts one after the other in torch."""

from __future__ import annotations

import pytest
import torch

import fkjit
from fkjit.errors import ParameterError
from fkjit.jit.build import quiet
from fkjit.ops.grouped import few
from fkjit.runtime import abstract
from tests.core.sampling import one_in
from tests.grouped.kit import F, layer, layer_arrays
from tests.grouped.test_grouped_linear import close


def call(*args, **options):
    with quiet():
        return fkjit.moe_layer(*args, **options)


@one_in(3)
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "fp32"),
        ({"renormalize": True}, "bf16"),
        ({"scoring": "sigmoid", "renormalize": True}, "fp32"),
        ({"activation": "gelu_tanh"}, "fp32"),
        ({"block_size": 128}, "fp32"),
    ],
)
def test_numbers(options, dtype):
    given = layer_arrays(45, 7, 40, 24, dtype)
    how = {name: value for name, value in options.items() if name != "block_size"}
    y, wide = call(*given, 2, **options), [a.double() for a in given]
    close(y, layer(*wide, 2, **how), dtype)


@pytest.mark.parametrize(("tokens", "options"), [(1, {}), (20, {"renormalize": True})])
def test_few_tokens(tokens, options):
    given = layer_arrays(tokens, 16, 40, 24, "bf16")
    y, wide = call(*given, 4, impl="stream", **options), [a.double() for a in given]
    close(y, layer(*wide, 4, **options), "bf16")
    assert torch.equal(y, call(*given, 4, impl="stream", **options))


@pytest.mark.parametrize(
    "said", [{}, {"renormalize": True}, {"scoring": "sqrtsoftplus", "renormalize": True}]
)
def test_gradients(said):
    """Of x, the logits and both weights."""
    given = [a.requires_grad_() for a in layer_arrays(33, 5, 24, 16)]
    wide = [a.detach().double().requires_grad_() for a in given]
    y, expected = call(*given, 2, **said), layer(*wide, 2, **said)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    with quiet():
        y.backward(dy)
    expected.backward(dy.double())
    for one, other in zip(given, wide, strict=True):
        close(one.grad, other.grad)


def test_gradients_have_the_same_bits_without_what_the_activation_is_of():
    found = []
    for save in (True, False):
        given = [a.requires_grad_() for a in layer_arrays(33, 5, 24, 16)]
        y = call(*given, 2, save_pre_activation=save)
        with quiet():
            y.square().sum().backward()
        found.append([y.detach(), *(a.grad for a in given)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_router_and_a_shared_expert():
    x, _, up, down = layer_arrays(20, 4, 16, 24)
    router, shared_up, shared_down = torch.randn(4, 16), torch.randn(24, 16), torch.randn(16, 12)
    y = call(x, None, up, down, 2, router_weight=router, shared_gate_up=shared_up,
             shared_down=shared_down)  # fmt: skip
    wide = [a.double() for a in (x, x @ router.t(), up, down)]
    gate, second = (wide[0] @ shared_up.double().t()).chunk(2, -1)
    expected = layer(*wide, 2) + (F.silu(gate) * second) @ shared_down.double().t()
    assert (y.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_two_halves_of_the_experts_are_the_whole():
    """Expert parallelism: what two calls with an expert_map make adds up."""
    x, logits, up, down = layer_arrays(30, 6, 16, 8)
    parts = []
    for first in (0, 3):
        here = torch.full((6,), -1, dtype=torch.int32)
        here[first : first + 3] = torch.arange(3, dtype=torch.int32)
        own = (up[first : first + 3].contiguous(), down[first : first + 3].contiguous())
        parts.append(call(x, logits, *own, 2, expert_map=here))
    assert (sum(parts) - call(x, logits, up, down, 2)).abs().max() <= 1e-6


def test_capacity_drops_the_last_choices():
    x, logits, up, down = layer_arrays(9, 3, 16, 8)
    logits = torch.tensor([[9.0, 0.0, -9.0]]).repeat(9, 1)
    y, full = call(x, logits, up, down, 1, capacity=4), call(x, logits, up, down, 1)
    assert torch.equal(y[:4], full[:4]) and not y[4:].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"router_logits": None}, "router_logits or router_weight"),
        ({"router_weight": torch.randn(4, 16)}, "one of the two"),
        ({"w_gate_up": torch.randn(3, 16, 16)}, "4 experts, w_gate_up is of 3"),
        ({"shared_down": torch.randn(16, 8)}, "together"),
    ],
)
def test_bad_input(change, words):
    names = ("x", "router_logits", "w_gate_up", "w_down")
    given = {**dict(zip(names, layer_arrays(8, 4, 16, 8), strict=True)), **change}
    with pytest.raises(ParameterError, match=f"moe_layer: .*{words}"):
        call(top_k=2, **given)


def described(text, arch="sm_90a"):
    return abstract.described(text, abstract.device_for(arch))


@pytest.mark.parametrize(
    ("x", "up", "arch", "expected"),
    [
        ("bf16[1, 64]", "bf16[4, 96, 64]", "sm_90a", "stream"),
        ("fp16[16, 64]", "fp16[4, 96, 64]", "sm_90a", "stream"),
        ("bf16[17, 64]", "bf16[4, 96, 64]", "sm_90a", "gather"),
        ("bf16[64, 64]", "bf16[4, 96, 64]", "sm_90a", "gather"),
        ("bf16[65, 64]", "bf16[4, 96, 64]", "sm_90a", "auto"),
        ("bf16[0, 64]", "bf16[4, 96, 64]", "sm_90a", "auto"),
        ("fp32[1, 64]", "fp32[4, 96, 64]", "sm_90a", "auto"),
        ("bf16[1, 60]", "bf16[4, 96, 60]", "sm_90a", "auto"),
        ("bf16[1, 64]", "bf16[4, 96, 64]", "sm_80", "auto"),
    ],
)
def test_who_takes_few_tokens(x, up, arch, expected):
    given = described(x, arch), described(up, arch), described("bf16[4, 64, 48]", arch)
    if "fp" in x:
        given = (*given[:2], described(x[:4] + "[4, 64, 48]", arch))
    assert few.implementation("auto", *given) == expected
    assert few.implementation("wgmma", *given) == "wgmma"


@pytest.mark.parametrize(
    ("given", "impl", "precision", "rows", "dtype", "arch", "expected"),
    [
        (None, "auto", "ieee", 256, "bf16", "sm_90a", 16),
        (None, "auto", "ieee", 1000, "bf16", "sm_90a", 64),
        (None, "auto", "ieee", 256, "fp32", "sm_90a", 64),
        (None, "auto", "ieee", 256, "bf16", "sm_80", 64),
        (None, "wgmma", "ieee", 256, "bf16", "sm_90a", 64),
        (None, "ragged", "ieee", 1000, "bf16", "sm_90a", 16),
        (None, "auto", "short", 1000, "bf16", "sm_90a", 16),
        (128, "ragged", "ieee", 256, "bf16", "sm_90a", 128),
    ],
)
def test_who_gets_places_by_16(given, impl, precision, rows, dtype, arch, expected):
    shapes = ("[900, 64]", "[4, 96, 64]", "[4, 64, 48]")
    arrays = [described(dtype + shape, arch) for shape in shapes]
    assert few.block_size_of(given, impl, precision, rows, *arrays) == expected


def test_gradients_and_cpus_keep_the_usual_kernels():
    x, up = torch.ones(1, 64, dtype=torch.bfloat16), torch.ones(4, 96, 64, dtype=torch.bfloat16)
    assert few.implementation("auto", x, up) == "auto"
    assert few._wants_gradients(x, up.requires_grad_())
    with torch.no_grad():
        assert not few._wants_gradients(x, up)
