"""fkjit.models.routers: which of transformers' routers a kernel replaces, and what it makes."""

from __future__ import annotations

from importlib import import_module

import pytest

from fkjit.jit.build import quiet
from fkjit.models import routers

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers, fkjit[models]")

SIZES = {"hidden_size": 32, "num_experts_per_tok": 3, "num_local_experts": 8}
GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
MIXTRAL, QWEN3, DEEPSEEK = "Mixtral", "Qwen3Moe", "DeepseekV3"
PLACES = {
    MIXTRAL: "mixtral.modeling_mixtral.MixtralTopKRouter",
    QWEN3: "qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter",
    DEEPSEEK: "deepseek_v3.modeling_deepseek_v3.DeepseekV3TopkRouter",
}


def kind_of(name):
    """The class, which takes seconds to import: only workers that run these tests do."""
    module, _, kind = PLACES[name].rpartition(".")
    return getattr(import_module(f"transformers.models.{module}"), kind)


def router(kind, config, dtype="float32"):
    """With random weights, and a bias where it has one."""
    torch.manual_seed(2)
    made = kind(config)
    with torch.no_grad():
        made.weight.copy_(torch.randn(made.weight.shape))
        for buffer in made.buffers():
            buffer.copy_(0.3 * torch.randn(buffer.shape))
    return made.to(getattr(torch, dtype))


@pytest.mark.parametrize(("name", "config", "dtype"), [
    pytest.param(MIXTRAL, {}, "float32", id="renormalised"),
    pytest.param(
        QWEN3, {"num_experts": 8, "norm_topk_prob": False}, "float32", id="softmax"
    ),
    pytest.param(
        QWEN3, {"num_experts": 8, "norm_topk_prob": True}, "bfloat16", id="bf16"
    ),
    pytest.param(DEEPSEEK, GROUPED, "float32", id="grouped"),
    pytest.param(DEEPSEEK, GROUPED, "bfloat16", id="fp32 logits"),
])  # fmt: skip
def test_choices_weights_dtypes_and_gradients_are_the_module_s(name, config, dtype):
    made = getattr(transformers, f"{name}Config")(**SIZES | config)
    module = router(kind_of(name), made, dtype)
    x, slopes, found = torch.randn(2, 9, 32, dtype=module.weight.dtype), torch.randn(18, 8), []
    with quiet():
        replaced = routers.replacement(module)
        assert replaced is not None and replaced[0] == "router"
        for forward in (module, replaced[1]):
            logits, weights, ids = forward(x)
            dense = torch.zeros(18, 8).scatter(1, ids, weights.float())
            (dense * slopes).sum().backward()
            found.append((logits, dense.detach(), module.weight.grad, weights.dtype, ids.dtype))
            module.weight.grad = None
    (logits, wanted, slope, *dtypes), (ours, made, given, *own) = found
    assert torch.equal(ours, logits) and own == dtypes
    torch.testing.assert_close(made, wanted, rtol=2.0**-7, atol=1e-6)
    torch.testing.assert_close(given, slope, rtol=3e-2, atol=1e-5 if dtype == "float32" else 0.05)


def test_equal_logits_of_16_bits_hide_no_rule():
    config = transformers.OlmoeConfig(**SIZES | {"num_experts": 64, "num_experts_per_tok": 8})
    from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter

    module = router(OlmoeTopKRouter, config, "bfloat16")
    with torch.no_grad():
        module.weight.mul_(0.02)
        logits = module(torch.randn(64, 32, dtype=torch.bfloat16))[0]
    assert any(len(row.unique()) < 64 for row in logits)
    with quiet():
        assert routers.replacement(module) is not None


def test_a_router_with_another_rule_or_other_results_is_left():
    mixtral = kind_of(MIXTRAL)

    class OtherTopKRouter(mixtral):
        """Weights that no rule makes."""

        def forward(self, hidden_states):
            logits, weights, ids = super().forward(hidden_states)
            return logits, weights.sqrt(), ids

    class SoloTopKRouter(mixtral):
        """One result in place of three."""

        def forward(self, hidden_states):
            return super().forward(hidden_states)[0]

    config = transformers.MixtralConfig(**SIZES)
    many = transformers.MixtralConfig(**SIZES | {"num_local_experts": 2048})
    with quiet():
        assert routers.replacement(router(OtherTopKRouter, config)) is None
        assert routers.replacement(router(SoloTopKRouter, config)) is None
        assert routers.replacement(router(mixtral, many)) is None  # too many experts
        assert routers.replacement(torch.nn.Linear(4, 4)) is None
