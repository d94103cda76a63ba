"""Summaries of times, how sure a median is, and what counts as wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.core.accuracy import Expected
from bench.core.ceilings import measure, rates
from bench.core.clocks import over, reasons
from bench.core.statistics import median_interval, noise, spread, summary
from tests.bench.kit import FakeDevice

TIMES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=200)


def by_hand(values: list[float], share: float) -> float:
    """A percentile, interpolated between the two neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@given(TIMES)
def test_a_summary_is_what_the_formulas_say(values):
    found = summary(values)
    assert found["count"] == len(values)
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        assert found[name] == pytest.approx(by_hand(values, share))
    mean = math.fsum(values) / len(values)
    assert found["mean"] == pytest.approx(mean)
    if len(values) > 1:
        variance = math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1)
        assert found["std"] == pytest.approx(math.sqrt(variance), abs=1e-9)
    assert (found["min"], found["max"]) == (min(values), max(values))
    assert found["min"] <= found["low"] <= found["p50"] <= found["high"] <= found["max"]


def test_nothing_has_no_summary():
    with pytest.raises(ValueError, match="no samples"):
        summary([])


def test_the_interval_holds_the_true_median_95_times_in_100():
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(1000):
        low, high = median_interval(list(rng.lognormal(0.0, 0.3, 101)))
        inside += low <= 1.0 <= high
    assert 930 <= inside <= 990


def test_turns_keep_their_medians_and_make_the_noise():
    turns = [[1.0, 1.1, 1.2], [2.0, 2.1, 2.2], [3.0, 3.1, 3.2]]
    found = summary([x for turn in turns for x in turn], turns)
    assert found["turns"] == [1.1, 2.1, 3.1]
    assert noise(found) == pytest.approx(max(1.4826, (found["high"] - found["low"]) / 2) / 2.1)
    steady = summary([5.0] * 100, [[5.0] * 50, [5.0] * 50])
    assert noise(steady) == 0.0
    assert noise({"p50": 1.0}) == 0.0


def test_the_spread_of_a_normal_is_its_standard_deviation_whatever_the_outliers():
    values = np.random.default_rng(2).normal(10.0, 2.0, 5000)
    assert spread(values) == pytest.approx(2.0, rel=0.05)
    values[:50] = 1e6
    assert spread(values) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_output_is_judged_by_norm_and_by_its_worst_element(kind):
    want = np.random.default_rng(3).standard_normal((4, 100))
    make = np.asarray if kind == "numpy" else pytest.importorskip("torch").from_numpy
    expected = Expected([((0,), make(want[0])), ((2,), make(want[2]))], 1e-3)

    def judged(change):
        given_ = want.copy()
        change(given_)
        return expected.judge(make(given_))

    def scaled(x):
        x *= 1.0005

    assert judged(scaled).relative == pytest.approx(5e-4) and judged(scaled).why_wrong() is None
    assert judged(lambda x: x.__setitem__((1, 5), 1e9)).relative == 0.0  # not a part
    single = judged(lambda x: x.__setitem__((2, 5), want[2, 5] + 0.05))
    assert single.worst == pytest.approx(0.05 / np.abs(want[[0, 2]]).max())
    assert "wrong result" in str(single.why_wrong())
    assert "nan" in str(judged(lambda x: x.__setitem__((0, 0), np.nan)).why_wrong())
    assert expected.judge(make(want[:, :50])).why_wrong() is not None


def test_one_wrong_element_among_many_is_found():
    want = np.ones(1_000_000)
    given_ = want.copy()
    given_[77] = 1.3
    found = Expected([(..., want)], 2.5e-2).judge(given_)
    assert found.relative < found.limit and "worst element" in str(found.why_wrong())


def test_rates_are_of_the_work_and_of_the_ceilings():
    limits = {"copy_gbs": 4000.0, "gemm_tflops": {"bf16": 800.0}}
    found = rates(1e-3, 4e11, 1e9, "bf16", limits)
    assert found == pytest.approx(
        {"tflops": 400.0, "gbs": 1000.0, "share_gemm": 0.5, "share_copy": 0.25}
    )
    assert rates(1e-3, 0.0, 1e9, "int8", None) == {"gbs": pytest.approx(1000.0)}


def test_ceilings_are_medians_of_amounts_over_times():
    device = FakeDevice()
    calls = {
        "copy": (8e9, lambda: device.work(2e-3)),
        "gemm": (1e12, lambda: device.work(1e-3)),
    }
    assert measure(device, calls) == pytest.approx({"copy": 4e12, "gemm": 1e15})


def test_readings_of_clocks_become_ranges_and_reasons():
    assert reasons(0x1) == [] and reasons(0x5) == ["power cap"]
    states = [
        {"sm_mhz": 1980, "watts": 300.0, "throttle": []},
        {"sm_mhz": 1755, "watts": 690.0, "throttle": ["power cap"]},
    ]
    assert over(states) == {
        "sm_mhz": [1755, 1980],
        "watts": [300.0, 690.0],
        "throttle": ["power cap"],
    }
    assert over([{}]) == {}
