"""`fkjit profile`: a real table of Nsight Compute, the file it becomes, and profilers that fail."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench.core.catalog import selected
from bench.profile import collect, command, metrics, show, store, target
from bench.profile.parse import Launch, parse, range_name
from fkjit.errors import ParameterError, ToolchainError
from tests.cli.kit import run

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = (ROOT / "tests" / "data" / "ncu_attention.csv").read_text()
CASE = "bf16 D128 S1024 B4 H16 full"


def answer(*names: str) -> dict:
    """What the target says when it launched these candidates on one case."""
    found = [{"candidate": n, "kind": "ours", "version": "1", "range": f"0 {n}"} for n in names]
    entry = {"op": "attention", "case": CASE, "problem": {}, "flops": 1.0, "bytes": 2.0}
    where = {"date": "2026-11-21T10:00:00", "gpu": "NVIDIA H200", "driver": "580"}
    return {"environment": where, "ncu": "2025.3", "entries": [{**entry, "candidates": found}]}


def taken(*names: str) -> dict:
    return collect.joined(answer(*names), parse(SAMPLE))


def test_a_table_of_ncu_is_read_with_its_ranges_sizes_and_numbers():
    launches = parse(SAMPLE)
    assert [launch.range for launch in launches] == [
        "0 fkjit flash", "0 fkjit tiled", "0 fkjit naive", "0 sdpa-flash", "0 sdpa-cudnn",
    ]  # fmt: skip
    first = launches[0]
    assert (first.kernel, first.grid, first.block) == ("attention_flash", (512, 1, 1), (128, 1, 1))
    assert first.metrics["gpu__time_duration.sum"] == pytest.approx(103e3, rel=0.02)
    assert first.metrics["sm__inst_executed.sum"] == 30_971_904
    assert "device__attribute_display_name" not in first.metrics  # a text


def test_scaled_units_and_lines_of_the_profiler_itself_are_understood():
    text = (
        "==PROF== Connected\n"
        '"ID","Kernel Name","Block Size","Grid Size","gpu__time_duration.sum","dram__bytes.sum"\n'
        '"","","","","usecond","Mbyte"\n'
        '"0","f(int)","(32, 2, 1)","(7, 1, 1)","1,234.5","2.5"\n'
        "==PROF== Disconnected\n"
    )
    assert parse(text) == [
        Launch(
            None, "f(int)", (7, 1, 1), (32, 2, 1),
            {"gpu__time_duration.sum": 1_234_500.0, "dram__bytes.sum": 2.5e6},
        )
    ]  # fmt: skip


def test_what_is_no_table_is_refused():
    with pytest.raises(ParameterError, match="no table"):
        parse("==ERROR== Invalid option\n")


def test_every_metric_and_stall_of_the_sample_is_found():
    kernel = metrics.extract(parse(SAMPLE)[0].metrics)
    assert set(kernel) == {metric.name for metric in metrics.METRICS} | {"stalls"}
    assert list(kernel["stalls"])[:2] == ["wait", "math_pipe_throttle"]
    values = list(kernel["stalls"].values())
    assert values == sorted(values, reverse=True) and min(values) > 0
    raw = {name for launch in parse(SAMPLE) for name in launch.metrics if "issue_stalled" in name}
    known = {metrics._STALL.format(reason) for reason in [*metrics.STALLS, "selected"]}
    assert raw == known  # every reason that the profiler has is explained
    assert (kernel["registers"], kernel["occupancy_limit"]) == (255, 12.5)


def test_metrics_that_a_gpu_has_not_are_left_out():
    made = metrics.extract({"launch__shared_mem_per_block_static": 1024.0})
    assert made == {"shared_bytes": 1024, "stalls": {}}


def test_kernels_are_given_to_the_candidate_in_whose_range_they_ran():
    entry = taken("fkjit flash", "sdpa-cudnn", "absent")["entries"][0]
    flash, cudnn, absent = entry["candidates"]
    assert [kernel["kernel"] for kernel in flash["kernels"]] == ["attention_flash"]
    assert cudnn["kernels"][0]["kernel"].startswith("cudnn_generated")
    assert absent["missing"] == "ncu saw no kernel of it"


def test_a_second_profile_replaces_what_it_has_again_and_keeps_the_rest(tmp_path):
    path = tmp_path / "gpu.json"
    store.add(path, taken("fkjit flash", "fkjit tiled"))
    later = taken("fkjit tiled")
    later["environment"]["driver"] = "590"
    made = store.add(path, later)
    assert made == store.read(path)
    flash, tiled = made["entries"][0]["candidates"]
    assert [made["runs"][one["run"]]["driver"] for one in (flash, tiled)] == ["580", "590"]
    both = taken("fkjit flash", "fkjit tiled")
    both["environment"]["driver"] = "600"
    assert [run["driver"] for run in store.add(path, both)["runs"]] == ["600"]
    with pytest.raises(ParameterError, match="is of NVIDIA H200, this one of Other"):
        store.add(path, {**both, "environment": {"gpu": "Other", "date": "x"}})


def test_what_is_no_profile_is_refused(tmp_path):
    for text in ("", "[]", '{"schema": 1}', '{"schema": 9, "entries": []}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ParameterError, match=r"bad\.json"):
            store.read(tmp_path / "bad.json")


def test_tables_name_every_metric_and_say_how_it_is_read(capsys):
    entries = taken("fkjit flash", "fkjit naive")["entries"]
    entries[0]["candidates"].append({"candidate": "fa4", "missing": "not installed"})
    show.print_entry(entries[0])
    show.print_reading(entries)
    out = capsys.readouterr().out
    for metric in metrics.METRICS:
        assert metric.title in out and metric.reading.split(";")[0][:30] in out
    assert "long_scoreboard 21.2" in out and "fa4: not profiled: not installed" in out
    assert "103.0 us" in out and "56.2 %" in out


def test_several_kernels_of_a_call_count_together_and_the_longest_is_shown():
    kernels = [{"duration": 5, "dram_read_bytes": 1}, {"duration": 7, "dram_read_bytes": 2}]
    assert show.main_kernel({"kernels": kernels}) == kernels[1]
    assert show.total({"kernels": kernels}, "dram_read_bytes", "dram_write_bytes") == 3
    assert show.total({"kernels": kernels}, "l2_bytes") is None


def test_shapes_choose_cases_by_words_and_by_fields():
    (op,) = selected(["attention"])
    assert target.cases(op, [])[0].label == "bf16 D64 S1024 B4 H32 full"
    labels = [c.label for c in target.cases(op, ["D128 causal B4", "head_dim=256 fp32 S512"])]
    assert labels[0].startswith("bf16 D128 S512 B4") and labels[1].startswith("fp32 D256 S512")
    with pytest.raises(ParameterError, match="no case of attention"):
        target.cases(op, ["D77"])


class FakeCuda:
    """Counts what happens between start and stop."""

    def __init__(self) -> None:
        self.profiler, self.torch, self.cuda = self, self, self
        self.events: list[str] = []

    def start(self) -> None:
        self.events.append("start")

    def stop(self) -> None:
        self.events.append("stop")

    def synchronize(self) -> None:
        pass


def test_the_target_launches_once_between_start_and_stop():
    from contextlib import nullcontext
    from types import SimpleNamespace

    from bench.core.op import Candidate, Prepared, Refused

    device = FakeCuda()
    device.span = lambda name: device.events.append(name) or nullcontext()
    call = lambda: device.events.append("call")  # noqa: E731
    one = Candidate(name="a", prepare=lambda problem, arrays: Prepared(call))
    assert target._once(device, one, SimpleNamespace(problem={}), {}, 3) is None
    assert device.events == ["call", "call", "start", range_name("3 a"), "call", "stop"]

    def refuse(problem, arrays):
        raise Refused("too wide")

    two = Candidate(name="b", prepare=refuse)
    assert target._once(device, two, SimpleNamespace(problem={}), {}, 3) == "too wide"


def profiler(folder: Path, name: str, code: str) -> None:
    """An executable of that name, which runs Python."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport sys, json\nfrom pathlib import Path\n{code}")
    path.chmod(0o755)


NCU = f"""
words = sys.argv[1:]
if words == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1)")
elif words[0] == "--import":
    assert Path(words[1]).read_text() == "report"
    print(Path({str(ROOT / "tests/data/ncu_attention.csv")!r}).read_text())
else:
    assert words[:4] == ["--clock-control", "none", "--profile-from-start", "off"]
    if "--metrics" in words and Path(sys.argv[0]).with_name("old").exists():
        sys.exit("==ERROR== Failed to find metric lts__t_bytes.sum")
    Path(words[words.index("--export") + 1] + ".ncu-rep").write_text("report")
    assert json.loads(Path(words[-2]).read_text())["op"] == "attention"
    Path(words[-1]).write_text({json.dumps(answer("fkjit flash"))!r})
"""


@pytest.fixture
def places(tmp_path, monkeypatch) -> Path:
    """A folder that is the whole PATH of profilers."""
    monkeypatch.setattr(collect, "_PLACES", (str(tmp_path),))
    monkeypatch.setenv("PATH", "/nowhere")
    return tmp_path


@pytest.mark.parametrize("old", [False, True], ids=["all metrics", "a metric unknown"])
def test_the_command_profiles_prints_and_stores(places, old):
    profiler(places, "ncu", NCU)
    if old:
        (places / "old").touch()
    out = places / "made" / "p.json"
    done = run("profile", "attention", "flash", "--out", str(out), "--commit", "abc1234")
    assert done.status == 0 and "tensor pipe busy" in done.out and str(out) in done.out
    made = store.read(out)
    assert (made["gpu"], made["runs"][0]["commit"]) == ("NVIDIA H200", "abc1234")
    assert made["runs"][0]["ncu"] == "2025.3.1.0"
    shown = run("profile", "attention", "--show", "--out", str(out))
    assert shown.status == 0 and "56.2 %" in shown.out


def test_a_profiler_that_fails_says_what_it_said(places):
    profiler(places, "ncu", "sys.exit('==ERROR== ERR_NVGPUCTRPERM: no permission')")
    done = run("profile", "attention")
    assert done.status == 1 and "ERR_NVGPUCTRPERM" in done.err and "ncu failed (1)" in done.err


@pytest.mark.parametrize(("words", "tool"), [((), "ncu"), (("--nvtx",), "nsys")])
def test_without_the_profiler_one_message_says_how_to_get_it(places, words, tool):
    done = run("profile", "attention", *words)
    assert done.status == 1 and done.err.count("\n") == 1
    assert done.err.startswith(f"fkjit: profile: {tool} is neither on the PATH")
    with pytest.raises(ToolchainError):
        collect.find(tool)


def test_a_timeline_is_taken_by_nsys_with_ranges(places):
    code = """
words = sys.argv[1:]
assert words[:3] == ["profile", "--trace", "cuda,nvtx"]
Path(words[words.index("--output") + 1] + ".nsys-rep").write_text("")
Path(words[-1]).write_text('{"entries": []}')
"""
    profiler(places, "nsys", code)
    done = run("profile", "attention", "--nvtx", "--report", str(places / "line"))
    assert done.status == 0 and done.out.strip() == str(places / "line.nsys-rep")
    assert os.path.exists(done.out.strip())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("conv",), "'conv' is not one of"),
        (("attention", "slow"), "kernel 'slow' of attention is not one of flash"),
        (("attention", "--show", "--out", "nothing.json"), "nothing.json is not a profile"),
    ],
)
def test_what_cannot_be_profiled_is_refused(words, message):
    done = run("profile", *words)
    assert done.status == 1 and message in done.err


def test_where_a_kernel_is_one_of_a_call_the_call_is_profiled_too():
    asked = command.request(command.parser().parse_args(["attention_backward"]))
    assert asked["impl"].split(",")[:2] == ["auto", "keys"]
    asked = command.request(command.parser().parse_args(["attention_backward", "keys"]))
    assert asked["impl"] == "keys"
