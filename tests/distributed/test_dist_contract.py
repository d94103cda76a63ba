"""What is refused, and by whom; ranks that stop; order of tokens; packed sequences; compiling."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fkjit import errors
from tests.core.sampling import one_in
from tests.distributed.kit import Ranks, draw, error, ranks, visible, whole_attention

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as made:
        yield made


def raised(call: Callable[[], Any]) -> tuple[str, str]:
    """(type, text) of what it raises."""
    try:
        call()
    except errors.FkjitError as found:
        return type(found).__name__, str(found)
    return "", ""


def rows(tokens: int, heads: int = 2, dtype: Any = None) -> Any:
    return torch.zeros(1, heads, tokens, 32, dtype=dtype or torch.float16)


# ------------------------------------------------------------------ errors


def refusals(rank: int) -> dict[str, tuple[str, str]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import fkjit.distributed as fd

    q, mesh, alone = rows(8), init_device_mesh("cpu", (1, 2)), dist.new_group([0])
    ends, odd = (torch.tensor(x, dtype=torch.int32) for x in ([0, 8], [0, 5, 8]))
    packed, attend = torch.zeros(8, 2, 32, dtype=torch.float16), fd.ring_attention
    x, w, logits = torch.zeros(3, 32), torch.zeros(2, 32, 32), torch.zeros(3, 6)
    calls = {
        "not a group": lambda: attend(q, q, q, "world"),
        "a mesh of two": lambda: fd.merge_states(q, q[..., 0], mesh),
        "not in the group": lambda: fd.shard(q, alone) if rank else attend(q, q, q, "world"),
        "a NumPy array": lambda: attend(q.numpy(), q, q),
        "uneven for zigzag": lambda: attend(rows(7), rows(7), rows(7), causal=True),
        "uneven to shard": lambda: fd.shard(rows(10)),
        "another layout": lambda: attend(q, q, q, layout="striped"),
        "another form": lambda: attend(q, q, q, form="tree"),
        "keys of another length": lambda: attend(q, rows(4), rows(4)),
        "heads for ulysses": lambda: attend(rows(8, 3), rows(8, 3), rows(8, 3), form="ulysses"),
        "dtypes": lambda: attend(q, q, rows(8, 2, torch.bfloat16)),
        "sinks": lambda: attend(q, q, q, sinks=torch.zeros(3)),
        "a negative window": lambda: attend(q, q, q, window=(-3, 0)),
        "a window of packed": lambda: attend(
            packed, packed, packed, cu_seqlens=ends, max_seqlen=8, window=(3, 0)
        ),
        "odd packed lengths": lambda: attend(packed, packed, packed, cu_seqlens=odd, max_seqlen=8),
        "packed and gathered": lambda: attend(
            packed, packed, packed, cu_seqlens=ends, max_seqlen=8, form="gather"
        ),
        "no symmetric memory": lambda: attend(q, q, q, transport="symmetric"),
        "a time-out": lambda: attend(q, q, q, timeout=-1),
        "ranks that differ": lambda: attend(*[rows(16 + 4 * rank)] * 3),
        "experts": lambda: fd.moe_layer(x, logits, w, w[:, :, :16], 1),
        "rows of a product": lambda: fd.row_parallel_linear(x, torch.zeros(4, 32)),
        "a window in decoding": lambda: fd.attention_decode(q, q, q, window=(3, 0)),
    }  # fmt: skip
    return {name: raised(call) for name, call in calls.items()}


WANTED = {
    "not in the group": "ArgumentTypeError",
    "not a group": "ArgumentTypeError", "a NumPy array": "ArgumentTypeError",
    "dtypes": "ArgumentTypeError", "no symmetric memory": "DeviceError",
}  # fmt: skip


def test_what_no_rank_accepts_is_refused_in_words(two):
    for found in two.run(refusals):
        for name, (kind, text) in found.items():
            wanted = WANTED.get(name, "ParameterError")
            said = "allowed" in text or "is not one of" in text
            assert kind == wanted and said, (name, kind, text)
        assert "rank 1: [1, 2, 20" in found["ranks that differ"][1]


def test_without_a_process_group_it_is_said():
    import fkjit.distributed as fd

    with pytest.raises(errors.DeviceError, match="init_process_group"):
        fd.ring_attention(rows(8), rows(8), rows(8))
    with pytest.raises(AttributeError, match="no attribute 'tree'"):
        _ = fd.tree  # type: ignore[attr-defined]


# ------------------------------------------------------------------ ranks that stop


def waiting(rank: int, form: str, seconds: float) -> Any:
    """How a call ends whose other rank does not make it, and after how long."""
    import fkjit.distributed as fd

    q, begin = rows(16), time.monotonic()
    calls = {
        "moe": lambda: fd.moe_layer(
            torch.zeros(3, 32), torch.zeros(3, 4), torch.zeros(2, 32, 32), torch.zeros(2, 32, 16),
            1, timeout=seconds,
        ),
        "linear": lambda: fd.row_parallel_linear(
            torch.zeros(4, 32), torch.zeros(4, 32), timeout=seconds
        ),
    }  # fmt: skip
    found = raised(calls.get(form, lambda: fd.ring_attention(q, q, q, form=form, timeout=seconds)))
    return *found, time.monotonic() - begin


def stop(rank: int) -> None:
    import os

    os._exit(0)


@pytest.mark.parametrize("form", ["ring", "moe"])
def test_a_rank_that_died_is_an_error_and_no_hang(form):
    with ranks(2) as pool:
        pool.pipes[1].send(("tests.distributed.test_dist_contract", "stop", ()))
        ((kind, text, seconds),) = pool.run(waiting, form, 20.0, ranks=[0])
    assert kind == "PeerError" and "a rank has stopped" in text and seconds < 20


@pytest.mark.parametrize("form", ["gather", "linear"])
def test_a_rank_that_does_something_else_is_an_error_after_the_time_out(form):
    with ranks(2) as pool:
        ((kind, text, seconds),) = pool.run(waiting, form, 0.5, ranks=[0])
    assert kind == "PeerError" and "within 0.5 s" in text and 0.3 < seconds < 10


# ------------------------------------------------------------------ order of tokens


def ordering(rank: int, size: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import fkjit.distributed as fd

    x = torch.arange(48.0).view(1, 24, 2).requires_grad_()
    mesh = init_device_mesh("cpu", (1, size))
    groups = (None, dist.group.WORLD, init_device_mesh("cpu", (size,)), mesh)
    for layout, group in itertools.product(("zigzag", "contiguous"), groups):
        own = fd.shard(x, group, layout=layout)
        assert own.shape == (1, 24 // size, 2)
        assert torch.equal(fd.unshard(own, group, layout=layout), x)
        found = fd.positions(24, group, layout=layout)
        assert torch.equal(own[0, :, 0], 2.0 * found)
        (grad,) = torch.autograd.grad(own.sum(), x)
        assert grad.sum() == 48 / size and set(grad.flatten().tolist()) == {0.0, 1.0}
    assert fd.shard(torch.arange(8), layout="zigzag", dim=0).tolist() == [
        [0, 1, 6, 7], [2, 3, 4, 5],
    ][rank]  # fmt: skip


def test_shards_go_back_to_the_sequence_they_came_from(two):
    two.run(ordering, 2)


# ------------------------------------------------------------------ packed sequences


def packed(rank: int, layout: str, causal: bool, gradients: bool, sinks: bool) -> dict[str, float]:
    import fkjit.distributed as fd

    lengths, dtype = (12, 0, 20, 4), torch.float16
    ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    whole = [draw(n, (int(ends[-1]), h, 32), dtype) for n, h in enumerate((4, 2, 2, 4))]
    own = [fd.shard(x, layout=layout, dim=0, cu_seqlens=ends) for x in whole]
    own = [x.detach().requires_grad_(gradients) for x in own]
    sink = draw(8, (4,), torch.float32) if sinks else None
    o, lse = fd.ring_attention(
        *own[:3], causal=causal, layout=layout, cu_seqlens=fd.shard_lengths(ends, layout=layout),
        max_seqlen=10, sinks=sink, return_lse=True,
    )  # fmt: skip
    rows64 = [x.double().requires_grad_(gradients) for x in whole]
    found = [
        whole_attention(
            *(x[a:b].transpose(0, 1) for x in rows64[:3]), visible(b - a, causal),
            None if sink is None else sink.double(),
        )
        for a, b in itertools.pairwise(ends.tolist())
        if b > a
    ]  # fmt: skip
    wanted = torch.cat([x.transpose(0, 1) for x, _ in found])
    sums = torch.cat([x.t() for _, x in found])
    mine = {"o": (o.detach(), wanted), "lse": (lse.detach().t(), sums)}
    if gradients:
        o.backward(own[3].detach())
        wanted.backward(rows64[3].detach())
        mine |= {n: (a.grad, b.grad) for n, a, b in zip("qkv", own, rows64[:3], strict=False)}
    return {
        name: error(f, fd.shard(w.detach(), layout=layout, dim=0, cu_seqlens=ends))
        for name, (f, w) in mine.items()
    }


PACKED = [("zigzag", True, True, False), ("contiguous", False, False, True)]


@one_in(2)
@pytest.mark.parametrize("layout,causal,gradients,sinks", PACKED)
def test_packed_sequences_are_shared_out_one_by_one(two, layout, causal, gradients, sinks):
    for errors_of in two.run(packed, layout, causal, gradients, sinks):
        assert max(errors_of.values()) < 5e-3, errors_of


# ------------------------------------------------------------------ torch.compile


def test_a_compiled_function_breaks_its_graph_at_the_call(tmp_path, every_variant):
    if not every_variant:
        pytest.skip("imports the whole compiler: with --every-variant")
    import torch._dynamo.testing as testing
    import torch.distributed as dist

    import fkjit.distributed as fd

    counter = testing.CompileCounter()

    def step(q: Any) -> Any:
        return fd.ring_attention(q * 2, q, q, causal=True, form="ring") + 1

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        q = draw(3, (1, 2, 8, 32), torch.float16)
        assert torch.equal(torch.compile(step, backend=counter)(q), step(q))
    finally:
        dist.destroy_process_group()
    assert counter.frame_count == 2
