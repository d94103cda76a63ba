"""What the mark `sampled` keeps of a test's cases by default."""

from __future__ import annotations

import itertools

from tests.core.mutations import BUGS
from tests.core.sampling import ONE_OF_EACH_KIND, one_in, spread


def test_each_value_stays_with_each_of_the_shorter_axis_in_turns():
    axes = {"shape": [(3, 64), (2, 3), (9,), (4, 4)], "dtype": ["fp16", "bf16", "fp32"]}
    key = one_in(3, **axes).kwargs["key"]
    cases = [dict(zip(axes, each, strict=True)) for each in itertools.product(*axes.values())]
    kept = [case for case in cases if key(**case) is not None]
    assert len(kept) == len(cases) // 3 and len({key(**case) for case in kept}) == len(kept)
    for name, values in axes.items():
        assert {repr(case[name]) for case in kept} == set(map(repr, values))


def test_a_bug_of_each_kind_stays_in_each_kernel():
    keys = {ONE_OF_EACH_KIND.kwargs["key"](bug) for bug in BUGS}
    assert {(bug.kernel, bug.by) for bug in BUGS} == keys
    assert len(keys) < len(BUGS)


def test_one_in_so_many_has_as_many_values_as_it_can():
    axes = {"dtype": ["fp16", "bf16", "fp32"], "gate": [True, False], "layout": ["nk", "kn"]}
    cases = [dict(zip(axes, each, strict=True)) for each in itertools.product(*axes.values())]
    kept = [cases[place] for place in spread(cases, 3)]
    assert len(kept) == 4
    for name, values in axes.items():
        assert {case[name] for case in kept} == set(values)
    assert spread(cases, 3) == spread(cases, 3) and len(spread([{}], 2)) == 1
