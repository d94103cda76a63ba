"""The paged KV cache on a GPU: against the CPU's, in CUDA graphs, in torch and CuPy."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.errors import CaptureError, PoolExhaustedError, SequenceTooLongError
from fkjit.jit.build import quiet

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.gpu
HEADS, DIM = 4, 64


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


def cache(**options):
    """40 pages of 16 tokens."""
    given = {
        **{"num_pages": 40, "page_size": 16, "num_kv_heads": HEADS, "head_dim": DIM},
        **{"dtype": "bf16", "device": "cuda", "framework": "torch", "max_sequences": 8},
    }
    return fkjit.PagedKVCache(**{**given, **options})


def normal(count, heads=HEADS, dtype=torch.bfloat16):
    """[count, heads, head_dim] on the GPU, fresh."""
    return torch.randn(count, heads, DIM, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_what_is_done_on_the_cpu_is_done_on_the_gpu(layout, dtype):
    """The same calls in both, at random; all that is read is alike, to the bit."""
    rng = np.random.default_rng([len(layout), len(dtype)])
    scales = {} if dtype == "bf16" else {"k_scale": 0.02, "v_scale": [0.01, 0.02, 0.03, 0.04]}
    pair = [cache(dtype=dtype, layout=layout, device=d, **scales) for d in ("cuda", "cpu")]
    there, here = pair
    live = [both(pair, lambda c: c.allocate())]
    for _ in range(60):
        act = rng.choice(["new", "fork", "free", "move", "append", "append", "append"])
        one = int(rng.choice(live))
        try:
            if act == "new":
                live.append(both(pair, lambda c: c.allocate()))
            elif act == "fork":
                length = int(rng.integers(0, there.length(one) + 1))
                live.append(both(pair, lambda c, one=one, length=length: c.fork(one, length)))
            elif act == "free" and len(live) > 1:
                both(pair, lambda c, one=one: c.free(one))
                live.remove(one)
            elif act == "move":
                both(pair, lambda c: c.defragment())
            else:
                append(pair, list({one, live[0]}), rng)
        except PoolExhaustedError:
            both(pair, lambda c, one=one: c.free(one))
            live.remove(one)
            live = live or [both(pair, lambda c: c.allocate())]
    append(pair, [live[0]], rng)
    for x, y in zip(there.read(live), here.read(live), strict=True):
        assert x.numel() and torch.equal(x.cpu(), y)
    assert torch.equal(there.page_table.cpu(), here.page_table)
    assert torch.equal(there.lengths.cpu(), here.lengths)


def both(pair, call):
    """What a call of either cache returns, or raises."""
    found = []
    for one in pair:
        try:
            found.append(call(one))
        except PoolExhaustedError as error:
            found.append(error)
    first, second = (str(x) if isinstance(x, Exception) else x for x in found)
    assert first == second
    if isinstance(found[0], Exception):
        raise found[0]
    return first


def append(pair, some, rng):
    """The same fresh tokens to both caches."""
    counts = [int(n) for n in rng.integers(1, 40, len(some))]
    k, v = normal(sum(counts)), normal(sum(counts))
    both(pair, lambda c: c.reserve(some, counts))
    for one in pair:
        place = one.page_table.device
        fkjit.kv_append(k.to(place), v.to(place), one, one.extend(some, counts))


@pytest.mark.parametrize("rope", [False, True])
def test_decoding_in_a_graph_grows_sequences_without_waiting(rope):
    """One capture, 50 replays; the host neither waits nor learns of anything between them."""
    ours = cache()
    batch = [ours.allocate() for _ in range(3)]
    prompt = [7, 16, 0]
    k, v = normal(sum(prompt)), normal(sum(prompt))
    fkjit.kv_append(k, v, ours, ours.extend(batch, prompt))
    expected = [[x] for x in k.split(prompt)], [[x] for x in v.split(prompt)]
    rows = ours.rows(batch)
    new_q, new_k, new_v = normal(3, 8), normal(3), normal(3)
    at = torch.tensor(prompt, device="cuda", dtype=torch.int32)

    def step():
        slots = fkjit.kv_slots(ours, rows)
        if rope:
            fkjit.rope_kv_append(new_q, new_k, new_v, ours, slots, at)
        else:
            fkjit.kv_append(new_k, new_v, ours, slots)

    fkjit.prepare("kv_slots", ours, rows)
    slots = torch.zeros(3, dtype=torch.int32, device="cuda")
    fkjit.prepare("kv_append", new_k, new_v, ours, slots)
    fkjit.prepare("rope_kv_append", new_q, new_k, new_v, ours, slots, at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        with pytest.raises(CaptureError, match=r"reserve: the stream is being captured"):
            ours.reserve(batch, 1)
    for _ in range(50):
        source_k, source_v = normal(3), normal(3)
        torch.cuda.set_sync_debug_mode("error")
        new_k.copy_(source_k)
        new_v.copy_(source_v)
        ours.reserve(batch, 1)
        graph.replay()
        ours.advance(batch, 1)
        torch.cuda.set_sync_debug_mode("default")
        turned = fkjit.rope(source_k, None, at) if rope else source_k
        for i in range(3):
            expected[0][i].append(turned[i : i + 1])
            expected[1][i].append(source_v[i : i + 1])
    found = ours.read(batch)
    for x, parts in zip(found, expected, strict=True):
        assert torch.equal(x, torch.cat([y for one in parts for y in one]))
    assert ours.lengths.cpu().tolist()[:3] == [57, 66, 50]


def test_a_replay_beyond_what_was_reserved_writes_nothing():
    ours = cache()
    a = ours.allocate()
    rows = ours.rows([a])
    k, v = normal(1), normal(1)
    ours.reserve([a], 16)
    fkjit.prepare("kv_slots", ours, rows)
    fkjit.prepare("kv_append", k, v, ours, torch.zeros(1, dtype=torch.int32, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fkjit.kv_append(k, v, ours, fkjit.kv_slots(ours, rows))
    for _ in range(40):
        graph.replay()
    assert ours.lengths[ours.pool.row(a)].item() == 16
    assert ours.pages()[0].ne(0).flatten(1).any(1).sum().item() == 1
    with pytest.raises(SequenceTooLongError):
        ours.advance([a], 17)


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    for dtype, kept in (("fp16", "float16"), ("fp8", "uint8")):
        ours = cache(framework="cupy", dtype=dtype)
        a = ours.allocate()
        k, v = (cupy.random.standard_normal((50, HEADS, DIM)).astype("f2") for _ in "kv")
        fkjit.kv_append(k, v, ours, ours.extend([a], 50))
        b = ours.fork(a, 33)
        fkjit.kv_append(k[:5], v[:5], ours, ours.extend([b], 5))
        ours.free(a)
        assert ours.defragment() and ours.pages()[0].dtype == kept
        for x, y in zip(ours.read([b], dtype="fp16"), (k, v), strict=True):
            want = cupy.concatenate([y[:33], y[:5]])
            assert float(abs(x - want).max()) <= (0 if dtype == "fp16" else 0.26)


def test_sixteen_thousand_tokens_and_a_stream_of_ones_own():
    ours = cache(num_pages=2100, num_kv_heads=8, head_dim=128, max_length=2**15, num_layers=2)
    a = ours.allocate()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        k, v = (torch.randn(16_384, 8, 128, device="cuda").bfloat16() for _ in "kv")
        slots = ours.extend([a], 16_384)
        for layer in range(2):
            fkjit.kv_append(k + layer, v, ours, slots, layer=layer)
        found = ours.read([a], layer=1)
        assert torch.equal(found[0], k + 1) and torch.equal(found[1], v)
        assert torch.equal(slots, ours.slots([a]))
