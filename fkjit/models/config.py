"""What a model is: the numbers of a Hugging Face configuration that a forward pass needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fkjit.arguments import one_of, shown, whole
from fkjit.errors import ArgumentTypeError, ParameterError, did_you_mean
from fkjit.ops.rope.frequencies import THETA, Llama3Scaling

_CALL = "ModelConfig"
_FOLDER = Path(__file__).parent / "configs"

# transformers' names of activations -> `fkjit.linear`'s
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu",
}  # fmt: skip
# What else a GPT-2 may say, and the one thing that a forward pass here computes.
_GPT2_ONLY = {
    "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True,
    "add_cross_attention": False,
}  # fmt: skip
_QWEN_FULL = 28  # layers with all keys before those with a window, where nothing is said
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
MODEL_TYPES = (*_LLAMA_LIKE, "gpt2")
_LAYER_TYPES = ("full_attention", "sliding_attention")
HEADS = range(8, 257, 8)  # columns of a head that is read in pages


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    model_type: transformers' name. vocabulary: tokens. hidden, mlp: columns of the residual stream
    and behind the activation. heads_q, heads_kv: of queries, and of keys and values; head_dim:
    columns of each. activation: as `fkjit.linear` calls it. eps: of the norms, RMSNorm's, with
    learned positions LayerNorm's. max_length: positions that there are. theta: of RoPE; None:
    learned positions. scaling: of RoPE's frequencies. windows: of each layer, how many keys a token
    sees, itself included; None: all before it. gated: gate and up, activation(gate) * up. qk_norm:
    RMSNorm of each head before RoPE. tied: the embedding is the head as well.

    Example:
        >>> config = fkjit.models.ModelConfig.of("llama-3.2-1b")
        >>> config.layers, config.heads_q, config.heads_kv, config.head_dim
        (16, 32, 8, 64)
    """

    model_type: str
    vocabulary: int
    hidden: int
    layers: int
    heads_q: int
    heads_kv: int
    head_dim: int
    mlp: int
    activation: str
    eps: float
    max_length: int
    theta: float | None
    scaling: Llama3Scaling | None
    windows: tuple[int | None, ...]
    gated: bool
    qk_norm: bool
    tied: bool

    @classmethod
    def of(cls, config: Any) -> ModelConfig:
        """Of a transformers configuration, its dictionary, or a name of `named_configs()`.

        Raises:
            ArgumentTypeError: something else.
            ParameterError: a name or model_type that there is not, a missing field, or a part that
                no kernel here computes.
        """
        if isinstance(config, cls):
            return config
        fields = fields_of(config)
        kind = fields.get("model_type")
        if kind not in MODEL_TYPES:
            raise ParameterError(
                f"{_CALL}: model_type={shown(kind)}; allowed: {', '.join(MODEL_TYPES)}"
            )
        return cls(**(_gpt2(fields) if kind == "gpt2" else _llama(fields)))

    def products(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of a layer's weights, by name; up: gate and up, where it is gated."""
        heads, hidden = self.heads_q * self.head_dim, self.hidden
        return {
            "qkv": (heads + 2 * self.heads_kv * self.head_dim, hidden), "out": (hidden, heads),
            "up": (self.mlp * (2 if self.gated else 1), hidden), "down": (hidden, self.mlp),
        }  # fmt: skip

    def with_layers(self, layers: int) -> ModelConfig:
        """The same with the first layers alone."""
        return replace(self, layers=layers, windows=self.windows[:layers])


def named_configs() -> tuple[str, ...]:
    """Models whose configurations come with fkjit.

    Example:
        >>> "llama-3.2-1b" in fkjit.models.named_configs()
        True
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def configuration(call: str, name: str) -> ModelConfig:
    """By name, or of the file of a config.json. ParameterError where it cannot be read."""
    if name in named_configs() or not name.endswith(".json"):
        return ModelConfig.of(name)
    try:
        fields = json.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise ParameterError(f"{call}: config={name}: {error}") from error
    return ModelConfig.of(fields)


def fields_of(config: Any) -> Mapping[str, Any]:
    """By transformers' names, of what `ModelConfig.of` takes but itself."""
    if isinstance(config, str):
        if config not in named_configs():
            near = did_you_mean(config, named_configs())
            raise ParameterError(
                f"{_CALL}: no {shown(config)}{near} (has: {', '.join(named_configs())})"
            )
        return json.loads((_FOLDER / f"{config}.json").read_text())
    if isinstance(config, Mapping):
        return config
    if callable(getattr(config, "to_dict", None)):
        return config.to_dict()
    raise ArgumentTypeError(
        f"{_CALL}: config is a {type(config).__name__}; allowed: a transformers configuration, its "
        f"dictionary, or one of {', '.join(named_configs())}"
    )


def _need(fields: Mapping[str, Any], *names: str) -> list[Any]:
    missing = [name for name in names if fields.get(name) is None]
    if missing:
        raise ParameterError(f"{_CALL}: the configuration lacks {', '.join(missing)}")
    return [fields[name] for name in names]


def _sizes(fields: Mapping[str, Any], *names: str) -> list[int]:
    """Whole numbers from 1 on."""
    found = zip(names, _need(fields, *names), strict=True)
    return [whole(_CALL, name, value, 1) for name, value in found]


def _size(fields: Mapping[str, Any], name: str, usual: int) -> int:
    """One that may be left out, or be None."""
    return usual if fields.get(name) is None else _sizes(fields, name)[0]


def _number(name: str, value: Any) -> float:
    """Finite and above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{_CALL}: {name}={shown(value)}; allowed: a number")
    if not 0 < value < float("inf"):
        raise ParameterError(f"{_CALL}: {name}={shown(value)}; allowed: above 0")
    return float(value)


def _multiple(name: str, value: int, other: str, of: int) -> None:
    if value % of:
        raise ParameterError(f"{_CALL}: {name}={value}; allowed: a multiple of {other}={of}")


def _activation(name: Any) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ParameterError(
            f"{_CALL}: activation {shown(name)}; allowed: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _gpt2(fields: Mapping[str, Any]) -> dict[str, Any]:
    names = ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")
    vocabulary, hidden, layers, heads, positions = _sizes(fields, *names)
    _multiple("n_embd", hidden, "n_head", heads)
    for name, only in _GPT2_ONLY.items():
        if fields.get(name, only) != only:
            raise ParameterError(f"{_CALL}: {name}={shown(fields[name])}; allowed: {only}")
    return {
        "model_type": "gpt2", "vocabulary": vocabulary, "hidden": hidden, "layers": layers,
        "heads_q": heads, "heads_kv": heads, "head_dim": hidden // heads,
        "mlp": _size(fields, "n_inner", 4 * hidden), "max_length": positions,
        "activation": _activation(fields.get("activation_function", "gelu_new")),
        "eps": _number("layer_norm_epsilon", fields.get("layer_norm_epsilon", 1e-5)),
        "theta": None, "scaling": None,
        "windows": (None,) * layers, "gated": False, "qk_norm": False,
        "tied": fields.get("tie_word_embeddings", True),
    }  # fmt: skip


def _llama(fields: Mapping[str, Any]) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "max_position_embeddings")  # fmt: skip
    vocabulary, hidden, mlp, layers, heads, positions = _sizes(fields, *names)
    heads_kv = _size(fields, "num_key_value_heads", heads)
    _multiple("num_attention_heads", heads, "num_key_value_heads", heads_kv)
    theta, scaling = _rope(fields)
    return {
        "model_type": fields["model_type"], "vocabulary": vocabulary, "hidden": hidden,
        "layers": layers, "heads_q": heads,
        "heads_kv": heads_kv, "head_dim": _size(fields, "head_dim", hidden // heads), "mlp": mlp,
        "activation": _activation(fields.get("hidden_act", "silu")),
        "eps": _number("rms_norm_eps", fields.get("rms_norm_eps", 1e-6)),
        "max_length": positions, "theta": theta,
        "scaling": scaling, "windows": _windows(fields, layers), "gated": True,
        "qk_norm": fields["model_type"] == "qwen3",
        "tied": fields.get("tie_word_embeddings", False),
    }  # fmt: skip


def _rope(fields: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """theta and scaling; transformers 5 has them in rope_parameters, config.json often apart."""
    said: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = fields.get(name) or {}
        if not isinstance(given, Mapping):
            raise ArgumentTypeError(f"{_CALL}: {name}={shown(given)}; allowed: a dictionary, None")
        said |= given
    found = (said.get("rope_theta"), fields.get("rope_theta"), THETA)
    theta = _number("rope_theta", next(one for one in found if one is not None))
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ParameterError(f"{_CALL}: rope_type={shown(kind)}; allowed: default, llama3")
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = map(_number, names, _need(said, *names))
    (context,) = _sizes(said, "original_max_position_embeddings")
    return theta, Llama3Scaling(factor, low, high, context)


def _windows(fields: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """What each layer sees, as `layer_types` or the model's own default say: of Qwen layers from
    `max_window_layers` on have the window."""
    qwen = fields["model_type"].startswith("qwen")
    window = fields.get("sliding_window")
    if fields["model_type"] == "llama" or (qwen and not fields.get("use_sliding_window")):
        window = None
    if window is not None:
        window = whole(_CALL, "sliding_window", window, 1)
    kinds = fields.get("layer_types")
    if kinds is None:
        full = _size(fields, "max_window_layers", _QWEN_FULL) if qwen else 0
        return tuple(window if n >= full else None for n in range(layers))
    if not isinstance(kinds, list | tuple):
        raise ArgumentTypeError(f"{_CALL}: layer_types={shown(kinds)}; allowed: a list of words")
    for kind in kinds:
        one_of(_CALL, "layer_types", kind, _LAYER_TYPES)
    if len(kinds) != layers:
        raise ParameterError(f"{_CALL}: {len(kinds)} layer_types; allowed: {layers}, one a layer")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
