"""fkjit.attention on a CUDA GPU: accuracy against PyTorch, streams, graphs, frameworks."""

from __future__ import annotations

import pytest

import fkjit
from fkjit.errors import CaptureError, DeviceError, ParameterError
from fkjit.runtime import device

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
cupy = pytest.importorskip("cupy", reason="needs CuPy")

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def normal(*shape, dtype="bf16", seed=0):
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator).to(DTYPES[dtype])


def hidden(sq, sk):
    return torch.ones(sq, sk, dtype=torch.bool, device="cuda").tril(sk - sq).logical_not()


def exact(q, k, v, causal, scale=None):
    """(o, lse) in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(hidden(q.shape[2], k.shape[2]), float("-inf"))
    return torch.softmax(scores, -1).nan_to_num() @ v, torch.logsumexp(scores, -1)


def pytorch(q, k, v, causal, scale=None):
    """PyTorch's own low-precision attention on the same inputs."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    mask = hidden(q.shape[2], k.shape[2]).logical_not() if causal else None
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return o.nan_to_num()


SHAPES = [  # B, Hq, Hkv, Sq, Sk, D, Dv, causal
    (2, 8, 2, 1000, 1000, 128, 128, True),
    (1, 4, 4, 2048, 2048, 64, 64, False),
    (2, 4, 1, 333, 777, 128, 128, True),
    (2, 4, 2, 777, 333, 64, 64, True),
    (1, 2, 2, 513, 600, 96, 96, False),
    (1, 3, 1, 500, 500, 192, 128, True),
    (1, 2, 2, 300, 1100, 256, 256, False),
    (1, 2, 1, 300, 300, 40, 72, True),
    (1, 2, 1, 129, 257, 77, 51, False),
    (3, 2, 2, 1, 4097, 128, 128, True),
    (1, 1, 1, 257, 1, 32, 32, False),
    (1, 2, 2, 100, 100, 1, 1, False),
]


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_at_most_twice_pytorchs(shape, dtype):
    b, hq, hkv, sq, sk, d, dv, causal = shape
    worst = {"ours": 0.0, "theirs": 0.0}
    squares = {"ours": 0.0, "theirs": 0.0}
    for seed in range(3):
        q, k, v = (
            normal(b, h, s, w, dtype=dtype, seed=seed * 100 + i)
            for i, (h, s, w) in enumerate(((hq, sq, d), (hkv, sk, d), (hkv, sk, dv)))
        )
        o, lse = fkjit.attention(q, k, v, causal=causal, return_lse=True)
        expected, expected_lse = exact(q, k, v, causal)
        for name, found in (("ours", o), ("theirs", pytorch(q, k, v, causal))):
            error = (found.double() - expected).abs()
            worst[name] = max(worst[name], error.max().item())
            squares[name] += error.square().sum().item()
        visible = torch.isfinite(expected_lse)
        assert torch.equal(torch.isneginf(lse), ~visible)
        assert torch.allclose(lse[visible].double(), expected_lse[visible], rtol=1e-5, atol=1e-5)
    floor = 2e-6 if dtype == "fp32" else 1e-6
    assert worst["ours"] <= 2 * worst["theirs"] + floor
    assert squares["ours"] ** 0.5 <= 2 * squares["theirs"] ** 0.5 + floor


@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_fp16_on_normal_inputs_is_within_a_thousandth(impl):
    q, k, v = (normal(2, 4, 1024, 64, dtype="fp16", seed=i) for i in range(3))
    o = fkjit.attention(q, k, v, impl=impl)
    assert (o.double() - exact(q, k, v, False)[0]).abs().max().item() < 1e-3


def test_any_strides_and_both_layouts():
    packed = normal(2, 600, 3, 4, 64)  # [B, S, 3, H, D], as a fused projection leaves it
    q, k, v = (packed[:, :, i] for i in range(3))
    o = fkjit.attention(q, k, v, causal=True, layout="bshd")
    assert o.shape == (2, 600, 4, 64) and o.is_contiguous()
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    again = fkjit.attention(*heads_first, causal=True)
    assert torch.equal(o.transpose(1, 2), again)
    expected = exact(*heads_first, True)[0]
    assert (again.double() - expected).abs().max().item() < 2e-2


def test_misaligned_views_are_right():
    q, k, v = (normal(1, 2, 200, 65, dtype="fp16", seed=i)[..., 1:] for i in range(3))
    o = fkjit.attention(q, k, v)
    assert (o.double() - exact(q, k, v, False)[0]).abs().max().item() < 1e-3


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1.0, 3.0])
def test_any_scale(scale):
    q, k, v = (normal(1, 2, 300, 64, dtype="fp16", seed=i) for i in range(3))
    o = fkjit.attention(q, k, v, causal=True, softmax_scale=scale)
    expected = exact(q, k, v, True, scale)[0]
    theirs = (pytorch(q, k, v, True, scale).double() - expected).abs().max().item()
    assert (o.double() - expected).abs().max().item() <= 2 * theirs + 1e-6


def test_large_scores_do_not_overflow():
    q, k, v = (normal(1, 2, 500, 64, dtype="fp16", seed=i) for i in range(3))
    q, k = q * 60, k * 60
    o = fkjit.attention(q, k, v)
    assert (o.double() - exact(q, k, v, False)[0]).abs().max().item() < 4e-3


def test_no_keys_and_empty_outputs():
    q = normal(2, 2, 5, 64)
    none = q[:, :, :0]
    o, lse = fkjit.attention(q, none, none, return_lse=True)
    assert not o.any() and torch.isneginf(lse).all()
    assert fkjit.attention(none, q, q).shape == (2, 2, 0, 64)
    assert fkjit.attention(q[:0], q[:0], q[:0]).shape == (0, 2, 5, 64)


def test_every_output_is_written_and_repeats_are_identical():
    q, k, v = (normal(2, 4, 777, 128, seed=i) for i in range(3))
    first = fkjit.attention(q, k, v, causal=True)
    poison = torch.full_like(first, float("nan"))  # the allocator may hand this memory out next
    del poison
    for _ in range(250):
        assert torch.equal(fkjit.attention(q, k, v, causal=True), first)


def test_a_scale_that_is_a_tensor_is_read_at_every_call():
    q, k, v = (normal(1, 2, 100, 64, seed=i) for i in range(3))
    scale = torch.tensor(0.1)
    for value in (0.1, 0.7, 0.3):
        scale.fill_(value)
        found = fkjit.attention(q, k, v, softmax_scale=scale)
        assert torch.equal(found, fkjit.attention(q, k, v, softmax_scale=scale.item()))


def test_subclasses_and_parameters_come_back_alike_cold_and_warm():
    class Mine(torch.Tensor):
        pass

    q, k, v = (normal(1, 2, 100, 64, seed=i) for i in range(3))
    expected = fkjit.attention(q, k, v)
    for make in (lambda x: x.as_subclass(Mine), lambda x: torch.nn.Parameter(x, False)):
        mine = [make(x) for x in (q, k, v)]
        for _ in range(2):
            o = fkjit.attention(*mine)
            assert type(o) is torch.Tensor and torch.equal(o, expected)


def test_work_goes_to_the_callers_stream():
    q, k, v = (normal(1, 8, 4096, 128, seed=i) for i in range(3))
    expected = fkjit.attention(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(q)
        torch.cuda._sleep(20_000_000)
        late.copy_(q)  # a launch on another stream would read zeros
        o = fkjit.attention(late, k, v)
    stream.synchronize()
    assert torch.equal(o, expected)


def test_a_captured_graph_replays_on_new_inputs():
    q, k, v = (normal(1, 4, 512, 64, seed=i) for i in range(3))
    fkjit.attention.prepare(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = fkjit.attention(q, k, v, causal=True)
    for seed in (10, 20):
        q.copy_(normal(1, 4, 512, 64, seed=seed))
        graph.replay()
        assert torch.equal(o, fkjit.attention(q, k, v, causal=True))


def test_a_first_call_under_capture_says_prepare():
    device.forget()
    from fkjit.ops.attention.forward import _ATTENTION

    _ATTENTION.plans.forget()
    q, k, v = (normal(1, 2, 128, 64, seed=i) for i in range(3))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        with pytest.raises(CaptureError, match=r"fkjit\.prepare\('attention'"):
            fkjit.attention(q, k, v)
        graph.capture_end()
    fkjit.prepare("attention", q, k, v)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        fkjit.attention(q, k, v)


def test_cupy_and_dlpack_arrays_come_back_in_kind():
    q, k, v = (normal(1, 2, 130, 64, dtype="fp16", seed=i) for i in range(3))
    expected = fkjit.attention(q, k, v)
    arrays = [cupy.from_dlpack(x) for x in (q, k, v)]
    o = fkjit.attention(*arrays)
    assert isinstance(o, cupy.ndarray) and bool((o == cupy.from_dlpack(expected)).all())

    class Foreign:  # any framework that speaks DLPack
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    o = fkjit.attention(*(Foreign(x) for x in arrays))
    assert bool((cupy.asarray(o) == cupy.from_dlpack(expected)).all())


def test_mixed_devices_are_refused_before_anything_runs():
    q = normal(1, 2, 64, 64)
    with pytest.raises(DeviceError, match="k is on the CPU but q is on cuda:0"):
        fkjit.attention(q, q.cpu(), q)


def test_a_plan_without_gradients_is_not_taken_for_those_that_want_them():
    q = normal(1, 2, 64, 64)
    assert not fkjit.attention(q, q, q).requires_grad
    assert fkjit.attention(q.clone().requires_grad_(), q, q).requires_grad
    with torch.no_grad():
        assert not fkjit.attention(q.clone().requires_grad_(), q, q).requires_grad


def test_nothing_leaks():
    q, k, v = (normal(1, 2, 256, 64, seed=i) for i in range(3))
    fkjit.attention(q, k, v)
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        fkjit.attention(q, k, v)
        with pytest.raises(ParameterError):
            fkjit.attention(q, k, v, block=48)
    assert torch.cuda.memory_allocated() == before


def test_another_thread_can_be_the_first_to_launch():
    import threading

    q, k, v = (normal(1, 2, 256, 64, seed=i) for i in range(3))
    expected, found = fkjit.attention(q, k, v), []
    threads = [
        threading.Thread(target=lambda: found.append(fkjit.attention(q, k, v))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(found) == 4 and all(torch.equal(o, expected) for o in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu_has_its_own_kernel():
    q, k, v = (normal(1, 2, 256, 64, seed=i) for i in range(3))
    expected = fkjit.attention(q, k, v)
    others = [x.to("cuda:1") for x in (q, k, v)]
    for _ in range(2):
        o = fkjit.attention(*others)
        assert o.device.index == 1 and torch.equal(o.cpu(), expected.cpu())
    assert torch.cuda.current_device() == 0
