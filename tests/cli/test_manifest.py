"""What `fkjit compile --output` writes for programs without Python."""

from __future__ import annotations

import shutil
import struct
import subprocess

import pytest

from fkjit.arch import target
from fkjit.cli.manifest import write
from fkjit.jit.build import build, quiet
from fkjit.spec import find
from tests.cli.c_program import ADD, PROGRAM, c_name, compiled, written


def test_a_manifest_says_what_a_launch_needs(tmp_path):
    found, _ = written(tmp_path, *ADD, "--arch", "sm_90a")
    assert (tmp_path / found["image"]).read_bytes()[:4] == b"\x7fELF"
    assert (found["entry"], found["block"], found["shared_dynamic"]) == (
        "vector_add",
        [256, 1, 1],
        0,
    )
    assert found["target"] == "sm_90a" and found["registers"] > 0
    arguments = {one["name"]: one for one in found["arguments"]}
    assert [arguments[name]["const"] for name in ("a", "b", "out")] == [True, True, False]
    assert arguments["a_strides"]["fields"] == [{"type": "int64_t", "count": 3}]
    example = found["example"]
    assert example["arguments"].keys() == arguments.keys() and len(example["grid"]) == 3


@pytest.mark.parametrize(("compiler", "suffix"), [("cc", ".c"), ("c++", ".cpp")])
def test_arguments_in_c_have_the_sizes_that_the_kernel_reads(tmp_path, compiler, suffix):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} on this machine")
    spec, to = find("attention.flash_sm90"), target("sm_90a")
    params = next(spec.variants(to.arch, {"dtype": "bf16", "head_dim": 64}))
    with quiet():
        entry = build(spec, params, to)
    header = write(spec, params, entry, tmp_path).with_suffix(".h")
    names = [name for name, _, _ in entry.meta["arguments"]]
    printed = " ".join(f'printf("%zu ", sizeof a.{name});' for name in names)
    source = tmp_path / f"sizes{suffix}"
    kind = f"{c_name(header)}_arguments"
    source.write_text(
        f"#include HEADER\n#include <stdio.h>\nint main(void) {{ {kind} a; {printed} return 0; }}"
    )
    program = compiled(source, header, tmp_path, compiler)
    sizes = subprocess.run([str(program)], capture_output=True, text=True).stdout.split()
    assert list(map(int, sizes)) == [struct.calcsize(c) for _, c, _ in entry.meta["arguments"]]
    text = header.read_text()
    assert "FKJIT_ALIGNED(64) uint8_t" in text and "MAX_DYNAMIC_SHARED_SIZE_BYTES" in text


def test_the_program_in_c_compiles(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no cc on this machine")
    _, header = written(tmp_path, *ADD, "--arch", "sm_90a")
    compiled(PROGRAM, header, tmp_path)
