"""`fkjit show`: machine code below its source lines, texts in files."""

from __future__ import annotations

import re

import pytest

from fkjit.jit import disassemble
from tests.cli.kit import run

CHOICE = ("vector_add", "--dtype", "fp32", "--threads", "256", "--arch", "sm_90a")
TOOL = disassemble.disassembler()


@pytest.mark.skipif(TOOL is None or TOOL.name != "nvdisasm", reason="no nvdisasm")
def test_lines_stand_above_what_was_made_of_them():
    text = run("show", *CHOICE, "--sass", "--lines").out
    above = {}
    for place in re.split(r"(?m)^(?=// )", text)[1:]:
        head, _, code = place.partition("\n")
        above[head] = above.get(head, "") + code
    stores = [head for head, code in above.items() if re.search(r"\bSTG\b", code)]
    assert any("out[column * out_column] = static_cast<elem_t>(sum);" in head for head in stores)
    pdl = [head for head in above if "griddepcontrol.wait" in head]
    assert pdl and "ACQBULK" in above[pdl[0]] and pdl[0].startswith("// templates/ptx/pdl.cuh:")
    assert (
        "//##" not in text and "// " not in run("show", *CHOICE, "--sass").out.partition(".text")[2]
    )


def test_a_text_goes_to_a_file(tmp_path):
    file = tmp_path / "add.ptx"
    done = run("show", *CHOICE, "--ptx", "-o", str(file))
    assert (done.status, done.out) == (0, "")
    assert file.read_text() == run("show", *CHOICE, "--ptx").out
    missing = run("show", *CHOICE, "--ptx", "-o", str(tmp_path / "no" / "add.ptx"))
    assert missing.status == 1 and "--output" in missing.err


@pytest.mark.parametrize("words", [("--ptx", "--lines"), ("-o", "table")])
def test_what_does_not_go_together(words):
    done = run("show", *CHOICE, *words)
    assert done.status == 2 and "goes with" in done.err


@pytest.mark.parametrize("op", ["decode_step", "linear.wgmma"])
def test_why_there_is_no_variant_is_told_of_kernels_with_millions_of_combinations(op):
    """Not all of them are asked."""
    done = run("show", op, "--arch", "sm_80")
    assert done.status == 1
    assert "has no variant for sm_80: needs wgmma, which sm_80 has not" in done.err
