"""Attention over the sizes and features that users know, forward and backward, on a GPU.

A sample with a fixed seed; everything against float64, with at most twice the error that PyTorch's
own operators make in the same dtype. Cases of a group share kernels, which processes compile side
by side before the first test.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
DIMS = (  # D, Dv
    (32, 32), (40, 40), (59, 59), (64, 64), (80, 80), (96, 96), (111, 111), (128, 128), (160, 160),
    (192, 128), (256, 256), (40, 72),
)  # fmt: skip
PAIRS = (
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024),
    (1023, 1024), (1024, 1023), (1, 339), (3, 1024), (3, 799), (64, 800), (64, 2048), (1, 1),
)  # fmt: skip
HEADS = ((4, 4), (4, 2), (6, 1))
FEATURES = ("window", "softcap", "alibi_slopes", "bias", "mask", "sinks")
CASES_OF_GROUP = 5
LONG = (1, 131_072)


class Case(NamedTuple):
    """What a seed and a few numbers say; arrays are made from them anew."""

    dtype: str
    dims: tuple[int, int]
    features: tuple[str, ...]
    heads: tuple[int, int]
    pair: tuple[int, int]
    batch: int
    causal: bool
    seed: int

    def __str__(self) -> str:
        parts = (*self[:2], "+".join(self.features) or "plain", *self[3:6])
        return " ".join(str(part).replace(" ", "") for part in parts) + " causal" * self.causal


def sample() -> list[list[Case]]:
    """Groups of cases: each has one dtype, head_dim and set of features."""
    drawn = random.Random(20)
    groups = []
    for number, dims in enumerate(DIMS * 2):
        dtype = ("fp16", "bf16")[number % 2] if number % 5 else "fp32"
        some = [name for name in FEATURES if drawn.random() < 0.4]
        features = ((), (drawn.choice(FEATURES),), tuple(some))[(number + number // 12) % 3]
        pairs = drawn.sample(PAIRS, CASES_OF_GROUP)
        groups.append([
            Case(dtype, dims, features, drawn.choice(HEADS), pair, drawn.choice((1, 2)),
                 drawn.random() < 0.5, drawn.randrange(1 << 20))
            for pair in pairs
        ])  # fmt: skip
    long = [Case("bf16", (128, 128), f, (4, 2), LONG, 1, True, 5) for f in ((), ("window",))]
    return [*groups, *([case] for case in long)]


GROUPS = sample()
CASES = [case for group in GROUPS for case in group]


def normal(made: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return torch.randn(shape, device="cuda", generator=made).to(dtype)


def arrays(case: Case) -> tuple[list[Any], Any, dict[str, Any]]:
    """q, k and v, the gradient of o, and attention's options."""
    made = torch.Generator("cuda").manual_seed(case.seed)
    drawn = random.Random(case.seed)
    (hq, hkv), (sq, sk), (d, dv), b = case.heads, case.pair, case.dims, case.batch
    shapes = ((b, hq, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv), (b, hq, sq, dv))
    *rows, dout = (normal(made, shape, DTYPES[case.dtype]) for shape in shapes)
    masks = [(b, hq, sq, sk), (1, hq, sq, sk), (b, 1, 1, sk), (1, 1, sq, sk)]
    bias = (torch.float32, DTYPES[case.dtype])[drawn.randrange(2)]
    sides = (sk // 3, 17, None)
    every = {
        "window": (drawn.choice(sides), drawn.choice((0, 9, None))),
        "softcap": drawn.uniform(1, 5),
        "alibi_slopes": torch.rand((b, hq)[drawn.randrange(2) :], device="cuda", generator=made),
        "bias": normal(made, drawn.choice(masks), bias),
        "mask": torch.rand(drawn.choice(masks), device="cuda", generator=made) < 0.7,
        "sinks": normal(made, (hq,), torch.float32),
    }
    return rows, dout, {"causal": case.causal} | {name: every[name] for name in case.features}


def seen(sq: int, sk: int, causal: bool, window: Any, mask: Any) -> Any:
    """Which keys each query sees."""
    apart = distance(sq, sk)
    left, right = (sq + sk if side is None else side for side in window or (None, None))
    found = (apart >= -left) & (apart <= (min(right, 0) if causal else right))
    return found if mask is None else found & mask


def distance(sq: int, sk: int) -> Any:
    """Of a key from a query's own position."""
    rows = torch.arange(sq, device="cuda")[:, None] + sk - sq
    return torch.arange(sk, device="cuda") - rows


def textbook(
    q: Any, k: Any, v: Any, *, causal: bool, window: Any = None, softcap: float | None = None,
    alibi_slopes: Any = None, bias: Any = None, mask: Any = None, sinks: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """(o, lse) by PyTorch's operators: products and weights in the dtype of q, scores between them
    in fp32 at the least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = (q @ k.mT).to(wide) * q.shape[-1] ** -0.5
    sq, sk = s.shape[-2:]
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(wide)[..., None, None] * distance(sq, sk).abs()
    s = s if bias is None else s + bias.to(wide)
    s = s.masked_fill(~seen(sq, sk, causal, window, mask), float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.to(wide)[:, None, None].expand(*s.shape[:3], 1)], -1)
    weights = s.to(q.dtype).softmax(-1).nan_to_num()[..., :sk]
    return weights @ v, s.logsumexp(-1)


def with_gradients(call: Any, rows: list[Any], dout: Any, options: dict[str, Any]) -> list[Any]:
    """o, lse, dq, dk, dv."""
    leaves = [x.detach().clone().requires_grad_() for x in rows]
    o, lse = call(*leaves, **options)
    o.backward(dout)
    return [o.detach(), lse.detach(), *(leaf.grad for leaf in leaves)]


def ours(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return fkjit.attention(q, k, v, return_lse=True, **options)


def run(case: Case, call: Any = ours, dtype: Any = None) -> list[Any]:
    rows, dout, options = arrays(case)
    if dtype is not None:
        rows, dout = [x.to(dtype) for x in rows], dout.to(dtype)
    return with_gradients(call, rows, dout, options)


@cache
def compiled() -> None:
    """Every kernel into the run's cache, by processes: NVRTC compiles one at a time in each."""
    workers = min(os.cpu_count() or 1, 16, len(GROUPS))
    command = [sys.executable, "-m", "tests.attention.test_attention_grid_gpu", str(workers)]
    root = Path(__file__).parents[2]
    running = [subprocess.Popen([*command, str(number)], cwd=root) for number in range(workers)]
    for process in running:
        process.wait()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_pytorchs(case):
    compiled()
    with quiet():
        found = run(case)
    exact, peer = run(case, textbook, torch.float64), run(case, textbook)
    hidden = torch.isneginf(exact[1])
    assert torch.equal(torch.isneginf(found[1]), hidden)
    assert torch.allclose(found[1][~hidden].double(), exact[1][~hidden], rtol=1e-5, atol=2e-5)
    # Of one key, q's gradient is nothing, or with a sink the rest of two numbers that cancel, one
    # of them a sum over o as it was rounded: half an ulp of what the others have.
    half_ulp = torch.finfo(DTYPES[case.dtype]).eps / 2 if case.pair == (1, 1) else 0
    floor = max(2e-6, half_ulp) * max(x.norm() for x in exact[2:])
    for name, one, other, expected in zip(
        ("o", "dq", "dk", "dv"), (found[0], *found[2:]), (peer[0], *peer[2:]),
        (exact[0], *exact[2:]), strict=True,
    ):  # fmt: skip
        error, theirs = (x.double() - expected for x in (one, other))
        assert error.norm() <= 2 * theirs.norm() + floor, name
        most = 2 * theirs.abs().max() + 2e-6 * expected.abs().max()
        assert name != "o" or error.abs().max() <= most, name


REPEATED = [group[0] for group in GROUPS if len(group[0].features) > 1][:3]


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_250_repeats_of_a_form_have_the_same_bits(case):
    compiled()
    rows, dout, options = arrays(case._replace(pair=(300, 500)))
    with quiet():
        first = with_gradients(ours, rows, dout, options)
        for _ in range(250):
            again = with_gradients(ours, rows, dout, options)
            assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


if __name__ == "__main__":
    of, own = (int(word) for word in sys.argv[1:])
    for mine in GROUPS[own::of]:
        for one in mine:
            with quiet(), suppress(Exception):  # the test will say what
                run(one)
