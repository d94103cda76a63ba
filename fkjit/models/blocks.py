"""Parts of Llama-like models as few nodes of autograd, each with the kernels that a block needs.

    q, k, v = RoPE(x Wqkvᵀ)          one product, turned in place
    y = (act(x Wgᵀ) * x Wuᵀ) Wdᵀ     two products: gate and up are one; the residual in the second

The backward of each makes one gradient of the weights that stand together (fkjit/models/joined.py)
and hands out views of it. The residual stream goes through its norm's node, which adds both
gradients, so that no kernel is there for sums alone.

Where the weights are apart, hooked or of other classes, under autocast and under torch.compile, a
module computes as transformers wrote it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fkjit.errors import FkjitError
from fkjit.models import hf_attention
from fkjit.models.config import ModelConfig
from fkjit.models.gated import gated_mlp, hooked, lined, of_product, plain_products
from fkjit.models.joined import TOGETHER, as_one
from fkjit.models.modules import ACTIVATIONS, Forward, is_ours
from fkjit.ops.gemm.call import linear
from fkjit.ops.norm.call import layer_norm, norm_and_stream, rms_norm
from fkjit.ops.op import torch_ops
from fkjit.ops.op.autograd import Differentiable, Tensors
from fkjit.ops.rope.call import rope

_FAMILIES = ("Llama", "Mistral", "Qwen2")
_HEADS, _ = TOGETHER
_LAYER_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


def replacement(module: Any) -> tuple[str, Forward] | None:
    """(kind, forward) of an attention, a gated MLP or a layer; None of any other."""
    kind = type(module)
    if kind.__module__.startswith("transformers.models."):
        if kind.__name__ in [f"{name}Attention" for name in _FAMILIES]:
            return _attention(module)
        if kind.__name__ in [f"{name}DecoderLayer" for name in _FAMILIES]:
            return "layer", partial(_layer, module)
        if kind.__name__ == "GPT2Block":
            return "layer", partial(_gpt2_layer, module)
    return None


# ------------------------------------------------------------------ attention


def _attention(module: Any) -> tuple[str, Forward] | None:
    try:
        config = ModelConfig.of(module.config)
    except FkjitError:
        return None
    return "attention block", partial(_attended, module, config)


def _attended(
    module: Any, config: ModelConfig, hidden_states: Any, *args: Any, **named: Any
) -> Any:
    """As transformers' attention modules, with one product for q, k and v and RoPE in place."""
    heads = _heads(module, config, hidden_states, named.get("position_ids"))
    if args or heads is None:
        return type(module).forward(module, hidden_states, *args, **named)
    q, k, v = (one.transpose(1, 2) for one in heads)
    cache = named.pop("past_key_values", None)
    if cache is not None:
        k, v = cache.update(k, v, module.layer_idx)
    named.pop("position_embeddings", None)
    made, _ = hf_attention.attention_forward(
        module, q, k, v, named.pop("attention_mask", None),
        dropout=module.attention_dropout if module.training else 0.0, scaling=module.scaling,
        **named,
    )  # fmt: skip
    return module.o_proj(made.flatten(2)), None


def _heads(module: Any, config: ModelConfig, x: Any, positions: Any) -> Any:
    """q, k and v [B, S, heads, head_dim], turned; None where this module must do it itself."""
    parts = [module._modules[name] for name in _HEADS]
    if module.config._attn_implementation != hf_attention.NAME or positions is None:
        return None
    if not plain_products(parts, x):
        return None
    weights, biases = [one.weight for one in parts], [one.bias for one in parts]
    weight, bias = as_one(weights), as_one(biases)
    if weight is None or (bias is None) != (biases[0] is None):
        return None
    options = (weight, bias, config)
    inputs = (x, *weights, *biases, positions)
    if torch_ops.wants_grad(inputs):
        return _TURNED(inputs, options)
    return _turned(x, positions, options)


def _turned(x: Any, positions: Any, options: Any) -> Tensors:
    weight, bias, config = options
    q, k, v = _split(linear(x, weight, bias), config)
    _turn(q, k, positions, config, q, k, False)
    return q, k, v


def _split(x: Any, config: ModelConfig) -> Tensors:
    """Heads of q, of k and of v."""
    heads = x.unflatten(-1, (-1, config.head_dim))
    return heads.split((config.heads_q, config.heads_kv, config.heads_kv), -2)


def _turn(q: Any, k: Any, positions: Any, config: ModelConfig, out_q: Any, out_k: Any,
          inverse: bool) -> None:  # fmt: skip
    rope(
        q, k, positions, theta=config.theta, scaling=config.scaling, layout="bshd", out_q=out_q,
        out_k=out_k, inverse=inverse,
    )  # fmt: skip


def _turned_forward(inputs: Tensors, options: Any) -> tuple[Tensors, Tensors]:
    x, positions = inputs[0], inputs[-1]
    return _turned(x, positions, options), (x, options[0], positions)


def _turned_backward(saved: Tensors, gradients: Tensors, needed: Tensors, options: Any) -> Tensors:
    (x, weight, positions), config = saved, options[2]
    dz = x.new_empty(*x.shape[:-1], weight.shape[0])
    for own, given in zip(_split(dz, config), gradients, strict=True):
        if given is None:
            own.zero_()
    q, k, v = _split(dz, config)
    dq, dk, dv = (
        own if given is None else given
        for own, given in zip((q, k, v), gradients, strict=True)
    )  # fmt: skip
    _turn(lined(dq), lined(dk), positions, config, q, k, True)
    if dv is not v:
        v.copy_(dv)
    dx, dweight, dbias = of_product(dz, x, weight, needed[0], any(needed[1:4]), any(needed[4:7]))
    sizes = [part * config.head_dim for part in (config.heads_q, *[config.heads_kv] * 2)]
    parts = [(None,) * 3 if one is None else one.split(sizes) for one in (dweight, dbias)]
    return (dx, *parts[0], *parts[1], None)


_TURNED = Differentiable("QkvRope", _turned_forward, _turned_backward)

# ------------------------------------------------------------------ layers


def _layer(module: Any, hidden_states: Any, *args: Any, **named: Any) -> Any:
    """A pre-norm layer: a norm adds what came before it to the residual stream, or hands it on."""
    first, attend, second, mlp = (module._modules[name] for name in _LAYER_PARTS)
    if args or not (_is_norm(first, hidden_states) and _is_norm(second, hidden_states)):
        return type(module).forward(module, hidden_states, *args, **named)
    normed, stream = norm_and_stream(
        hidden_states, first.weight, None, first.variance_epsilon, "rms_norm"
    )  # fmt: skip
    attended, _ = attend(hidden_states=normed, **named)
    normed, stream = rms_norm(attended, second.weight, second.variance_epsilon, stream)
    activation = ACTIVATIONS.get(type(getattr(mlp, "act_fn", None)).__name__)
    if is_ours(mlp.__dict__.get("forward")) and not hooked(mlp) and activation is not None:
        made = gated_mlp(mlp, activation, normed, stream)
        if made is not None:
            return made
    return stream + mlp(normed)


def _is_norm(module: Any, x: Any) -> bool:
    """Whether `patch` replaced it, and all of the residual stream has one dtype."""
    if torch_ops.torch_seen().is_autocast_enabled(x.device.type):
        return False
    found = module.__dict__.get("forward")
    return is_ours(found) and not hooked(module)


def _gpt2_layer(
    module: Any, hidden_states: Any, past_key_values: Any = None, attention_mask: Any = None,
    encoder_hidden_states: Any = None, **named: Any,
) -> Any:  # fmt: skip
    """The same of GPT-2."""
    first, second, mlp = module.ln_1, module.ln_2, module.mlp
    plain = _is_norm(first, hidden_states) and _is_norm(second, hidden_states)
    if encoder_hidden_states is not None or not plain:
        return type(module).forward(
            module, hidden_states, past_key_values, attention_mask, encoder_hidden_states, **named
        )
    normed, stream = norm_and_stream(
        hidden_states, first.weight, first.bias, first.eps, "layer_norm"
    )  # fmt: skip
    attended, _ = module.attn(
        normed, past_key_values=past_key_values, attention_mask=attention_mask, **named
    )
    normed, stream = layer_norm(attended, second.weight, second.bias, second.eps, stream)
    drops = module.training and mlp.dropout.p > 0
    if is_ours(mlp.__dict__.get("forward")) and not hooked(mlp) and not drops:
        return mlp(normed, residual=stream)
    return stream + mlp(normed)
