"""`fkjit.models.register_experts`: models with experts beside transformers' own, on a CPU."""

from __future__ import annotations

import pytest

import fkjit
from fkjit.jit.build import quiet
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers, fkjit[models]")

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "Mixtral": {"num_local_experts": 3}, "Qwen3Moe": {"num_experts": 4},
    "Olmoe": {"num_experts": 5, "num_key_value_heads": 2},
    "DeepseekV3": {
        "head_dim": 8, "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
        "num_local_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 0,
    },
}  # fmt: skip


def built(family, experts):
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family])
    config._attn_implementation = "eager"
    config._experts_implementation = experts
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


@one_in(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family):
    fkjit.models.register_experts()
    tokens = torch.tensor([[5, 9, 2, 7, 11, 3, 3]])
    found = []
    for experts in ("eager", "fkjit", "patched"):
        model = built(family, "eager" if experts == "patched" else experts)
        with quiet():
            if experts == "patched":
                kinds = {kind for _, kind in fkjit.models.patch(model).replaced}
                assert {"experts", "router"} <= kinds
            logits = model(tokens).logits
            logits.square().mean().backward()
        parts = {n: p.grad for n, p in model.named_parameters() if ".mlp." in n}
        found.append((logits.detach(), parts))
    (theirs, wanted), *ours = found
    assert any("experts" in name for name in wanted) and any("gate." in name for name in wanted)
    for logits, given in ours:
        assert (logits - theirs).abs().max() <= 1e-4 * theirs.abs().max()
        assert given.keys() == wanted.keys()
        for name, grad in wanted.items():
            assert (given[name] - grad).abs().max() <= 1e-4 * grad.abs().max().clamp(min=1e-6), name
