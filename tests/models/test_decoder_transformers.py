"""`fkjit.models.Decoder` of transformers' own configurations and weights."""

from __future__ import annotations

import pytest

from fkjit.jit.build import quiet
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers, fkjit[models]")
from fkjit.models import Decoder  # noqa: E402
from tests.models.reference_model import CONFIGS, state_of  # noqa: E402

PROMPT = [5, 9, 2, 7, 11]


@one_in(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_transformers(name):
    """The reference's weights in a model of transformers, which gives them back by its names."""
    said = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(name, **said, bos_token_id=1, eos_token_id=2)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    missing, unexpected = model.load_state_dict(state_of(name, torch.float32), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    decoder = Decoder(
        model.config, model.state_dict(), dtype="fp16", device="cpu", max_batch=1, max_length=16,
        page_size=8,
    )  # fmt: skip
    with quiet():
        [made] = decoder.generate([PROMPT], max_new_tokens=3)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + made])).logits[0, len(PROMPT) - 1 : -1]
    assert made == logits.argmax(-1).tolist()
