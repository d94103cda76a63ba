"""`patch(model, loss=True)`, blocks and `CapturedStep`: losses and gradients of tiny models are
those of transformers. (Steps of an optimizer: tests/bench/test_bench_train.py.)"""

from __future__ import annotations

import copy
import inspect

import pytest

import fkjit
from fkjit.jit.build import quiet

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers, fkjit[models]")
from tests.core.sampling import ONLY_WITH_EVERY_VARIANT, one_in  # noqa: E402
from tests.models.test_patch import MODELS, SIZES, TOKENS, built  # noqa: E402

IDS = torch.tensor(TOKENS)
DROPLESS = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)


def model_of(family, **more):
    MODELS.setdefault("Qwen2", SIZES)
    return built(family, **more, **(DROPLESS if family == "GPT2" else {})).train()


@one_in(4)
@pytest.mark.parametrize("family", ["GPT2", "Qwen2", "Llama", "Mistral"])
def test_the_loss_and_its_gradients_without_logits(family):
    """Mistral's window is shorter than the sequences; Qwen2 has biases of q, k and v."""
    model = model_of(family)
    other = copy.deepcopy(model)
    labels = IDS.clone()
    labels[0, 1] = -100
    wanted = model(input_ids=IDS, labels=labels)
    wanted.loss.backward()
    report = fkjit.models.patch(other, loss=True)
    assert ("", "loss") in report.replaced
    with quiet():
        made = other(input_ids=IDS, labels=labels)
        made.loss.backward()
    assert made.logits is None
    torch.testing.assert_close(made.loss, wanted.loss, rtol=1e-5, atol=0)
    gradients = [{n: p.grad for n, p in one.named_parameters()} for one in (other, model)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)


def test_what_else_a_forward_pass_is_asked_for():
    model = model_of("Llama")
    calls = ({"num_items_in_batch": 3}, {"attention_mask": torch.ones_like(IDS)})
    wanted = [model(input_ids=IDS, labels=IDS, **one).loss.item() for one in calls]
    dense = model(IDS, labels=IDS).logits
    names = inspect.signature(model.forward).parameters
    fkjit.models.patch(model, loss=True)
    with quiet():
        made = [model(input_ids=IDS, labels=IDS, **one).loss.item() for one in calls]
        assert made == pytest.approx(wanted, rel=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(model(IDS, labels=IDS).logits, dense, rtol=1e-3, atol=1e-4)
        assert model(IDS).loss is None and model(IDS).logits is not None
    assert inspect.signature(model.forward).parameters == names
    fkjit.models.unpatch(model)
    assert "forward" not in model.__dict__
    torch.testing.assert_close(model(IDS, labels=IDS).logits, dense)


@ONLY_WITH_EVERY_VARIANT
def test_torch_compile_traces_a_patched_model_whole():
    model = model_of("Llama", num_hidden_layers=1, use_cache=False)
    fkjit.models.patch(model, loss=True)
    with quiet():
        wanted = model(input_ids=IDS, labels=IDS).loss
        made = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(made(input_ids=IDS, labels=IDS).loss, wanted)


def test_a_captured_step_on_a_cpu_is_a_step():
    models = [model_of("GPT2") for _ in range(2)]
    losses = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if model is models[1]:
            step = fkjit.models.CapturedStep(model, optimizer)
            losses.append([step(input_ids=IDS, labels=IDS).item() for _ in range(2)])
            continue
        losses.append([])
        for _ in range(2):
            loss = model(input_ids=IDS, labels=IDS).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[0].append(loss.item())
    assert losses[0] == losses[1]


class Adapted(torch.nn.Module):
    """A product with something added, as adapters put in its place."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.rows = torch.nn.Parameter(torch.ones(2, base.in_features))

    def forward(self, x):
        return self.base(x) + (x @ self.rows.t()).sum(-1, keepdim=True) / 64


def test_adapters_frozen_weights_checkpoints_and_autocast():
    """What comes after `patch`; half of the layers is as it was."""
    models = [model_of("Llama", use_cache=False) for _ in range(2)]
    fkjit.models.patch(models[1], loss=True)
    found = []
    for model in models:
        first, second = model.model.layers
        first.self_attn.q_proj, first.mlp.up_proj = (
            Adapted(one) for one in (first.self_attn.q_proj, first.mlp.up_proj)
        )
        second.self_attn.k_proj.weight.requires_grad_(False)
        second.mlp.gate_proj.weight.requires_grad_(False)
        model.gradient_checkpointing_enable()
        with quiet():
            model(input_ids=IDS, labels=IDS).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-6)
    with quiet(), torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [model(input_ids=IDS, labels=IDS).loss for model in models]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0)
