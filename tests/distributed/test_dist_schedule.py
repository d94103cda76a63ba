"""The simulator: tasks wait for what they need, and totals are those of a count by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fkjit.distributed import forms, schedule
from fkjit.distributed.schedule import Attention, Experts, Machine, Product, Timeline

FAST = Machine(link_latency=0.0, network_latency=0.0, memory=1e30)


def test_a_task_begins_when_its_lane_is_free_and_what_it_needs_is_done():
    line = Timeline()
    first = line.add(0, "compute", "a", 2.0)
    other = line.add(1, "link", "b", 3.0, (None,))
    last = line.add(0, "compute", "c", 1.0, (first, other))
    assert (last.begin, last.end, line.seconds, line.busy(0)) == (3.0, 4.0, 4.0, 3.0)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_causal_zigzag_ring_has_equal_steps(size):
    a = Attention(4096)
    line = schedule.ring(a, FAST, size)
    whole = schedule.whole(a, FAST, size)
    for rank in range(size):
        assert line.busy(rank) == pytest.approx(whole / size, rel=1e-2)
    # Keys of 4,096 tokens take a fifth of a step: all but nothing is waited for.
    assert line.seconds == pytest.approx(whole / size, rel=1e-2)
    naive = schedule.ring(a, FAST, size, overlap=False).seconds
    assert naive == pytest.approx(line.seconds + (size - 1) * a.kv_bytes / FAST.link, rel=1e-2)


def test_links_that_are_slow_decide():
    slow, a = Machine(link=1e9, link_latency=0.0), Attention(4096)
    line = schedule.ring(a, slow, 4)
    last = schedule.whole(a, slow, 4) / 16 + a.o_bytes * 13 / slow.memory
    assert line.seconds == pytest.approx(3 * a.kv_bytes / 1e9 + last, rel=2e-2)


def test_a_contiguous_causal_ring_waits_for_its_last_rank():
    a = Attention(4096)
    even, odd = (schedule.ring(a, FAST, 4, layout).seconds for layout in ("zigzag", "contiguous"))
    assert odd > 1.5 * even


def test_sums_of_the_backward_travel_one_step_behind_and_home():
    a, names = (
        Attention(4096),
        [t.name for t in schedule.ring(Attention(64), FAST, 4, "zigzag", True).tasks],
    )
    assert {f"sums {n}" for n in range(4)} <= set(names)
    line = schedule.ring(a, FAST, 4, "zigzag", True)
    home = a.kv_bytes / FAST.link
    compute = schedule.whole(a, FAST, 4, True) / 4
    assert line.seconds == pytest.approx(compute + home, rel=2e-2)


def test_hosts_are_reached_by_the_network():
    lanes = {t.lane for t in schedule.ring(Attention(64), Machine(), 8).tasks}
    assert "network" not in lanes
    crossing = [
        t.rank for t in schedule.ring(Attention(64), Machine(), 16).tasks if t.lane == "network"
    ]
    assert set(crossing) == {0, 8}


def test_the_form_that_is_picked_is_the_fastest_that_is_allowed():
    machine = Machine()
    for size in (2, 4, 16):
        a = Attention(8192)
        both = [forms.times(a, machine, size, "zigzag", backward) for backward in (False, True)]
        seconds = {name: sum(x[name].seconds for x in both) for name in both[0]}
        assert forms.best(a, size, "zigzag", True) == min(seconds, key=seconds.__getitem__)
        assert ("ulysses" in seconds) == (size <= 8)
    assert "gather" not in forms.times(Attention(1 << 20), machine, 4, "zigzag")
    assert forms.best(Attention(8192), 4, "zigzag", False) != "ulysses"


def test_chunks_of_experts_and_products_overlap():
    a, p = Experts(), Product()
    compute = a.flops / FAST.products
    travel = a.tokens * a.top_k * a.hidden * a.itemsize / 2 / FAST.link
    assert schedule.experts(a, FAST, 2, 1).seconds == pytest.approx(compute + 2 * travel)
    assert schedule.experts(a, FAST, 2, 4).seconds == pytest.approx(compute + 2 * travel / 4)
    whole = p.seconds(FAST, 4)
    assert schedule.column_linear(p, FAST, 4).seconds == pytest.approx(whole)
    assert schedule.column_linear(p, FAST, 4, overlap=False).seconds > whole * 1.2


def test_the_page_has_what_the_simulator_says():
    from bench.distributed.schedule import written

    for path, text in written(Machine()).items():
        assert path.read_text() == text, f"{path}: python -m bench.distributed.schedule --write"


def test_a_profile_becomes_a_timeline_and_says_what_was_hidden():
    pytest.importorskip("torch")
    from bench.distributed.timeline import draw
    from bench.distributed.trace import hidden, timeline

    def event(
        name: str, begin: float, end: float, device: str = "DeviceType.CUDA"
    ) -> SimpleNamespace:
        span = SimpleNamespace(start=1000 + begin, end=1000 + end)
        return SimpleNamespace(name=name, device_type=device, time_range=span)

    events = [
        event("attention<T>", 10, 30), event("ncclDevKernel_SendRecv", 0, 20),
        event("aten::mul", 0, 90, "DeviceType.CPU"), event("Memcpy PtoP", 25, 35),
    ]  # fmt: skip
    line = timeline(events, 3)
    assert [(t.rank, t.lane, t.name) for t in line.tasks] == [
        (3, "link", "ncclDevKernel_SendRecv"), (3, "compute", "attention<T>"),
        (3, "link", "Memcpy PtoP"),
    ]  # fmt: skip
    assert line.seconds == pytest.approx(35e-6)
    assert hidden(line) == pytest.approx((10 + 5) / 30)
    assert "attention&lt;T&gt;" in draw("a call", [("one", line)])
