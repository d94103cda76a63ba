"""Whole runs on a device with a clock of its own: what is timed, what is not, what stays."""

from __future__ import annotations

import types

import pytest

from bench.core import clocks
from bench.core.method import LEAST, Effort, Runner, iterations, pace, time_in_turns, warm_up
from bench.core.op import Candidate, Prepared, Refused
from bench.core.run import INTERRUPTED, Plan, execute, folded
from bench.core.store import Writer, read
from bench.core.trial import Trial
from tests.bench.kit import EFFORT, Doubler, FakeDevice, candidate, cases, doubling

LIMITS = {"copy_gbs": 10_000.0, "gemm_tflops": {"fp32": 1000.0}}


@pytest.fixture
def device():
    return FakeDevice()


def trial(device, candidates, effort=EFFORT, seconds=None):
    """{candidate: record} of one case."""
    made = Trial(device, cases(doubling())[0], effort, LIMITS).run(candidates, seconds)
    return {record["candidate"]: record for record in made}


def run(device, tmp_path, candidates, count=3, say=None, **plan):
    """(status, run as it was stored, lines)."""
    lines: list[str] = []
    op = doubling()
    planned = Plan(cases(op, count), {op.name: candidates}, plan.pop("effort", EFFORT), **plan)
    writer = Writer(tmp_path / "run.jsonl")
    status = execute(planned, device, writer, {"date": "2026-11-21"}, LIMITS, say or lines.append)
    return status, read(writer.path)[0], lines


# ------------------------------------------------------------------ one case


def test_times_are_those_of_the_clock_in_every_mode(device):
    found = trial(device, [candidate("fkjit", Doubler(device, 1e-3))])["fkjit"]
    assert found["warm"]["p50"] == pytest.approx(1.0)
    assert found["cold"]["p50"] == pytest.approx(1.5)  # the half more that a cold cache costs it
    assert found["graph"]["p50"] == pytest.approx(1.0) and found["graph"]["copies"] == 2
    assert found["warm"]["count"] == found["cold"]["count"] == 40
    assert found["graph"]["count"] == 20
    assert found["host_us"] == pytest.approx(1000.0)  # host and device share the clock
    assert device.flushes == 40 and device.captures == 1


def test_a_cell_has_rates_shares_memory_accuracy_clocks_and_work(device):
    found = trial(device, [candidate("fkjit", Doubler(device, 1e-3))])["fkjit"]
    assert found["warm"]["tflops"] == pytest.approx(100.0)  # 1e11 in a millisecond
    assert found["warm"]["gbs"] == pytest.approx(100.0)
    assert found["warm"]["share_gemm"] == pytest.approx(0.1)
    assert found["warm"]["share_copy"] == pytest.approx(0.01)
    assert found["memory"] == {"driver_bytes": 1000, "peak_bytes": 800}
    assert found["accuracy"] == {"relative": 0.0, "worst": 0.0, "limit": 1e-6}
    assert found["gpu"]["during"] == {"sm_mhz": [1980, 1980], "throttle": []}
    assert found["gpu"]["before"]["sm_mhz"] == found["gpu"]["after"]["sm_mhz"] == 1980
    assert (found["flops"], found["bytes"]) == (1e11, 1e8)
    assert found["version"] and found["case"] == "fp32 N100"


@pytest.mark.parametrize("fault", ["wrong", "unwritten"])
@pytest.mark.parametrize("kind", ["ours", "peer"])
def test_a_wrong_kernel_has_no_time(device, fault, kind):
    found = trial(
        device,
        [candidate("good", Doubler(device)), candidate("bad", Doubler(device, fault=fault), kind)],
    )
    assert found["bad"]["error"].startswith("wrong result: relative error")
    assert not {"warm", "cold", "graph", "host_us"} & set(found["bad"])
    assert found["good"]["warm"]["count"] == 40


def test_a_kernel_that_is_wrong_after_it_was_timed_has_no_time_either(device):
    found = trial(device, [candidate("late", Doubler(device, fault="wrong later"))])["late"]
    assert found["error"].startswith("wrong result")
    assert not {"warm", "cold", "graph"} & set(found)


def test_a_candidate_that_raises_in_the_middle_leaves_the_others_alone(device):
    found = trial(
        device,
        [
            candidate("good", Doubler(device)),
            candidate("bad", Doubler(device, fault="raises later")),
        ],
    )
    assert found["bad"]["error"] == "RuntimeError: out of luck"
    assert not {"warm", "cold", "graph"} & set(found["bad"])
    assert found["good"]["warm"]["count"] == found["good"]["cold"]["count"] == 40


def test_missing_and_refusing_peers_are_there_with_the_reason(device):
    def refuse(problem, arrays):
        raise Refused("takes even numbers only")

    found = trial(
        device,
        [
            candidate("fkjit", Doubler(device)),
            candidate("absent", Doubler(device), "peer", module="no_such_library.part"),
            Candidate(name="picky", prepare=refuse),
        ],
    )
    assert found["absent"]["missing"] == "not installed (no module no_such_library)"
    assert found["picky"]["missing"] == "takes even numbers only"
    assert "warm" in found["fkjit"] and "error" not in found["picky"]


def test_what_cannot_be_captured_says_so_and_is_timed_otherwise(device):
    found = trial(device, [candidate("own graph", Doubler(device, fault="no graph"))])["own graph"]
    assert "graph of its own" in found["graph"]["missing"]
    assert found["warm"]["count"] == 40

    def refuse(call, copies):
        raise RuntimeError("operation not permitted when stream is capturing")

    device.capture = refuse
    found = trial(device, [candidate("fkjit", Doubler(device))])["fkjit"]
    assert "not permitted" in found["graph"]["missing"] and found["cold"]["count"] == 40


def test_candidates_take_turns_each_turn_in_another_order(device):
    order = []

    class Noted(Doubler):
        def call(self):
            order.append(self)
            return super().call()

    doublers = [Noted(device) for _ in range(3)]
    runners = []
    for name, doubler in zip("abc", doublers, strict=True):
        runner = Runner(
            name, doubler.prepare({}, {"x": cases(doubling())[0].op.inputs({"n": 5}, 0)["x"]})
        )
        pace(device, runner)
        runners.append(runner)
    order.clear()
    effort = Effort(iterations=30, turns=3, modes=("warm",))
    assert list(time_in_turns(device, runners, effort, 10.0)) == ["warm"]
    assert len(order) == 99  # one more a turn, which is not timed
    turns = ["".join(dict.fromkeys("abc"[doublers.index(one)] for one in order[begin : begin + 33]))
             for begin in (0, 33, 66)]  # fmt: skip
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns) and len(set(turns)) > 1
    assert [len(turn) for turn in runners[0].times["warm"]] == [10, 10, 10]


# ------------------------------------------------------------------ how much


def test_iterations_are_what_fits_but_never_below_the_least():
    assert iterations(1000, 1e-3, 10.0) == 1000
    assert iterations(1000, 1e-3, 0.1) == 100
    assert iterations(1000, 1.0, 0.1) == LEAST == 20
    assert iterations(5, 1.0, 0.1) == 5  # unless fewer are asked for


def test_a_long_cell_limits_itself_and_says_how_many_it_took(device):
    effort = Effort(warmup=100, iterations=1000, seconds=1.0)
    found = trial(device, [candidate("slow", Doubler(device, 10e-3))], effort)["slow"]
    each = 10e-3 + 1.25 * 10e-3 + 5e-6  # and a delay, since its host time is as long
    assert found["warm"]["count"] == int(1.0 / each) < 100
    assert found["warmup"] == 20  # a fifth of a second
    assert found["asked"] == {"iterations": 1000, "seconds": 1.0}


def test_warm_up_calls_are_counted(device):
    doubler = Doubler(device)
    runner = Runner(
        "a", doubler.prepare({}, {"x": cases(doubling())[0].op.inputs({"n": 5}, 0)["x"]})
    )
    pace(device, runner)
    before = doubler.calls
    assert warm_up(device, runner, Effort(warmup=7)) == 7 == doubler.calls - before


def test_a_budget_is_kept_where_the_least_allows_it(device, tmp_path):
    effort = Effort(warmup=100, iterations=1000, turns=10, seconds=1.0)
    two = [candidate(name, Doubler(device, 1e-4)) for name in "ab"]
    status, stored, lines = run(device, tmp_path, two, count=10, effort=effort, budget=6.0)
    assert status == 0 and stored.end["reason"] == "complete"
    assert 3.0 < device.clock < 6.5
    counts = [cell["warm"]["count"] for cell in stored.cells]
    assert all(LEAST <= count < 1000 for count in counts)
    assert "left" in lines[0] and lines[-1].endswith("(0:00 left)")


def test_an_impossible_budget_still_takes_the_least(device, tmp_path):
    one = [candidate("slow", Doubler(device, 0.05))]
    status, stored, _ = run(device, tmp_path, one, count=2, budget=0.1)
    assert status == 0
    assert [cell["cold"]["count"] for cell in stored.cells] == [LEAST, LEAST]


# ------------------------------------------------------------------ a run


def test_a_run_has_a_header_a_line_for_each_cell_and_an_end(device, tmp_path):
    two = [
        candidate("fkjit", Doubler(device, 2e-3)),
        candidate("absent", Doubler(device), "peer", module="no_such_library"),
    ]
    status, stored, lines = run(device, tmp_path, two, left_out={"compile": "slow"})
    assert status == 0 and len(stored.cells) == 6 and len(lines) == 3
    assert stored.header["ceilings"] == LIMITS
    assert [(p["name"], p["missing"]) for p in stored.header["peers"]] == [
        ("fkjit", None),
        ("absent", "not installed (no module no_such_library)"),
        ("compile", "slow"),
    ]
    assert stored.end == {
        "record": "end", "reason": "complete", "cases": 3, "of": 3,
        "seconds": pytest.approx(device.clock),
    }  # fmt: skip
    assert lines[0].startswith("[1/3] doubling fp32 N100:  fkjit 2.000 ms 50 TFLOP/s")


def test_a_wrong_kernel_of_ours_fails_the_run_a_wrong_peer_does_not(device, tmp_path):
    good = candidate("fkjit", Doubler(device))
    bad_peer = candidate("peer", Doubler(device, fault="wrong"), "peer")
    assert run(device, tmp_path, [good, bad_peer])[0] == 0
    (tmp_path / "run.jsonl").unlink()
    status, _, lines = run(device, tmp_path, [candidate("fkjit", Doubler(device, fault="wrong"))])
    assert status == 1 and "FAILED (wrong result" in lines[0]


def test_ctrl_c_keeps_what_is_done(device, tmp_path):
    class Impatient(Doubler):
        def call(self):
            if self.device.clock > 4.0:
                raise KeyboardInterrupt
            return super().call()

    seen = []
    one = [candidate("fkjit", Impatient(device))]
    status, stored, _ = run(device, tmp_path, one, count=9, say=seen.append)
    assert status == INTERRUPTED and stored.end["reason"] == "interrupted"
    assert 0 < len(stored.cells) == stored.end["cases"] < 9
    assert all("warm" in cell for cell in stored.cells)
    assert seen[-1].startswith(f"interrupted: {len(stored.cells)} of 9 cases are done and kept in ")


def test_every_result_is_in_the_file_before_the_next_case_begins(device, tmp_path):
    lengths = []

    def say(line):
        lengths.append(len(read(tmp_path / "run.jsonl")[0].cells))

    run(device, tmp_path, [candidate("fkjit", Doubler(device))], say=say)
    assert lengths == [1, 2, 3]


def test_a_device_in_an_error_state_ends_the_run(device, tmp_path):
    class Fatal(Doubler):
        def call(self):
            if self.device.clock > 4.0:
                self.device.broken = "illegal memory access"
                raise RuntimeError(self.device.broken)
            return super().call()

    status, stored, lines = run(device, tmp_path, [candidate("fkjit", Fatal(device))], count=9)
    assert status == 1 and 0 < len(stored.cells) < 9
    assert "error state" in stored.end["reason"] and "illegal memory access" in lines[-1]


def test_inputs_that_do_not_fit_fail_their_case_alone(device, tmp_path):
    def inputs(problem, on):
        if problem["n"] == 200:
            raise MemoryError("no room")
        return made.sets and original(problem, on)

    made = doubling()
    original = made.inputs
    op = doubling(inputs=inputs)
    plan = Plan(cases(op, 3), {op.name: [candidate("fkjit", Doubler(device))]}, EFFORT)
    writer = Writer(tmp_path / "run.jsonl")
    assert execute(plan, device, writer, {}, None, lambda line: None) == 1
    cells = read(writer.path)[0].cells
    assert [cell.get("error") for cell in cells] == [None, "MemoryError: no room", None]
    assert "share_copy" not in cells[0]["warm"]  # no ceilings


def test_ranges_for_profilers_surround_case_and_candidate(device, tmp_path):
    run(device, tmp_path, [candidate("fkjit", Doubler(device))], count=1)
    assert {"doubling fp32 N100", "fkjit cold", "fkjit warm", "fkjit graph"} <= set(device.spans)


def test_how_our_variant_was_built_is_noted_and_cannot_cost_the_time(device):
    class Spec:
        id = "doubling.plain"

    doubler = Doubler(device)

    def prepare(problem, arrays):
        doubler.prepare(problem, arrays)
        return Prepared(doubler.call, variant=(Spec, {}))

    one = [Candidate(name="fkjit", kind="ours", prepare=prepare)]
    assert trial(device, one)["fkjit"]["variant"]["load_ms"] == 3.0

    def fail(spec, params):
        raise OSError("no cache")

    device.variant = fail
    found = trial(device, one)["fkjit"]
    assert found["variant"] == {"error": "OSError: no cache"} and found["warm"]["count"] == 40


def test_clocks_are_read_where_the_driver_answers(monkeypatch):
    def refuse(gpu):
        raise RuntimeError("Not Supported")

    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId=lambda bus: bus.decode(),
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetClockInfo=lambda gpu, which: {1: 1755, 2: 3201}[which],
        nvmlDeviceGetPowerUsage=lambda gpu: 691_500,
        nvmlDeviceGetTemperature=refuse,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 0x4 | 0x1,
    )
    runtime = types.SimpleNamespace(deviceGetPCIBusId=lambda index: f"0000:0{index}:00.0")
    found = {"pynvml": nvml}
    monkeypatch.setattr(clocks, "import_module", found.__getitem__)
    monkeypatch.setattr(clocks, "cupy_cuda", lambda: types.SimpleNamespace(runtime=runtime))
    assert clocks.Clocks(7).read() == {
        "sm_mhz": 1755,
        "memory_mhz": 3201,
        "watts": 691.5,
        "throttle": ["power cap"],
    }
    del found["pynvml"]
    none = clocks.Clocks(0)
    assert none.read() == {} and none.missing == "KeyError: 'pynvml'"


def test_a_line_breaks_between_candidates_on_a_narrow_terminal():
    words = ("[1/9] linear bf16 M1 K4096 N6144:", "fkjit 16.1 us 3127 GB/s")
    line = "  ".join((*words, "torch 14.1 us 3565 GB/s", "(0:25 left)"))
    assert folded(line, 200) == line
    assert folded(line, 80).split("\n") == [
        "[1/9] linear bf16 M1 K4096 N6144:  fkjit 16.1 us 3127 GB/s",
        "    torch 14.1 us 3565 GB/s  (0:25 left)",
    ]
