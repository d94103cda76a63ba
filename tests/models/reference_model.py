"""Tiny configurations of each family, their weights by Hugging Face's names, and the forward pass
in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import embedding, gelu, layer_norm, linear, silu

LLAMA = {
    "model_type": "llama", "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_theta": 1000.0, "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
}  # fmt: skip
PLAIN_ROPE = {"rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"}}
CONFIGS = {
    "llama": LLAMA,
    "mistral": LLAMA | PLAIN_ROPE | {"model_type": "mistral", "sliding_window": 3,
                                      "tie_word_embeddings": False},
    "qwen2": LLAMA | PLAIN_ROPE | {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": LLAMA | PLAIN_ROPE | {"model_type": "qwen3", "tie_word_embeddings": False},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 2,
        "n_positions": 64, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    },
}  # fmt: skip


def state_of(name: str, dtype=torch.float16) -> dict[str, torch.Tensor]:
    """Random weights, large enough that scores are not all alike."""
    config, made = CONFIGS[name], torch.Generator().manual_seed(1)
    gpt2 = name == "gpt2"

    def matrix(rows, columns):
        x = torch.randn(rows, columns, generator=made) * columns**-0.5
        return (x.t().contiguous() if gpt2 else x).to(dtype)

    def vector(n, mean=0.0):
        return (mean + 0.2 * torch.randn(n, generator=made)).to(dtype)

    state = _gpt2(config, matrix, vector) if gpt2 else _llama(name, config, matrix, vector)
    for table in ("transformer.wte.weight", "transformer.wpe.weight", "model.embed_tokens.weight"):
        if table in state:
            rows, hidden = 64 if "wpe" in table else 48, config["n_embd" if gpt2 else "hidden_size"]
            state[table] = torch.randn(rows, hidden, generator=made).to(dtype)
    return state


def _gpt2(config, matrix, vector):
    state = {"transformer.wte.weight": None, "transformer.wpe.weight": None}
    hidden = config["n_embd"]
    products = {"attn.c_attn": (3 * hidden, hidden), "attn.c_proj": (hidden, hidden),
                "mlp.c_fc": (4 * hidden, hidden), "mlp.c_proj": (hidden, 4 * hidden)}  # fmt: skip
    for n in range(config["n_layer"]):
        for part, (rows, columns) in products.items():
            state[f"transformer.h.{n}.{part}.weight"] = matrix(rows, columns)
            state[f"transformer.h.{n}.{part}.bias"] = vector(rows)
        for norm in ("ln_1", "ln_2"):
            state[f"transformer.h.{n}.{norm}.weight"] = vector(hidden, 1.0)
            state[f"transformer.h.{n}.{norm}.bias"] = vector(hidden)
    last = {"weight": vector(hidden, 1.0), "bias": vector(hidden)}
    return state | {f"transformer.ln_f.{name}": x for name, x in last.items()}


def _llama(name, config, matrix, vector):
    hidden, dim, mlp = (config[n] for n in ("hidden_size", "head_dim", "intermediate_size"))
    q, kv = (dim * config[f"num_{n}_heads"] for n in ("attention", "key_value"))
    state = {"model.embed_tokens.weight": None, "model.norm.weight": vector(hidden, 1.0)}
    products = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
                "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden),
                "mlp.down_proj": (hidden, mlp)}  # fmt: skip
    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}."
        for part, (rows, columns) in products.items():
            state[f"{at}{part}.weight"] = matrix(rows, columns)
            if name == "qwen2" and part[-6:] in ("q_proj", "k_proj", "v_proj"):
                state[f"{at}{part}.bias"] = vector(rows)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{at}{norm}.weight"] = vector(hidden, 1.0)
        if name == "qwen3":
            for norm in ("q_norm", "k_norm"):
                state[f"{at}self_attn.{norm}.weight"] = vector(dim, 1.0)
    if not config["tie_word_embeddings"]:
        state["lm_head.weight"] = matrix(48, hidden)
    return state


def logits_of(name: str, state, tokens: list[int], dtype=torch.float64) -> torch.Tensor:
    """[tokens, vocabulary] behind each token of one sequence."""
    state = {key: value.to(dtype) for key, value in state.items()}
    ids = torch.tensor(tokens)
    return _gpt2_logits(state, ids) if name == "gpt2" else _llama_logits(name, state, ids)


def _gpt2_logits(state, ids):
    def product(x, at):
        return x @ state[f"{at}.weight"] + state[f"{at}.bias"]

    def norm(x, at):
        return layer_norm(x, x.shape[-1:], state[f"{at}.weight"], state[f"{at}.bias"], 1e-5)

    stream = embedding(ids, state["transformer.wte.weight"])
    stream = stream + state["transformer.wpe.weight"][: len(ids)]
    for n in range(2):
        at = f"transformer.h.{n}"
        heads = product(norm(stream, f"{at}.ln_1"), f"{at}.attn.c_attn")
        q, k, v = heads.unflatten(-1, (3, 2, -1)).permute(1, 2, 0, 3)
        stream = stream + product(_attention(q, k, v, None), f"{at}.attn.c_proj")
        inner = gelu(product(norm(stream, f"{at}.ln_2"), f"{at}.mlp.c_fc"), approximate="tanh")
        stream = stream + product(inner, f"{at}.mlp.c_proj")
    return norm(stream, "transformer.ln_f") @ state["transformer.wte.weight"].t()


def _llama_logits(name, state, ids):
    config = CONFIGS[name]
    heads = (-1, config["head_dim"])

    def product(x, at):
        return linear(x, state[f"{at}.weight"], state.get(f"{at}.bias"))

    stream = embedding(ids, state["model.embed_tokens.weight"])
    for n in range(2):
        at = f"model.layers.{n}"
        x = _rms(stream, state[f"{at}.input_layernorm.weight"])
        q, k, v = (
            product(x, f"{at}.self_attn.{part}_proj").unflatten(-1, heads).transpose(0, 1)
            for part in "qkv"
        )
        if name == "qwen3":
            q, k = (_rms(x, state[f"{at}.self_attn.{part}_norm.weight"])
                    for x, part in ((q, "q"), (k, "k")))  # fmt: skip
        q, k = (_turned(x, config["rope_parameters"]) for x in (q, k))
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        attended = _attention(q, k, v, config.get("sliding_window"))
        stream = stream + product(attended, f"{at}.self_attn.o_proj")
        x = _rms(stream, state[f"{at}.post_attention_layernorm.weight"])
        inner = silu(product(x, f"{at}.mlp.gate_proj")) * product(x, f"{at}.mlp.up_proj")
        stream = stream + product(inner, f"{at}.mlp.down_proj")
    head = state.get("lm_head.weight", state["model.embed_tokens.weight"])
    return _rms(stream, state["model.norm.weight"]) @ head.t()


def _attention(q, k, v, window):
    """[tokens, heads * head_dim] of q, k, v [heads, tokens, head_dim]."""
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    if window:
        seen &= ~torch.ones_like(seen).tril(-window)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def _rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _turned(x, rope):
    """[heads, tokens, D] by their positions, with Llama 3's frequencies."""
    half = x.shape[-1] // 2
    frequency = rope["rope_theta"] ** -(torch.arange(half, dtype=torch.float64) / half)
    if rope["rope_type"] == "llama3":
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        kept = ((turns - rope["low_freq_factor"])
                / (rope["high_freq_factor"] - rope["low_freq_factor"])).clamp(0, 1)  # fmt: skip
        frequency = frequency * (kept + (1 - kept) / rope["factor"])
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)
