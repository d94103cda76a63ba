"""Whole models on fkjit's kernels.

    import fkjit
    report = fkjit.models.patch(model)     # a Hugging Face model, in place
    print(report)                          # what was replaced, what was left
    fkjit.models.unpatch(model)

    decoder = fkjit.models.Decoder(model.config, model.state_dict())   # or a loop of fkjit's own
    decoder.generate(prompts, max_new_tokens=64)

docs/MODELS.md has what each replacement needs, and what a Decoder does.
"""

from __future__ import annotations

from fkjit.models.config import ModelConfig, named_configs
from fkjit.models.decoder import Decoder, Token
from fkjit.models.experts import register_experts
from fkjit.models.loss import linear_cross_entropy
from fkjit.models.patching import Report, patch, unpatch
from fkjit.models.plan import StepPlan
from fkjit.models.sampling import Sampling
from fkjit.models.torch_attention import torch_attention
from fkjit.models.torch_flash import register_flash_attention
from fkjit.models.training.captured_step import CapturedStep
from fkjit.models.training.optimizer import patch_optimizer
from fkjit.models.weights import random_weights

__all__ = [
    "CapturedStep",
    "Decoder",
    "ModelConfig",
    "Report",
    "Sampling",
    "StepPlan",
    "Token",
    "linear_cross_entropy",
    "named_configs",
    "patch",
    "patch_optimizer",
    "random_weights",
    "register_experts",
    "register_flash_attention",
    "torch_attention",
    "unpatch",
]
