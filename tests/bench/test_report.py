"""`fkjit report`: a whole page of stored results, and one of results that hold next to nothing."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench.report import cells, command, look, png, speed, summary, work
from bench.report.chart import PALETTE, styles
from bench.report.matrix import Matrix, Row, html, matrices
from bench.report.page import page
from tests.bench.report_tools import HEADER, results
from tests.cli.kit import run

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = {
    "summary", "latency", "throughput", "speedup", "scaling", "bandwidth", "memory", "roofline",
    "decode", "triton", "resources", "profile",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A report of made-up results."""
    folder = tmp_path_factory.mktemp("report")
    stored = results(folder / "run.jsonl", "quick", "scaling", "decode", "readme")
    words = ("--out", str(folder / "out"), "--pictures")
    done = run("report", str(stored), *words)
    assert done.status == 0, done.err
    return folder / "out"


def study(folder: Path, *sets: str) -> cells.Study:
    (one,) = cells.studies(cells.load([results(folder / "r.jsonl", *sets)]))
    return one


class Page(HTMLParser):
    """Ids, addresses and open tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.stack: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.ids += [named["id"]] if "id" in named else []
        self.addresses += [named[key] for key in ("src", "href") if named.get(key)]
        if tag not in ("meta", "link", "br", "img", "input"):
            self.stack.append(tag)

    def handle_endtag(self, tag):
        if tag != "meta":
            assert self.stack.pop() == tag


def data(text: str) -> dict:
    (found,) = re.findall(r'(?s)<script type="application/json" id="data">(.*?)</script>', text)
    return json.loads(found)


def test_every_section_is_there_and_drawn(made):
    text = (made / "index.html").read_text()
    page = Page(text)
    assert page.stack == [] and set(page.ids) >= SECTIONS
    assert len(page.ids) == len(set(page.ids))
    assert {a.removeprefix("#") for a in page.addresses} <= set(page.ids)
    charts = data(text)["charts"]
    assert set(charts) == SECTIONS - {"summary", "resources", "profile"}
    assert 'class="missing">no target was asked for' in text


def test_the_page_is_whole_without_a_network(made):
    text = (made / "index.html").read_text()
    assert not re.findall(r"(?:src|href)=\"(?!#)|@import|url\(|fetch\(|XMLHttp", text)
    assert set(re.findall(r"https?://[^\"' <]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_on_top_stands_how_many_times_as_fast_ours_is(made, tmp_path):
    text = (made / "index.html").read_text()
    modes = re.findall(r'class="scroll matrix" data-mode="(\w+)"', text)
    assert sorted(modes) == ["cold", "graph", "warm"]
    assert text.index('class="scroll matrix"') < text.index("<li>") < text.index('id="latency"')
    one = study(tmp_path, "quick")
    warm = next(made for made in matrices(one) if made.mode == "warm")
    assert warm.own == "fkjit" and warm.peers[0] == "triton" and "fkjit" not in warm.peers
    row = warm.rows[0]
    assert row.ratios[0] == one.speedup(row.case, "triton", "warm")
    found = html(warm, {"triton": "#123456"})
    assert f'<tr data-case="{row.case}">' in found and f">{row.ratios[0]:.2f}</td>" in found
    assert '<i style="background:#123456"></i>triton</th>' in found
    for ratio, name in ((3.0, "w3"), (1.05, "w1"), (1.0, "even"), (0.95, "l1"), (0.1, "l3")):
        row = Row("c", 1.0, (ratio, None))
        cells_ = html(Matrix("warm", "fkjit", ("a", "b"), (row,)), {})
        assert f'<td class="number {name}">{ratio:.2f}</td><td class="number none">–' in cells_


@pytest.mark.parametrize(("own", "shown"), [(0.0123, "fkjit [us]</th>"), (0.4, "fkjit [ms]</th>")])
def test_times_of_ours_are_in_a_unit_that_reads(own, shown):
    rows = tuple(Row(case, own, (1.0,)) for case in "abc")
    found = html(Matrix("warm", "fkjit", ("peer",), rows), {})
    assert shown in found and f">{'12.3' if own < 0.1 else '0.4'}</td>" in found


def test_attention_comes_first_and_a_peer_has_one_colour_everywhere(tmp_path):
    def of(op, *names):
        kinds = {"fkjit": "ours", "any order": "ours"}
        return [{**turn(n, 1.0 + i, kinds.get(n, "peer")), "op": op} for i, n in enumerate(names)]

    lines = [HEADER, *of("rope", "torch", "fkjit"), *of("attention", "sdpa", "fkjit", "torch"),
             *of("attention_decode", "any order", "cudnn", "fkjit", "torch")]  # fmt: skip
    runs = cells.load([write(tmp_path / "r.jsonl", lines)])
    parts = command.build(runs, None, None)
    assert [name.split()[0] for name, _ in parts] == ["attention", "attention_decode", "rope"]
    seen: dict[str, set[str]] = {}
    for series in (s for _, found in parts for one in found for c in one.charts for s in c.series):
        if not series.guide and series.name in ("fkjit", "any order", "torch", "sdpa", "cudnn"):
            seen.setdefault(series.name, set()).add(series.colour)
    assert seen["fkjit"] == seen["any order"] == {PALETTE[0]}
    assert all(len(colours) == 1 for colours in seen.values())
    assert len(set.union(*seen.values())) == 4, "ours and three peers"
    text = page("t", parts, runs, look.styles(cells.studies(runs)), ["fkjit", "any order"])
    assert data(text)["ours"] == ["fkjit", "any order"]
    assert re.findall(r'class="part" data-part="(\w+)', text) == [n.split()[0] for n, _ in parts]


def test_axes_have_units_and_points_their_numbers(made):
    found = data((made / "index.html").read_text())
    for charts in found["charts"].values():
        for chart in charts:
            value = chart["y"]["label"]
            assert "[" in value or "time of" in value
            for series in chart["series"]:
                assert series["guide"] or all(found["notes"][p[2]] for p in series["points"])
    latency = found["charts"]["latency"]
    assert {chart["choice"]["mode"] for chart in latency} == {"warm", "cold", "graph"}
    names = {s["name"] for chart in latency for s in chart["series"]}
    assert names >= {"fkjit", "triton", "sdpa-cudnn", "fa4"}
    roofs = {s["name"] for chart in found["charts"]["roofline"] for s in chart["series"]}
    assert {"copy 4100 GB/s", "GEMM 760 TFLOP/s", "fkjit flash, measured bytes"} <= roofs


def test_pictures_are_valid_and_named_by_what_they_show(made):
    folder = made / "pictures"
    drawn = sorted(folder.glob("*.svg"))
    own = "attention-on-nvidia-h200-"
    assert all(path.name.startswith(own) for path in drawn)
    assert {path.name.removeprefix(own).split("-")[0] for path in drawn} == SECTIONS - {
        "summary", "resources", "profile",
    }  # fmt: skip
    for path in drawn:
        root = ET.fromstring(path.read_text())
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for node in root.iter("{http://www.w3.org/2000/svg}text"):
            x, y = float(node.attrib["x"]), float(node.attrib["y"])
            assert 0 <= x <= width and 0 <= y <= height, (path.name, node.text)
        assert root.find("{http://www.w3.org/2000/svg}title") is not None
        picture = path.with_suffix(".png")
        assert picture.exists() == (png.available() is None)
    if png.available() is None:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_summary_says_who_is_faster_and_what_failed(made):
    text = (made / "summary.txt").read_text()
    assert "Fastest: sdpa-cudnn in" in text and "We are behind in" in text
    assert re.search(r"triton: fkjit is 1\.\d\d times as fast on average", text)
    assert "eager has no time for bf16 D64 S1024 B4 H32 full: wrong: relative error" in text
    assert "Not measured: compile: takes a minute a case." in text


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_results_with_next_to_nothing_say_so_in_every_section(tmp_path):
    problem = {"n": 8}
    cell = {"record": "cell", "op": "scale", "case": "n8", "candidate": "fkjit", "kind": "ours"}
    lines = [
        {"record": "run", "schema": 1, "gpu": "G", "date": "2026-01-01"},
        {**cell, "problem": problem, "warm": {"p50": 1.5}},
    ]
    stored = write(tmp_path / "small.jsonl", lines)
    assert run("report", str(stored), "--out", str(tmp_path / "out")).status == 0
    text = (tmp_path / "out" / "index.html").read_text()
    assert set(data(text)["charts"]) == {"latency"}
    assert text.count('class="missing"') == len(SECTIONS) - 2  # all but summary and latency
    assert "no profile of scale on G" in text and "no peer was measured beside ours" in text


def test_a_run_without_a_single_time_is_reported(tmp_path):
    cell = {"record": "cell", "op": "scale", "case": "n8", "candidate": "a", "kind": "peer"}
    header = {"record": "run", "schema": 1}
    stored = write(tmp_path / "r.jsonl", [header, {**cell, "problem": {}, "error": "<b>wrong"}])
    done = run("report", str(stored), "--out", str(tmp_path / "out"))
    assert done.status == 0 and "nothing has a time" in done.out
    text = (tmp_path / "out" / "index.html").read_text()
    assert "&lt;b&gt;wrong" in text and "<b>wrong" not in text and data(text)["charts"] == {}


def test_no_results_at_all_are_an_error_that_says_what_makes_some(tmp_path, monkeypatch):
    for module in (cells, command):
        monkeypatch.setattr(module, "results_folder", lambda: tmp_path)
    monkeypatch.setattr(cells, "_DOCS", tmp_path)
    (tmp_path / "other.jsonl").write_text("{}\n")
    assert cells.default_files() == []
    done = run("report", "--out", str(tmp_path / "out"))
    assert done.status == 1 and not (tmp_path / "out").exists()
    assert done.err == (
        f"fkjit: report: no results in {tmp_path}: `fkjit bench` measures and stores some, or name "
        "files: fkjit report RESULTS.jsonl\n"
    )
    write(tmp_path / "empty.jsonl", [HEADER])
    assert "no results in" in run("report", str(tmp_path / "empty.jsonl")).err


def test_the_newest_run_is_the_default(tmp_path, monkeypatch):
    for name, date in (("a", "2026-02-01"), ("b", "2026-03-01"), ("c", "2026-01-01")):
        write(tmp_path / f"{name}.jsonl", [{**HEADER, "date": date}])
    monkeypatch.setattr(cells, "_DOCS", tmp_path)
    monkeypatch.setattr(cells, "results_folder", lambda: tmp_path / "none")
    assert [path.name for path in cells.default_files()] == ["b.jsonl"]
    assert [r.header["date"][5:7] for r in cells.load([tmp_path])] == ["01", "02", "03"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.jsonl"], "nothing.jsonl cannot be read"),
        (["docs/BENCHMARKS.md"], "is not a result line"),
        (["docs/attention_portable_h200.jsonl", "--target", "sm_1"], "is not an architecture"),
        (["docs/attention_portable_h200.jsonl", "--profile", "README.md"], "is not a profile"),
        (["docs/attention_portable_h200.jsonl", "--out", "README.md/x"], "cannot be written"),
    ],
)
def test_what_cannot_be_reported_is_refused(words, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = run("report", *words)
    assert done.status == 1 and message in done.err and done.err.count("\n") == 1


def turn(name: str, time: float, kind: str = "peer", case: str = "c") -> dict:
    made = {"record": "cell", "op": "o", "case": case, "candidate": name, "kind": kind}
    return {**made, "problem": {"n": 4}, "warm": {"p50": time}}


def test_a_ratio_is_of_one_run_and_the_last_one_counts(tmp_path):
    early, late = ({**HEADER, "date": f"2026-0{month}-01"} for month in (1, 2))
    first = write(tmp_path / "1.jsonl", [
        early, turn("fkjit", 2.0, "ours"), turn("a", 4.0), turn("b", 3.0),
    ])  # fmt: skip
    second = write(tmp_path / "2.jsonl", [late, turn("fkjit", 1.0, "ours"), turn("b", 3.0)])
    (one,) = cells.studies(cells.load([second, first]))
    assert one.cells("c")["fkjit"]["warm"]["p50"] == 1.0
    assert one.speedup("c", "a", "warm") == 2.0  # against the slower fkjit of its own run
    assert one.speedup("c", "b", "warm") == 3.0
    assert one.speedup("c", "absent", "warm") is None
    said = " ".join(summary.words(one))
    assert "Fastest: fkjit in 1 of 1 cases. We are behind nobody." in said
    assert "a: fkjit is 2.00 times as fast on average; faster in 1 of 1." in said


def test_gpus_and_operations_have_parts_of_their_own(tmp_path):
    other = {**HEADER, "gpu": "B"}
    lines = [HEADER, turn("fkjit", 1.0, "ours"), other, turn("fkjit", 2.0, "ours")]
    runs = cells.load([write(tmp_path / "r.jsonl", lines)])
    parts = command.build(runs, "none", None)
    assert [name for name, _ in parts] == ["o on NVIDIA H200", "o on B"]


def test_families_are_rows_of_a_batch_or_of_tokens(tmp_path):
    found = {f.label: f for f in cells.families(study(tmp_path, "readme", "scaling", "decode"))}
    row = found["bf16 D128 B1 H16 full"]
    assert [x for x, _ in row.places] == [512, 1024, 2048, 4096, 16_384] and row.tokens == 0
    tokens = found["bf16 D64 H32 causal, 16k tokens"]
    assert tokens.tokens == 16_384 and [x for x, _ in tokens.places] == [2048, 4096, 8192, 16_384]
    decode = found["bf16 D128 B1 H32/8 full"]
    assert [x for x, _ in decode.places] == [4096, 32_768, 131_072]
    labels = [case for f in found.values() for _, case in f.places]
    assert set(labels) == set(study(tmp_path, "readme", "scaling", "decode").cases)
    assert found["single cases"].along is None


def test_scaling_finds_the_exponent(tmp_path):
    lines = [HEADER]
    for batch in (1, 2):
        for length in (512, 1024, 2048):
            made = turn("fkjit", 1e-6 * batch * length**1.5, "ours", f"B{batch} S{length}")
            lines.append({**made, "problem": {"batch": batch, "seqlen_k": length}})
    (one,) = cells.studies(cells.load([write(tmp_path / "r.jsonl", lines)]))
    section = speed.scaling(one, styles(one.candidates))
    assert [row[2] for row in section.tables[0].rows] == ["1.50", "1.50"]
    assert [series.name for series in section.charts[0].series] == ["B1", "B2"]


def test_decode_is_measured_in_bytes_and_prefill_in_operations(tmp_path):
    one = study(tmp_path, "decode", "readme")
    section = work.decode(one, styles(one.candidates))
    assert [c.y.label for c in section.charts[:2]] == ["counted bytes [GB/s]", "speed [TFLOP/s]"]
    assert len(section.charts[0].categories) == 6 and len(section.charts[1].categories) == 3
    cell = one.cells("bf16 D128 S1/4096 B16 H32/8 full")["fkjit"]
    (point,) = [p for p in section.charts[0].series[0].points if p.x == 3]
    assert point.y == pytest.approx(cell["warm"]["gbs"])


def test_without_matplotlib_there_are_pictures_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(png, "available", lambda: "PNG needs matplotlib")
    stored = results(tmp_path / "r.jsonl", "quick")
    words = ("--out", str(tmp_path / "out"), "--target", "none")
    done = run("report", str(stored), *words)
    assert (done.status, done.err) == (0, "") and not (tmp_path / "out" / "pictures").exists()
    done = run("report", str(stored), *words, "--pictures")
    assert done.status == 0 and "no PNG pictures: PNG needs matplotlib" in done.err
    kinds = {path.suffix for path in (tmp_path / "out" / "pictures").iterdir()}
    assert kinds == {".svg"}
