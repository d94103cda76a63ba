"""Calls of streamed decode steps, on the CPU: one behind the other, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from fkjit.ops.step import stream
from fkjit.ops.step.call import Norm
from fkjit.ops.step.logits import pick_largest, streamed_logits
from fkjit.ops.step.stream import Scaled, streamed_append, streamed_linear, tile_for
from fkjit.settings import settings

torch = pytest.importorskip("torch", reason="needs torch")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """The interpreter's usual target has neither TMA nor wgmma."""
    chosen = replace(settings(), target="compute_90a")
    monkeypatch.setattr("fkjit.jit.build.settings", lambda: chosen)


def made(*shape, scale=1.0, mean=0.0):
    numbers = torch.Generator().manual_seed(len(shape) + shape[0])
    return torch.randn(shape, generator=numbers).mul_(scale).add_(mean).half()


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_product_its_norm_and_logits(kind):
    """The residual stream, then logits of its norm, of which the largest are picked."""
    x, weight, stream_ = made(6, 96), made(128, 96, scale=0.1), made(6, 128, mean=2.0)
    norm = Norm(made(128, scale=0.2, mean=1.0), made(128) if kind == "layer" else None, 1e-5)
    head, logits = made(70, 128, scale=0.1), torch.full((6, 72), -9.0)[:, :70]
    with quiet():
        out, scaled = streamed_linear(x, weight, residual=stream_, norm=norm)
        _, largest = streamed_logits(scaled, head, logits)
        tokens, positions = torch.zeros(6, dtype=torch.int64), torch.arange(6).int()
        best = pick_largest(largest, tokens, positions, torch.ones(6).int(), advance=False)
        assert not tokens.any() and positions.tolist() == [0, 1, 2, 3, 4, 5]
        pick_largest(largest, tokens, positions, torch.tensor([1, 0] * 3).int(), advance=True)
    wanted = stream_.double() + x.double() @ weight.double().t()
    torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-3)
    rows, factor = out.double(), norm.weight.double()
    normed = torch.nn.functional.rms_norm(rows, (128,), factor, 1e-5)
    if kind == "layer":
        normed = torch.nn.functional.layer_norm(rows, (128,), factor, norm.bias.double(), 1e-5)
    torch.testing.assert_close(
        logits.double(), normed @ head.double().t(), rtol=4e-3, atol=1e-2
    )  # fmt: skip
    assert torch.equal(best, logits.argmax(-1)) and torch.equal(tokens, best)
    assert positions.tolist() == [1, 1, 3, 3, 5, 5]


def test_tiles_are_as_many_as_a_gpu_has_room_for():
    assert tile_for(16384, 2048)[:2] == (128, 1)  # Llama's gate and up
    for n, k in ((2048, 2048), (2048, 8192), (3072, 2048), (768, 3072), (768, 64)):
        rows, cluster, _ = tile_for(n, k)
        assert cluster * -(-n // rows) <= 132 and cluster * 64 <= k


def test_what_is_refused():
    x, weight = made(6, 96), made(128, 96)
    norm = Norm(made(128), None, 1e-5)
    cache = fkjit.PagedKVCache(
        2, page_size=8, num_kv_heads=1, head_dim=32, dtype=torch.float16, device="cpu",
        max_sequences=1, max_length=16, framework="torch",
    )  # fmt: skip
    for error, match, call in (
        (ParameterError, r"x has shape \(65, 96\); allowed: up to 64 rows",
         lambda: streamed_linear(made(65, 96), weight)),
        (ParameterError, r"and \[n, k\]", lambda: streamed_linear(x, made(128, 88))),
        (ParameterError, "tile=.*allowed: one of",
         lambda: streamed_linear(x, weight, tile=(96, 1, 80))),
        (ParameterError, "k for each block", lambda: streamed_linear(x, weight, tile=(64, 4, 80))),
        (ParameterError, "has no kernel", lambda: streamed_linear(x, weight, activation="relu")),
        (ParameterError, "moments has shape",
         lambda: streamed_linear(Scaled(x, torch.zeros(2, 5), norm), weight)),
        (ParameterError, "a multiple of 64, for a norm",
         lambda: streamed_linear(x, made(72, 96), norm=Norm(made(72), made(72), 1e-5))),
        (ParameterError, "out has strides",
         lambda: streamed_logits(x, weight, torch.zeros(6, 130)[:, :128])),
        (ArgumentTypeError, "weight", lambda: streamed_linear(x, weight.float())),
        (ParameterError, "heads of 32 columns",
         lambda: streamed_append(x, weight, None, cache, torch.zeros(6).int(), None, None,
                                 heads_q=2, layer=0)),
    ):  # fmt: skip
        with pytest.raises(error, match=match), quiet():
            call()
    assert stream.fits(64, (96, 128), 64, "silu", True)
    assert not stream.fits(64, (90,), 64, "silu", True)
    assert not stream.fits(5, (96,), 80, None, False)
