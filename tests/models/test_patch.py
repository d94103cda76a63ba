"""`fkjit.models.patch`: tiny models' logits, generation and state against transformers' own.
(Gradients: tests/bench/test_bench_train.py.)"""

from __future__ import annotations

import copy

import pytest

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers, fkjit[models]")

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 64,
}  # fmt: skip
MIXTURE = SIZES | {
    "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
MODELS = {
    "GPT2": {"vocab_size": 48, "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64,
             "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0},
    "Llama": SIZES,
    "Qwen3": SIZES,
    "Mistral": SIZES | {"sliding_window": 3},
    "Mixtral": SIZES | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "Qwen3Moe": MIXTURE, "Olmoe": MIXTURE | {"num_key_value_heads": 2},
    "DeepseekV3": MIXTURE | {
        "head_dim": 8, "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
        "num_local_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "num_hidden_layers": 2,
    },
    "Gemma2": SIZES | {"sliding_window": 3, "query_pre_attn_scalar": 16,
                       "attn_logit_softcapping": 2.0},
}  # fmt: skip
TOKENS = [[5, 9, 2, 7, 11], [0, 0, 3, 8, 4]]
SEEN = [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]  # left padding


def built(family: str, **config):
    """A model with random weights, large enough that scores are not all alike."""
    torch.manual_seed(1)
    said = getattr(transformers, f"{family}Config")(**MODELS[family] | config)
    said._attn_implementation = "eager"
    head = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    model = getattr(transformers, head)(said).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def logits(model, padded: bool):
    rows = slice(None) if padded else slice(1)
    with torch.no_grad():
        made = model(
            input_ids=torch.tensor(TOKENS[rows]), attention_mask=torch.tensor(SEEN[rows])
        ).logits
    return made[torch.tensor(SEEN[rows]).bool()]


@one_in(6)
@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_transformers_and_come_back(family):
    model = built(family)
    wanted = {padded: logits(model, padded) for padded in (False, True)}
    report = fkjit.models.patch(model)
    assert report.attention and model.config._attn_implementation == "fkjit"
    for padded, own in wanted.items():
        torch.testing.assert_close(logits(model, padded), own, rtol=1e-3, atol=1e-4)
    fkjit.models.unpatch(model)
    assert model.config._attn_implementation == "eager"
    assert not [m for m in model.modules() if "forward" in m.__dict__]
    assert torch.equal(logits(model, True), wanted[True])


@pytest.mark.parametrize("family, kinds, left", [
    ("GPT2", {"linear": 9, "layer_norm": 5, "MLP": 2, "layer": 2}, {"Embedding": 2}),
    ("Llama", {"linear": 15, "rms_norm": 5, "gated MLP": 2, "attention block": 2, "layer": 2},
     {"Embedding": 1}),
    ("Qwen3", {"linear": 15, "rms_norm": 9, "gated MLP": 2}, {"Embedding": 1}),
    ("Gemma2", {"linear": 15, "rms_norm": 9, "gated MLP": 2}, {"Gemma2TextScaledWordEmbedding": 1}),
    ("Mixtral", {"linear": 9, "rms_norm": 5, "experts": 2, "router": 2}, {"Embedding": 1}),
    ("DeepseekV3", {"linear": 17, "rms_norm": 9, "gated MLP": 2, "experts": 1, "router": 1},
     {"Embedding": 1}),
])  # fmt: skip
def test_the_report_names_each_module(family, kinds, left):
    report = fkjit.models.patch(built(family))
    found = [kind for _, kind in report.replaced]
    assert {kind: found.count(kind) for kind in found} == kinds
    kept = [name for _, name in report.left]
    assert {name: kept.count(name) for name in kept} == left
    for counts in (kinds, left):
        assert all(f"{count} {name}" in str(report) for name, count in counts.items())


@one_in(2)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_generate_with_left_padding(family, cache):
    model = built(family)
    options = {
        "input_ids": torch.tensor(TOKENS), "attention_mask": torch.tensor(SEEN),
        "max_new_tokens": 3, "do_sample": False, "cache_implementation": cache,
        "disable_compile": True,
    }  # fmt: skip
    wanted = model.generate(**options)
    fkjit.models.patch(model)
    assert torch.equal(model.generate(**options), wanted)


def test_a_second_patch_changes_nothing_and_a_copy_has_its_own_weights():
    model = built("Llama")
    report = fkjit.models.patch(model)
    assert fkjit.models.patch(model) is report
    wanted = logits(model, False)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(logits(other, False), wanted)


def test_other_things_than_models_and_dropout_are_refused():
    with pytest.raises(ArgumentTypeError, match="model is a Linear; allowed: a transformers"):
        fkjit.models.patch(torch.nn.Linear(2, 2))
    with pytest.raises(ArgumentTypeError, match="unpatch: model is a Linear; allowed"):
        fkjit.models.unpatch(torch.nn.Linear(2, 2))
    with pytest.raises(ArgumentTypeError, match=r"patch: model is torch\.float64; allowed: fp16"):
        fkjit.models.patch(built("Llama").double())
    with pytest.raises(ArgumentTypeError, match="patch: loss='x' is not True or False"):
        fkjit.models.patch(built("Llama"), loss="x")
    step = fkjit.models.CapturedStep(None, None)
    for given in ({}, {"input_ids": [1]}):
        with pytest.raises(ArgumentTypeError, match=r"CapturedStep: .* allowed: the model's torch"):
            step(**given)
    model = built("Llama")
    step = fkjit.models.CapturedStep(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ParameterError, match="of input_ids the model makes no loss; allowed: tens"):
        step(input_ids=torch.tensor(TOKENS[:1]))
    model = built("Llama", attention_dropout=0.1).train()
    fkjit.models.patch(model)
    with pytest.raises(ParameterError, match=r"attention dropout=0\.1; allowed: 0"):
        model(input_ids=torch.tensor(TOKENS[:1]))
