"""`fkjit bench` and `python -m bench`: what can be asked for, and an operation without a file."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.command import effort_of, main, parser
from bench.core import catalog as operations
from bench.core.store import read, results_folder
from fkjit.errors import ParameterError, ToolchainError
from tests.bench.kit import FakeDevice
from tests.cli.kit import run
from tests.core.user_kernel import registered_kernel, write_kernel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scale(tmp_path):
    with registered_kernel(write_kernel(tmp_path / "kernels")) as spec:
        yield spec


class InterpretedDevice(FakeDevice):
    """Each event comes a millisecond after the one before."""

    def mark(self):
        mark = super().mark()
        before = mark.record

        def record():
            self.clock += 1e-3
            before()

        mark.record = record
        return mark


def test_a_kernel_without_a_file_in_the_suite_is_measured_from_its_spec(scale, tmp_path):
    out = tmp_path / "run.jsonl"
    quick = ["--iterations", "2", "--warmup", "1", "--modes", "warm", "--only", "fp32"]
    status = main(["scale", *quick, "--out", str(out)], InterpretedDevice())
    (stored,) = read(out)
    assert status == 0
    names = {(c["candidate"], c["kind"]) for c in stored.cells}
    assert names == {("fkjit plain", "ours")}
    assert {c["case"] for c in stored.cells} == {
        "fp32 n=1000 factor=0.5 negated=False",
        "fp32 n=1000 factor=0.5 negated=True",
    }
    for cell in stored.cells:
        assert cell["accuracy"]["relative"] < 1e-6 and cell["warm"]["count"] == 2
        assert cell["variant"]["kernel"] == "scale.plain"
    assert stored.header["command"].startswith("fkjit bench scale --iterations 2")
    assert stored.header["configuration"]["iterations"] == 2
    assert stored.header["gpu"] == "Fake 9000"


def test_a_wrong_kernel_has_an_error_and_the_command_fails(scale, tmp_path, capsys):
    out = tmp_path / "run.jsonl"
    source = tmp_path / "kernels" / "scale.cu"
    source.write_text(source.read_text().replace("float value = factor", "float value = -factor"))
    arguments = ["scale", "--only", "fp32 negated=False", "--modes", "warm", "--iterations", "2"]
    assert main([*arguments, "--out", str(out)], InterpretedDevice()) == 1
    (cell,) = read(out)[0].cells
    assert cell["error"].startswith("wrong result: relative error 2") and "warm" not in cell
    assert "FAILED (wrong result" in capsys.readouterr().err


def test_every_legal_tile_is_a_candidate(scale, tmp_path):
    out = tmp_path / "run.jsonl"
    arguments = ["--variants", "--only", "fp16 negated=False", "--modes", "warm"]
    assert (
        main(["scale", *arguments, "--iterations", "2", "--out", str(out)], InterpretedDevice())
        == 0
    )
    assert [c["candidate"] for c in read(out)[0].cells] == [
        "fkjit plain threads=256",
        "fkjit plain threads=64",
    ]


def test_benchmark_problems_of_a_spec_go_before_those_for_testing(scale):
    wanted = [{"n": 4096, "factor": 2.0, "negated": False}]
    object.__setattr__(scale, "work", replace(scale.work, bench=lambda params: wanted))
    found = operations.operations()["scale"].sets["default"]
    assert {p["n"] for p in found} == {4096} and {p["dtype"] for p in found} == {"fp16", "fp32"}


def test_every_registered_operation_can_be_measured():
    from fkjit.spec import registered

    found = operations.operations()
    assert {spec.op for spec in registered()} <= set(found)
    for op in found.values():
        labels = [op.label(problem) for problem in op.sets["default"]]
        assert labels and len(set(labels)) == len(labels)
        assert len({peer.name for peer in op.peers}) == len(op.peers)


def test_dry_run_and_list_need_no_gpu(scale):
    planned = run("bench", "attention", "--set", "scaling", "--dry-run", "--impl", "all")
    assert planned.status == 0
    assert "\n12 cases, " in planned.out and "bf16 D128 S512 B1 H16 full" in planned.out
    for name in ("fkjit naive", "fkjit tiled", "fkjit flash", "eager", "sdpa-cudnn", "fa4"):
        assert f" {name} " in planned.out
    assert "left out: torch.compile" in planned.out
    listed = " ".join(run("bench", "--list").out.split())  # however it is broken into lines
    assert "scaling (12)" in listed and "flashinfer-batch" in listed and "scale" in listed


def test_peers_are_taken_by_name(capsys):
    assert run("bench", "attention", "--dry-run", "--peers", "none").out.count(" peer ") == 0
    some = run("bench", "attention", "--dry-run", "--peers", "compile,fa4").out
    assert "compile " in some and "fa4 " in some and "sdpa" not in some
    every = run("bench", "attention", "--dry-run", "--peers", "all").out
    assert "left out" not in every and "flashinfer-single" in every


def test_tiles_are_taken_by_their_words(capsys):
    words = ["attention", "--dry-run", "--peers", "none", "--impl", "auto,flash", "--variants"]
    every, some = (run("bench", *words, *more).out for more in ([], ["--tiles", "flash block=64"]))
    assert (
        " fkjit " in some
        and " fkjit flash block=64" in some
        and some.count("fkjit flash") < every.count("fkjit flash")
    )


def test_quick_takes_the_quick_set_where_there_is_one(scale):
    planned = run("bench", "attention", "scale", "--quick", "--dry-run").out
    assert "\n9 cases, " in planned and planned.count("scale ") >= 4
    assert (
        "\n16 cases, " in run("bench", "attention", "--quick", "--set", "default", "--dry-run").out
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["conv"], "bench: 'conv' is not one of adamw, attention"),
        (["attention", "--set", "huge"], "--set 'huge' is not one of all, default, quick, peers"),
        (
            ["attention", "--where", "colour=red"],
            "is not FIELD=VALUE[,VALUE] with a field of batch",
        ),
        (
            ["attention", "--only", "D80"],
            "no case of attention in --set default passes the filters",
        ),
        (["attention", "--impl", "fast", "--dry-run"], "--impl 'fast' of attention is not one of"),
        (
            ["attention", "--impl", "flash", "--variants", "--tiles", "block=7", "--dry-run"],
            "--tiles 'block=7' is none of fkjit flash block",
        ),
        (["attention", "--peers", "fa9", "--dry-run"], "--peers 'fa9' is not one of all, none"),
        (["--compare", "none.jsonl", "none.jsonl"], "none.jsonl cannot be read"),
    ],
)
def test_a_mistake_is_one_message(arguments, message):
    done = run("bench", *arguments)
    assert done.status == 1 and done.err.startswith("fkjit: ") and message in done.err


def test_modes_and_effort_are_read_from_the_options():
    quick = effort_of(parser().parse_args(["--quick"]))
    assert (quick.warmup, quick.iterations) == (10, 100)
    full = effort_of(parser().parse_args([]))
    assert (full.warmup, full.iterations, full.modes) == (100, 1000, ["cold", "warm", "graph"])
    some = effort_of(parser().parse_args(["--modes", "warm,graph", "--iterations", "50"]))
    assert (some.modes, some.iterations, some.warmup) == (["warm", "graph"], 50, 100)
    with pytest.raises(ParameterError, match="'hot' is not one of cold, warm, graph"):
        effort_of(parser().parse_args(["--modes", "hot"]))
    for wrong in (["--iterations", "0"], ["--budget", "-1"], ["--unknown"]):
        with pytest.raises(SystemExit) as raised:
            parser().parse_args(wrong)
        assert raised.value.code == 2


def test_help_is_the_suites_own():
    done = run("bench", "--help")
    assert done.status == 0
    assert "--cell-seconds" in done.out and "docs/BENCHMARKS.md" in done.out


def test_without_a_gpu_the_message_says_what_is_needed():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ToolchainError, match="torch sees no CUDA device here"):
        main(["attention", "--quick"])


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "bench", "attention", "--only", "D64 S512", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "\n2 cases, " in done.stdout
    done = subprocess.run([*command[:3], "conv"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("fkjit: bench: 'conv' is not")


def test_results_of_a_checkout_lie_beside_the_suite():
    assert results_folder() == ROOT / "bench" / "results"


def test_first_calls_are_cells_by_state_of_the_cache(tmp_path):
    from bench.core.first_call import DIMS, measure

    seen = []

    def take(cache, dim):
        seen.append((cache, dim))
        again = sum(entry == (cache, dim) for entry in seen) > 1
        times = {"cupy_import": 50.0, "new_geometry": 0.1}
        return {**times, "first_call": (20.0 if again else 500.0) + dim}

    cells = measure(3, take)
    assert len(cells) == 2 * len(DIMS) and len(seen) == 6 * len(DIMS)
    assert cells[0]["case"] == "fp16 D64 cold" and cells[0]["first_call"]["p50"] == 564.0
    assert cells[1]["case"] == "fp16 D64 warm disk cache" and cells[1]["first_call"]["p50"] == 84.0
    assert len({cache for cache, _ in seen}) == 3 * len(DIMS)
    assert np.isfinite(cells[1]["new_geometry"]["mean"])
