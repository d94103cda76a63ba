"""What `bench.models` measures the Decoder beside, on the CPU: the same model in plain PyTorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from bench.models.decode import Row, line  # noqa: E402
from bench.models.sdpa_step import SdpaStep  # noqa: E402
from fkjit.models import ModelConfig  # noqa: E402
from fkjit.models.weights import arranged  # noqa: E402
from tests.models.reference_model import CONFIGS, logits_of, state_of  # noqa: E402

TOKENS = [5, 9, 2, 7]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steps_of_the_peer_are_those_of_the_model(name):
    config, state = ModelConfig.of(CONFIGS[name]), state_of(name, torch.float32)
    step = SdpaStep(config, arranged(config, state, torch.float32, "cpu"), 2, 8)
    found = []
    for at, token in enumerate(TOKENS):
        step.tokens.fill_(token)
        step.position.fill_(at)
        step()
        found.append(step.logits)
    for row in torch.stack(found, 1):
        torch.testing.assert_close(
            row.double(), logits_of(name, state, TOKENS), rtol=1e-4, atol=1e-4
        )
    assert torch.equal(step.tokens, step.logits.argmax(-1))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_step_of_the_peer_goes_on_behind_a_prompt(name):
    config, state = ModelConfig.of(CONFIGS[name]), state_of(name, torch.float32)
    step = SdpaStep(config, arranged(config, state, torch.float32, "cpu"), 2, 8)
    found = [step.prompt(torch.tensor([TOKENS[:3]] * 2))]
    assert torch.equal(step.tokens, found[0].argmax(-1))
    assert int(step.position) == 3
    step.tokens.fill_(TOKENS[3])
    step()
    found.append(step.logits)
    for row in torch.stack(found, 1):
        torch.testing.assert_close(
            row.double(), logits_of(name, state, TOKENS)[2:], rtol=1e-4, atol=1e-4
        )


def test_a_row_of_the_table():
    shown = line("gpt2", Row(16, 976_427.4, 27_297.2, 583.1, 902.0))
    assert shown == "| gpt2 | 16 | 976,427 | 27,297 | 583 | 902 | 17,738 |"
