"""Every block of the tutorials runs, and prints what stands below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fkjit import ops, spec
from fkjit.cache.lookup import default_cache
from fkjit.jit.build import quiet
from fkjit.settings import settings
from tests.core import pages

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.fixture
def folder(tmp_path):
    """The working directory of a process whose settings and kernels are its own."""
    ops.load()
    before = dict(spec._REGISTRY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        yield patch
    spec._REGISTRY.clear()
    spec._REGISTRY.update(before)
    settings.cache_clear()
    default_cache.cache_clear()


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(page, folder):
    with quiet():
        wrong = pages.execute(page.read_text(), page.name, folder)
    assert not wrong, "\n".join(wrong)


def test_there_are_tutorials():
    assert len(TUTORIALS) >= 5
    for page in TUTORIALS:
        assert any(block.language == "python" for block in pages.blocks(page.read_text())), page


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a 1\n", "a 1\n", True),
        ("a …\n", "a 1 2   \n", True),
        ("a … c\n", "a b\n", False),
        ("…\nb\n", "x\ny\nb\n", True),
        ("…\nb\n", "x\nb\nc\n", False),
        ("a\n…\n", "a\n", True),
        ("a\n", "a\nb\n", False),
    ],
)
def test_what_is_shown_is_what_was_printed(shown, printed, same):
    assert pages.matches(shown, printed) == same


def test_what_differs_is_told(folder):
    show = "```python\nprint(open('a.cu').read())\n```"
    page = f"`a.cu`:\n\n```cuda\nx\n```\n\n{show}\n\n```text\ny\n```\n"
    (wrong,) = pages.execute(page, "P.md", folder)
    assert "P.md:12" in wrong and "x" in wrong
