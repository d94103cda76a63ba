"""The tool that says whether two trees give the same machine code."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.core.machine_code import ROOT, Kept, Source, main

KERNEL = "kernels_cu/elementwise/vector_add.cu"
CHOICE = ["--ops=vector_add", "--targets=sm_80,sm_90a", "--sample=1", "--jobs=1"]


@pytest.fixture
def tree(tmp_path):
    """A copy of this checkout, to be edited."""
    for name in ("fkjit", "kernels_cu", "templates"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=ignored)
    return tmp_path / "tree"


@pytest.fixture
def compare(tree, tmp_path, capsys):
    """What `compare` says of the edited tree: the status, what it prints, what it counts."""

    def run(before=ROOT):
        kept = Kept(tmp_path / "kept.txt")
        status = main(["compare", str(before), str(tree), *CHOICE], kept)
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_header_that_moves_is_the_same_without_a_compile(tree, compare):
    header = next(
        line.split('"')[1]
        for line in (tree / KERNEL).read_text().splitlines()
        if "vector.cuh" in line
    )
    (tree / "templates" / header).rename(tree / "templates" / "vector.cuh")
    edit(tree / KERNEL, header, "vector.cuh")
    for path in (tree / "templates").rglob("*.cuh"):
        path.write_text(path.read_text().replace(f'"{header}"', '"vector.cuh"'))
    edit(tree / KERNEL, "  after_previous_kernel();", "\n  after_previous_kernel();  // moved\n")
    status, out, err = compare()
    assert (status, out) == (0, "the machine code is the same\n")
    assert "2 variants, 2 with the same tokens" in err and "compiled" not in err


def test_a_name_that_changes_is_the_same_to_ptxas(tree, compare):
    edit(tree / KERNEL, "first", "beginning")
    status, _, err = compare()
    assert status == 0
    assert "2 variants, 0 with the same tokens" in err and "0 differ in ptx" in err


def test_a_constant_that_changes_is_told(tree, compare):
    edit(tree / KERNEL, "x.get(k) + y.get(k)", "x.get(k) + y.get(k) + 1.f")
    status, out, _ = compare()
    lines = out.splitlines()
    assert status == 1 and len(lines) == 2
    assert lines[0].startswith("differs: vector_add.rows fp16 vector=True") and "sm_80" in lines[0]
    assert lines[1].endswith("sm_90a")


def test_a_file_of_digests_stands_for_its_tree(tree, compare, tmp_path):
    out = tmp_path / "digests.jsonl"
    assert main(["digest", f"--out={out}", str(tree), *CHOICE], Kept(tmp_path / "kept.txt")) == 0
    assert [json.loads(line)["target"] for line in out.read_text().splitlines()] == [
        "sm_80",
        "sm_90a",
    ]
    edit(tree / KERNEL, "first", "beginning")
    assert compare(out)[0] == 0
    edit(tree / KERNEL, "x.get(k) + y.get(k)", "x.get(k) - y.get(k)")
    assert compare(out)[0] == 1


def test_a_variant_that_one_tree_lacks_is_told(tree, compare):
    module = next((tree / "fkjit" / "ops").rglob("vector_add.py"))
    edit(module, '"vector_add"', '"vector_sum"')
    status, out, _ = compare()
    assert status == 1 and "only before: vector_add.rows" in out


def tokens(text, **headers):
    return Source("a.cu", text, {name + ".cuh": body for name, body in headers.items()}).tokens


def test_tokens_are_those_of_headers_in_place():
    whole = tokens("int a;\nint b; int c;\n")
    assert tokens('#include "a.cuh"\nint b;\nint c;', a="#pragma once\n// one\nint a;") == whole
    twice = '#line 1 "x"\n#include "a.cuh"\n#include "b.cuh"\nint c;'
    assert tokens(twice, a="int a;", b='#include "a.cuh"\nint b;') == whole
    assert tokens(twice, a="int a;", b='#include "a.cuh"\nint d;') != whole


def test_tokens_keep_what_counts():
    assert tokens("int ab;") != tokens("int a b;")
    assert tokens('char* a = "x  y";') != tokens('char* a = "x y";')
    assert tokens('char* a = "// x";') != tokens('char* a = "// y";')
    assert tokens("#pragma unroll\nfor") != tokens("#pragma unroll for")
    assert tokens("a /* b */ c") == tokens("a\n\n  c  // d")
