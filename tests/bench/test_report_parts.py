"""What a report is drawn of: axes, styles, bars, ceilings, the table of variants, occupancy."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench.core.store import Run
from bench.report import cells, machine, svg, work
from bench.report.chart import Axis, Chart, Point, Series, short, span, styles, ticks
from bench.report.section import Table
from fkjit.arch import target
from tests.bench.report_tools import CEILINGS

ROOT = Path(__file__).resolve().parents[2]


def test_the_ceilings_meet_where_both_are_equal():
    slope, flat = work._ceilings(CEILINGS, "bf16", [1.0, 1000.0])
    assert slope.points[-1].x == flat.points[0].x == pytest.approx(760e3 / 4100)
    assert slope.points[-1].y == pytest.approx(flat.points[0].y)
    for point in slope.points:
        assert point.y == pytest.approx(point.x * 4.1)
    chart = svg.clipped(slope, 10.0, 50.0)
    assert [(p.x, p.y) for p in chart] == [(10.0, pytest.approx(41)), (50.0, pytest.approx(205))]
    assert [s.name for s in work._ceilings(CEILINGS, "fp8", [1.0])] == ["copy 4100 GB/s"]
    assert work._ceilings(None, "bf16", [1.0]) == []


def test_variants_have_a_row_each_with_what_ptxas_said(monkeypatch):
    from fkjit import ops
    from fkjit.spec import find

    ops.load()
    asked = []
    monkeypatch.setattr(machine, "warm", lambda *names, **more: asked.append((names, more["arch"])))
    monkeypatch.setattr(machine, "registered", lambda op: [find("attention.naive")] * (op != "no"))
    section = machine.resources("attention", "sm_90a")
    (naive,) = section.tables
    assert asked == [(("attention",), "sm_90a")]
    assert naive.caption == "attention.naive: 3 variants" and len(naive.rows) == 3
    assert section.text[0].startswith("3 variants compiled for sm_90a; none of them spill")
    for row in naive.rows:
        named = dict(zip(naive.head, row, strict=True))
        assert 16 <= named[">registers"] <= 255 and named[">spills [B]"] == 0
        assert 0 < named[">occupancy [%]"] <= 100 and named[">blocks/SM"] >= 1
    assert machine.resources("no", "sm_90a").missing == "no is not registered here"
    assert machine.resources("attention", None).missing.startswith("no target was asked for")


def test_a_kernel_that_does_not_compile_is_left_out_and_named(monkeypatch):
    from fkjit.errors import CompileError
    from fkjit.spec import find

    def refuse(spec, to):
        raise CompileError("line 3: no\nmore")

    monkeypatch.setattr(machine, "warm", lambda *names, **more: None)
    monkeypatch.setattr(machine, "registered", lambda op: [find("attention.naive")])
    monkeypatch.setattr(machine, "_table", refuse)
    section = machine.resources("attention", "sm_90a")
    assert "attention.naive is left out: line 3: no." in section.text
    assert section.missing == "no kernel of attention is shipped for sm_90a"


def test_occupancy_in_theory_is_what_the_profiler_says():
    from bench.profile import store
    from bench.profile.show import main_kernel
    from bench.report.occupancy import occupancy

    arch, seen = target("sm_90a").arch, 0
    for entry in store.read(ROOT / "docs" / "profiles" / "nvidia_h200.json")["entries"]:
        for kernel in map(main_kernel, entry["candidates"]):
            threads = kernel["block"][0] * kernel["block"][1] * kernel["block"][2]
            own = kernel["shared_bytes"] - 1024  # less the driver's
            found = occupancy(arch, kernel["registers"], own, threads)
            assert 100 * found.share == pytest.approx(kernel["occupancy_limit"], abs=0.01)
            seen += 1
    assert seen >= 15


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "blocks", "limit"),
    [
        (32, 0, 1024, 2, "threads"),
        (33, 0, 1024, 1, "registers"),
        (32, 100_000, 128, 2, "shared memory"),
        (16, 0, 32, 32, "blocks"),
    ],
)
def test_occupancy_names_what_bounds_it(registers, shared, threads, blocks, limit):
    from bench.report.occupancy import occupancy

    found = occupancy(target("sm_90a").arch, registers, shared, threads)
    assert (found.blocks, found.limit) == (blocks, limit)
    assert found.share == blocks * threads / 2048


@pytest.mark.parametrize(
    ("axis", "low", "high", "expected"),
    [
        (Axis(""), 0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (Axis("", log=True), 0.9, 110.0, [1, 2, 5, 10, 20, 50, 100]),
        (Axis("", log=True), 0.01, 1000.0, [0.01, 0.1, 1, 10, 100, 1000]),
        (Axis("", log=True, base=2), 500.0, 5000.0, [512, 1024, 2048, 4096]),
        (Axis("", log=True), 1.2, 1.7, [1.2, 1.3, 1.4, 1.5, 1.6, 1.7]),
    ],
)
def test_ticks_are_round(axis, low, high, expected):
    assert ticks(axis, low, high) == pytest.approx(expected)


def test_ends_and_short_numbers():
    assert span(Axis(""), [2.0, 10.0])[0] == 0 and span(Axis("", zero=False), [2.0, 10.0])[0] < 2
    assert span(Axis("", log=True), [1.0, 100.0]) == (0.8, 125.0)
    assert [short(v, 2) for v in (512, 2048, 131_072, 1536)] == ["512", "2k", "128k", "1536"]
    assert [short(v) for v in (0.05, 10_000, 2e-5, 3e6)] == ["0.05", "10000", "2e-5", "3e6"]


def test_tables_of_small_batches_and_few_queries_come_from_a_run(tmp_path):
    from bench.report import shapes
    from bench.report.tables import with_tables
    from tests.bench.report_tools import results

    stored = results(tmp_path / "r.jsonl", "small_batch", "short_q")
    made = dict(shapes.tables(stored))
    assert list(made) == ["small_batch", "short_q"]
    head, _, *rows = made["short_q"].splitlines()
    assert head.startswith(
        "| case | fkjit | cuDNN | FlashAttention-4 | FlashAttention-2 | Triton |"
    )
    assert rows[0].startswith("| bf16 D128 S1/4096 B1 H32/8 causal | ") and len(rows) == 12 + 2
    assert "microseconds in a CUDA graph, medians; NVIDIA H200, 2026-11-21, NVRTC 13.0." in rows[-1]
    own, *times, ratio = [float(x) for x in rows[1].split("|")[2:-1]]
    assert abs(min(times[:-1]) / own - ratio) < 0.02
    for name in made:
        assert f"<!-- {name}: begin -->\n" in shapes.README.read_text()
    page = with_tables(shapes.README.read_text(), made)
    assert made["small_batch"] in page and page.count("<!-- short_q: begin -->") == 1


def test_styles_stay_with_names_and_ours_comes_first():
    assert styles(["b", "a", "b"], ["a"]) == {"a": 0, "b": 1}
    series = [Series(str(n), [], n) for n in range(24)]
    assert len({(s.colour, s.marker, s.dash) for s in series}) == 24


def test_bars_stand_in_groups_with_their_numbers():
    two = [Series(n, [Point(0, 40.0), Point(1, 80.0)], k) for k, n in enumerate("ab")]
    chart = Chart("t & t", "bar", Axis(""), Axis("v [u]"), two, [("1k", "g"), ("2k", "h")])
    root = ET.fromstring(svg.draw(chart, "said"))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("40") == texts.count("80") >= 2 and {"t & t", "g", "h", "v [u]"} <= {*texts}
    heights = [
        float(n.attrib["height"])
        for n in root.iter("{http://www.w3.org/2000/svg}rect")
        if n.attrib["height"] != "11"
    ]
    assert heights == pytest.approx(
        [heights[0], heights[0], 2 * heights[0], 2 * heights[0]], rel=0.01
    )


def test_tables_escape_what_they_hold():
    from bench.report.page import table

    made = table(Table(("a", ">b"), [("<x>", 3)], "c & d"))
    assert "&lt;x&gt;" in made and "c &amp; d" in made and '<td class="number">3</td>' in made


def test_a_ceiling_far_above_everything_does_not_flatten_it(tmp_path):
    import json

    from bench.report import cells, speed
    from tests.bench.report_tools import HEADER

    lines = [HEADER]
    for rows in (1024, 2048):
        cell = {"record": "cell", "op": "o", "case": f"rows={rows}", "candidate": "fkjit"}
        rates = {"p50": 1.0, "tflops": 2.0, "gbs": 1000.0}
        problem = {"rows": rows, "dtype": "bf16"}
        lines.append({**cell, "kind": "ours", "problem": problem, "warm": rates})
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (one,) = cells.studies(cells.load([path]))
    (fast,), (wide,) = (f(one, {"fkjit": 0}).charts for f in (speed.throughput, speed.bandwidth))
    assert [s.guide for s in fast.series] == [False]
    assert [s.name for s in wide.series] == ["fkjit", "device copy, 4100 GB/s"]
    assert work.decode(one, {"fkjit": 0}).missing == "o has no queries and keys"


def _cell(case, problem, **modes):
    found = {mode: {"p50": time} for mode, time in modes.items()}
    whole = {"record": "cell", "op": "moe_route", "case": case, "candidate": "fkjit"}
    return {**whole, "kind": "ours", "problem": problem, **found}


def test_cases_that_differ_in_their_size_by_name_are_a_row_whatever_follows_from_it():
    run = Run({"gpu": "G"})
    for tokens in (64, 1024, 8192):
        problem = {"tokens": tokens, "experts": 8, "places": 3 * tokens + 7}
        run.cells.append(_cell(f"fp32 T{tokens} E8 K1", problem, graph=1.0))
    run.cells.append(_cell("other", {"tokens": 5, "experts": 9, "places": 1}, graph=1.0))
    (study,) = cells.studies([run])
    row, rest = cells.families(study)
    assert (row.label, row.along) == ("fp32 E8 K1", "tokens")
    assert [place[0] for place in row.places] == [64, 1024, 8192]
    assert rest.along is None and rest.places == ((0.0, "other"),)


def test_a_later_run_of_other_modes_adds_to_the_one_before_and_an_error_replaces_it():
    runs = [Run({"gpu": "G", "date": str(n)}) for n in range(3)]
    runs[0].cells.append(_cell("a", {"n": 1}, warm=1.0, cold=2.0))
    runs[1].cells.append(_cell("a", {"n": 1}, warm=3.0, graph=4.0))
    (study,) = cells.studies(runs[:2])
    found = study.cells("a")["fkjit"]
    assert [cells.median(found, mode) for mode in ("cold", "warm", "graph")] == [2.0, 3.0, 4.0]
    runs[2].cells.append({**_cell("a", {"n": 1}), "error": "wrong"})
    (study,) = cells.studies(runs)
    assert not study.modes


def test_the_mode_with_most_times_comes_first():
    run = Run({"gpu": "G"})
    run.cells += [_cell(str(n), {"n": n}, graph=1.0) for n in range(3)]
    run.cells.append(_cell("3", {"n": 3}, graph=1.0, warm=1.0))
    assert cells.studies([run])[0].modes == ["graph", "warm"]
