"""`fkjit bench host`: its cases, its arithmetic on a made-up GPU, and its place in the report."""

from __future__ import annotations

import json
import types

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from bench.core import host  # noqa: E402
from bench.core.store import read  # noqa: E402
from bench.report import host as shown  # noqa: E402
from bench.report.command import main as report  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402


class OnCpu:
    """torch, whose "cuda" is the CPU."""

    cuda = types.SimpleNamespace(synchronize=lambda: None)

    def __getattr__(self, name):
        found = getattr(torch, name)
        if name in ("randn", "ones", "full", "arange", "zeros", "tensor"):
            return lambda *given, **named: found(*given, **{**named, "device": "cpu"})
        return found


def test_every_case_is_a_call_that_runs():
    names = []
    with quiet():
        for case in host.cases(OnCpu()):
            if case.ours and not case.grad:
                arrays = case.arrays(OnCpu(), 20)
                assert case.call(*arrays) is not None
            names.append(case.name)
    assert len(set(names)) == len(names) > 20


def test_each_size_is_another_shape():
    """Else what is called new is not, and what alternates stands still."""

    def shapes(case, n):
        return [x if isinstance(x, int) else tuple(x.shape) for x in case.arrays(OnCpu(), n)]

    for case in host.cases(OnCpu()):
        sizes = (*host._WIDTHS, host._FIRST_NEW, host._FIRST_NEW + 1, host._FIRST_NEW + 16)
        found = [shapes(case, n) for n in sizes]
        assert all(one not in found[:at] for at, one in enumerate(found)), case.name


def test_new_shapes_are_new_and_the_two_that_alternate_differ():
    sizes = []
    case = host.Case("noted", lambda torch, n: (n,), lambda n: sizes.append(n))
    (cell,) = host.measure(OnCpu(), [case], 2)
    warm, new = sizes[: -host._NEW], sizes[-host._NEW :]
    assert len(set(new)) == host._NEW and not set(new) & set(warm)
    assert set(warm) == set(host._WIDTHS)
    assert 0 < cell["new_least"] <= cell["new"] and cell["torch_add"] > 0


def run(path):
    header = {"record": "run", "schema": 1, "gpu": "NVIDIA H200", "date": "2026-11-22"}
    cell = {
        "record": "host", "case": "rms_norm", "unit": "us", "kind": "ours", "torch_add": 5.0,
        "warm": 6.5, "alternating": 8.5, "new": 30.0, "new_least": 28.0,
    }  # fmt: skip
    soak = {"record": "host", "case": "soak of 9 calls", "unit": "MB", "kind": "ours",
            "before": 900.0, "after": 910.0}  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in (header, cell, soak)))
    return read(path)


def test_the_report_has_its_table(tmp_path, capsys):
    (stored,) = run(tmp_path / "r.jsonl")
    section = shown.section(stored)
    assert section.tables[0].rows == [["rms_norm", "6.5", "1.30", "8.5", "0.40", "30"]]
    assert "900 MB of host memory before, 910 MB after" in section.text[1]
    assert report([str(tmp_path / "r.jsonl"), "--out", str(tmp_path / "out"), "--no-pictures"]) == 0
    page = (tmp_path / "out" / "index.html").read_text()
    assert "host time on NVIDIA H200" in page and "1.30" in page


def test_a_run_without_host_times_has_no_part(tmp_path):
    (stored,) = run(tmp_path / "r.jsonl")
    stored.host.clear()
    assert shown.runs_of([stored]) == {} and "no run" in shown.section(stored).missing
