"""NVRTC without a GPU: errors at the template's own line, resources, and what is in the key."""

import os
import re
import tempfile
from pathlib import Path

import pytest

from fkjit.arch import DEFAULT_ARCHS, target
from fkjit.errors import CompileError, ToolchainError
from fkjit.jit import toolchain
from fkjit.jit.compile import (
    Resources,
    compile_source,
    keep_source,
    key_fields,
    options,
    parse_resources,
    problems,
)
from fkjit.jit.render import Rendered, load, render
from tests.golden.compile import mend_cubin
from tests.jit.test_render import KERNELS, spec_of

SM_80, PTX_80 = target("sm_80"), target("compute_80")


@pytest.fixture(autouse=True)
def _kept_sources_go_to_the_test_folder(tmp_path, monkeypatch):
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "kept"))


def lines_cu(at: int = 0, **values) -> Rendered:
    """The kernel of known lines with an undefined name planted at line `at`."""
    given = {"block": 64, "at": at, "bad": "undefined_name;", "scaled": True, **values}
    return render(spec_of("lines.cu", **given), {})


def compiled(rendered: Rendered, entry: str = "lines", to=SM_80):
    return compile_source(rendered, entry, to, describe="test.lines fp16 block=64")


def plain(text: str, **headers: str) -> Rendered:
    return Rendered("kernels_cu/t.cu", text, headers, Path("t.cu"))


def test_a_kernel_becomes_a_cubin_with_its_resources():
    result = compiled(lines_cu())
    assert result.image[:4] == b"\x7fELF"
    assert (result.kind, result.target, result.problems) == ("cubin", "sm_80", ())
    assert result.resources is not None
    assert 8 <= result.resources.registers <= 64
    assert result.resources.constant >= 352 + 24  # the launch block, then 24 bytes of arguments
    assert result.resources.spill_stores == result.resources.stack == 0
    assert result.nvrtc_version == toolchain.dotted(toolchain.nvrtc_info().version)
    assert 0 < result.seconds < 60


@pytest.mark.parametrize("name", DEFAULT_ARCHS)
def test_every_architecture_compiles_and_the_cubin_is_whole(name):
    major, minor = target(name).arch.capability
    if major * 10 + minor not in toolchain.nvrtc_info().supported:
        pytest.skip(f"this NVRTC is older than {name}")
    image = compiled(lines_cu(), to=target(name)).image
    program_headers = int.from_bytes(image[32:40], "little")
    size, count = (int.from_bytes(image[at : at + 2], "little") for at in (54, 56))
    assert len(image) == program_headers + size * count


def test_mending_adds_the_one_byte_cupy_drops_and_no_other():
    whole = compiled(lines_cu()).image
    assert mend_cubin(whole[:-1]) == whole
    assert mend_cubin(whole) == whole
    assert mend_cubin(whole[:-2]) == whole[:-2]


@pytest.mark.parametrize(
    ("at", "scaled"),
    [(8, True), (16, True), (19, True), (22, False), (24, False), (27, True), (30, True)],
)
def test_nvrtc_errors_name_the_line_before_in_and_after_blocks_and_loops(at, scaled):
    with pytest.raises(CompileError) as info:
        compiled(lines_cu(at, scaled=scaled))
    message, source = str(info.value), (KERNELS / "lines.cu").read_text().splitlines()
    assert message.startswith("test.lines fp16 block=64: NVRTC ")
    assert f"for sm_80: kernels/lines.cu:{at}: " in message
    shown = re.findall(r"^  ([> ]) +(\d+) \| ?(.*)$", message, re.MULTILINE)
    assert [int(number) for _, number, _ in shown] == list(range(at - 2, at + 3))
    assert [text for _, _, text in shown] == [line.rstrip() for line in source[at - 3 : at + 2]]
    assert [int(number) for mark, number, _ in shown if mark == ">"] == [at]


def test_a_compile_error_lists_parameters_target_and_where_the_source_is():
    with pytest.raises(CompileError) as info:
        compiled(lines_cu(16))
    message = str(info.value)
    assert "parameters: at=16, bad=undefined_name;, block=64, scaled=True" in message
    assert "target: sm_80" in message
    assert f"template: {KERNELS / 'lines.cu'}" in message
    kept = Path(re.search(r"^rendered source: (.*)$", message, re.MULTILINE)[1])
    assert kept.read_text() == lines_cu(16).text
    assert (kept.parent / "prelude.cuh").is_file()
    assert 'kernels/lines.cu(16): error: identifier "undefined_name" is undefined' in info.value.log


def test_a_compile_error_survives_a_disk_that_takes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    with pytest.raises(CompileError, match=r"rendered source: could not be kept \(.*not there"):
        compiled(lines_cu(16))


def test_the_kept_source_stays_in_its_folder(tmp_path):
    kept = keep_source(plain("int a;\n", **{"../../h.cuh": "int b;\n"}))
    assert (Path(kept).parent / "h.cuh").read_text() == "int b;\n"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_an_error_in_a_header_shows_the_header(tmp_path):
    (tmp_path / "t.cu").write_text('#include "h.cuh"\nextern "C" __global__ void t() {}\n')
    (tmp_path / "h.cuh").write_text('// one\n#include "prelude.cuh"\nint a = nothing;\n// four\n')
    with pytest.raises(CompileError) as info:
        compiled(render(spec_of("t.cu", tmp_path), {}), "t")
    assert f"{tmp_path.name}/h.cuh:3: " in str(info.value)
    assert (
        '       2 | #include "prelude.cuh"\n  >    3 | int a = nothing;\n       4 | // four'
        in str(info.value)
    )


def test_further_errors_are_counted_and_a_missing_header_has_its_line():
    with pytest.raises(CompileError) as info:
        compiled(plain("int a = x;\nint b = y;\nint c = z;\n"), "t")
    assert "kernels_cu/t.cu:1: " in str(info.value)
    assert "and 2 more:\n  kernels_cu/t.cu:2: " in str(info.value)
    with pytest.raises(CompileError, match=r'kernels_cu/t\.cu:2: .*"gone\.cuh"'):
        compiled(plain('// one\n#include "gone.cuh"\n'), "t")


def test_a_missing_entry_point_is_a_compile_error():
    with pytest.raises(CompileError, match="has no extern \"C\" __global__ function 'other'"):
        compiled(lines_cu(), "other")


def test_ptx_names_the_templates_and_their_lines():
    result = compiled(lines_cu(scaled=False), to=PTX_80)
    text = result.image.decode()
    assert (result.kind, result.target, result.resources) == ("ptx", "compute_80", None)
    assert ".target sm_80" in text and not text.endswith("\0")
    files = dict(re.findall(r'\.file\s+(\d+) "([^"]*)"', text))
    ours = {name for name in files.values() if not name.endswith(".hpp")}
    assert ours == {"kernels/lines.cu", "kernels/beside.cuh"}
    lines = {
        (files[number], int(line)) for number, line in re.findall(r"\.loc\s+(\d+) (\d+)", text)
    }
    assert {("kernels/lines.cu", 15), ("kernels/lines.cu", 32), ("kernels/beside.cuh", 6)} <= lines
    assert not lines & {("kernels/lines.cu", 18), ("kernels/lines.cu", 2)}


def test_the_working_directory_changes_nothing(tmp_path, monkeypatch):
    first = compiled(lines_cu()).image
    monkeypatch.chdir(tmp_path)
    assert compiled(lines_cu()).image == first
    assert str(tmp_path).encode() not in first


@pytest.mark.parametrize("include", ["<cuda_fp16.h>", '"cuda_fp16.h"'])
def test_a_header_planted_in_the_working_directory_is_not_picked_up(include, tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "kernels_cu"):
        folder.mkdir(exist_ok=True)
        (folder / "cuda_fp16.h").write_text("#error planted\n")
    monkeypatch.chdir(tmp_path)
    text = f'#include {include}\nextern "C" __global__ void t(__half* x) {{ x[0] = x[1]; }}\n'
    assert compiled(plain(text), "t").image[:4] == b"\x7fELF"


def test_the_headers_of_every_element_type_compile():
    text = (
        '#include "prelude.cuh"\n#include <cuda_fp8.h>\n'
        "static_assert(ceil_div(7, 3) == 3 && round_up(7, 4) == 8 && NEG_INFINITY < -3.4e38f);\n"
        "static_assert(sizeof(Strides) == 24 && sizeof(fp16) == 2 && sizeof(bf16) == 2);\n"
        'extern "C" __global__ void t(fp16* a, bf16* b, __nv_fp8_e4m3* c) {\n'
        "    c[0] = __nv_fp8_e4m3(__half2float(a[0]) + __bfloat162float(b[0]) * LOG2E * LN2);\n}\n"
    )
    rendered = load(spec_of("lines.cu", block=64, at=0, bad="", scaled=True), {})
    source = Rendered("kernels_cu/t.cu", text, rendered.headers, Path("t.cu"))
    for name in ("sm_75", "sm_89"):
        assert compiled(source, "t", target(name)).problems == ()


def test_spills_and_static_shared_memory_are_counted_and_a_problem():
    result = compiled(render(spec_of("spill.cu", count=96), {}), "spill")
    resources = result.resources
    assert resources is not None and resources.registers == 32
    assert resources.shared == 1024
    assert resources.spill_stores > 0 and resources.spill_loads > 0 and resources.stack > 0
    expected = f"spill spills registers: {resources.spill_stores} bytes stored"
    assert len(result.problems) == 1 and result.problems[0].startswith(expected)
    assert compiled(render(spec_of("spill.cu", count=4), {}), "spill").problems == ()


def test_an_ignored_setmaxnreg_is_a_problem():
    result = compiled(render(spec_of("setmaxnreg.cu"), {}), "setmaxnreg", target("sm_90a"))
    assert len(result.problems) == 1
    assert re.search(r"\(C75\d\d\).*setmaxnreg", result.problems[0])


LOG = """\
ptxas info    : 8 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
ptxas         .     48 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Function properties for helper
ptxas         .     0 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 48 bytes cumulative stack size, 1024 bytes \
smem, 580 bytes cmem[0], 16 bytes cmem[2]
ptxas info    : Compiling entry function 'one_more' for 'sm_90a'
ptxas info    : Function properties for one_more
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, 360 bytes cmem[0]
ptxas warning : (C7508) setmaxnreg ignored; C7519 in a comment
"""


def test_the_log_is_read_entry_by_entry():
    one = Resources(168, 12, 20, 48, 1024, 596, 3)
    assert parse_resources(LOG, "one") == one
    assert parse_resources(LOG, "one_more") == Resources(10, constant=360)
    assert parse_resources(LOG, "on") is None
    assert Resources.from_dict(one.to_dict()) == one
    assert Resources.from_dict({"registers": 7, "later": 1}) == Resources(7)


def test_every_problem_of_a_log_is_listed_once():
    found = problems(LOG + LOG)
    assert [re.search(r"\(C75\d\d\)|\S+ spills.*", line)[0] for line in found] == [
        "(C7510)",
        "(C7508)",
        "one spills registers: 8 bytes stored, 16 bytes loaded",
        "helper spills registers: 4 bytes stored, 4 bytes loaded",
    ]


def test_options_have_no_fast_math_and_fit_the_nvrtc():
    old, new = options(SM_80, (12, 4)), options(target("compute_80"), (12, 9))
    assert old[0] == "--gpu-architecture=sm_80" and new[0] == "--gpu-architecture=compute_80"
    assert "--no-cache" in new and "--no-cache" not in old
    assert "--no-source-include" in old and "--no-source-include" in new
    assert "--ptxas-options=-v" in old and "--ptxas-options=-v" not in new
    assert not re.search("ftz|fast|prec|fmad|-I", " ".join(old + new))


def test_the_key_names_what_decides_the_image_and_no_path(tmp_path, monkeypatch):
    fields = key_fields("test.lines", lines_cu(), "lines", SM_80)
    monkeypatch.chdir(tmp_path)
    assert key_fields("test.lines", lines_cu(), "lines", SM_80) == fields
    assert fields["kernel"] == "test.lines" and fields["target"] == "sm_80"
    assert str(fields["nvrtc"]).startswith(toolchain.dotted(toolchain.nvrtc_info().version))
    shown = str({**fields, "template": str(fields["template"]).partition(" ")[2]})
    assert not [part for part in (str(Path.home()), os.sep, "site-packages") if part in shown]


def test_each_thing_that_decides_the_image_changes_its_own_field():
    def changed(*arguments):
        new = key_fields(*arguments)
        return {name for name in base if base[name] != new[name]}

    base = key_fields("test.lines", lines_cu(), "lines", SM_80)
    assert changed("test.lines", lines_cu(), "lines", SM_80) == set()
    assert changed("test.other", lines_cu(), "lines", SM_80) == {"kernel"}
    assert changed("test.lines", lines_cu(), "other", SM_80) == {"entry"}
    assert changed("test.lines", lines_cu(block=32), "lines", SM_80) == {"values"}
    assert changed("test.lines", lines_cu(), "lines", target("sm_86")) == {"target", "options"}
    assert changed("test.lines", lines_cu(), "lines", PTX_80) == {"target", "options"}


def test_a_target_nvrtc_does_not_know_is_refused_before_it_is_tried():
    with pytest.raises(ToolchainError) as info:
        compiled(lines_cu(), to=target("sm_131"))
    assert "cannot compile for sm_131 (it knows sm_" in str(info.value)
    assert f"({toolchain.nvrtc_info().library})" in str(info.value)
    assert "pip install --upgrade nvidia-cuda-nvrtc" in str(info.value)
