"""Attention on codes on a GPU: codes as on a CPU to the bit, against float64, in CUDA graphs."""

from __future__ import annotations

import pytest

import fkjit
from fkjit.jit.build import quiet
from tests.attention.test_quantized_attention import ERRORS, SCHEMES, error, reference

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


def arrays(batch, heads, heads_kv, rows, keys, dim, dtype=torch.bfloat16, offset=1.0):
    normal = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    return (normal(batch, heads, rows, dim).to(dtype),
            (normal(batch, heads_kv, keys, dim) + offset * normal(dim)).to(dtype),
            normal(batch, heads_kv, keys, dim).to(dtype))  # fmt: skip


def needs(scheme, dim=64):
    capability = torch.cuda.get_device_capability()
    if capability < ((8, 0) if scheme == "int8" else (8, 9)):
        pytest.skip("needs tensor cores for these codes")
    if scheme.startswith("fp8") and dim == 256 and (9, 0) < capability < (12, 0):
        pytest.skip("there is no kernel: e4m3 of 256 columns as fp16")


@pytest.mark.parametrize("scales", ["block", "block128", "head", "tensor"])
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_are_those_of_the_cpu(scheme, dim, rotate, scales):
    q, k, v = arrays(2, 4, 2, 150, 333, dim)
    said = {"rotate": rotate, "scales": scales, "smooth_k": False}
    here = fkjit.quantize_attention(q, k, v, scheme, **said)
    there = fkjit.quantize_attention(q.cpu(), k.cpu(), v.cpu(), scheme, **said)
    for name, a, b in zip(here._fields[:7], here[:7], there[:7], strict=True):
        if a is not None:
            a, b = (x.view(torch.uint8) if x.element_size() == 1 else x for x in (a.cpu(), b))
            assert torch.equal(a, b), name


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("shape", [
    (1, 8, 8, 1024, 1024, 128), (2, 8, 2, 517, 1043, 64), (1, 4, 1, 130, 2048, 256),
    (3, 6, 2, 1, 77, 128), (1, 16, 2, 2000, 2000, 64),
])  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_against_float64(scheme, causal, shape, smooth):
    needs(scheme, shape[-1])
    q, k, v = arrays(*shape, offset=1.0 if smooth else 0.0)
    found, lse = fkjit.quantized_attention(q, k, v, scheme=scheme, smooth_k=smooth, causal=causal,
                                           return_lse=True)  # fmt: skip
    wanted, wanted_lse = (x.cuda() for x in reference(q.cpu(), k.cpu(), v.cpu(), causal=causal))
    assert error(found, wanted) < ERRORS[scheme]
    assert (lse.double() - wanted_lse).abs().max() < 0.3
    again = fkjit.quantized_attention(q, k, v, scheme=scheme, smooth_k=smooth, causal=causal)
    assert torch.equal(found, again)


@pytest.mark.parametrize("promote", [0, 32, 64])
def test_each_interval(promote):
    needs("int8_fp8")
    q, k, v = arrays(1, 2, 2, 64, 16_384, 64)
    found = fkjit.quantized_attention(q, k, v, scheme="int8_fp8", promote=promote)
    assert error(found, reference(q.cpu(), k.cpu(), v.cpu())[0].cuda()) < 0.08


@pytest.mark.parametrize("window", [(100, 0), (64, 64), (None, 5)])
def test_windows(window):
    needs("int8")
    q, k, v = arrays(1, 4, 2, 700, 900, 128)
    found = fkjit.quantized_attention(q, k, v, window=window)
    wanted = reference(q.cpu(), k.cpu(), v.cpu(), window=window)[0].cuda()
    assert error(found, wanted) < ERRORS["int8"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_a_cuda_graph(scheme):
    needs(scheme)
    q, k, v = arrays(1, 4, 2, 256, 640, 128)
    wanted = fkjit.quantized_attention(q, k, v, scheme=scheme, scales="head")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fkjit.quantized_attention(q, k, v, scheme=scheme, scales="head")
    found.zero_()
    graph.replay()
    assert torch.equal(found, wanted)


# ------------------------------------------------------------------ Hopper's kernel


def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel of Hopper's")


VARIANTS = [
    ("fp8", 128, (192, 96), 0), ("fp8", 128, (128, 128), 512), ("fp8", 128, (128, 192), 1024),
    ("fp8", 128, (128, 128), 256), ("fp8", 64, (192, 64), 0), ("fp8", 64, (192, 128), 512),
    ("fp8", 256, (128, 64), 0), ("fp8", 256, (128, 64), 256), ("int8_fp8", 128, (128, 192), 512),
    ("int8_fp8", 64, (192, 128), 0), ("int8_fp8", 256, (128, 64), 512), ("int8", 64, (192, 64), 0),
    ("int8", 128, (128, 128), 0), ("int8", 256, (128, 64), 0), ("fp8_e5m2", 128, (192, 96), 0),
    ("fp8_e5m2", 64, (192, 128), 512),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "dim", "block", "promote"), VARIANTS)
@pytest.mark.parametrize("said", [{}, {"causal": True}, {"window": (300, 40)}])
def test_every_tile_on_hopper(scheme, dim, block, promote, said):
    hopper()
    q, k, v = arrays(2, 8, 2, 1203, 1611, dim)
    found, lse = fkjit.quantized_attention(q, k, v, scheme=scheme, block=block, promote=promote,
                                           return_lse=True, **said)  # fmt: skip
    wanted, wanted_lse = (x.cuda() for x in reference(q.cpu(), k.cpu(), v.cpu(), **said))
    assert error(found, wanted) < ERRORS[scheme]
    assert (lse.double() - wanted_lse).abs().max() < 0.3
    again = fkjit.quantized_attention(q, k, v, scheme=scheme, block=block, promote=promote, **said)
    assert torch.equal(found, again)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("jump", [1.0, 400.0])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_maxima_that_grow_late(scheme, jump, dim):
    """Keys are taken from the last to the first: with these each tile has greater scores than the
    one before, at last beyond fp32's range of powers of two."""
    hopper()
    q, k, v = arrays(1, 4, 2, 500, 2000, dim, offset=0.0)
    k = (k * torch.linspace(3 * jump, 0, 2000, device="cuda")[:, None]).bfloat16()
    codes = fkjit.quantize_attention(q, k, v, scheme, smooth_k=False)
    found, lse = fkjit.quantized_attention(codes, return_lse=True)
    number = codes.k_scales.repeat_interleave(64, 2)[:, :, :2000, None]
    exact = codes.q.double() * codes.q_scales[..., None], codes.k.double() * number, v
    wanted, wanted_lse = (x.cuda() for x in reference(*(x.cpu() for x in exact)))
    assert error(found, wanted) < 0.045
    assert ((lse.double() - wanted_lse).abs() / (1 + wanted_lse.abs())).max() < 1e-3


def test_promotion_keeps_what_the_tensor_cores_lose():
    """32,768 values that add up: never promoted, a third of the output would be missing."""
    hopper()
    q, k, v = arrays(1, 2, 2, 200, 32_768, 128, offset=0.0)
    codes = fkjit.quantize_attention(q, k, v + 1, "fp8")
    wanted = fkjit.attention(q, k, v + 1).double()
    errors = [error(fkjit.quantized_attention(codes, promote=n), wanted) for n in (0, 1024, 256)]
    assert errors[0] > 0.1 and errors[1] < 0.03 and errors[2] < 0.03
    found = fkjit.quantized_attention(codes)
    assert error(found, wanted) < 0.03


# ------------------------------------------------------------------ packed sequences


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_sequences_are_as_they_are_alone(scheme, dim):
    needs(scheme, dim)
    rows, keys = [300, 0, 777, 2048], [333, 64, 1000, 2048]
    q, k, v = (x[0].transpose(0, 1).contiguous()
               for x in arrays(1, 8, 2, sum(rows), sum(keys), dim))  # fmt: skip
    ends = [torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32, device="cuda")
            for x in (rows, keys)]  # fmt: skip
    said = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "max_seqlen_q": 2048,
            "max_seqlen_k": 2048}  # fmt: skip
    how = {"scheme": scheme, "causal": True, "return_lse": True}
    o, lse = fkjit.quantized_attention(q, k, v, **said, **how)
    wanted, wanted_lse = fkjit.attention_varlen(
        q, k, v, *ends, 2048, 2048, causal=True, return_lse=True
    )
    assert error(o, wanted.double()) < ERRORS[scheme] and (lse - wanted_lse).abs().max() < 0.3
    again = fkjit.quantized_attention(q, k, v, **said, **how)
    assert torch.equal(o, again[0]) and torch.equal(lse, again[1])
    first_q, first_k = sum(rows[:3]), sum(keys[:3])
    alone = (x[None, first:].transpose(1, 2).contiguous()
             for x, first in ((q, first_q), (k, first_k), (v, first_k)))  # fmt: skip
    dense, _ = fkjit.quantized_attention(*alone, **how)
    assert error(o[first_q:].transpose(0, 1), dense[0].double()) < 0.01


def test_packed_in_a_cuda_graph_with_other_lengths():
    needs("int8")
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in arrays(1, 4, 2, 600, 600, 64))
    ends = torch.tensor([0, 200, 600], dtype=torch.int32, device="cuda")
    said = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 600, "max_seqlen_k": 600}
    for _ in range(2):
        fkjit.quantized_attention(q, k, v, **said)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fkjit.quantized_attention(q, k, v, **said)
    ends.copy_(torch.tensor([0, 500, 600], dtype=torch.int32))
    graph.replay()
    assert torch.equal(found, fkjit.quantized_attention(q, k, v, **said))
