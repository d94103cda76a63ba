"""Decode steps in products that fetch their weight early, on the CPU: against plain PyTorch, and
who has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fkjit.cpu.run as cpu
from fkjit.arch import arch
from fkjit.jit.build import quiet
from fkjit.models import ModelConfig
from fkjit.models.plan import StepPlan, streams
from fkjit.settings import settings

torch = pytest.importorskip("torch", reason="needs torch")
from fkjit.models import Decoder  # noqa: E402
from tests.core.sampling import one_in  # noqa: E402
from tests.models.reference_model import CONFIGS, logits_of, state_of  # noqa: E402

STREAMED = StepPlan(streamed=True)
HEAD = 64  # columns, at least: a head is a tile
WIDE = {
    "llama": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
              "head_dim": HEAD},
    "gpt2": {"n_embd": 2 * HEAD},
}  # fmt: skip
PROMPTS = [[1, 5, 9, 3], [1, 7], [2, 3, 4, 5, 6, 7, 8, 9, 1], [11], [12, 13]]


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """The interpreter's usual target has neither TMA nor wgmma."""
    chosen = replace(settings(), target="compute_90a")
    monkeypatch.setattr("fkjit.jit.build.settings", lambda: chosen)


@one_in(2)
@pytest.mark.parametrize("name", WIDE)
def test_logits_of_steps(name, monkeypatch):
    """Of two steps of three sequences behind prompts of several lengths; which kernels ran."""
    monkeypatch.setitem(CONFIGS, name, CONFIGS[name] | WIDE[name])
    config, state = CONFIGS[name], state_of(name)
    kept, interpret = [], cpu.interpret
    monkeypatch.setattr("fkjit.ops.op.op.interpret", lambda spec, *rest: (
        kept.append(spec.op), interpret(spec, *rest)))  # fmt: skip
    decoder = Decoder(config, state, dtype="fp16", device="cpu", max_batch=3, max_length=16,
                      page_size=8, plan=STREAMED)  # fmt: skip
    logits, run = [], decoder._steps.run

    def noted(size, mode, plan=None):
        kept.clear()
        run(size, mode, plan)
        logits.append(decoder._steps._logits.rows(size).clone())

    monkeypatch.setattr(decoder._steps, "run", noted)
    with quiet():
        found = decoder.generate(PROMPTS[:3], max_new_tokens=3)
    layers = len(decoder._network.weights.layers)
    step = ["streamed_append", "settled_attention", *["streamed_linear"] * 3]
    assert kept == ["step_begin", *step * layers, "streamed_logits", "pick_largest"]
    for row, (prompt, new) in enumerate(zip(PROMPTS, found, strict=False)):
        wanted = logits_of(name, state, prompt + new[:-1])[-2:]
        for step, line in enumerate(wanted):
            error = (logits[step][row].double() - line).norm() / line.norm()
            assert error < 4e-3, (row, step, error)


def test_who_has_them():
    def fits(rows=16, name="llama-3.2-1b", codes=None, target="sm_90a", **changes):
        config = replace(ModelConfig.of(name), **changes)
        return streams(config, rows, codes, arch(target))

    assert fits() and fits(64) and fits(5, "gpt2")
    assert not fits(65) and not fits(codes="int4_group") and not fits(target="sm_80")
    assert not fits(qk_norm=True) and not fits(head_dim=32) and not fits(hidden=2044)
