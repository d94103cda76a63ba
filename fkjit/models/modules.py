"""Forwards of single modules by fkjit's kernels, each known by what the module computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fkjit.models.gated import gated_mlp
from fkjit.ops.gemm.call import linear
from fkjit.ops.norm.call import layer_norm, rms_norm
from fkjit.ops.op import torch_ops

# A partial of the module, never a closure: a deep copy of the model then has its own weights.
Forward = Callable[..., Any]

# transformers' activation modules, by class -> `fkjit.linear`'s activation
ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
    "ReLU": "relu",
}


def replacement(module: Any) -> tuple[str, Forward] | None:
    """(kind, forward) of a module that a kernel of ours computes; None of any other."""
    for find in (_linear, _layer_norm, _rms_norm, _gated_mlp, _gpt2_mlp):
        found = find(module)
        if found is not None:
            return found
    return None


def is_ours(forward: Any) -> bool:
    """Whether a module's forward is a replacement of this package."""
    made = getattr(forward, "func", None)
    return getattr(made, "__module__", "").startswith("fkjit.")


def floating(*arrays: Any) -> bool:
    """Whether arrays, without those that are None, have one dtype that kernels take."""
    torch = torch_ops.torch_seen()
    dtypes = {array.dtype for array in arrays if array is not None}
    return len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16, torch.float32}


# ------------------------------------------------------------------ products


def _linear(module: Any) -> tuple[str, Forward] | None:
    layout = _layout(module)
    if layout is None or not floating(module.weight, module.bias):
        return None
    return "linear", partial(_product, module, layout)


def _layout(module: Any) -> str | None:
    """Of the weight of an nn.Linear or of GPT-2's Conv1D, which keeps it transposed."""
    if type(module) is torch_ops.torch_seen().nn.Linear:
        return "nk"
    kind = type(module)
    conv1d = kind.__module__ == "transformers.pytorch_utils" and kind.__name__ == "Conv1D"
    return "kn" if conv1d else None


def _product(
    module: Any, layout: Any, x: Any, activation: str | None = None, residual: Any = None
) -> Any:
    weight = module.weight
    if layout == "kn" and weight.stride(0) == 1:  # as `joined` leaves it
        weight, layout = weight.t(), "nk"
    return linear(
        x, weight, module.bias, activation=activation, residual=residual, weight_layout=layout
    )


def _gated_mlp(module: Any) -> tuple[str, Forward] | None:
    """down(activation(gate(x)) * up(x)), as Llama, Qwen, Mistral and Gemma have it."""
    parts = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
    activation = ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)
    if {name for name, _ in module.named_children()} != {
        "gate_proj", "up_proj", "down_proj", "act_fn"
    } or activation is None:  # fmt: skip
        return None
    if any(part is None or _layout(part) != "nk" or part.bias is not None for part in parts):
        return None
    return "gated MLP", partial(_gated, module, activation)


def _gated(module: Any, activation: str, x: Any) -> Any:
    """Gate and up in one product where their weights are in one array; else the activation in the
    gate's product."""
    made = gated_mlp(module, activation, x)
    if made is not None:
        return made
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    if any(_layout(part) is None for part in (gate, up, down)):
        return type(module).forward(module, x)  # others came in their place
    return _product(down, "nk", _product(gate, "nk", x, activation) * _product(up, "nk", x))


def _gpt2_mlp(module: Any) -> tuple[str, Forward] | None:
    activation = ACTIVATIONS.get(type(getattr(module, "act", None)).__name__)
    if {name for name, _ in module.named_children()} != {
        "c_fc", "c_proj", "act", "dropout"
    } or activation is None:  # fmt: skip
        return None
    if None in (_layout(module.c_fc), _layout(module.c_proj)):
        return None
    return "MLP", partial(_plain_mlp, module, activation)


def _plain_mlp(module: Any, activation: str, x: Any, residual: Any = None) -> Any:
    """residual: added by the second product; for a module that drops nothing."""
    first, last = module.c_fc, module.c_proj
    inner = _product(first, _layout(first), x, activation)
    made = _product(last, _layout(last), inner, residual=residual)
    return module.dropout(made) if residual is None else made


# ------------------------------------------------------------------ norms


def _layer_norm(module: Any) -> tuple[str, Forward] | None:
    if type(module) is not torch_ops.torch_seen().nn.LayerNorm or len(module.normalized_shape) > 1:
        return None
    if module.weight is not None and not floating(module.weight, module.bias):
        return None
    return "layer_norm", partial(_layer_normalized, module)


def _layer_normalized(module: Any, x: Any) -> Any:
    return layer_norm(x, module.weight, module.bias, module.eps)


def _rms_norm(module: Any) -> tuple[str, Forward] | None:
    """By class name and numbers: of the many classes of this name some add 1 to the weight, some
    gate or scale besides, so what the module makes of a row decides."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or weight is None or not isinstance(eps, float):
        return None
    if not floating(weight) or weight.dim() != 1 or len(list(module.parameters())) != 1:
        return None
    offset = _weight_offset(module, weight, eps)
    return None if offset is None else ("rms_norm", partial(_rms_normalized, module, eps, offset))


def _rms_normalized(module: Any, eps: float, offset: float, x: Any) -> Any:
    return rms_norm(x, module.weight, eps, weight_offset=offset)


def _weight_offset(module: Any, weight: Any, eps: float) -> float | None:
    """0 or 1, whichever makes `module`'s numbers of one row; None where neither does."""
    torch = torch_ops.torch_seen()
    with torch.no_grad():
        row = torch.linspace(-1.0, 2.0, weight.numel(), device=weight.device).to(weight.dtype)
        try:
            made = module(row[None])[0].float()
        except (TypeError, RuntimeError, ValueError, IndexError, AttributeError):
            return None  # it needs other arguments
        scaled = row.float() * torch.rsqrt(row.float().square().mean() + eps)
        for offset in (0.0, 1.0):
            wanted = scaled * (weight.float() + offset)
            if torch.allclose(made, wanted, rtol=2e-2, atol=1e-3):
                return offset
    return None
