"""Attention in all its forms on a CUDA GPU: error beside PyTorch's own, graphs, streams, plans."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.errors import CaptureError, DeviceError
from tests.attention.feature_kit import FEATURES, draw, exact

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")

SHAPES = (  # batch, heads, lengths, dims, dtype
    (2, (4, 2), (113, 203), (32, 32), "fp16"),
    (2, (4, 4), (108, 256), (40, 40), "bf16"),
    (1, (3, 1), (1023, 1024), (59, 59), "bf16"),
    (2, (6, 2), (1, 339), (64, 64), "bf16"),
    (2, (2, 2), (3, 1024), (96, 96), "fp16"),
    (1, (4, 1), (500, 700), (111, 64), "bf16"),
    (1, (4, 2), (1024, 1023), (128, 128), "bf16"),
    (2, (2, 1), (64, 2048), (128, 128), "fp16"),
    (1, (2, 2), (300, 515), (192, 128), "fp16"),
    (1, (2, 1), (257, 300), (256, 256), "bf16"),
    (1, (2, 1), (203, 113), (40, 24), "fp32"),
    (1, (2, 2), (256, 512), (128, 128), "fp32"),
)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def to_gpu(value):
    if isinstance(value, dict):
        return {name: to_gpu(item) for name, item in value.items()}
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(np.ascontiguousarray(value)).cuda()


def run(case, **more):
    q, k, v = (to_gpu(x) for x in case[:3])
    options = to_gpu(case.options)
    return fkjit.attention(q, k, v, **options, return_lse=True, **more)


def eager(case, dtype):
    """PyTorch's own on the same inputs: products in the inputs' dtype, the final scores rounded to
    it, an fp32 softmax."""
    q, k, v = (to_gpu(x) for x in case[:3])
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    raw = (q @ k.mT).double().cpu().numpy() * q.shape[-1] ** -0.5
    from tests.attention.feature_kit import final

    scores = torch.from_numpy(final(case, raw)).cuda().to(DTYPES[dtype])
    sinks = case.options.get("sinks")
    if sinks is not None:
        column = to_gpu(sinks).to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights.nan_to_num() @ v).double().cpu().numpy()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_at_most_twice_pytorchs(shape):
    for seed in range(3):
        case = draw(seed * 17 + shape[2][1], *shape)
        o, lse = run(case)
        expected, expected_lse = exact(case)
        ours = np.abs(o.double().cpu().numpy() - expected).max()
        theirs = np.abs(eager(case, shape[-1]) - expected).max()
        floor = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 2.0**-20}[shape[-1]]
        assert ours <= max(2 * theirs, floor * np.abs(expected).max()), (seed, ours, theirs)
        hidden = np.isneginf(expected_lse)
        found = lse.cpu().numpy()
        assert np.array_equal(np.isneginf(found), hidden)
        assert np.allclose(found[~hidden], expected_lse[~hidden], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_alone(feature, dtype):
    case = draw(len(feature) + 50, 2, (4, 2), (300, 517), (128, 128), dtype, {feature})
    o, _ = run(case)
    expected, _ = exact(case)
    bound = {"bf16": 2.0**-8, "fp32": 4e-6}[dtype] * max(1, np.abs(expected).max())
    assert np.abs(o.double().cpu().numpy() - expected).max() <= bound


def test_results_are_the_same_to_the_bit():
    case = draw(3, 2, (4, 2), (300, 500), (64, 64), "bf16", FEATURES)
    first, lse = run(case)
    for _ in range(100):
        again, other = run(case)
        assert torch.equal(again, first) and torch.equal(other, lse)


def varlen(lengths, seed=0, heads=(4, 2), dim=64):
    generator = torch.Generator("cuda").manual_seed(seed)
    totals = [sum(pair[i] for pair in lengths) for i in (0, 1)]
    rows = [
        torch.randn(total, h, dim, device="cuda", generator=generator).bfloat16()
        for total, h in ((totals[0], heads[0]), (totals[1], heads[1]), (totals[1], heads[1]))
    ]
    ends = [ends_of([pair[i] for pair in lengths]) for i in (0, 1)]
    return rows, ends


def ends_of(lengths):
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")


def check_varlen(rows, lengths, o, **options):
    starts = np.cumsum([(0, 0), *lengths], axis=0)
    for (q0, k0), (sq, sk) in zip(starts, lengths, strict=False):
        if not sq:
            continue
        own = [x[a : a + n].transpose(0, 1)[None] for x, a, n in zip(
            rows, (q0, k0, k0), (sq, sk, sk), strict=True)]  # fmt: skip
        alone = fkjit.attention(*own, window=(None, None), **options)
        found = o[q0 : q0 + sq].transpose(0, 1)[None]
        # Perhaps by another kernel or tile.
        assert torch.allclose(found.float(), alone.float(), rtol=0.02, atol=0.02), (sq, sk)


def test_packed_sequences_are_what_each_is_alone():
    lengths = [(500, 700), (0, 30), (1, 1), (64, 64), (1023, 1024), (30, 0), (3, 900)]
    rows, ends = varlen(lengths)
    o = fkjit.attention_varlen(*rows, *ends, 1023, 1024, causal=True, softcap=8.0)
    check_varlen(rows, lengths, o, causal=True, softcap=8.0)


def test_a_graph_follows_sequences_of_other_lengths():
    lengths = [(100, 300), (200, 100), (0, 0), (40, 40)]
    rows, ends = varlen(lengths)
    call = lambda: fkjit.attention_varlen(*rows, *ends, 256, 320, causal=True)  # noqa: E731
    fkjit.prepare("attention_varlen", *rows, *ends, 256, 320, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    for other in (lengths, [(10, 20), (90, 300), (200, 50), (40, 70)]):
        for end, i in zip(ends, (0, 1), strict=True):
            end.copy_(ends_of([pair[i] for pair in other]))
        graph.replay()
        torch.cuda.synchronize()
        check_varlen(rows, other, o, causal=True)


def test_a_first_call_while_capturing_names_prepare():
    q = torch.randn(1, 2, 64, 64, device="cuda").half()
    slopes = torch.rand(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match=r"fkjit.prepare\('attention'"), torch.cuda.graph(graph):
        fkjit.attention(q, q, q, alibi_slopes=slopes, softcap=3.25, sinks=slopes)


def alike(one, two):
    """By two kernels: within two units in the last place of fp16, and 2e-3 where terms cancel.

    Values near 4, of which one unit is 4e-3, come up in one of six draws of the test below.
    """
    return torch.allclose(one.float(), two.float(), rtol=2.0**-9, atol=2e-3)


def test_another_stream_and_arrays_that_change():
    q = torch.randn(1, 2, 300, 64, device="cuda").half()
    bias = torch.zeros(1, 1, 300, 300, device="cuda")
    plain = fkjit.attention(q, q, q, window=(None, None))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        unchanged = fkjit.attention(q, q, q, bias=bias)
        bias[..., 5] = float("-inf")
        hidden = fkjit.attention(q, q, q, bias=bias)
    stream.synchronize()
    assert alike(unchanged, plain) and not alike(hidden, plain)
    mask = torch.ones(1, 1, 1, 300, dtype=torch.bool, device="cuda")
    mask[..., 5] = False
    assert torch.equal(fkjit.attention(q, q, q, mask=mask), hidden)
    assert not torch.equal(hidden, unchanged)


def test_arrays_elsewhere_are_refused():
    q = torch.randn(1, 2, 64, 64, device="cuda").half()
    with pytest.raises(DeviceError, match="bias is on the CPU but q is on cuda:0"):
        fkjit.attention(q, q, q, bias=torch.zeros(1, 1, 64, 64))


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    case = draw(6, 1, (2, 1), (40, 60), (64, 64), "fp16", FEATURES)
    move = lambda x: cupy.asarray(x) if isinstance(x, np.ndarray) else x  # noqa: E731
    options = {n: move(x) for n, x in case.options.items() if n != "score_args"}
    if options.get("bias") is not None and options["bias"].dtype.name == "bfloat16":
        options["bias"] = options["bias"].astype("f4")
    args = {n: move(x) for n, x in case.options["score_args"].items()}
    for _ in range(2):
        o = fkjit.attention(*(move(x) for x in case[:3]), **options, score_args=args)
    assert np.abs(cupy.asnumpy(o).astype("f8") - exact(case)[0]).max() < 4e-3
