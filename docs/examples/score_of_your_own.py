"""Attention whose scores a CUDA expression changes, and which variants that compiles."""

import torch

import fkjit

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 96, 64, device=device).half() for _ in range(3))

# score, q_idx and k_idx are names that the expression may use: here a bias by distance.
o = fkjit.attention(q, k, v, score_mod="score - 0.05f * fabsf(q_idx - k_idx)")

place = torch.arange(96, device=device)
bias = -0.05 * (place[:, None] - place).abs()
scores = q.double() @ k.double().transpose(-1, -2) * 64**-0.5 + bias
expected = scores.softmax(-1) @ v.double()
torch.testing.assert_close(o.double(), expected, atol=4e-3, rtol=0)

print("largest error:", f"{(o.double() - expected).abs().max():.1e}")
print("head dimensions with a kernel:",
      sorted({one["head_dim"] for one in fkjit.variants("attention.flash", "sm_80")}))  # fmt: skip
