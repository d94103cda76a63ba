"""The interpreter against a GPU: every case of tests/golden gives what the GPU gave.

The goldens are made by `python -m tests.golden.generate` on a GPU of compute capability 9.0.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fkjit.errors import SanitizerError
from fkjit.interp import Checks
from tests.core.sampling import one_in
from tests.golden.case import Case, Tolerance
from tests.golden.compare import differing, report
from tests.golden.compile import GPU, compile_kernel
from tests.golden.groups import GROUPS, cases_of
from tests.golden.produce import MOST_WORKERS, failure, produce
from tests.golden.replay import replay
from tests.golden.store import DATA, Golden, load, save


@cache
def stored(group: str) -> Golden | None:
    try:
        return load(DATA, group)
    except FileNotFoundError:
        return None


def golden_of(group: str, case: Case) -> dict[str, np.ndarray]:
    """The case's outputs on the GPU; the test is skipped where there are none yet."""
    golden = stored(group)
    if golden is None:
        pytest.skip(f"no goldens of {group}: python -m tests.golden.generate {group} on a GPU")
    if case.name not in golden.outputs:
        pytest.skip(f"no golden of {group}/{case.name}: generate it on a GPU")
    assert golden.digests[case.name] == case.digest(), (
        f"{group}/{case.name} is not the case that its golden was made of: generate it again"
    )
    return golden.outputs[case.name]


def assert_same(case: Case, got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, kind in case.outputs.items():
        wrong = differing(got[name], expected[name], kind, case.tolerance)
        assert not wrong.any(), f"{name}: {report(got[name], expected[name], kind, wrong)}"


EVERY = [(group, name) for group in GROUPS for name in cases_of(group)]


@one_in(3)
@pytest.mark.parametrize(("group", "name"), EVERY, ids=[f"{g}/{n}" for g, n in EVERY])
def test_interpreter_gives_what_the_gpu_gave(group: str, name: str) -> None:
    case = cases_of(group)[name]
    expected = golden_of(group, case)
    if case.fault:
        with pytest.raises(SanitizerError):
            replay(case)
        return
    assert_same(case, replay(case), expected)


RACES = ("warp", "copy", "matrix", "wmma", "barrier", "bulk", "tma", "cluster")


@pytest.mark.parametrize("group", RACES)
def test_no_race_is_seen_where_there_is_none(group: str) -> None:
    for case in cases_of(group).values():
        if case.fault:
            continue
        plain, checked = replay(case), replay(case, Checks(race=True))
        assert_same(case, checked, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_goldens_still_match_the_gpu(group: str) -> None:
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("the cases are compiled for compute capability 9.0")
    golden = stored(group)
    if golden is None:
        pytest.skip(f"no goldens of {group}")
    results = produce("gpu", group, list(golden.outputs))
    cases = cases_of(group)
    reasons = {name: failure(cases[name], result) for name, result in results.items()}
    failed = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    for name, result in results.items():
        if isinstance(result, dict):
            assert_same(cases[name], result, golden.outputs[name])
    assert not failed, "\n".join(failed)


def test_cases_take_the_same_inputs_every_time() -> None:
    for group in ("warp", "mma"):
        case = next(iter(cases_of(group).values()))
        first, second = case.make_arrays(), case.make_arrays()
        assert all(np.array_equal(first[name], second[name]) for name in first)
        assert case.digest() == case.digest()
    a, b, *_ = cases_of("integer").values()
    assert a.digest() != b.digest()


def test_a_case_of_every_group_compiles_for_the_gpu() -> None:
    for group in GROUPS:
        case = next(iter(cases_of(group).values()))
        assert compile_kernel(case.source, GPU)[:4] == b"\x7fELF"


def test_goldens_come_back_as_they_were_saved(tmp_path) -> None:
    golden = Golden({"gpu": "none"})
    rng = np.random.RandomState(4)
    outputs = {"d": rng.randint(0, 99, (3, 5)).astype("u2"), "e": rng.rand(7)}
    golden.add("one", "abc", outputs)
    golden.add("two", "def", {"d": np.arange(3, dtype="u1")})
    save(tmp_path, "cvt", golden)
    again = load(tmp_path, "cvt")
    assert again.made_by == golden.made_by and again.digests == golden.digests
    for name, array in outputs.items():
        assert again.outputs["one"][name].dtype == array.dtype
        np.testing.assert_array_equal(again.outputs["one"][name], array)
    np.testing.assert_array_equal(again.outputs["two"]["d"], [0, 1, 2])


def test_workers_hand_back_results_and_reasons() -> None:
    results = produce("interpreter", "warp", ["vote.all", "vote.none", "vote.any"])
    assert list(results) == ["vote.all", "vote.none", "vote.any"]
    for name in ("vote.all", "vote.any"):
        result = results[name]
        assert isinstance(result, dict)
        assert_same(cases_of("warp")[name], result, replay(cases_of("warp")[name]))
    assert str(results["vote.none"]).startswith("KeyError")


FLOAT_BITS = {
    # kind: one, the next float, a NaN, another NaN
    "f16": (0x3C00, 0x3C01, 0x7E00, 0xFE01),
    "bf16": (0x3F80, 0x3F81, 0x7FC0, 0xFFC1),
    "f32": (0x3F800000, 0x3F800001, 0x7FC00000, 0xFFFFFFFF),
    "f64": (0x3FF0 << 48, (0x3FF0 << 48) + 1, 0x7FF8 << 48, 0xFFF << 52 | 1),
}


@pytest.mark.parametrize("kind", FLOAT_BITS)
def test_comparison_of_floats(kind: str) -> None:
    one, following, nan, other = np.array(
        FLOAT_BITS[kind], {"f16": "u2", "bf16": "u2", "f32": "u4", "f64": "u8"}[kind]
    )
    got, expected = np.array([one, one, nan, nan]), np.array([one, following, other, one])
    assert differing(got, expected, kind).tolist() == [False, True, False, True]
    near = differing(got, expected, kind, Tolerance(ulps=1))
    assert near.tolist() == [False, False, False, True]
    assert differing(got, expected, kind, Tolerance(ulps=0.4)).tolist() == [
        False,
        True,
        False,
        True,
    ]
    assert differing(got, expected, kind, Tolerance(absolute=1)).tolist() == near.tolist()


def test_comparison_of_bytes_and_infinities() -> None:
    got = np.array([0x7F, 0xFF, 0x7E, 0x01], np.uint8)
    expected = np.array([0xFF, 0x7F, 0x7F, 0x01], np.uint8)
    assert differing(got, expected, "e4m3").tolist() == [False, False, True, False]
    assert differing(got, expected, "u8").tolist() == [True, True, True, False]
    infinite = np.array([0x7F800000, 0x7F7FFFFF], np.uint32)
    wrong = differing(infinite, infinite[::-1].copy(), "f32", Tolerance(relative=1, ulps=4))
    assert wrong.tolist() == [True, True]
    text = report(infinite, infinite[::-1].copy(), "f32", wrong)
    assert text.startswith("2 of 2 f32 elements differ") and "7f7fffff" in text


def test_a_worker_that_dies_costs_the_one_case_it_died_at(monkeypatch) -> None:
    fine = {"d": np.zeros(1, np.uint8)}
    turns = [
        ([fine], "the process ended with status -11"),  # a crash at the second case
        (
            ["CUDARuntimeError: illegal address"],
            "the process ended with status 1",
        ),  # tells of it, then ends
        ([], "the process ended with status -14"),
        ([fine], ""),
    ]
    asked: list[list[str]] = []

    def one_worker(engine: str, group: str, names: list[str]):
        asked.append(list(names))
        return turns[len(asked) - 1]

    monkeypatch.setattr("tests.golden.produce._one_worker", one_worker)
    results = produce("gpu", "warp", ["a", "b", "c", "d", "e"])
    assert asked == [["a", "b", "c", "d", "e"], ["c", "d", "e"], ["d", "e"], ["e"]]
    assert results == {
        "a": fine,
        "b": "the process ended with status -11",
        "c": "CUDARuntimeError: illegal address",
        "d": "the process ended with status -14",
        "e": fine,
    }


def test_a_group_is_given_up_when_every_worker_dies(monkeypatch) -> None:
    monkeypatch.setattr("tests.golden.produce._one_worker", lambda *_: ([], "no GPU"))
    results = produce("gpu", "warp", [str(number) for number in range(40)])
    assert len(results) == 40
    assert [str(r) for r in results.values()].count("no GPU") == MOST_WORKERS
    assert results["39"] == f"not run: {MOST_WORKERS} processes have died"


def test_a_fault_is_a_result_where_one_must_come() -> None:
    case = cases_of("tma")["tma.load.misaligned.f32"]
    assert case.fault == "illegal instruction"
    assert failure(case, "CUDARuntimeError: an illegal instruction was encountered") == ""
    assert failure(case, "SanitizerError: misaligned tensor coordinate") == ""
    assert "it gave a result" in failure(case, {"result": np.zeros(1)})
    assert "illegal address" in failure(case, "CUDARuntimeError: illegal address")
    plain = replace(case, fault="")
    assert failure(plain, {"result": np.zeros(1)}) == ""
    assert failure(plain, "no GPU") == "no GPU"


def test_ulps_of_subnormals_are_those_of_the_smallest_normal_number() -> None:
    got, expected = np.array([3, 3], np.uint32), np.array([4, 5], np.uint32)
    assert differing(got, expected, "f32", Tolerance(ulps=1)).tolist() == [False, True]


def test_a_changed_bit_is_found() -> None:
    case = cases_of("integer")["prmt.b32"]
    expected = replay(case)
    assert_same(case, replay(case), expected)
    expected["result"][0, 17] ^= 1 << 9
    with pytest.raises(AssertionError, match=r"1 of 320 u32 elements differ\s+\[17\] interp"):
        assert_same(case, replay(case), expected)
