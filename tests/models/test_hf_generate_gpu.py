"""`generate` of a patched model on a GPU: its prompt is a CUDA graph from the third call on, and
the host waits for nothing between the prompt and the steps."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers, fkjit[models]")

import fkjit  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from fkjit.models import Sampling  # noqa: E402
from tests.models.test_patch import built  # noqa: E402

SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    made = built("Llama", **SIZES).bfloat16().cuda()
    fkjit.models.patch(made)
    return made


def prompt(rows):
    torch.manual_seed(rows)
    return torch.randint(1, 512, (rows, 40), device="cuda")


@pytest.mark.parametrize("rows", [1, 3])
def test_calls_that_are_known_make_the_tokens_of_the_first_one(model, rows):
    """And other prompts, lengths and numbers of new tokens between them change nothing."""
    said = {"do_sample": False, "max_new_tokens": 24}
    with quiet():
        tokens, mask = prompt(rows), torch.ones_like(prompt(rows))
        mask[0, :7] = 0
        first = model.generate(tokens, attention_mask=mask, **said)
        for _ in range(3):
            model.generate(prompt(rows + 1)[:, :30], do_sample=False, max_new_tokens=3)
            assert torch.equal(model.generate(tokens, attention_mask=mask, **said), first)
        short = model.generate(tokens, attention_mask=mask, do_sample=False, max_new_tokens=5)
    assert torch.equal(short, first[:, :45])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=5)], ids=["greedy", "draws"])
def test_nothing_waits_for_the_prompt(model, sampling):
    with quiet():
        for _ in range(3):
            model.generate(prompt(2), do_sample=False, max_new_tokens=4)
            model.generate(prompt(2), do_sample=True, top_k=5, max_new_tokens=4)
        engine = model.generate.args[1].engine
        prompts = [row.numpy() for row in prompt(2).cpu()]
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.start(prompts, 4, sampling)
            engine.step(engine.mode)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            engine.clear()
