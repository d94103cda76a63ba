"""fkjit.rope on a CUDA GPU: float64, graphs, plans, arrays past 2^31 elements."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit import Llama3Scaling, YarnScaling  # noqa: E402
from fkjit.ops.rope.frequencies import amplitude, frequencies  # noqa: E402

LIMITS = {torch.float16: 6e-4, torch.bfloat16: 4.5e-3, torch.float32: 4e-7}


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, dtype=dtype, device="cuda")


def expected(x, at, rotary=None, theta=1e4, scaling=None, interleaved=False):
    """x [B, S, H, D] in float64, turned to positions [B, S] of up to 10^7 or so."""
    rotary = rotary or x.shape[-1]
    turning = torch.from_numpy(frequencies(rotary, theta, scaling).astype("f8")).cuda()
    angle = at.double()[..., None, None] * turning
    c, s = amplitude(scaling) * angle.cos(), amplitude(scaling) * angle.sin()
    one = slice(0, rotary, 2) if interleaved else slice(0, rotary // 2)
    two = slice(1, rotary, 2) if interleaved else slice(rotary // 2, rotary)
    made = x.double()
    u, v = made[..., one].clone(), made[..., two].clone()
    made[..., one], made[..., two] = u * c - v * s, v * c + u * s
    return made


def assert_near(found, wanted):
    error = (found.double() - wanted).abs().max().item()
    assert error <= LIMITS[found.dtype] * max(1.0, wanted.abs().max().item()), error


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [(128, 128), (192, 64), (80, 80), (14, 6), (512, 512)])
@pytest.mark.parametrize("source", ["fused", "llama", "yarn"])
def test_against_float64(dtype, interleaved, dims, source):
    dim, rotary = dims
    q, k = normal(3, 333, 9, dim, dtype=dtype), normal(3, 333, 2, dim, dtype=dtype)
    at = torch.randint(0, 5000 if source == "yarn" else 1_000_001, (3, 333), device="cuda")
    scaling = {"fused": None, "llama": Llama3Scaling(), "yarn": YarnScaling(4.0, 512)}[source]
    options = {"scaling": scaling} if source != "yarn" else {}
    if source == "yarn":
        options["table"] = fkjit.rope_table(5000, rotary, scaling=scaling, like=q)
    called = {"rotary_dim": rotary, "interleaved": interleaved, **options}
    poison = [torch.full_like(x, float("nan")) for x in (q, k)]
    del poison  # the allocator may hand this memory out next
    found = fkjit.rope(q, k, at, layout="bshd", **called)
    wanted = [expected(x, at, rotary, scaling=scaling, interleaved=interleaved) for x in (q, k)]
    for mine, right in zip(found, wanted, strict=True):
        assert_near(mine, right)
    seen = [x.transpose(1, 2) for x in (q, k)]  # [B, H, S, D] of the same memory
    fkjit.rope(*seen, at, inplace=True, **called)
    for mine, right in zip((q, k), wanted, strict=True):
        assert_near(mine, right)


def test_a_plan_serves_both_what_is_in_place_and_what_is_not():
    q = normal(2, 40, 4, 96)
    at = torch.arange(40, device="cuda").expand(2, -1)
    wanted = expected(q, at, rotary=32)
    for _ in range(2):
        x, out = q.clone(), torch.full_like(q, float("nan"))
        fkjit.rope(x, None, at, rotary_dim=32, layout="bshd", out_q=x)
        fkjit.rope(q, None, at, rotary_dim=32, layout="bshd", out_q=out)
        assert_near(x, wanted)
        assert_near(out, wanted)


def test_a_graph_reads_positions_when_it_is_replayed():
    q, k = normal(5, 8, 128), normal(5, 2, 128)
    at = torch.zeros(5, dtype=torch.int64, device="cuda")
    fkjit.prepare("rope", q, k, at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fkjit.rope(q, k, at)
    for step in (0, 7, 1_000_000):
        at.copy_(torch.arange(5) + step)
        graph.replay()
        for mine, x in zip(found, (q, k), strict=True):
            assert_near(mine, expected(x[None], at[None])[0])


def test_gradients_on_the_gpu():
    q = normal(1, 3, 50, 64, dtype=torch.float32).requires_grad_()
    gradient = torch.randn_like(q)
    fkjit.rope(q, None, 12).backward(gradient)
    assert torch.equal(q.grad, fkjit.rope(gradient, None, 12, inverse=True))
    assert_near(fkjit.rope(q.grad, None, 12), gradient.double())


def test_past_two_to_the_31_elements():
    q = torch.empty(17, 1 << 20, 1, 128, dtype=torch.float16, device="cuda")
    q.normal_()
    ends = [(0, 0), (16, (1 << 20) - 1), (8, 12_345)]
    before = [q[end].clone() for end in ends]
    fkjit.rope(q, None, 3, layout="bshd", inplace=True)
    for (batch, row), x in zip(ends, before, strict=True):
        at = torch.tensor([[row + 3]], device="cuda")
        assert_near(q[batch, row], expected(x[None, None], at)[0, 0])
