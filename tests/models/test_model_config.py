"""`fkjit.models.ModelConfig`: configurations by name, dictionary and object."""

from __future__ import annotations

import pytest

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.models import ModelConfig, named_configs
from fkjit.ops.rope.frequencies import Llama3Scaling

LLAMA = {
    "model_type": "llama", "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 48, "n_embd": 32, "n_layer": 1, "n_head": 2,
        "n_positions": 16}  # fmt: skip


@pytest.mark.parametrize("name, millions", [
    ("gpt2", 124.4), ("llama-3.2-1b", 1235.8), ("llama-3.1-8b", 8030.3), ("qwen3-0.6b", 596.0),
])  # fmt: skip
def test_named_configurations_have_the_parameters_that_their_names_say(name, millions):
    one = ModelConfig.of(name)
    assert name in named_configs()
    heads = (one.heads_q + 2 * one.heads_kv) * one.head_dim
    layer = one.hidden * (heads + one.heads_q * one.head_dim + 2 * one.mlp)
    layer += one.hidden * one.mlp if one.gated else heads + 2 * one.hidden + one.mlp
    layer += one.hidden * (2 if one.theta else 4) + 2 * one.head_dim * one.qk_norm
    found = one.vocabulary * one.hidden * (1 if one.tied else 2) + one.layers * layer
    found += one.hidden if one.theta else one.hidden * (one.max_length + 2)
    assert found / 1e6 == pytest.approx(millions, abs=0.06)


def test_every_named_configuration_is_counted():
    assert set(named_configs()) == {"gpt2", "llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b"}


def test_rope_is_read_from_both_forms():
    old = ModelConfig.of(LLAMA | {"rope_theta": 5e5, "rope_scaling": SCALED})
    new = ModelConfig.of(LLAMA | {"rope_parameters": {**SCALED, "rope_theta": 5e5}})
    assert old == new and old.theta == 5e5 and old.scaling == Llama3Scaling(8.0, 1.0, 4.0, 32)
    assert ModelConfig.of(LLAMA).scaling is None and ModelConfig.of(LLAMA).theta == 10_000
    assert ModelConfig.of(old) is old


def test_windows_are_of_layers():
    windowed = {"model_type": "mistral", "sliding_window": 5}
    assert ModelConfig.of(LLAMA | windowed).windows == (5, 5)
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    assert ModelConfig.of(LLAMA | windowed | kinds).windows == (None, 5)
    qwen = {"model_type": "qwen2", "sliding_window": 5}
    assert ModelConfig.of(LLAMA | qwen | {"use_sliding_window": False}).windows == (None, None)
    some = {"use_sliding_window": True, "max_window_layers": 1}
    assert ModelConfig.of(LLAMA | qwen | some).windows == (None, 5)


@pytest.mark.parametrize("given, error, match", [
    ("gpt-2", ParameterError, r"no 'gpt-2'; did you mean gpt2\? \(has: gpt2, llama"),
    (7, ArgumentTypeError, "config is a int; allowed: a transformers configuration"),
    ({"model_type": "t5"}, ParameterError, "model_type='t5'; allowed: llama, mistral"),
    ({"model_type": "llama"}, ParameterError, "lacks vocab_size, hidden_size"),
    (LLAMA | {"hidden_act": "mish"}, ParameterError, "activation 'mish'; allowed: silu"),
    (LLAMA | {"rope_scaling": {"rope_type": "yarn"}}, ParameterError, "rope_type='yarn'"),
    (LLAMA | {"hidden_act": ["silu"]}, ParameterError, r"activation \['silu'\]; allowed: silu"),
    (LLAMA | {"rope_scaling": "yarn"}, ArgumentTypeError, "rope_scaling='yarn'; allowed: a dict"),
    (LLAMA | {"rope_scaling": SCALED | {"factor": "8"}}, ArgumentTypeError, "factor='8'; allowed"),
    (LLAMA | {"rope_scaling": SCALED | {"original_max_position_embeddings": 0.5}},
     ArgumentTypeError, "original_max_position_embeddings=0.5 is not a whole number"),
    (LLAMA | {"hidden_size": "32"}, ArgumentTypeError, "hidden_size='32' is not a whole number"),
    (LLAMA | {"num_hidden_layers": 0}, ParameterError, "num_hidden_layers=0; allowed: 1 and"),
    (LLAMA | {"num_key_value_heads": 3}, ParameterError,
     "num_attention_heads=4; allowed: a multiple of num_key_value_heads=3"),
    (LLAMA | {"rope_theta": -1}, ParameterError, "rope_theta=-1; allowed: above 0"),
    (LLAMA | {"rms_norm_eps": "x"}, ArgumentTypeError, "rms_norm_eps='x'; allowed: a number"),
    (LLAMA | {"layer_types": ["full_attention"]}, ParameterError, "1 layer_types; allowed: 2"),
    (LLAMA | {"layer_types": 2}, ArgumentTypeError, "layer_types=2; allowed: a list of words"),
    (LLAMA | {"layer_types": ["full_attention", "chunked"]}, ParameterError,
     "layer_types='chunked' is not one of full_attention, sliding_attention"),
    (GPT2 | {"n_head": 3}, ParameterError, "n_embd=32; allowed: a multiple of n_head=3"),
    (GPT2 | {"scale_attn_weights": False}, ParameterError, "scale_attn_weights=False; allowed: T"),
])  # fmt: skip
def test_what_is_refused(given, error, match):
    with pytest.raises(error, match=match):
        ModelConfig.of(given)
