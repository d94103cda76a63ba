"""A mixture of experts in one call, with gradients, against the sum written out."""

import torch

import fkjit

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 24, 64, 64, 4, 2
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
scale = HIDDEN**-0.5
x = torch.randn(TOKENS, HIDDEN, device=device).half().requires_grad_()
router = torch.randn(EXPERTS, HIDDEN, device=device).half()
up = (scale * torch.randn(EXPERTS, 2 * INNER, HIDDEN, device=device)).half()
down = (scale * torch.randn(EXPERTS, HIDDEN, INNER, device=device)).half()

logits = (x.detach() @ router.T).float()
y = fkjit.moe_layer(x, logits, up, down, TOP_K, renormalize=True)

weights, chosen = logits.softmax(-1).topk(TOP_K)
weights = weights / weights.sum(-1, keepdim=True)
expected = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64, device=device)
for token in range(TOKENS):
    for weight, expert in zip(weights[token], chosen[token], strict=True):
        gate, value = (up[expert].double() @ x[token].detach().double()).chunk(2)
        inner = torch.nn.functional.silu(gate) * value
        expected[token] += weight * (down[expert].double() @ inner)
torch.testing.assert_close(y.double(), expected, atol=1e-2, rtol=1e-2)

y.float().square().mean().backward()
print("output", tuple(y.shape), "gradient", tuple(x.grad.shape), "finite:",
      bool(x.grad.isfinite().all()))  # fmt: skip
