"""The gallery's pages are what `fkjit gallery --write docs` makes, and its pictures show what was
seen."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fkjit.gallery import catalog, page, pictures
from fkjit.gallery.ladder import Picture
from fkjit.gallery.pipeline import stages
from fkjit.gallery.pipeline_picture import pipeline
from fkjit.gallery.trace import banks, owners
from tests.core.sampling import ONLY_WITH_EVERY_VARIANT

DOCS = Path(__file__).resolve().parents[2] / "docs"
ANEW = "fkjit gallery --write docs"


@pytest.mark.parametrize("name", catalog.NAMES)
def test_pages_say_what_the_ladders_say(name, monkeypatch, every_variant):
    stored = (DOCS / "gallery" / f"{name}.md").read_text(encoding="utf-8")
    if not every_variant:  # of the source: they change with every kernel
        monkeypatch.setattr(page, "source_changes", lambda step, before: ["…"])
        stored = re.sub(r": \d+ lines of differences", ": 1 lines of differences", stored)
        stored = re.sub(r"(?ms)^```diff\n.*?^```$", "```diff\n…\n```", stored)
        stored = stored.replace("Source: the same.\n", _details("…"))
    assert page.page(catalog.find(name)) == stored, f"write it anew: {ANEW}"


def _details(body: str) -> str:
    return (
        "<details>\n<summary>Source, as it is rendered: 1 lines of differences</summary>\n\n"
        f"```diff\n{body}\n```\n\n</details>\n"
    )


def test_the_index_says_what_the_ladders_say():
    stored = (DOCS / page.INDEX).read_text(encoding="utf-8")
    assert page.index() == stored, f"write it anew: {ANEW}"


def test_pages_show_every_picture_that_there_is():
    shown = {
        file for path in (DOCS / "gallery").glob("*.md")
        for file in re.findall(r"\]\(([^)/]+\.svg)\)", path.read_text(encoding="utf-8"))
    }  # fmt: skip
    assert shown == {path.name for path in (DOCS / "gallery").glob("*.svg")} and len(shown) > 40


def test_links_of_pages_lead_somewhere():
    for path in (DOCS / "gallery").glob("*.md"):
        for link in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).exists(), (path.name, link)


@pytest.mark.parametrize("name", catalog.NAMES)
@ONLY_WITH_EVERY_VARIANT
def test_pictures_are_those_of_the_code(name):
    for file, text in page.drawn(catalog.find(name)):
        assert (DOCS / "gallery" / file).read_text(encoding="utf-8") == text, f"{file}: {ANEW}"


def test_who_writes_which_row_of_the_output():
    ladder = catalog.find("attention")
    tiled = owners(ladder, ladder.steps[1], "o", pictures.TARGET)
    rows = np.arange(150)[:, None]
    last_first = 2 - rows // 64  # 64 queries a block
    assert (tiled.block == np.broadcast_to(last_first, (150, 128))).all()
    naive = owners(ladder, ladder.steps[0], "o", pictures.TARGET)
    assert (naive.block == np.broadcast_to(37 - rows // 4, (150, 128))).all()  # a warp a query
    assert (naive.warp == np.broadcast_to(rows % 4, (150, 128))).all()


def test_banks_with_the_swizzle_and_without_it():
    ladder = catalog.find("attention")
    step = ladder.steps[2]
    own, plain = banks(ladder, step, "ldmatrix", pictures.TARGET)
    assert (own["wavefronts"], own["ideal"]) == (4, 4)
    assert (plain["wavefronts"], plain["ideal"]) == (32, 4)


def test_the_pipeline_brings_the_next_tile_while_one_is_read():
    ladder = catalog.find("attention")
    seen = stages(ladder, ladder.steps[2], {}, pictures.TARGET)
    found = dict(zip(seen.names, seen.fills, strict=True))
    assert [len(found[f"{kind} stage {at}"]) for at in (0, 1) for kind in "KV"] == [2, 2, 1, 1]
    for fills in found.values():
        times = [at or 0 for one in fills for at in (one.begins, one.lands, one.first, one.last)]
        assert times == sorted(times), "read before it was there, or written over while it was read"
    assert found["K stage 1"][0].begins < (found["K stage 0"][0].first or 0)
    drawn = pipeline("attention.flash", seen)
    assert "<title>V stage 1, content 1: in use</title>" in drawn


def test_fragments_are_those_of_the_ptx_manual():
    """A of mma.m16n8k16: row lane / 4, columns 2 (lane % 4) and the next."""
    ladder = catalog.find("attention")
    text = pictures.draw(ladder, ladder.steps[2], Picture("fragments", "mma"))
    cells = re.findall(r">(\d+:\d+\.\d+)<", text)
    assert cells[:4] == ["0:0.0", "0:0.1", "1:0.0", "1:0.1"]
    assert cells[16:18] == ["4:0.0", "4:0.1"] and cells[8 * 16] == "0:1.0"
