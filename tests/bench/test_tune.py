"""`fkjit tune` on a device whose clock only work moves: what is timed, kept, resumed and shown."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from bench.core.catalog import operations
from bench.tune import session, strategies
from bench.tune.command import main
from bench.tune.task import shaped
from fkjit import tuning
from fkjit.errors import ParameterError, ToolchainError, TuningError
from fkjit.settings import settings
from fkjit.spec import register
from tests.bench.kit import FakeDevice
from tests.cli.kit import run
from tests.core.sampling import one_in
from tests.core.user_kernel import registered_kernel, write_kernel

GPU = FakeDevice.name
CASE = ["--shape", "dtype=fp32,negated=false"]
FAST = ["--seconds", "0.01"]
SPEED = {32: 4e-4, 64: 3e-4, 128: 1e-4, 256: 2e-4}  # seconds of a call by its threads


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's folder of this test's own."""
    monkeypatch.setenv("FKJIT_CACHE_DIR", str(tmp_path / "home"))
    settings.cache_clear()
    tuning.forget()
    yield tmp_path / "home" / "tuning"
    monkeypatch.undo()
    settings.cache_clear()
    tuning.forget()


@pytest.fixture
def scale(tmp_path):
    """The kernel of CONTRIBUTING.md with four tiles; the first is the default."""
    with registered_kernel(write_kernel(tmp_path / "kernels")) as spec:
        params = [
            replace(param, values=tuple(SPEED)) if param.name == "threads" else param
            for param in spec.params
        ]
        yield register(replace(spec, params=tuple(params)), replace=True)


class Lab:
    """Runs the command; every launch takes SPEED seconds. `launched` counts them by threads."""

    def __init__(self, monkeypatch):
        self.speed, self.launched, self.wrong = dict(SPEED), {}, set()
        self.interrupt_after = None
        self.launched_by = session.launched
        monkeypatch.setattr(session, "launched", self.launch)

    def launch(self, op, spec, params, problem, arrays, device):
        prepared = self.launched_by(op, spec, params, problem, arrays, device)
        threads, first = params["threads"], []  # what the first launch made: the others make it too

        def call():
            self.launched[threads] = self.launched.get(threads, 0) + 1
            if self.interrupt_after is not None and sum(self.launched.values()) > (
                self.interrupt_after
            ):
                raise KeyboardInterrupt
            first.extend([] if first else [np.copy(prepared.call())])
            made = np.copy(first[0])
            device.work(self.speed[threads])
            if threads in self.wrong:
                made += 1.0
            return made

        return replace(prepared, call=call)

    def tune(self, *arguments):
        self.launched = {}
        return main(["scale", *arguments, *FAST], FakeDevice())


@pytest.fixture
def lab(monkeypatch, home, scale):
    return Lab(monkeypatch)


def stored():
    return json.loads(tuning.user_file(GPU).read_text())["entries"]


def lines():
    return [json.loads(t) for t in tuning.user_file(GPU).with_suffix(".jsonl").open()]


def test_the_fastest_variant_is_stored_for_its_class(lab, scale, capsys):
    assert lab.tune(*CASE) == 0
    (entry,) = stored()
    assert entry["choice"] == {"threads": 128} and entry["default"] == {"threads": 32}
    assert entry["kernel"] == "scale.plain" and entry["capability"] == "8.0"
    assert entry["fixed"] == {"dtype": "fp32", "negated": False} and entry["shape"] == {"n": 1024}
    assert entry["ms"] == pytest.approx(0.1) and entry["ratio"] == pytest.approx(0.25)
    assert entry["tried"] == 4
    ratios = {line["choice"]["threads"]: line["ratio"] for line in lines()}
    assert ratios == {t: pytest.approx(s / SPEED[32]) for t, s in SPEED.items()}
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [str(tuning.user_file(GPU))]
    assert "[1/1] scale.plain fp32" in shown.err and "-> threads=128" in shown.err
    assert "threads=64: 300.0 us, 75.0 % of the default" in shown.err


def test_what_is_stored_is_what_lookup_gives(lab, scale):
    lab.tune(*CASE)
    where = replace(_arch(), gpu=GPU)
    given = {"n": 513, "factor": 3.0, "negated": False}  # of the same class
    fixed = {"dtype": "fp32", "negated": False}
    assert tuning.lookup(scale, fixed, given, where) == {"threads": 128}
    assert tuning.lookup(scale, {**fixed, "dtype": "fp16"}, given, where) is None
    assert tuning.lookup(scale, fixed, {**given, "n": 512}, where) is None


def _arch():
    from fkjit.jit.build import interpreter_target

    return interpreter_target().arch


def test_a_second_call_measures_nothing_and_stores_the_same(lab):
    lab.tune(*CASE)
    first, before = stored(), lines()
    tuning.user_file(GPU).unlink()
    assert lab.tune(*CASE) == 0
    assert lab.launched == {} and stored() == first and lines() == before
    assert lab.tune(*CASE, "--again") == 0 and set(lab.launched) == set(SPEED)


def test_a_wrong_variant_is_never_chosen_however_fast(lab, capsys):
    lab.wrong = {128}
    assert lab.tune(*CASE) == 0
    (entry,) = stored()
    assert entry["choice"] == {"threads": 256} and entry["tried"] == 3
    (bad,) = [line for line in lines() if line["choice"] == {"threads": 128}]
    assert bad["error"].startswith("wrong result") and "ms" not in bad
    assert "threads=128: left out: wrong result" in capsys.readouterr().err


def test_where_every_variant_is_wrong_nothing_is_stored(lab, capsys):
    lab.wrong = set(SPEED)
    assert lab.tune(*CASE) == 1
    assert stored() == [] and "no variant has a time" in capsys.readouterr().err


def test_where_the_default_is_wrong_the_others_go_by_their_times(lab):
    lab.wrong = {32}
    assert lab.tune(*CASE) == 0
    (entry,) = stored()
    assert entry["choice"] == {"threads": 128} and entry["ratio"] is None


@pytest.mark.parametrize(("seconds", "winner"), [(3.98e-4, 32), (3.9e-4, 128)])
def test_the_default_stays_unless_something_is_faster_by_a_margin(lab, seconds, winner):
    lab.speed = {32: 4e-4, 64: 5e-4, 128: seconds, 256: 6e-4}
    lab.tune(*CASE)
    (entry,) = stored()
    assert entry["choice"] == {"threads": winner}


TWO = [*CASE, "--shape", "dtype=fp32,negated=false,n=4000"]


def test_ctrl_c_keeps_what_is_done_and_the_next_call_goes_on(lab, capsys, monkeypatch):
    monkeypatch.setattr(session, "BATCH", 2)
    lab.tune(*CASE)
    whole = sum(lab.launched.values())
    lab.interrupt_after = whole + 200  # within the second case's second trial or later
    tuning.user_file(GPU).unlink()
    tuning.user_file(GPU).with_suffix(".jsonl").unlink()
    capsys.readouterr()
    assert lab.tune(*TWO) == 130
    kept = lines()
    assert 4 < len(kept) < 8 and len(stored()) == 1
    assert "interrupted: 1 of 2 are done" in capsys.readouterr().err
    lab.interrupt_after = None
    assert lab.tune(*TWO) == 0
    assert lines()[: len(kept)] == kept and len(lines()) == 8 and len(stored()) == 2
    measured_before = {line["choice"]["threads"] for line in kept[4:]} - {32}
    assert not measured_before & set(lab.launched)


def test_a_line_that_was_torn_by_a_crash_is_measured_again(lab):
    lab.tune(*CASE)
    path = tuning.user_file(GPU).with_suffix(".jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    assert lab.tune(*CASE) == 0
    assert set(lab.launched) == {32, 256} and len(lines()) == 4


def test_a_budget_ends_between_trials(lab, monkeypatch, capsys):
    monkeypatch.setattr(session, "BATCH", 1)
    assert lab.tune(*TWO, "--budget", "0.02") == 0
    assert 0 < len(lines()) < 8 and "out of time: 0 of 2" in capsys.readouterr().err
    assert lab.tune(*TWO) == 0 and len(lines()) == 8


def test_a_changed_kernel_is_measured_anew(lab, scale):
    lab.tune(*CASE)
    source = scale.root / "scale.cu"
    source.write_text(
        source.read_text().replace("float value", "const int unused = 0;\n  float value")
    )
    lab.speed[64] = 5e-5
    assert lab.tune(*CASE) == 0
    assert set(lab.launched) == set(SPEED)
    assert stored()[0]["choice"] == {"threads": 64}


def test_another_mode_is_another_result(lab):
    lab.tune(*CASE)
    assert lab.tune(*CASE, "--mode", "cold") == 0
    assert set(lab.launched) == set(SPEED) and stored()[0]["mode"] == "cold"


def test_another_gpu_is_another_result(lab, tmp_path, monkeypatch):
    results = ["--results", str(tmp_path / "all.jsonl")]
    lab.tune(*CASE, *results)
    monkeypatch.setattr(FakeDevice, "name", "Fake 9001")
    assert lab.tune(*CASE, *results) == 0
    assert set(lab.launched) == set(SPEED)
    assert tuning.read(tuning.user_file("Fake 9001")).gpu == "Fake 9001"


def test_a_default_is_what_stands_without_tuning(lab):
    lab.tune(*CASE)
    assert lab.tune(*CASE, "--again") == 0
    assert stored()[0]["default"] == {"threads": 32}


def test_winners_can_be_written_for_shipping(lab, tmp_path):
    out = tmp_path / "shipped" / "fake.json"
    assert lab.tune(*CASE, "--out", str(out)) == 0
    (entry,) = tuning.read(out).entries.values()
    assert entry["choice"] == {"threads": 128}
    assert not tuning.user_file(GPU).exists()


def test_a_file_that_cannot_be_used_is_found_before_anything_is_measured(lab):
    path = tuning.user_file(GPU)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(TuningError, match=str(path)):
        lab.tune(*CASE)
    assert lab.launched == {}


def test_a_device_that_broke_ends_the_run_with_what_is_done(lab, monkeypatch, capsys):
    device, count = FakeDevice(), []

    def break_later(op, spec, params, problem, arrays, on):
        count.append(params)
        if len(count) > 5:
            device.broken = "an illegal memory access"
            raise RuntimeError("launch failed")
        return lab.launch(op, spec, params, problem, arrays, on)

    monkeypatch.setattr(session, "launched", break_later)
    assert main(["scale", *TWO, *FAST], device) == 1
    assert len(stored()) == 1 and "error state" in capsys.readouterr().err


# ------------------------------------------------------------------ what is asked for


def test_every_case_of_a_set_is_a_task_once_a_class(lab, capsys):
    arguments = ["scale", "--gpu", "NVIDIA H200", "--arch", "sm_90a", "--dry-run"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 4  # dtype by negated
    assert all(line.endswith("threads=32; threads=64; threads=128; threads=256") for line in shown)
    assert main([*arguments, "--shape", "n=1001", "--shape", "n=1002"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1  # the same class


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seqlen=4096", {"seqlen_q": 4096, "seqlen_k": 4096}),
        ("seqlen=4096,seqlen_q=1", {"seqlen_q": 1, "seqlen_k": 4096}),
        ("head_dim=192, head_dim_v=128", {"head_dim": 192, "head_dim_v": 128}),
        ("D64 causal batch=3", {"head_dim": 64, "causal": True, "batch": 3}),
        ("dtype=fp32 causal=true", {"dtype": "fp32", "causal": True}),
    ],
)
def test_a_shape_is_a_case_with_other_values(text, expected):
    problem = shaped(operations()["attention"], text).problem
    assert {name: problem[name] for name in expected} == expected
    assert all(type(problem[name]) is type(value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sequence=4096", "'sequence' is not one of dtype, batch"),
        ("seqlen=long", "'long' is not a number above 0"),
        ("batch=0", "'0' is not a number above 0"),
        ("causal=2", "'2' is not one of true, false"),
        ("D77", "no case of attention has the words D77"),
    ],
)
def test_a_shape_that_fits_nothing_is_refused(text, message):
    with pytest.raises(ParameterError, match=message):
        shaped(operations()["attention"], text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scale.none"], "tune: kernel 'scale.none' is not registered"),
        (["nothing"], "'nothing' is not one of"),
        (["scale", "--gpu", "NVIDIA H200"], "--gpu and --arch are for --show"),
        (["scale", "--show", "--gpu", "NVIDIA H200"], "name its --arch as well"),
        (["scale", "--show", "--arch", "sm_90a", "--shape", "dtype=fp64"], "nothing to choose"),
        (["attention.naive", "--show"], "no parameter that is free"),
    ],
)
def test_what_makes_no_sense_is_one_message(home, scale, arguments, message):
    done = run("tune", *arguments)
    assert done.status == 1 and message in done.err and "Traceback" not in done.err


# ------------------------------------------------------------------ --show


SHOW = ["tune", "scale", "--show", "--gpu", GPU, "--arch", "sm_80", *CASE]


def test_show_says_the_default_and_why(home, scale):
    shown = run(*SHOW).out
    assert "runs threads=32: the default" in shown
    assert f"note: no file of tuned values for {GPU}" in shown
    assert "class: n=1024 (dtype=fp32 negated=false)" in shown


def test_show_says_which_file_and_entry(lab):
    lab.tune(*CASE)
    shown = run(*SHOW).out
    assert "runs threads=128: tuned; the default is threads=32" in shown
    assert f"from {tuning.user_file(GPU)}" in shown.replace("\n", "")
    assert "measured 100.0 us, 25.0 % of the default's, L2 warm, best of 4, on 20" in shown
    other = run(*SHOW[:-2], "--shape", "dtype=fp32,negated=false,n=99999").out
    assert "runs threads=32: the default" in other and "no entry for this in" in other


def test_show_says_what_is_stale(lab):
    lab.tune(*CASE)
    (entry,) = stored()
    tuning.store(tuning.user_file(GPU), GPU, [{**entry, "choice": {"threads": 1024}}])
    shown = run(*SHOW).out
    assert "runs threads=32: the default" in shown
    assert "stale entry, {'threads': 1024}: scale.plain has no such values" in shown


def test_show_without_a_gpu_says_so(home, scale, monkeypatch):
    monkeypatch.setattr("fkjit.runtime.gpus.gpus", lambda: ([], "none here"))
    assert "note: no GPU, so nothing tuned" in run("tune", "scale", "--show", *CASE).out


# ------------------------------------------------------------------ kernel_tuner


def test_without_kernel_tuner_a_strategy_is_refused_with_the_fix(lab, monkeypatch):
    monkeypatch.setitem(sys.modules, "kernel_tuner", None)
    monkeypatch.setitem(sys.modules, "kernel_tuner.interface", None)
    with pytest.raises(ToolchainError, match=r"pip install 'fkjit\[tune\]'"):
        lab.tune(*CASE, "--strategy", "genetic_algorithm")
    assert lab.launched == {}


@one_in(2)
@pytest.mark.parametrize(
    "name", ["brute_force", "random_sample", "greedy_mls", "mls", "greedy_ils"]
)
def test_a_strategy_of_kernel_tuner_finds_it(lab, name):
    pytest.importorskip("kernel_tuner")
    assert lab.tune(*CASE, "--strategy", name) == 0
    (entry,) = stored()
    wanted = min((SPEED[line["choice"]["threads"]] for line in lines()), default=0)
    assert SPEED[entry["choice"]["threads"]] == wanted
    assert name == "random_sample" or entry["choice"] == {"threads": 128}


def test_a_strategy_tries_no_more_than_it_may(lab):
    pytest.importorskip("kernel_tuner")
    assert lab.tune(*CASE, "--strategy", "random_sample", "--evaluations", "2") == 0
    assert 2 <= len(lines()) <= 3  # and the default


def test_a_strategy_that_fails_is_named_and_its_times_are_kept(lab, monkeypatch):
    interface = pytest.importorskip("kernel_tuner.interface")

    class Broken:
        @staticmethod
        def tune(space, runner, options):
            runner.run(space.list[1:2], options)
            raise IndexError("list index out of range")

    monkeypatch.setitem(interface.strategy_map, "mls", Broken)
    with pytest.raises(ToolchainError, match=r"--strategy mls failed \(IndexError: list index"):
        lab.tune(*CASE, "--strategy", "mls")
    assert len(lines()) == 2 and stored() == []


def test_an_unknown_strategy_is_refused(lab):
    pytest.importorskip("kernel_tuner")
    with pytest.raises(ParameterError, match="'luck' is not one of all, "):
        lab.tune(*CASE, "--strategy", "luck")
    assert strategies.ALL == "all"
