"""Experts and products over ranks, and decoding over shared keys, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.kit import DEVICE, Ranks, draw, error, ranks

torch = pytest.importorskip("torch")
FORWARD = {"gradients": False}
TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2, "float32": 4e-6}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as made:
        yield made


def below(found: list[dict[str, float]], limit: float) -> None:
    for rank, errors in enumerate(found):
        assert all(e < limit for e in errors.values()), (rank, errors)


# ------------------------------------------------------------------ experts


def experts(rank: int, seed: int, sizes: Any, dtype_name: str, said: dict[str, Any]) -> Any:
    """Errors of a layer and its gradients; ranks have different numbers of tokens."""
    import torch.distributed as dist

    import fkjit.distributed as fd

    said, dtype, size = dict(said), getattr(torch, dtype_name), dist.get_world_size()
    tokens, count, hidden, inner, top_k = sizes
    x = draw(seed, (sum(tokens), hidden), dtype)
    logits = draw(seed + 1, (sum(tokens), count), torch.float32)
    up = draw(seed + 2, (count, 2 * inner, hidden), dtype) / hidden**0.5
    down = draw(seed + 3, (count, hidden, inner), dtype) / inner**0.5
    along = draw(seed + 4, (sum(tokens), hidden), dtype)
    if said.pop("skewed", False):
        logits[:, : count // size] += 100.0  # all choices go to rank 0
    here, begin = count // size, sum(tokens[:rank])
    mine = slice(begin, begin + tokens[rank])
    local = slice(rank * here, (rank + 1) * here)
    gradients = said.pop("gradients", True)
    own = [a.clone() for a in (x[mine], logits[mine], up[local], down[local])]
    own = [a.requires_grad_(gradients) for a in own]
    out = fd.moe_layer(*own, top_k, **said)
    if gradients:
        out.backward(along[mine])
    wanted = experts_float64(x, logits, up, down, along, top_k)
    places = (mine, mine, mine, local, local)
    found = (out.detach(), *(a.grad for a in own))
    names = ("out", "dx", "dlogits", "dw_gate_up", "dw_down")
    return {
        name: error(f, w[at], w)
        for name, f, w, at in zip(names, found, wanted, places, strict=True)
        if f is not None and f.numel()
    }


def experts_float64(x: Any, logits: Any, up: Any, down: Any, along: Any, top_k: int) -> Any:
    rows = [a.double().requires_grad_() for a in (x, logits, up, down)]
    x, logits, up, down = rows
    weights, ids = logits.softmax(-1).topk(top_k)
    every = torch.einsum("th,eih->tei", x, up)
    gate, value = every.chunk(2, -1)
    y = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * value, down)
    picked = y.gather(1, ids.unsqueeze(-1).expand(-1, -1, x.shape[1]))
    out = (weights.unsqueeze(-1) * picked).sum(1)
    out.backward(along.double())
    return (out.detach(), *(a.grad for a in rows))


def test_experts_of_two_ranks_are_one_layer(two):
    below(two.run(experts, 0, ((13, 6), 4, 32, 32, 2), "float16", {}), TOLERANCE["float16"])


def test_a_rank_without_rows_and_one_without_tokens(two):
    sizes = ((5, 0), 4, 32, 32, 2)
    found = two.run(experts, 9, sizes, "float16", {"skewed": True, "chunks": 1})
    below(found, TOLERANCE["float16"])


def test_room_for_all_rows_needs_no_numbers_of_the_host(two):
    found = two.run(experts, 2, ((9, 6), 4, 32, 32, 2), "float16", {"max_rows": 10, **FORWARD})
    below(found, TOLERANCE["float16"])


def left_out(rank: int) -> None:
    """Of five tokens for one expert, room is for three: the others' results are 0."""
    import fkjit.distributed as fd

    x, up = draw(rank, (5, 32), torch.float16), draw(7, (4, 64, 32), torch.float16) / 6
    down = draw(8, (4, 32, 32), torch.float16) / 6
    logits = torch.zeros(5, 4)
    logits[:, 3 * rank] = 9.0  # each to its own rank's experts
    given = x, logits, up[2 * rank :][:2], down[2 * rank :][:2], 1
    every = fd.moe_layer(*given, chunks=1)
    some = fd.moe_layer(*given, chunks=1, max_rows=3)
    assert torch.equal(some[:3], every[:3]) and every[3:].any(1).all()
    assert not some[3:].any()


def test_choices_without_room_are_left_out(two):
    two.run(left_out)


def test_codes_of_8_bits_cost_what_they_round(two):
    found = two.run(experts, 5, ((9, 8), 4, 32, 32, 2), "float16", {"dispatch": "e4m3", **FORWARD})
    below(found, 0.08)
    assert max(e["out"] for e in found) > 1e-3  # or nothing was rounded


# ------------------------------------------------------------------ products


def products(rank: int, seed: int, sizes: Any, dtype_name: str, said: dict[str, Any]) -> Any:
    """Errors of both kinds of product, and of their gradients."""
    import torch.distributed as dist

    import fkjit.distributed as fd

    dtype, size = getattr(torch, dtype_name), dist.get_world_size()
    rows, n, k = sizes  # of a rank
    found = {}
    x, w = draw(seed, (size * rows, k), dtype), draw(seed + 1, (size * n, k), dtype) / k**0.5
    bias = draw(seed + 2, (size * n,), dtype)
    wide = n // 2 if said.get("gate") else n
    along = draw(seed + 3, (size * rows, size * wide), dtype)
    mine, out = slice(rank * rows, (rank + 1) * rows), slice(rank * n, (rank + 1) * n)
    cols = slice(rank * wide, (rank + 1) * wide)
    own = [a.clone().requires_grad_() for a in (x[mine], w[out], bias[out])]
    y = fd.column_parallel_linear(*own, **said)
    y.backward(along[:, cols].contiguous())
    full = [a.double().requires_grad_() for a in (x, w, bias)]
    pieces = [full[0] @ a.T + b for a, b in zip(full[1].split(n), full[2].split(n), strict=True)]
    whole = torch.cat([act(piece, said) for piece in pieces], 1)
    whole.backward(along.double())
    found["column"] = error(y.detach(), whole.detach()[:, cols], whole.detach())
    grads = zip(("dx", "dw", "db"), own, full, (mine, out, out), strict=True)
    found |= {name: error(a.grad, b.grad[at], b.grad) for name, a, b, at in grads}
    return found | row_products(rank, seed + 50, sizes, dtype, said)


def row_products(rank: int, seed: int, sizes: Any, dtype: Any, said: Any) -> dict[str, float]:
    import torch.distributed as dist

    import fkjit.distributed as fd

    (rows, n, k), size = sizes, dist.get_world_size()
    x = draw(seed, (size * rows, size * k), dtype)
    w, bias = draw(seed + 1, (n, size * k), dtype) / (size * k) ** 0.5, draw(seed + 2, (n,), dtype)
    along = draw(seed + 3, (size * rows, n), dtype)
    mine, cols = slice(rank * rows, (rank + 1) * rows), slice(rank * k, (rank + 1) * k)
    own = [a.clone().contiguous().requires_grad_() for a in (x[:, cols], w[:, cols], bias)]
    given = {name: said[name] for name in ("transport", "pieces") if name in said}
    y = fd.row_parallel_linear(*own, **given)
    y.backward(along[mine])
    full = [a.double().requires_grad_() for a in (x, w, bias)]
    whole = full[0] @ full[1].T + full[2]
    whole.backward(along.double())
    found = {"row": error(y.detach(), whole.detach()[mine], whole.detach())}
    every = slice(None)
    grads = zip(
        ("rdx", "rdw", "rdb"), own, full, ((every, cols), (every, cols), every), strict=True
    )
    return found | {name: error(a.grad, b.grad[at], b.grad) for name, a, b, at in grads}


def act(z: Any, said: dict[str, Any]) -> Any:
    if said.get("gate"):
        gate, up = z.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.relu(z) if said.get("activation") == "relu" else z


@pytest.mark.parametrize("said", [{"activation": "silu", "gate": True, "pieces": 3}], ids=str)
def test_column_and_row_parallel_products(two, said):
    below(two.run(products, 0, (9, 16, 24), "float16", said), TOLERANCE["float16"])


# ------------------------------------------------------------------ decoding


def decoding(rank: int, seed: int, sizes: Any, dtype_name: str, said: dict[str, Any]) -> Any:
    """Errors of attention over keys of which ranks have a part; their other rows are NaN."""
    import torch.distributed as dist

    import fkjit.distributed as fd

    dtype, size = getattr(torch, dtype_name), dist.get_world_size()
    lengths, heads_q, heads_kv, tokens, dim, dim_v = sizes  # lengths[rank][sequence]
    batch, room = len(lengths[0]), max(itertools.chain(*lengths)) + 3
    shape = (batch, heads_q, tokens, dim) if tokens > 1 else (batch, heads_q, dim)
    q, sinks = draw(seed, shape, dtype), None
    k = [draw(seed + 1 + r, (batch, heads_kv, room, dim), dtype) for r in range(size)]
    v = [draw(seed + 9 + r, (batch, heads_kv, room, dim_v), dtype) for r in range(size)]
    for r, b in itertools.product(range(size), range(batch)):
        k[r][b, :, lengths[r][b] :] = v[r][b, :, lengths[r][b] :] = float("nan")
    if said.get("sinks"):
        sinks = draw(seed + 30, (heads_q,), torch.float32)
    lens = torch.tensor(lengths[rank], dtype=torch.int32, device=DEVICE[0])
    found = fd.attention_decode(
        q, k[rank], v[rank], lens, sinks=sinks, return_lse=True, newest=said.get("newest", -1)
    )
    errors = {}
    order = [r for r in range(size) if r != said.get("newest", -1) % size]
    order.append(said.get("newest", -1) % size)
    for b in range(batch):
        keys, values = (
            torch.cat([x[r][b, :, : lengths[r][b]] for r in order], 1).double() for x in (k, v)
        )
        wanted = decoded(q[b].double().view(heads_q, tokens, dim), keys, values, sinks)
        for name, f, w in zip(("o", "lse"), found, wanted, strict=True):
            errors[f"{name} {b}"] = error(f[b].reshape(w.shape), w, w)
    return errors


def decoded(q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
    from tests.distributed.kit import visible, whole_attention

    tokens, keys = q.shape[1], k.shape[1]
    seen = visible(keys, True)[keys - tokens :]
    return whole_attention(q, k, v, seen, None if sinks is None else sinks.double())


@pytest.mark.parametrize(
    "tokens,said", [(1, {"sinks": True}), (3, {}), (2, {"newest": 0})], ids=str
)
def test_decoding_over_shared_keys(two, tokens, said):
    sizes = (((5, 40), (17, 4)), 4, 2, tokens, 32, 32)
    below(two.run(decoding, 3, sizes, "float16", said), TOLERANCE["float16"])


def test_a_rank_without_keys(two):
    below(two.run(decoding, 3, (((5,), (0,)), 4, 2, 1, 32, 32), "float16", {}), 3e-3)


# ------------------------------------------------------------------ many of them


def test_every_size_and_dtype(every_variant):
    if not every_variant:
        pytest.skip("minutes: with --every-variant")
    with ranks(2) as two, ranks(4) as four:
        for pool, dtype in itertools.product((two, four), TOLERANCE):
            size, limit = pool.size, TOLERANCE[dtype]
            for seed, tokens in enumerate((1, 37, 64)):
                each = tuple(tokens + 3 * r for r in range(size))
                said = {"chunks": 1 + seed}
                below(pool.run(experts, seed, (each, 8, 64, 32, 3), dtype, said), 2 * limit)
                for said in ({}, {"activation": "relu"}, {"activation": "silu", "gate": True}):
                    sizes = (tokens, 24 + 8 * seed, 40)
                    below(pool.run(products, seed, sizes, dtype, said), 2 * limit)
            if dtype != "float32":
                for seed, tokens in enumerate((1, 4, 16)):
                    lengths = tuple((20 + r, 16 * r + tokens) for r in range(size))
                    sizes = (lengths, 8, 2, tokens, 64, 32)
                    below(pool.run(decoding, seed, sizes, dtype, {"newest": 1}), limit)
