"""Every document: tables whose rows fit their headings, links and paths that lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fkjit import errors

ROOT = Path(__file__).resolve().parents[2]
RECORD = "bench/notes"  # keeps the names of files as they were on the day
EXAMPLES = {"scale.cu", "block_sum.cu", "gate.cu", "transpose.cu"}  # kernels that documents have
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "docs/[!_]*/*.md", "bench/*.md", f"{RECORD}/*.md")
    for path in ROOT.glob(pattern)
)


def tables(text: str) -> list[list[str]]:
    """The lines of each table, code blocks left out."""
    text = re.sub(r"(?ms)^```.*?^```$", "", text)
    return [found.splitlines() for found in re.findall(r"(?m)(?:^\|.*\n?)+", text)]


def width(line: str) -> int:
    """Cells of a row: a bar that is no border is written `\\|`, in code as well."""
    return len(re.findall(r"(?<!\\)\|", line.strip())) - 1


def faults(text: str) -> list[str]:
    """Rows that do not have as many cells as the heading, and tables that have none."""
    found = []
    for head, *rest in tables(text):
        if not rest or not re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", rest[0]):
            found.append(f"no heading: {head}")
        found += [line for line in (head, *rest) if width(line) != width(head)]
    return found


def test_documents_are_found():
    assert {"README.md", "docs/MOE.md", "bench/NOTES.md", "bench/notes/moe.md"} <= set(DOCUMENTS)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("| a | b |\n|---|---:|\n| 1 | 2 |\n", 0),
        ("| a | b |\n|---|---:|\n| 1 | 2 | 3 |\n", 1),
        ("| a | b |\n|---|---|\n| 1 |\n", 1),
        ("| a \\| b |\n|---|\n| `1 \\| 2` |\n", 0),
        ("text\n\n| 1 | 2 |\n", 1),
        ("```\n| 1 |\n```\n", 0),
    ],
)
def test_a_table_that_does_not_fit_is_found(text, count):
    assert len(faults(text)) == count


@pytest.mark.parametrize("document", DOCUMENTS)
def test_rows_of_tables_have_as_many_cells_as_their_heading(document):
    assert not faults((ROOT / document).read_text())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_documents_point_to_is_there(document):
    text = (ROOT / document).read_text()
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (ROOT / document).parent.joinpath(link).exists(), link
    if document.startswith(RECORD):
        return
    for path in re.findall(r"`((?:tests|docs|bench|fkjit|templates|kernels_cu)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path


def test_kernels_and_headers_that_documents_name_are_there():
    folders = (ROOT / "kernels_cu", ROOT / "templates")
    sources = {path.name for folder in folders for path in folder.rglob("*.cu*")}
    for document in DOCUMENTS:
        if not document.startswith(RECORD):
            text = re.sub(r"(?ms)^```.*?^```$", "", (ROOT / document).read_text())
            named = set(re.findall(r"`(\w+\.cuh?)`", text))
            assert named <= sources | EXAMPLES, (document, named - sources)


def said() -> set[str]:
    """The texts in fkjit's sources, "…" for what a format fills in."""
    found = set()
    for path in (ROOT / "fkjit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_messages_that_troubleshooting_explains_are_said():
    page = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
    wanted = re.findall(r"(?m)^### `(.*)`$", page)
    texts = "\n".join(said()) + "\n".join(vars(errors))
    missing = [
        text
        for text in wanted
        if not re.search("[^\n]*?".join(map(re.escape, text.split("…"))), texts)
    ]
    assert len(wanted) > 20 and not missing


def terms() -> dict[str, list[str]]:
    """Of each table of the glossary, the first column."""
    text = (ROOT / "docs" / "GLOSSARY.md").read_text()
    return {
        part.splitlines()[0]: re.findall(r"(?m)^\| ((?!term |in the record )[^|]*) \|", part)
        for part in text.split("\n## ")[1:]
    }


def test_the_glossary_is_in_order():
    for heading, found in terms().items():
        assert found == sorted(found, key=lambda t: re.sub("`", "", t).lower()), heading


def test_words_of_the_glossary_are_ones_that_are_used():
    """The first of those that mean the same, in another document or in a source."""
    folders = ("fkjit", "templates", "kernels_cu", "bench")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.[pc][yu]*")]
    files += [ROOT / name for name in DOCUMENTS if not name.endswith("GLOSSARY.md")]
    text = "\n".join(path.read_text() for path in files if path.suffix != ".pyc").lower()
    text += text.replace("_", " ")
    unused = [
        term
        for found in terms().values()
        for term in found
        if re.sub(r"`| \(.*\)", "", term.split(",")[0]).lower() not in text
    ]
    assert not unused
