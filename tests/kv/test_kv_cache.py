"""fkjit.PagedKVCache on the CPU: against a dictionary of token lists, and what it keeps."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

import fkjit
from fkjit.errors import PoolExhaustedError
from fkjit.ops.kv.append import APPEND
from fkjit.ops.kv.cases import decode, encode
from fkjit.ops.kv.read import READ
from tests.core.sampling import one_in
from tests.kv.kit import DIM, HEADS, append, silent, small, tokens  # noqa: F401

# ------------------------------------------------------------------ any calls in turn


class Against(RuleBasedStateMachine):
    """Each sequence is a list of numbers; a token is that number in every element, v negative."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.cache = small(num_pages=7, max_sequences=4, layout="hnd", num_layers=2)
        self.model: dict[int, list[int]] = {}
        self.token = 0

    @rule(target=sequences)
    def allocate(self):
        if len(self.model) == 4:
            return multiple()
        self.model[sequence := self.cache.allocate()] = []
        return sequence

    @rule(target=sequences, parent=sequences, part=st.floats(0, 1))
    def fork(self, parent, part):
        if parent not in self.model or len(self.model) == 4:
            return multiple()
        length = round(part * len(self.model[parent]))
        child = self.cache.fork(parent, length)
        self.model[child] = self.model[parent][:length]
        return child

    @rule(sequence=consumes(sequences))
    def free(self, sequence):
        if self.model.pop(sequence, None) is not None:
            self.cache.free(sequence)

    @rule(data=st.data(), some=st.lists(sequences, min_size=1, max_size=2, unique=True))
    def append(self, data, some):
        some = [s for s in some if s in self.model]
        counts = [data.draw(st.integers(0, 40)) for _ in some]
        find = data.draw(st.sampled_from([self.cache.extend, self.cache.place]))
        try:
            slots = find(some, counts)
        except PoolExhaustedError:
            return
        self.write(some, counts, slots)

    @rule(data=st.data(), some=st.lists(sequences, min_size=1, max_size=3, unique=True))
    def decode_as_a_graph_does(self, data, some):
        some = [s for s in some if s in self.model]
        steps = data.draw(st.integers(1, 3))
        try:
            self.cache.reserve(some, steps)
        except PoolExhaustedError:
            return
        rows = self.cache.rows(some)
        for _ in range(steps):
            self.write(some, [1] * len(some), fkjit.kv_slots(self.cache, rows))
            self.cache.advance(some, 1)

    def write(self, some, counts, slots):
        new = np.arange(self.token + 1, self.token + 1 + sum(counts), dtype=np.float16)
        self.token += len(new)
        k = np.broadcast_to(new[:, None, None], (len(new), HEADS, DIM)).copy()
        for layer in range(2):
            fkjit.kv_append(k + layer, -k, self.cache, slots, layer=layer)
        for sequence, part in zip(some, np.split(new, np.cumsum(counts)[:-1]), strict=True):
            self.model[sequence] += part.tolist()

    @rule()
    def defragment(self):
        before = self.cache.free_pages
        self.cache.defragment()
        used = {p for s in self.model for p in self.cache.pool.pages(s)}
        assert used == set(range(len(used))) and self.cache.free_pages == before

    @rule(layer=st.integers(0, 1))
    def read(self, layer):
        some = list(self.model)
        k, v = self.cache.read(some, layer=layer)
        expected = np.array([t for s in some for t in self.model[s]], np.float64)
        full = np.broadcast_to(expected[:, None, None], k.shape)
        assert np.array_equal(k, full + layer) and np.array_equal(v, -full)

    @invariant()
    def lengths_agree(self):
        self.cache.flush()
        for sequence, content in self.model.items():
            row = self.cache.pool.row(sequence)
            assert self.cache.length(sequence) == self.cache.lengths[row] == len(content)
        assert np.array_equal(self.cache.page_table, self.cache.pool.page_table)
        assert np.array_equal(self.cache.capacities, self.cache.pool.capacities)


TestAgainst = Against.TestCase
TestAgainst.settings = settings(
    deadline=None, max_examples=15, stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


# ------------------------------------------------------------------ what is kept


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_what_was_appended_is_read_exactly(dtype, layout):
    cache = small(dtype=dtype, layout=layout)
    a, b = cache.allocate(), cache.allocate()
    k, v = append(cache, [a, b], [21, 5], 1, dtype=dtype)
    found = cache.read([b, a])
    for x, y in zip(found, (k, v), strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, np.concatenate([y[21:], y[:21]]))


@pytest.mark.parametrize("kept", ["fp8", "int8"])
def test_tokens_are_divided_by_their_scale(kept):
    """Half-way between two codes, where a product with 1 / scale goes the other way; and far."""
    scale = np.linspace(0.011, 0.097, 16, dtype=np.float32)
    half = np.concatenate(
        [np.arange(-12, 12) + 0.5, [0, 1e9, -1e9, np.inf, -np.inf, 1e-30, 0.1, 3]]
    )
    x = (half[:, None, None] * scale[None, :, None]).astype(np.float32).repeat(8, 2)
    product = np.float32(1) / scale[:, None] * x
    assert (np.rint(product) != np.rint(x / scale[:, None])).any()
    sides = {"num_kv_heads": 16, "head_dim": 8, "k_scale": scale, "v_scale": scale}
    cache = small(dtype=kept, **sides)
    a = cache.allocate()
    fkjit.kv_append(x, -x, cache, cache.extend([a], [len(x)]))
    for kept_as, given in zip(cache.read([a], dtype="fp32"), (x, -x), strict=True):
        assert np.array_equal(kept_as, decode(encode(given, kept, scale), kept, scale, "fp32"))


@one_in(2)
@pytest.mark.parametrize("given", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("kept", ["fp8", "int8"])
def test_scaled_storage_rounds_once_each_way(kept, given):
    scale = np.array([[0.01, 0.03], [0.5, 0.02]], np.float32)
    cache = small(dtype=kept, num_layers=2, k_scale=scale, v_scale=0.02)
    a = cache.allocate()
    k, v = append(cache, [a], [40], 3, layer=1, dtype=given)
    found = cache.read([a], layer=1, dtype=given)
    for x, y, s in zip(found, (k, v), (scale[1], np.full(2, 0.02, np.float32)), strict=True):
        assert np.array_equal(x, decode(encode(y, kept, s), kept, s, given))
        near = np.abs(y.astype(np.float64)) < 2.4 * (s[:, None] / 0.02)
        step = {"fp8": 0.07, "int8": 0.0}[kept]
        off = np.abs(x.astype(np.float64) - y.astype(np.float64))
        assert (off <= s[:, None] * 0.52 + (step + 0.01) * np.abs(y))[near].all()
    assert cache.read([a], dtype=None)[0].dtype == ml_dtypes.bfloat16


def test_what_no_code_holds():
    """Beyond the greatest number, infinite, NaN."""
    values = np.array([500, -1e4, np.inf, -np.inf, np.nan, 0, -0.0, 3], np.float32)
    k = np.broadcast_to(values, (1, HEADS, DIM)).copy()
    for kept, expected in (
        ("fp8", [448, -448, 448, -448, np.nan, 0, 0, 3]),
        ("int8", [127, -127, 127, -127, -127, 0, 0, 3]),
    ):
        cache = small(dtype=kept)
        a = cache.allocate()
        fkjit.kv_append(k, k, cache, cache.extend([a], 1))
        found = cache.read([a], dtype="fp32")[0][0, 0]
        assert np.array_equal(found, np.array(expected, np.float32), equal_nan=True)


def test_a_fork_and_its_parent_go_apart():
    cache = small()
    a = cache.allocate()
    k, _ = append(cache, [a], [20], 1)
    b = cache.fork(a)
    c = cache.fork(a, 18)
    assert cache.free_pages == 10
    more, _ = append(cache, [a, b, c], [1, 2, 3], 5)
    assert cache.free_pages == 8  # two copies of the second page; the third sequence keeps it
    for sequence, first, last, length in ((a, 0, 1, 20), (b, 1, 3, 20), (c, 3, 6, 18)):
        expected = np.concatenate([k[:length], more[first:last]])
        assert np.array_equal(cache.read([sequence])[0], expected)


def test_tokens_that_were_not_reserved_are_not_written():
    cache = small()
    a, b = cache.allocate(), cache.allocate()
    append(cache, [a], [15], 1)
    rows = cache.rows([a, b])
    slots = [fkjit.kv_slots(cache, rows).tolist() for _ in range(2)]
    assert slots == [[15, -1], [-1, -1]]
    assert cache.lengths[cache.pool.row(a)] == 16 and cache.lengths[cache.pool.row(b)] == 0


def test_a_forked_page_cannot_be_written_before_reserve():
    cache = small()
    a = cache.allocate()
    append(cache, [a], [5], 1)
    b = cache.fork(a)
    rows = cache.rows([a, b])
    assert fkjit.kv_slots(cache, rows).tolist() == [-1, -1]
    cache.reserve([a, b])
    first, second = fkjit.kv_slots(cache, rows).tolist()
    assert first % 16 == second % 16 == 5 and first // 16 != second // 16


def test_rows_of_no_sequence_and_ragged_counts():
    cache = small()
    a, b = cache.allocate(), cache.allocate()
    cache.reserve([a, b], [20, 20])
    rows = np.array([cache.pool.row(b), -1, cache.pool.row(a)], np.int32)
    ends = np.array([0, 2, 5, 6], np.int32)
    slots = fkjit.kv_slots(cache, rows, ends, num_tokens=6)
    page_a, page_b = cache.pool.pages(a)[0], cache.pool.pages(b)[0]
    assert slots.tolist() == [page_b * 16, page_b * 16 + 1, -1, -1, -1, page_a * 16]
    first = fkjit.kv_slots(cache, rows, ends, num_tokens=6, append=False)
    assert first.tolist() == slots.tolist() and cache.lengths[rows[0]] == 2


def test_flashinfer_views():
    cache = small(layout="nhd")
    a, b, c = (cache.allocate() for _ in range(3))
    k, _ = append(cache, [a, b], [32, 5], 1)
    indptr, indices, last = cache.flashinfer([b, c, a])
    assert indptr.tolist() == [0, 1, 1, 3] and last.tolist() == [5, 0, 16]
    pages = cache.pages()[0]
    assert pages.shape == (12, 16, HEADS, DIM)
    assert np.array_equal(pages[indices[0], :5], k[32:])
    assert np.array_equal(pages[indices[1:]].reshape(-1, HEADS, DIM), k[:32])


def test_a_large_table_goes_over_in_one_piece_and_in_several():
    cache = small(num_pages=9000, num_kv_heads=1, max_sequences=2)
    a, b = cache.allocate(), cache.allocate()
    cache.reserve([a, b], [5000 * 16, 3])
    assert np.array_equal(cache.page_table, cache.pool.page_table)
    cache.free(a)
    cache.flush()
    assert np.array_equal(cache.page_table, cache.pool.page_table)


def test_nothing_to_do():
    cache = small()
    a = cache.allocate()
    slots = cache.extend([a], 0)
    assert slots.shape == (0,) and cache.extend([]).shape == (0,)
    fkjit.kv_append(tokens(0, 1), tokens(0, 1), cache, slots)
    assert [x.shape for x in cache.read([a])] == [(0, HEADS, DIM)] * 2
    assert cache.defragment() == {}


def test_pairs_of_arrays_of_any_strides():
    """As FlashInfer keeps them in one array; tokens as a slice of q, k and v in one."""
    both = np.full((4, 2, 16, HEADS, DIM), 9, np.float16)
    packed = tokens(6, 1, heads=3 * HEADS)
    k, v = packed[:, HEADS : 2 * HEADS], packed[:, 2 * HEADS :]
    slots = np.array([3, 60, -1, 16, 17, 0], np.int64)
    fkjit.kv_append(k, v, (both[:, 0], both[:, 1]), slots)
    expected = np.full_like(both, 9)
    for i, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // 16, 0, slot % 16], expected[slot // 16, 1, slot % 16] = k[i], v[i]
    assert np.array_equal(both, expected)
    out = np.empty_like(packed)
    ours = (out[:, :HEADS], out[:, 2 * HEADS :])
    found = fkjit.kv_read((both[:, 0], both[:, 1]), slots, out=ours)
    assert found[0] is ours[0]
    for x, y in zip(ours, (k, v), strict=True):
        assert np.array_equal(x, np.where((slots >= 0)[:, None, None], y, 0))


@pytest.mark.parametrize("spec", [APPEND, READ], ids=lambda spec: spec.op)
def test_the_kernels_themselves_leave_slots_alone_that_there_are_not(spec):
    """Which the calls refuse on the CPU, where slots can be looked at."""
    params = next(spec.variants())
    problem = spec.verification.problems(params, "small")[1]
    given = spec.verification.inputs(params, problem, np.random.default_rng(5))
    there = problem["num_pages"] * problem["page_size"]
    given["slot_mapping"][:4] = there, there + 7, -5, 2**31 - 1
    arrays = {**given, **spec.verification.outputs(params, problem)}
    fkjit.launch(spec, params, problem, arrays)
    slots = given["slot_mapping"]
    none = {**given, "slot_mapping": np.where(slots < there, slots, -1)}
    for output, expected in spec.verification.reference(problem, none).items():
        seen = np.isfinite(expected)
        assert np.array_equal(arrays[output][seen], expected[seen])


def test_keys_and_values_of_other_strides():
    """k in a pool of both, v in one of its own whose heads lie before its tokens."""
    both = np.full((4, 2, 16, HEADS, DIM), 9, np.float16)
    other = np.full((4, HEADS, 16, DIM), 9, np.float16).transpose(0, 2, 1, 3)
    k, v, slots = tokens(9, 1), tokens(9, 2), np.array([40, 3, 63, 0, 17, 16, 62, 5, 33], np.int64)
    q, at = tokens(9, 3), np.arange(9)
    fkjit.kv_append(k, v, (both[:, 0], other), slots)
    places = slots // 16, slots % 16
    assert np.array_equal(both[:, 0][places], k) and np.array_equal(other[places], v)
    assert (both == 9).sum() == both.size - k.size and (other == 9).sum() == other.size - v.size
    for x, y in zip(fkjit.kv_read((both[:, 0], other), slots), (k, v), strict=True):
        assert np.array_equal(x, y)
    fkjit.rope_kv_append(q, k, -v, (both[:, 0], other), slots, at)
    turned = fkjit.rope(k, None, at)
    assert np.array_equal(both[:, 0][places], turned) and np.array_equal(other[places], -v)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_torch_tensors(dtype):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, dtype)
    cache = fkjit.PagedKVCache(4, page_size=16, num_kv_heads=HEADS, head_dim=DIM, dtype=dtype,
                               device=torch.device("cpu"), k_scale=1.0)  # fmt: skip
    a = cache.allocate()
    k, v = (torch.randn(20, HEADS, DIM).bfloat16() for _ in "kv")
    fkjit.kv_append(k, v, cache, cache.extend([a], 20))
    fkjit.prepare("kv_append", k, v, cache, cache.slots([a]))
    found = cache.read([a])
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(found[0], k.to(dtype).bfloat16())
    assert torch.equal(found[1], v.to(dtype).bfloat16())
    assert cache.pages()[0].dtype == dtype and cache.page_table.dtype == torch.int32


def test_integers_are_divided_exactly_by_a_product():
    """As Lanes in kv/place.cuh does, around multiples of every kind of divisor."""
    rng = np.random.default_rng(1)
    divisors = np.concatenate([np.arange(1, 2049), rng.integers(2049, 2**22, 2000)])
    for divisor in divisors:
        multiples = rng.integers(0, 2**22 // divisor + 1, 50) * divisor
        x = np.clip(multiples[:, None] + np.arange(-1, 2), 0, 2**22 - 1)
        quotient = ((x + 0.5).astype(np.float32) * np.float32(1 / divisor)).astype(int)
        assert np.array_equal(quotient, x // divisor), divisor


# ------------------------------------------------------------------ with the rotary embedding


@one_in(3)
@pytest.mark.parametrize("kept", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("options", [{}, {"interleaved": True, "rotary_dim": 4}], ids=str)
@pytest.mark.parametrize("dim", [32, 6])
def test_rope_and_append_are_one_to_the_bit(dim, options, kept):
    """Whole 16-byte accesses, and single elements; with a table, too."""
    scales = {} if kept == "bf16" else {"k_scale": 0.02, "v_scale": 0.03}
    q, k, v = (tokens(21, i, "bf16", heads, dim) for i, heads in enumerate((5, 2, 2)))
    positions = np.arange(21, dtype=np.int32) * 40_000
    table = fkjit.rope_table(50, options.get("rotary_dim", dim))
    for given, at in (({"theta": 5e5}, positions), ({"table": table}, positions // 40_000)):
        one, two = (small(dtype=kept, head_dim=dim, **scales) for _ in range(2))
        slots = one.extend([one.allocate()], 21)
        slots[4] = -1
        turned = fkjit.rope_kv_append(q, k, v, one, slots, at, **given, **options)
        expected, k_turned = fkjit.rope(q, k, at, **given, **options)
        fkjit.kv_append(k_turned, v, two, slots)
        assert np.array_equal(turned, expected)
        for x, y in zip(one.pages(), two.pages(), strict=True):
            assert np.array_equal(x.view(np.uint8), y.view(np.uint8))
    again = q.copy()
    found = fkjit.rope_kv_append(again, k, v, one, slots, at, **given, **options, inplace=True)
    assert found is again and np.array_equal(again, expected)
