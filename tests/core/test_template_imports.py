"""CUDA sources point one way: `ptx` <- `tile` <- a family, and what is where says what it is."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").is_file())
TEMPLATES, KERNELS = ROOT / "templates", ROOT / "kernels_cu"
HEADERS = sorted(TEMPLATES.rglob("*.cuh"))
SOURCES = sorted(KERNELS.rglob("*.cu"))

# What headers of a folder may include beside their own, `prelude.cuh`, and `ptx` and `tile` below
# them. A folder that is not named here is a family with nothing of the others'.
MAY_INCLUDE = {
    "ptx": set(),
    "tile": {"ptx"},
    "attention": {"kv", "quantize", "rope"},
    "attention/sm90": {"attention", "kv"},
    "attention/backward": {"attention"},
    "attention/backward_sm90": {"attention", "attention/backward"},
    "attention/decode": {"attention", "kv"},
    "attention/mixed": {"attention", "attention/sm90", "attention/decode", "kv"},
    "gemm/sm90": {"gemm"},
    "kv": {"rope"},
    "moe": {"gemm"},
    "quantize": {"gemm", "gemm/sm90", "kv"},
    "step": {"gemm", "gemm/sm90", "kv", "quantize"},
}
MOST_FILES, MOST_LINES = 30, 400


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def folder(header: str) -> str:
    """Of a name as `#include` has it: "attention/sm90"; "" for the prelude."""
    return header.rpartition("/")[0]


@cache
def code(path: Path) -> str:
    """The text without comments."""
    return re.sub(r"//(?!%)[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


@cache
def includes(path: Path) -> tuple[str, ...]:
    return tuple(re.findall(r'#include "([^"]+)"', code(path)))


def allowed(of: str) -> set[str]:
    beside = MAY_INCLUDE.get(of, set())
    below = set() if of == "ptx" else {"ptx"} if of == "tile" else {"ptx", "tile"}
    return {"", of} | below | beside


def wrong_way(header: str, wanted: tuple[str, ...]) -> list[str]:
    """What a header includes and may not."""
    return [one for one in wanted if folder(one) not in allowed(folder(header))]


def a_circle(edges: dict[str, tuple[str, ...]]) -> list[str]:
    """Some headers that include one another, or none."""
    done: set[str] = set()

    def walk(at: str, way: list[str]) -> list[str]:
        if at in way:
            return [*way[way.index(at) :], at]
        if at in done:
            return []
        found = next(filter(None, (walk(to, [*way, at]) for to in edges.get(at, ()))), [])
        done.add(at)
        return found

    return next(filter(None, (walk(at, []) for at in edges)), [])


@pytest.mark.parametrize("path", HEADERS, ids=name)
def test_headers_include_what_is_below_them(path):
    header = path.relative_to(TEMPLATES).as_posix()
    assert wrong_way(header, includes(path)) == []
    assert all((TEMPLATES / one).is_file() for one in includes(path))


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("tile/row.cuh", "norm/moments.cuh"),
        ("ptx/tma.cuh", "tile/ring.cuh"),
        ("rope/pairs.cuh", "kv/place.cuh"),
        ("attention/mma.cuh", "attention/sm90/rings.cuh"),
        ("attention/decode/rows.cuh", "attention/backward/mma.cuh"),
    ],
)
def test_what_points_the_other_way_is_seen(header, wanted):
    assert wrong_way(header, ("prelude.cuh", wanted)) == [wanted]


def test_no_headers_include_one_another():
    edges = {path.relative_to(TEMPLATES).as_posix(): includes(path) for path in HEADERS}
    assert a_circle(edges) == []
    assert a_circle({"a": ("b",), "b": ("c", "d"), "d": ("b",)}) == ["b", "d", "b"]


def test_kernels_include_their_family_and_what_it_may():
    for path in SOURCES:
        family = path.relative_to(KERNELS).parts[0]
        for one in includes(path):
            top = one.split("/")[0] if "/" in one else ""
            assert top in allowed(family), f"{name(path)}: {one}"


def test_inline_ptx_stands_in_one_folder():
    others = [p for p in HEADERS + SOURCES if p.parent != TEMPLATES / "ptx"]
    assert [name(p) for p in others if re.search(r"\basm\b", code(p))] == []


@pytest.mark.parametrize("path", sorted((TEMPLATES / "ptx").glob("*.cuh")), ids=name)
def test_each_instruction_says_where_it_is_described(path):
    assert "PTX ISA" in path.read_text()


def test_kernels_are_in_kernels_cu():
    assert [name(p) for p in HEADERS if "__global__" in code(p)] == []
    assert [name(p) for p in SOURCES if "__global__" not in code(p)] == []


def test_every_header_has_a_user():
    used = {one for path in HEADERS + SOURCES for one in includes(path)}
    headers = {path.relative_to(TEMPLATES).as_posix() for path in HEADERS}
    assert headers - used == set()


def test_folders_and_kernels_can_be_taken_in():
    folders = {path.parent for path in HEADERS + SOURCES}
    counts = {name(one): sum(p.is_file() for p in one.iterdir()) for one in folders}
    assert {one: count for one, count in counts.items() if count > MOST_FILES} == {}
    lines = {name(path): path.read_text().count("\n") for path in SOURCES}
    assert {one: count for one, count in lines.items() if count > MOST_LINES} == {}
