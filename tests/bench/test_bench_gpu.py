"""The suite on a real GPU: a short run whose figures have to make sense."""

from __future__ import annotations

import pytest

from bench.command import main
from bench.core.store import read

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
MODES = ("cold", "warm", "graph")


def measured(tmp_path, *arguments):
    """(status, run) of a short run."""
    out = tmp_path / "run.jsonl"
    short = ("--iterations", "40", "--warmup", "5", "--cell-seconds", "0.2", "--out", str(out))
    status = main(["attention", *arguments, *short])
    (run,) = read(out)
    return status, run


def test_a_run_is_complete_and_plausible(tmp_path):
    case = ("--set", "default", "--only", "D128 S1024 full")
    status, run = measured(tmp_path, *case, "--peers", "eager,sdpa,sdpa-math")
    assert status == 0 and run.end["reason"] == "complete"
    ceilings = run.header["ceilings"]
    assert ceilings["copy_gbs"] > 100 and ceilings["gemm_tflops"]["bf16"] > 5
    assert run.header["gpu"] == torch.cuda.get_device_name()
    found = {cell["candidate"]: cell for cell in run.cells}
    assert list(found) == ["fkjit", "eager", "sdpa", "sdpa-math"]
    for cell in found.values():
        assert "error" not in cell and "missing" not in cell, cell
        for mode in MODES:
            times = cell[mode]
            assert times["count"] >= 20 and 0 < times["min"] <= times["p50"] <= times["p99"]
            assert 0 < times["share_gemm"] < 1.2
        # Without the host's time, an uncaptured call takes about as long as in a graph; its least
        # time does, since other tests may have the GPU meanwhile.
        assert cell["warm"]["min"] < 1.5 * cell["graph"]["p50"] + 0.01
        assert cell["host_us"] > 1
    ours = found["fkjit"]
    assert ours["variant"]["compile_ms"] > 0 and ours["variant"]["load_ms"] > 0
    output = 2 * 4 * 16 * 1024 * 128
    assert output <= ours["memory"]["peak_bytes"] < 1.2 * output + (1 << 20)
    assert found["eager"]["memory"]["peak_bytes"] > 4 * output


def test_registered_kernels_run_by_name(tmp_path):
    status, run = measured(tmp_path, "--set", "host", "--impl", "all", "--peers", "none")
    assert status == 0
    timed = {cell["candidate"] for cell in run.cells if "warm" in cell}
    assert {"fkjit", "fkjit naive", "fkjit tiled"} <= timed
    assert all("warm" in cell or "missing" in cell for cell in run.cells)
