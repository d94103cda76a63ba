"""Attention over ranks against float64 attention of the whole sequence: values and gradients."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.core.sampling import one_in
from tests.distributed.kit import DEVICE, Ranks, draw, error, ranks, visible, whole_attention

torch = pytest.importorskip("torch")
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-6}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as made:
        yield made


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with ranks(4) as made:
        yield made


def group_of(said: dict[str, Any]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = said.pop("mesh", None)
    return None if mesh is None else init_device_mesh(DEVICE[0], mesh)


def compare(rank: int, seed: int, shape: Any, dtype_name: str, said: dict[str, Any]) -> Any:
    """Errors of this rank's results by name, and their bits."""
    import fkjit.distributed as fd

    said, dtype, group = dict(said), getattr(torch, dtype_name), None
    batch, heads_q, heads_kv, tokens, dim, dim_v, gradients = shape
    group, layout = group_of(said), said.get("layout", "zigzag")
    sizes = ((heads_q, dim), (heads_kv, dim), (heads_kv, dim_v))
    wholes = [draw(seed + n, (batch, h, tokens, d), dtype) for n, (h, d) in enumerate(sizes)]
    own = [fd.shard(x, group, layout=layout).requires_grad_(gradients) for x in wholes]
    sinks = None
    if said.pop("sinks", False):
        sinks = draw(seed + 7, (heads_q,), torch.float32).requires_grad_(gradients)
    o, lse = fd.ring_attention(*own, group, sinks=sinks, return_lse=True, **said)
    weights = draw(seed + 5, (batch, heads_q, tokens, dim_v), dtype), draw(
        seed + 6, (batch, heads_q, tokens, 1), torch.float32
    )  # fmt: skip
    if gradients:
        along = [fd.shard(x, group, layout=layout) for x in weights]
        torch.autograd.backward([o, lse], [along[0], along[1][..., 0]])
    wanted = reference(wholes, weights, sinks, said, gradients)
    found = {"o": o.detach(), "lse": lse.detach().unsqueeze(-1)}
    if gradients:
        found |= dict(zip(("dq", "dk", "dv"), (x.grad for x in own), strict=True))
    errors = {n: error(x, fd.shard(wanted[n], group, layout=layout)) for n, x in found.items()}
    if gradients and sinks is not None:
        torch.distributed.all_reduce(sinks.grad)
        errors["dsinks"] = error(sinks.grad, wanted["dsinks"])
    return errors, [bits(x) for x in found.values()]


def bits(x: Any) -> bytes:
    return x.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def reference(wholes: Any, weights: Any, sinks: Any, said: Any, gradients: bool) -> Any:
    rows = [x.double().requires_grad_(gradients) for x in wholes]
    sinks = None if sinks is None else sinks.detach().double().requires_grad_(gradients)
    seen = visible(rows[0].shape[2], said.get("causal", False), said.get("window"))
    each = [
        whole_attention(*(x[b] for x in rows), seen, sinks, said.get("softcap") or 0.0)
        for b in range(rows[0].shape[0])
    ]
    o, lse = (torch.stack(x) for x in zip(*each, strict=True))
    found = {"o": o.detach(), "lse": lse.detach().unsqueeze(-1)}
    if gradients:
        along = weights[0].double(), weights[1][..., 0].double()
        torch.autograd.backward([o, lse], list(along))
        found |= {"dq": rows[0].grad, "dk": rows[1].grad, "dv": rows[2].grad}
        found["dsinks"] = None if sinks is None else sinks.grad
    return found


def check(pool: Ranks, shape: Any, dtype: str, said: dict[str, Any], seed: int = 0) -> Any:
    found = pool.run(compare, seed, shape, dtype, said)
    for rank, (errors, _) in enumerate(found):
        late = {n: e for n, e in errors.items() if not e < TOLERANCE[dtype] * (2 + n.count("d"))}
        assert not late, (rank, errors)
    return found


SMALL = (1, 4, 2, 48, 32, 32)
FORMS = ("ring", "gather", "ulysses")


GRADIENTS = [("ring", "zigzag"), ("gather", "contiguous"), ("ulysses", "zigzag")]


@one_in(4)
@pytest.mark.parametrize("form,layout", list(itertools.product(FORMS, ("zigzag", "contiguous"))))
def test_causal_attention_is_that_of_the_whole_sequence(two, form, layout):
    shape = (*SMALL, (form, layout) in GRADIENTS)
    check(two, shape, "float16", {"causal": True, "layout": layout, "form": form})


def test_three_ranks_give_the_same_bits_again(every_variant):
    said, shape = {"causal": True, "form": "ring"}, (1, 4, 2, 54, 32, 32)
    with ranks(3) as three:
        once = check(three, (*shape, True), "float16", said)
        again = three.run(compare, 0, (*shape, every_variant), "float16", said)
    for (_, first), (_, second) in zip(once, again, strict=True):
        assert first[: len(second)] == second


@one_in(2)
@pytest.mark.parametrize("form", ["ring", "auto"])
def test_a_mesh_of_two_dimensions_shares_tokens_and_heads(four, form):
    said = {"causal": True, "form": form, "mesh": (2, 2)}
    check(four, (1, 4, 2, 64, 32, 32, False), "float16", said)


CASES = [
    ({"form": "ring", "window": (5, 0), "causal": True, "sinks": True}, None),
    ({"form": "ring", "window": (20, None), "layout": "contiguous"}, False),
    ({"form": "gather", "window": (7, 3), "sinks": True}, False),
    ({"form": "ring", "causal": True, "sinks": True}, True),
    ({"form": "ring", "causal": True, "carry": False}, False),
    ({"form": "ulysses", "causal": True, "sinks": True, "window": (9, 0)}, False),
]


@one_in(2)
@pytest.mark.parametrize("said,gradients", CASES, ids=lambda said: str(said))
def test_windows_and_sinks(two, said, gradients, every_variant):
    """Gradients: None: with --every-variant, as they take kernels that no other test here does."""
    gradients = every_variant if gradients is None else gradients
    check(two, (*SMALL[:5], 32, gradients), "float16", said, seed=20)


def test_every_combination(two, four, every_variant):
    if not every_variant:
        pytest.skip("minutes: with --every-variant")
    windows = (None, (0, 0), (3, 8), (None, 4), (70, None))
    every = itertools.product(
        FORMS, ("zigzag", "contiguous"), (False, True), windows, (False, True), (two, four)
    )
    grid = random.Random(7).sample(list(every), 60)
    for n, (form, layout, causal, window, sinks, pool) in enumerate(grid):
        said = {"form": form, "layout": layout, "causal": causal, "window": window, "sinks": sinks}
        dtype = ("float16", "bfloat16", "float32")[n % 3]
        check(pool, (2 - n % 2, 8, 4, 72, 40, 24, True), dtype, said, seed=n * 10)
