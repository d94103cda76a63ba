"""Result files: written line by line, readable whatever cut them short; what moved between two."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.command import main
from bench.core import compare as comparing
from bench.core.statistics import summary
from bench.core.store import Writer, file_name, latest, read
from fkjit.errors import ParameterError

HEADER = {"record": "run", "schema": 1, "gpu": "NVIDIA H200", "date": "2026-11-21T09:30:15"}


def cell(case, candidate="fkjit", kind="ours", **more):
    return {
        "record": "cell", "op": "attention", "case": case, "candidate": candidate, "kind": kind,
        "version": "1", **more,
    }  # fmt: skip


def times(p50, seed=0, spread=0.01, drift=0.0):
    """A summary of 200 noisy times in ten turns."""
    rng = np.random.default_rng(seed)
    middle = p50 * (1 + drift * rng.standard_normal(10))
    turns = [list(m * (1 + spread * rng.standard_normal(20))) for m in middle]
    return summary([x for turn in turns for x in turn], turns)


def written(path, *cells, header=HEADER):
    writer = Writer(path)
    for record in (header, *cells):
        writer.write(record)
    return path


def test_what_is_written_is_read_back(tmp_path):
    path = written(
        tmp_path / "a" / "b.jsonl", cell("one", warm=times(1.0)), cell("two", error="wrong")
    )
    (run,) = read(path)
    assert run.header == HEADER and run.end is None
    assert [c["case"] for c in run.cells] == ["one", "two"]
    assert run.cells[0]["warm"] == times(1.0)
    Writer(path, append=True).write({"record": "end", "reason": "complete"})
    assert read(path)[0].end == {"record": "end", "reason": "complete"}


def test_a_torn_line_is_left_out_and_cut_before_more_is_appended(tmp_path):
    path = written(tmp_path / "run.jsonl", cell("one"), cell("two"))
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1]) + 1):
        path.write_bytes(whole[:-cut])
        assert [c["case"] for c in read(path)[0].cells] == ["one"]
    Writer(path, append=True).write(cell("three"))
    assert [c["case"] for c in read(path)[0].cells] == ["one", "three"]


def test_a_second_run_in_a_file_counts_where_it_measured_again(tmp_path):
    path = written(tmp_path / "run.jsonl", cell("one", error="a"), cell("two", error="b"))
    writer = Writer(path, append=True)
    writer.write({**HEADER, "commit": "abc"})
    writer.write(cell("one", error="c"))
    runs = read(path)
    assert [len(run.cells) for run in runs] == [2, 1] and runs[1].header["commit"] == "abc"
    assert latest(runs)["attention", "one", "fkjit"]["error"] == "c"
    assert latest(runs)["attention", "two", "fkjit"]["error"] == "b"


def test_a_file_that_stands_is_not_overwritten(tmp_path):
    path = written(tmp_path / "run.jsonl")
    with pytest.raises(ParameterError, match="exists; choose another name, or --append"):
        Writer(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no run"),
        ('{"record": "cell"}\n', "begins without a run's header"),
        (json.dumps({**HEADER, "schema": 99}) + "\n", "has schema 99; this fkjit reads 1"),
        (json.dumps(HEADER) + '\n{"record": \n' + json.dumps(cell("a")) + "\n", ":2 is not a"),
        (json.dumps(HEADER) + "\n[1]\n" + json.dumps(cell("a")) + "\n", ":2 is not a"),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused(tmp_path, text, message):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ParameterError, match=message):
        read(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ParameterError, match=r"none\.jsonl cannot be read"):
        read(tmp_path / "none.jsonl")


def test_infinities_are_text_not_broken_json(tmp_path):
    path = written(tmp_path / "run.jsonl", cell("one", accuracy={"relative": float("nan")}))
    assert "NaN" not in path.read_text()
    assert read(path)[0].cells[0]["accuracy"] == {"relative": "nan"}


def test_files_are_named_by_date_gpu_and_commit():
    assert file_name({**HEADER, "commit": "fe6e164"}) == "20261121-093015-h200-fe6e164.jsonl"
    named = file_name({**HEADER, "gpu": "NVIDIA GeForce RTX 5090", "commit": None})
    assert named == "20261121-093015-rtx-5090-unknown.jsonl"


# ------------------------------------------------------------------ what moved


def two_runs(tmp_path, before, after):
    first = written(tmp_path / "before.jsonl", *before)
    second = written(tmp_path / "after.jsonl", *after)
    return read(first), read(second)


def test_a_planted_regression_is_found_among_noise(tmp_path):
    names = [f"case {i}" for i in range(40)]
    before = [cell(n, warm=times(1.0, seed=i)) for i, n in enumerate(names)]
    after = [cell(n, warm=times(1.0, seed=100 + i)) for i, n in enumerate(names)]
    after[7] = cell(names[7], warm=times(1.08, seed=300))
    after[9] = cell(names[9], warm=times(0.9, seed=301))
    found = comparing.compare(*two_runs(tmp_path, before, after))
    moved = [(change.case, change.verdict(0.03)) for change in found.moved(0.03)]
    assert moved == [("case 9", "faster"), ("case 7", "slower")]
    assert [change.case for change in found.regressions(0.03)] == ["case 7"]


def test_noise_alone_is_not_reported(tmp_path):
    noisy = {"spread": 0.2, "drift": 0.05}
    names = [f"case {i}" for i in range(100)]
    before = [cell(n, warm=times(1.0, i, **noisy)) for i, n in enumerate(names)]
    after = [cell(n, warm=times(1.0, 1000 + i, **noisy)) for i, n in enumerate(names)]
    assert comparing.compare(*two_runs(tmp_path, before, after)).moved(0.0) == []


def test_what_is_noisy_has_to_move_further(tmp_path):
    quiet = [cell("quiet", cold=times(1.0, 1)), cell("noisy", cold=times(1.0, 2, drift=0.05))]
    after = [cell("quiet", cold=times(1.06, 3)), cell("noisy", cold=times(1.06, 4, drift=0.05))]
    found = comparing.compare(*two_runs(tmp_path, quiet, after))
    assert [change.case for change in found.moved(0.03)] == ["quiet"]


def test_every_mode_counts_and_peers_are_no_regressions(tmp_path):
    modes = {mode: times(1.0, 5) for mode in ("cold", "warm", "graph")}
    slower = {**modes, "graph": times(1.5, 6)}
    before = [cell("a", **modes), cell("a", "fa4", "peer", **modes)]
    after = [cell("a", **slower), cell("a", "fa4", "peer", **slower)]
    found = comparing.compare(*two_runs(tmp_path, before, after))
    assert len(found.changes) == 6 and len(found.moved(0.03)) == 2
    assert [(c.candidate, c.mode) for c in found.regressions(0.03)] == [("fkjit", "graph")]


def test_the_peers_drift_is_told_and_can_be_taken_out(tmp_path):
    before = [cell(f"c{i}", "fa4", "peer", warm=times(1.0, i)) for i in range(9)]
    after = [cell(f"c{i}", "fa4", "peer", warm=times(1.1, 50 + i)) for i in range(9)]
    before.append(cell("c0", warm=times(1.0, 60)))
    after.append(cell("c0", warm=times(1.1, 61)))
    runs = two_runs(tmp_path, before, after)
    plain, relative = comparing.compare(*runs), comparing.compare(*runs, relative=True)
    assert plain.drift == pytest.approx(1.1, abs=0.01) and plain.drift_cells == 9
    assert len(plain.regressions(0.03)) == 1 and relative.regressions(0.03) == []


def test_the_command_prints_what_moved_and_fails_for_ours_alone(tmp_path, capsys):
    same = written(tmp_path / "a.jsonl", cell("D64", warm=times(1.0)), cell("D96", warm=times(1.0)))
    slow = written(tmp_path / "b.jsonl", cell("D64", warm=times(1.2)), cell("D128", warm=times(1)))
    assert main(["--compare", str(same), str(same)]) == 0
    assert "2 times compared, 0 moved" in capsys.readouterr().out
    assert main(["--compare", str(same), str(slow)]) == 1
    out = capsys.readouterr().out
    assert "D64" in out and "+20.0 %" in out and "slower" in out
    assert "\ncells only before: 1, only after: 1\n" in out
    assert main(["--compare", str(slow), str(same)]) == 0
    assert main(["--compare", str(same), str(slow), "--threshold", "0.3"]) == 0


def test_one_of_ours_that_is_wrong_now_is_a_regression(tmp_path, capsys):
    good = written(tmp_path / "a.jsonl", cell("D64", warm=times(1.0)))
    bad = written(tmp_path / "b.jsonl", cell("D64", error="wrong result: 1"))
    assert main(["--compare", str(good), str(bad)]) == 1
    assert "D64 fkjit: wrong result: 1" in capsys.readouterr().out
    assert main(["--compare", str(bad), str(bad)]) == 0
