"""Products in step with copies, on a GPU: rows that another stream brings while the product runs,
and rows that it takes away, by way of pinned memory of the host, whose copies need no SM."""

from __future__ import annotations

import pytest

from fkjit.jit.build import quiet

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.gpu
RANKS, CHUNKS = 4, 2
SHAPES = [(2048, 1024, 512), (2048, 264, 136), (4096, 4096, 1024)]


@pytest.fixture(autouse=True)
def silent():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    with quiet():
        yield


def rows_of(chunk: int, rows: int) -> slice:
    each = rows // (RANKS * CHUNKS)
    return slice(chunk * each, (chunk + 1) * each)


def others(rank: int) -> list[int]:
    """Chunks of the other ranks, the next one's first."""
    ranks = ((rank + by) % RANKS for by in range(1, RANKS))
    return [r * CHUNKS + chunk for r in ranks for chunk in range(CHUNKS)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("gate", [False, True])
def test_tiles_wait_for_their_rows(shape, rank, gate):
    """Rows that are not there yet are NaN: who does not wait multiplies them."""
    import fkjit
    from fkjit.ops.gemm.flagged import linear_flagged
    from fkjit.runtime.stream_values import write_word

    m, n, k = shape
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n * (1 + gate), k, device="cuda", dtype=torch.bfloat16) / k**0.5
    given = {"activation": "silu", "gate": True} if gate else {}
    wanted, host, whole = fkjit.linear(x, weight, **given), x.cpu().pin_memory(), x.clone()
    exact = (x[::97].double() @ weight.double().T).chunk(1 + gate, 1)
    exact = torch.nn.functional.silu(exact[0]) * exact[1] if gate else exact[0]
    out = torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
    flags = torch.ones(RANKS * CHUNKS, dtype=torch.int32, device="cuda")
    side = torch.cuda.Stream()
    how = {"how": "waits", "chunk_rows": m // (RANKS * CHUNKS), "from_row": rank * m // RANKS}
    linear_flagged(whole, weight, None, flags, out, **how, **given)  # compiled and loaded
    for chunk in others(rank):
        whole[rows_of(chunk, m)] = torch.nan
        flags[chunk] = 0
    out.fill_(torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # cycles: the product is there first
        for chunk in others(rank):
            rows = rows_of(chunk, m)
            whole[rows].copy_(host[rows], non_blocking=True)
            write_word(side.cuda_stream, flags.data_ptr(), chunk, 1)
    linear_flagged(whole, weight, None, flags, out, **how, **given)
    torch.cuda.synchronize()
    limit = float(exact.abs().max()) * 2.0**-7
    assert float((out.float() - wanted.float()).abs().max()) < limit
    assert float((out[::97].double() - exact).abs().max()) < limit


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rank", [0, 2])
def test_rows_are_taken_when_they_are_there(shape, rank):
    from fkjit.ops.gemm.flagged import finished_count, linear_flagged
    from fkjit.runtime.stream_values import wait_word

    m, n, k = shape
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    weight = torch.randn(n, k, device="cuda", dtype=torch.float16) / k**0.5
    made = torch.full((m, n), torch.nan, device="cuda", dtype=torch.float16)
    flags = torch.zeros(RANKS * CHUNKS, dtype=torch.int32, device="cuda")
    side, chunk_rows = torch.cuda.Stream(), m // (RANKS * CHUNKS)
    full = finished_count(x, weight, made, chunk_rows=chunk_rows)
    how = {"how": "tells", "chunk_rows": chunk_rows, "from_row": (rank + 1) % RANKS * m // RANKS}
    linear_flagged(x, weight, None, flags, made, **how)
    assert flags.tolist() == [full] * (RANKS * CHUNKS)
    host = torch.full((m, n), torch.nan, dtype=torch.float16, pin_memory=True)
    flags.zero_()
    made.fill_(torch.nan)
    side.wait_stream(torch.cuda.current_stream())
    linear_flagged(x, weight, None, flags, made, **how)
    with torch.cuda.stream(side):
        for chunk in others(rank):
            wait_word(side.cuda_stream, flags.data_ptr(), chunk, full)
            rows = rows_of(chunk, m)
            host[rows].copy_(made[rows], non_blocking=True)
    torch.cuda.synchronize()
    exact = x.double() @ weight.double().T
    for chunk in others(rank):
        rows = rows_of(chunk, m)
        error = (host[rows].double() - exact[rows].cpu()).abs().max()
        assert float(error) < float(exact.abs().max()) * 2.0**-9
