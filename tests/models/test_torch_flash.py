"""`fkjit.models.register_flash_attention`: PyTorch's own registry, dispatcher and autograd call
fkjit. Its functions are registered for CPU tensors here, where PyTorch has none of these names."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from fkjit.errors import ParameterError
from fkjit.jit.build import quiet

torch = pytest.importorskip("torch", reason="needs torch")
from fkjit.models import register_flash_attention, torch_flash  # noqa: E402

ENDS = [0, 4, 9]


@pytest.fixture(autouse=True)
def on_the_cpu():
    handle = torch_flash.activated("CPU")
    with quiet():
        yield
    handle.remove()


def inputs(*heads, rows=5, packed=False):
    made = torch.Generator().manual_seed(1)
    shapes = [(9, h, 16) if packed else (2, h, rows, 16) for h in heads]
    return [torch.randn(s, generator=made).half().requires_grad_() for s in shapes]


def exact(q, k, v, **options):
    return torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), enable_gqa=True, **options
    )


def assert_close(found, wanted):
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), two.double(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_attention_and_its_gradients(causal, by_rows):
    q, k, v = inputs(4, 2, 2)
    if by_rows:
        q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
                   for x in (q, k, v))  # fmt: skip
    o, lse, *_, rows, keys, _, _, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, scale=0.3
    )
    wanted, gradient = exact(q, k, v, is_causal=causal, scale=0.3), torch.randn_like(o)
    assert (rows, keys, lse.dtype, o.stride()) == (5, 5, torch.float32, q.stride())
    assert_close([o], [wanted])
    assert_close(torch.autograd.grad(o, (q, k, v), gradient),
                 torch.autograd.grad(wanted, (q, k, v), gradient.double()))  # fmt: skip


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0)])
def test_packed_sequences_through_pytorchs_varlen(window):
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = inputs(2, 2, 2, packed=True)
    ends = torch.tensor(ENDS, dtype=torch.int32)
    o = varlen_attn(q, k, v, ends, ends, 5, 5, window_size=window)
    wanted = []
    for begin, end in itertools.pairwise(ENDS):
        seen = torch.ones(end - begin, end - begin, dtype=torch.bool)
        seen = seen.tril() if window[1] == 0 else seen
        seen = seen.triu(-window[0]) if window[0] >= 0 else seen
        rows = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
        wanted.append(exact(*rows, attn_mask=seen).transpose(0, 1))
    gradient = torch.randn_like(o)
    assert_close([o], [torch.cat(wanted)])
    assert_close(torch.autograd.grad(o, (q, k, v), gradient),
                 torch.autograd.grad(torch.cat(wanted), (q, k, v), gradient.double()))  # fmt: skip


def test_dropout_and_pages_are_refused():
    q, k, v = (x.detach() for x in inputs(2, 2, 2))
    with pytest.raises(ParameterError, match=r"dropout_p=0\.5: not supported; allowed: 0\.0"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.5, False)
    with pytest.raises(ParameterError, match=r"seqused_k=.*not supported; allowed: None"):
        torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, 5, 5, 0.0, False, False, seqused_k=torch.tensor([5, 5])
        )


def test_the_registry_activates_and_restores_it():
    """In a process of its own: PyTorch has one registry, and the kernels are for GPUs there."""
    code = (
        "import torch, fkjit\n"
        "from torch.nn import attention as a\n"
        "fkjit.models.register_flash_attention()\n"
        "a.activate_flash_attention_impl('fkjit')\n"
        "print('fkjit' in a.list_flash_attention_impls(), a.current_flash_attention_impl())\n"
        "a.restore_flash_attention_impl()\n"
        "print(a.current_flash_attention_impl())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "fkjit", "None"], done.stderr


def test_an_older_pytorch_is_told(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(ParameterError, match=r"has no registry.*allowed: 2\.11 and newer"):
        register_flash_attention()
