"""Cases of the distributed bench: arrays of a rank, and who computes what with them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fkjit
import fkjit.distributed as fd
from fkjit.distributed import schedule
from fkjit.distributed.forms import best_pieces
from fkjit.distributed.schedule import Attention, Experts, Machine, Product

from . import peers

Call = Callable[[], Any]


class Case(NamedTuple):
    """calls: by name, each returns this rank's result; the first is what others are compared with.
    alone: the work of one rank without any message. predicted: seconds, by name."""

    name: str
    calls: dict[str, Call]
    alone: Call
    flops: float  # of a rank
    predicted: dict[str, float]
    grads: list[Any]  # what requires grad
    compared: tuple[str, ...] = ()  # candidates with the same result as the first


def random(*shape: int, device: Any, dtype: Any = None) -> Any:
    return torch.randn(shape, device=device, dtype=dtype or torch.bfloat16)


def ring(tokens: int, device: Any, stack: ExitStack, backward: bool, small: bool) -> Case:
    """Causal zigzag attention, 32/8 heads of 128."""
    size, machine = dist.get_world_size(), Machine()
    a = Attention(tokens) if not small else Attention(tokens, 4, 2, 32, 32)
    generator = torch.Generator(device).manual_seed(1)
    heads = (a.heads_q, a.heads_kv, a.heads_kv)
    dtype = torch.float16 if small else torch.bfloat16
    wholes = [
        torch.randn(1, h, tokens * size, a.head_dim, generator=generator, device=device).to(dtype)
        for h in heads
    ]
    q, k, v = own = [fd.shard(x).requires_grad_(backward) for x in wholes]

    def form(name: str, **given: Any) -> Call:
        return lambda: fd.ring_attention(q, k, v, causal=True, form=name, **given)

    calls = {name: form(name) for name in ("gather", "ring")}
    calls |= {f"ring, {how}": form("ring", carry=how == "carried") for how in ("carried", "merged")}
    if a.heads_kv % size == 0:
        calls["ulysses"] = form("ulysses")
    if not small:
        calls["ring, symmetric"] = form("ring", transport="symmetric")
        calls["all-gather + torch"] = lambda: peers.gathered(q, k, v, peers.torch_attend)
    if not backward:
        calls["naive ring"] = lambda: peers.naive_ring(q, k, v)
        calls["all-gather + fkjit"] = lambda: peers.gathered(q, k, v, peers.fkjit_attend)
    if not small and dist.get_backend() == "nccl":  # last; through the host it ends the process
        calls["torch context parallel"] = lazily(
            lambda: peers.torch_context_parallel(*wholes, stack)
        )
    line = {name: make(a, machine, size, "zigzag", backward) for name, make in FORMS.items()}
    predicted = {name: x.seconds for name, x in line.items()}
    predicted["ring, symmetric"] = predicted["ring"]
    if backward:
        forward = {name: make(a, machine, size, "zigzag").seconds for name, make in FORMS.items()}
        predicted = {n: s + forward.get(n, forward["ring"]) for n, s in predicted.items()}
    else:
        predicted["naive ring"] = schedule.ring(a, machine, size, overlap=False).seconds
    pairs = (tokens * size) * (tokens * size + 1) / 2
    alone_rows = [x.detach().requires_grad_(backward) for x in wholes]
    return Case(
        f"ring causal zigzag {tokens} tokens a rank" + (" forward + backward" if backward else ""),
        calls, lambda: fkjit.attention(*alone_rows, causal=True),
        a.flops(pairs) / size * (3.5 if backward else 1.0), predicted,
        [*own, *alone_rows] if backward else [],
        ("ring", "ring, carried", "ring, merged", "ulysses", "ring, symmetric", "naive ring",
         "all-gather + fkjit", "all-gather + torch"),
    )  # fmt: skip


FORMS = {"gather": schedule.gather, "ring": schedule.ring, "ulysses": schedule.ulysses}


def lazily(make: Callable[[], Call]) -> Call:
    """A call that is made when it is first called: what cannot be had costs its own line."""
    made: list[Call] = []

    def call() -> Any:
        if not made:
            made.append(make())
        return made[0]()

    return call


def experts(device: Any, stack: ExitStack, backward: bool, small: bool) -> Case:
    """A layer of experts; alone: as many rows of a rank's own experts by fkjit.moe_layer."""
    size = dist.get_world_size()
    a = Experts() if not small else Experts(32, 8, 2, 32, 32)
    dtype, here = torch.float16 if small else torch.bfloat16, a.experts // size
    x = random(a.tokens, a.hidden, device=device, dtype=dtype)
    logits = random(a.tokens, a.experts, device=device, dtype=torch.float32)
    up = random(here, 2 * a.inner, a.hidden, device=device, dtype=dtype) * a.hidden**-0.5
    down = random(here, a.hidden, a.inner, device=device, dtype=dtype) * a.inner**-0.5
    local = random(a.tokens, here, device=device, dtype=torch.float32)
    arrays = (x, logits, up, down)
    if backward:
        arrays = tuple(array.requires_grad_() for array in arrays)

    def layer(chunks: int, **given: Any) -> Call:
        return lambda: fd.moe_layer(*arrays, a.top_k, chunks=chunks, **given)

    calls = {f"{n} chunks": layer(n) for n in (4, 2, 1)}
    calls["4 chunks, e4m3"] = layer(4, dispatch="e4m3")
    if not small:
        calls["torch grouped_mm"] = lambda: peers.grouped_mm_layer(*arrays, a.top_k)
    predicted = {
        f"{n} chunks": schedule.experts(a, Machine(), size, n).seconds * (3.0 if backward else 1.0)
        for n in (4, 2, 1)
    }
    return Case(
        f"experts T{a.tokens} E{a.experts} K{a.top_k} H{a.hidden} F{a.inner}"
        + (" forward + backward" if backward else ""),
        calls, lambda: fkjit.moe_layer(x, local, up, down, min(a.top_k, here)),
        a.flops * (3.0 if backward else 1.0), predicted, list(arrays) if backward else [],
        ("2 chunks", "1 chunks", "torch grouped_mm"),
    )  # fmt: skip


def products(device: Any, stack: ExitStack, kind: str, small: bool) -> Case:
    """Column- and row-parallel products 8192 x 28672 x 8192."""
    size = dist.get_world_size()
    a = Product() if not small else Product(32, 64, 64)
    dtype = torch.float16 if small else torch.bfloat16
    if kind == "column":
        x = random(a.m // size, a.k, device=device, dtype=dtype)
        weight = random(a.n // size, a.k, device=device, dtype=dtype)
        whole, part = random(a.m, a.k, device=device, dtype=dtype), weight
        call, other = fd.column_parallel_linear, peers.gathered_product
        predicted = schedule.column_linear(
            a, Machine(), size, pieces=best_pieces(True, a, size)
        ).seconds
    else:
        x = random(a.m, a.n // size, device=device, dtype=dtype)
        weight = random(a.k, a.n // size, device=device, dtype=dtype)
        whole, part = x, weight
        call, other = fd.row_parallel_linear, peers.scattered_product
        turned = Product(a.m, a.k, a.n, a.itemsize)
        predicted = schedule.row_linear(
            turned, Machine(), size, pieces=best_pieces(False, turned, size)
        ).seconds
    calls = {"fkjit": lambda: call(x, weight), "torch": lambda: other(x, weight)}
    if not small:
        calls["fkjit, symmetric"] = lambda: call(x, weight, transport="symmetric")
        calls["fkjit, tiles"] = lambda: call(x, weight, transport="tiles")
    return Case(
        f"{kind}-parallel {a.m} x {a.n} x {a.k}", calls, lambda: fkjit.linear(whole, part),
        2.0 * a.m * a.n * a.k / size, {"fkjit": predicted}, [],
        ("torch", "fkjit, symmetric", "fkjit, tiles"),
    )  # fmt: skip


def decode(device: Any, stack: ExitStack, small: bool) -> Case:
    """One token of 4 sequences against 128k keys."""
    size, batch = dist.get_world_size(), 1 if small else 4
    keys, heads, dim = (64, (4, 2), 32) if small else (131072, (32, 8), 128)
    dtype = torch.float16 if small else torch.bfloat16
    generator = torch.Generator(device).manual_seed(2)
    q, k, v = (
        torch.randn(batch, h, *rows, dim, generator=generator, device=device).to(dtype)
        for h, rows in ((heads[0], ()), (heads[1], (keys,)), (heads[1], (keys,)))
    )
    own = [fd.shard(x, layout="contiguous").contiguous() for x in (k, v)]
    one, read = Machine(), 2.0 * batch * heads[1] * keys * dim * 2
    return Case(
        f"decode {batch} x {keys} keys", {"fkjit": lambda: fd.attention_decode(q, *own)},
        lambda: fkjit.attention_decode(q, k, v), 4.0 * batch * heads[0] * keys * dim / size,
        {"fkjit": read / size / one.memory + one.link_latency}, [],
    )  # fmt: skip
