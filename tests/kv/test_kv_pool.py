"""The page pool of the KV cache against a dictionary of token lists, whatever is called in turn."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from fkjit.errors import (
    ArgumentTypeError,
    FkjitError,
    ParameterError,
    PoolExhaustedError,
    SequenceTooLongError,
    UnknownSequenceError,
)
from fkjit.ops.kv.pool import PagePool

PAGES, SIZE, SEQUENCES, LONGEST = 12, 4, 6, 5  # pages of 4 tokens; at most 5 of them a sequence
PAGES_TABLE = SEQUENCES * min(PAGES, LONGEST)  # cells
POISON = -7


def everything(pool):
    """All that a pool knows, to compare before and after."""
    return copy.deepcopy({k: v for k, v in vars(pool).items() if k != "changed"})


def same(one, two):
    """Whether two of those are alike."""
    return one.keys() == two.keys() and all(np.array_equal(one[k], two[k]) for k in one)


class Against(RuleBasedStateMachine):
    """`self.model` is what must come out; `self.memory` what pages hold, moved as the pool says."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES, SIZE, SEQUENCES, LONGEST)
        self.memory = np.full((PAGES, SIZE), POISON)
        self.model: dict[int, list[int]] = {}
        self.token = 0

    def refused(self, error, call):
        before = everything(self.pool)
        with pytest.raises(error):
            call()
        assert same(before, everything(self.pool))

    def pages_in_use(self):
        return {page for s in self.model for page in self.pool.pages(s)}

    @rule(target=sequences)
    def allocate(self):
        if len(self.model) == SEQUENCES:
            self.refused(PoolExhaustedError, self.pool.allocate)
            return multiple()
        sequence = self.pool.allocate()
        assert sequence not in self.model
        self.model[sequence] = []
        return sequence

    @rule(target=sequences, parent=sequences, part=st.floats(0, 1))
    def fork(self, parent, part):
        if parent not in self.model:
            self.refused(UnknownSequenceError, lambda: self.pool.fork(parent))
            return multiple()
        length = round(part * len(self.model[parent]))
        if len(self.model) == SEQUENCES:
            self.refused(PoolExhaustedError, lambda: self.pool.fork(parent, length))
            return multiple()
        free = self.pool.free_pages
        child = self.pool.fork(parent, length)
        assert self.pool.free_pages == free
        self.model[child] = self.model[parent][:length]
        return child

    @rule(sequence=consumes(sequences))
    def free(self, sequence):
        if sequence not in self.model:
            self.refused(UnknownSequenceError, lambda: self.pool.free(sequence))
            return
        self.pool.free(sequence)
        del self.model[sequence]
        unused = list(set(range(PAGES)) - self.pages_in_use())
        self.memory[unused] = POISON
        self.refused(UnknownSequenceError, lambda: self.pool.free(sequence))

    @rule(data=st.data(), some=st.lists(sequences, min_size=1, max_size=3, unique=True))
    def append(self, data, some):
        some = [s for s in some if s in self.model]
        counts = [data.draw(st.integers(0, 2 * SIZE + 1)) for _ in some]
        copies = self.reserve(some, counts)
        if copies is None:
            return
        for source, target in copies:
            assert (self.memory[target] == POISON).all()
            self.memory[target] = self.memory[source]
        slots = []
        for sequence, count in zip(some, counts, strict=True):
            row = self.pool.row(sequence)
            for at in range(len(self.model[sequence]), len(self.model[sequence]) + count):
                self.token += 1
                self.model[sequence].append(self.token)
                assert at < self.pool.capacities[row]
                page = self.pool.page_table[row, at // SIZE]
                self.memory[page, at % SIZE] = self.token
                slots.append(page * SIZE + at % SIZE)
        if data.draw(st.booleans()):
            self.pool.advance(some, counts)
        else:
            self.placed(some, counts, slots)

    def placed(self, some, counts, slots):
        """The device hears of the lengths, which nobody counts there."""
        before = len(self.pool.changed)
        assert self.pool.place(some, counts).tolist() == slots
        heard = {at for span in self.pool.changed[before:] for at in range(*span)}
        at = PAGES_TABLE + np.array([self.pool.row(sequence) for sequence in some])
        assert heard == set(at.tolist())

    @rule(data=st.data(), sequence=sequences)
    def reserve_only(self, data, sequence):
        if sequence in self.model:
            count = data.draw(st.integers(0, 2 * SIZE))
            for source, target in self.reserve([sequence], [count]) or ():
                self.memory[target] = self.memory[source]

    def reserve(self, some, counts):
        """The copies, or None where it was rightly refused."""
        needs = [len(self.model[s]) + n for s, n in zip(some, counts, strict=True)]
        if max(needs, default=0) > SIZE * LONGEST:
            self.refused(SequenceTooLongError, lambda: self.pool.reserve(some, counts))
            return None
        free, before = self.pool.free_pages, everything(self.pool)
        try:
            copies = self.pool.reserve(some, counts)
        except PoolExhaustedError as error:
            assert same(before, everything(self.pool))
            assert error.needed > error.free == free
            return None
        for sequence, need in zip(some, needs, strict=True):
            assert need <= self.pool.capacity(sequence) or need == len(self.model[sequence])
        return copies

    @rule()
    def defragment(self):
        used = self.pages_in_use()
        moved = self.pool.defragment()
        assert not set(moved) & set(moved.values()) and set(moved) <= used
        for source, target in moved.items():
            self.memory[target] = self.memory[source]
            self.memory[source] = POISON
        assert self.pages_in_use() == set(range(len(used)))

    @rule(sequence=sequences, beyond=st.integers(1, 3))
    def write_what_was_not_reserved(self, sequence, beyond):
        if sequence in self.model:
            count = self.pool.capacity(sequence) - self.pool.length(sequence) + beyond
            for call in (self.pool.advance, self.pool.place):
                self.refused(SequenceTooLongError, partial(call, [sequence], [count]))

    @invariant()
    def tokens_are_where_the_tables_say(self):
        assert set(self.pool.sequences) == set(self.model)
        for sequence, tokens in self.model.items():
            row, count = self.pool.row(sequence), len(tokens)
            pages = self.pool.page_table[row]
            found = [self.memory[pages[i // SIZE], i % SIZE] for i in range(count)]
            assert found == tokens
            assert self.pool.length(sequence) == self.pool.lengths[row] == count
            assert self.pool.capacity(sequence) == self.pool.capacities[row] >= count
            assert list(pages[pages >= 0]) == list(self.pool.pages(sequence))

    @invariant()
    def pages_are_free_or_used_and_rows_without_sequence_are_blank(self):
        assert self.pool.free_pages == PAGES - len(self.pages_in_use())
        rows = {self.pool.row(sequence) for sequence in self.model}
        assert len(rows) == len(self.model)
        for row in set(range(SEQUENCES)) - rows:
            assert (self.pool.page_table[row] == -1).all()
            assert self.pool.lengths[row] == self.pool.capacities[row] == 0

    @invariant()
    def no_page_that_may_be_written_is_shared(self):
        for sequence in self.model:
            length, capacity = self.pool.length(sequence), self.pool.capacity(sequence)
            for page in self.pool.pages(sequence)[length // SIZE : -(-capacity // SIZE)]:
                if length < capacity:
                    others = [s for s in self.model if page in self.pool.pages(s)]
                    assert others == [sequence]

    @invariant()
    def what_changed_is_noted(self):
        mirror = getattr(self, "mirror", np.full_like(self.pool.state, POISON))
        for first, last in self.pool.changed:
            mirror[first:last] = self.pool.state[first:last]
        self.pool.changed.clear()
        rows = [self.pool.row(sequence) for sequence in self.model]
        at = SEQUENCES * LONGEST + np.array(rows, int)
        mirror[at] = self.pool.state[at]  # whoever writes tokens counts them there
        assert np.array_equal(mirror, self.pool.state)
        self.mirror = mirror


TestAgainst = Against.TestCase
TestAgainst.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)


def filled():
    """A pool with a sequence of 6 tokens, number 0, and one that was freed, number 1."""
    pool = PagePool(PAGES, SIZE, SEQUENCES, LONGEST)
    for length in (6, 3):
        sequence = pool.allocate()
        pool.reserve([sequence], [length])
        pool.advance([sequence], [length])
    pool.free(1)
    return pool


# fmt: off
REFUSALS = [  # id, call, error, message
    ("double free", lambda p: p.free(1), UnknownSequenceError, "free: sequence 1 was freed"),
    ("unknown", lambda p: p.length(9), UnknownSequenceError, "sequence 9 was never allocated"),
    ("negative", lambda p: p.fork(-1), UnknownSequenceError, "sequence -1 was never allocated"),
    ("no number", lambda p: p.free("a"), ArgumentTypeError, "sequence='a' is not a whole number"),
    ("fork beyond", lambda p: p.fork(0, 7), SequenceTooLongError, "length=7.* has 6 tokens"),
    ("fork below", lambda p: p.fork(0, -1), ParameterError, "length=-1; allowed: 0 and above"),
    ("too long", lambda p: p.reserve([0], [15]), SequenceTooLongError, "6 tokens; 15 .* beyond 20"),
    ("half a token", lambda p: p.reserve([0], [0.5]), ArgumentTypeError, "tokens=0.5 is not"),
    ("fewer than none", lambda p: p.reserve([0], [-1]), ParameterError, "tokens=-1; allowed: 0 "),
    ("counts", lambda p: p.reserve([0], [1, 2]), ParameterError, "2 counts of tokens for 1 seq"),
    ("twice", lambda p: p.reserve([0, 0], [1, 1]), ParameterError, r"sequences \[0\] appear more"),
    ("not reserved", lambda p: p.advance([0], [3]), SequenceTooLongError, "room for 8; 3 more"),
]
# fmt: on


@pytest.mark.parametrize(("call", "error", "message"), [r[1:] for r in REFUSALS],
                         ids=[r[0] for r in REFUSALS])  # fmt: skip
def test_refusals_leave_the_pool_as_it_was(call, error, message):
    pool = filled()
    before = everything(pool)
    with pytest.raises(error, match=message) as caught:
        call(pool)
    assert isinstance(caught.value, FkjitError) and same(before, everything(pool))


def test_an_exhausted_pool_says_what_is_missing_and_can_be_used_again():
    pool = PagePool(3, 16, 4, 8)
    a, b = pool.allocate(), pool.allocate()
    pool.reserve([a], [33])
    with pytest.raises(PoolExhaustedError, match="need 1 pages; 0 of 3 are free") as caught:
        pool.reserve([b], [1])
    assert (caught.value.needed, caught.value.free) == (1, 0)
    pool.free(a)
    assert pool.reserve([b], [48]) == [] and pool.pages(b) == (0, 1, 2)


def test_two_forks_that_write_copy_one_page_fewer_than_they_share():
    pool = filled()
    child = pool.fork(0)
    assert pool.pages(child) == pool.pages(0) == (0, 1)
    assert pool.reserve([0, child], [1, 1]) == [(1, 2)]
    assert pool.pages(0) == (0, 2) and pool.pages(child) == (0, 1)


def test_whole_pages_are_shared_without_any_copy():
    pool = filled()
    child = pool.fork(0, 4)
    assert pool.reserve([0, child], [1, 1]) == []
    assert pool.pages(child)[0] == pool.pages(0)[0] and pool.pages(child)[1] != pool.pages(0)[1]
