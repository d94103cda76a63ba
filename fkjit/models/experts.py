"""fkjit as one of transformers' experts: of Mixtral, Qwen3-MoE, OLMoE and others that have all
experts' weights in one array."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from fkjit.errors import ParameterError
from fkjit.models.modules import ACTIVATIONS, Forward, floating
from fkjit.ops.grouped.call import grouped_linear
from fkjit.ops.grouped.kernels import LEAST_BLOCK
from fkjit.ops.moe.combine import moe_combine
from fkjit.ops.moe.permute import moe_permute
from fkjit.ops.moe.regroup import moe_regroup

NAME = "fkjit"
_CALL = "register_experts"


def register_experts() -> None:
    """Put "fkjit" among transformers' implementations of experts (transformers 5).

        fkjit.models.register_experts()
        model = AutoModelForCausalLM.from_config(config, experts_implementation="fkjit")

    The router stays the model's. Rows go to their experts, through grouped products with the
    activation between them, and back, weighted: `fkjit.moe_layer`'s kernels, with gradients.
    Experts on other devices (expert parallelism's sentinel) are left out.

    Raises ParameterError where transformers is missing or has no such registry.
    """
    try:
        registry = import_module("transformers.integrations.moe").ExpertsInterface
    except (ImportError, AttributeError):
        raise ParameterError(
            f"{_CALL}: transformers has no registry of experts; allowed: transformers 5 "
            "(pip install 'fkjit[models]')"
        ) from None
    registry.register(NAME, experts_forward)


def experts_forward(module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """[tokens, H] of hidden_states [tokens, H] and the router's choices [tokens, top_k]."""
    groups = moe_regroup(top_k_index.int().contiguous(), module.num_experts, LEAST_BLOCK)
    rows = moe_permute(hidden_states.contiguous(), groups)
    weight, bias = _parameters(module, "gate_up_proj" if module.has_gate else "up_proj")
    layout = "kn" if module.is_transposed else "nk"
    fused = _activation(module)
    hidden = grouped_linear(
        rows, weight, groups, bias, weight_layout=layout, activation=fused,
        gate=fused is not None and module.has_gate,
    )  # fmt: skip
    if fused is None:
        hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    weight, bias = _parameters(module, "down_proj")
    y = grouped_linear(hidden.contiguous(), weight, groups, bias, weight_layout=layout)
    return moe_combine(y, groups, top_k_weights.float().contiguous())


def replacement(module: Any) -> tuple[str, Forward] | None:
    """("experts", forward) of a module that takes its forward from transformers' registry, with
    weights of one floating dtype; None of any other."""
    if not all(hasattr(module, name) for name in _DECORATED):
        return None
    found = (*_parameters(module, "gate_up_proj" if module.has_gate else "up_proj"),
             *_parameters(module, "down_proj"))  # fmt: skip
    if not floating(*found) or {x.dim() for x in found if x is not None} - {2, 3}:
        return None
    return "experts", partial(experts_forward, module)


# What transformers' `use_experts_implementation` gives a class of experts and its objects.
_DECORATED = (
    "_apply_gate", "has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts"
)  # fmt: skip


def _parameters(module: Any, name: str) -> tuple[Any, Any]:
    return getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None


def _activation(module: Any) -> str | None:
    """What the first product's epilogue does; None where the module's own code has to."""
    plain = import_module("transformers.integrations.moe")._default_apply_gate
    own = module.has_gate and (
        not module.is_concatenated or type(module)._apply_gate is not plain
    )  # fmt: skip
    return None if own else ACTIVATIONS.get(type(module.act_fn).__name__)
