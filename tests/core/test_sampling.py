"""What the mark `sampled` keeps of a test's cases by default."""

from __future__ import annotations

import itertools

from tests.core.mutations import BUGS
from tests.core.sampling import ONE_OF_EACH_KIND, covering, one_in, spread


def test_each_value_stays_with_each_of_the_shorter_axis_in_turns():
    axes = {"shape": [(3, 64), (2, 3), (9,), (4, 4)], "dtype": ["fp16", "bf16", "fp32"]}
    key = one_in(3, **axes).kwargs["key"]
    cases = [dict(zip(axes, each, strict=True)) for each in itertools.product(*axes.values())]
    kept = [case for case in cases if key(**case) is not None]
    assert len(kept) == len(cases) // 3 and len({key(**case) for case in kept}) == len(kept)
    for name, values in axes.items():
        assert {repr(case[name]) for case in kept} == set(map(repr, values))


def test_a_bug_stays_of_each_kernel_and_of_each_kind():
    of = [ONE_OF_EACH_KIND.kwargs["cover"](bug) for bug in BUGS]
    kept = [BUGS[place] for place in covering(of)]
    assert {bug.kernel for bug in kept} == {bug.kernel for bug in BUGS}
    assert {bug.by for bug in kept} == {bug.by for bug in BUGS}
    assert len(kept) <= len(set().union(*of)) < len(BUGS)
    assert covering([{1}, {2, 3}, {3}, set()]) == {0, 1} and covering([]) == set()


def test_one_in_so_many_has_as_many_values_as_it_can():
    axes = {"dtype": ["fp16", "bf16", "fp32"], "gate": [True, False], "layout": ["nk", "kn"]}
    cases = [dict(zip(axes, each, strict=True)) for each in itertools.product(*axes.values())]
    kept = [cases[place] for place in spread(cases, 3)]
    assert len(kept) == 4
    for name, values in axes.items():
        assert {case[name] for case in kept} == set(values)
    assert spread(cases, 3) == spread(cases, 3) and len(spread([{}], 2)) == 1
