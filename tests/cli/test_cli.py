"""The commands: what they print, what they exit with, and errors without tracebacks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fkjit
from fkjit import ops
from fkjit.arch import target
from fkjit.cache.lookup import default_cache
from fkjit.cli import console
from fkjit.cli import select as cli_select
from fkjit.errors import ParameterError
from fkjit.jit import disassemble
from fkjit.jit.build import build, quiet
from fkjit.jit.render import load
from fkjit.settings import settings
from fkjit.spec import registered
from tests.cli.kit import run
from tests.core.user_kernel import VARIANTS, registered_kernel, write_kernel

PARAMS = {"dtype": "fp32", "threads": 256, "negated": True}
CHOICE = ("scale", "--dtype", "fp32", "--threads=256", "--negated", "true")


@pytest.fixture
def scale(tmp_path):
    with registered_kernel(write_kernel(tmp_path / "kernels")) as spec:
        yield spec


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A kernel cache of the test's own."""
    monkeypatch.setenv("FKJIT_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    default_cache.cache_clear()
    yield default_cache()
    monkeypatch.undo()
    settings.cache_clear()
    default_cache.cache_clear()


def built(spec, name="sm_80"):
    with quiet():
        return build(spec, PARAMS, target(name))


def test_without_a_command_it_shows_them_all():
    done = run()
    for name in ("doctor", "list", "show", "compile", "warm", "cache", "demo"):
        assert re.search(rf"\b{name}\b", done.out + done.err)
    assert run("--version").out == f"{fkjit.__version__}\n"


def test_list_is_one_line_an_op_as_wide_as_the_terminal(scale, monkeypatch):
    listed = dict(re.findall(r"(?m)^(\w+) +(\S.*)$", run("list").out))
    assert listed.keys() >= {spec.op for spec in registered()}
    assert "flash" in listed["attention"] and "factor * x" in listed["scale"]
    monkeypatch.setenv("COLUMNS", "80")
    narrow = run("list").out.splitlines()
    assert len(narrow) == len({spec.op for spec in registered()}) + 2
    assert max(map(len, narrow)) == 80


def test_list_for_programs(scale):
    (found,) = json.loads(run("list", "scale", "--json").out)
    assert (found["kernel"], found["variants"]) == ("scale.plain", VARIANTS)
    assert found["calls"] == ["scale"] and found["parameters"][1]["tunable"]
    assert found["parameters"][1]["values"] == ["64", "256"]
    kernels = [one["kernel"] for one in json.loads(run("list", "reduce_sum", "--json").out)]
    assert kernels == ["reduce.blocks", "reduce.lanes"]


def test_python_m_fkjit_is_the_command():
    command = [sys.executable, "-m", "fkjit", "--version"]
    assert (
        subprocess.run(command, capture_output=True, text=True).stdout == f"{fkjit.__version__}\n"
    )


def test_list_has_every_kernel_with_its_parameters_in_100_columns(scale):
    done = run("list", *dict.fromkeys(spec.op for spec in registered()))
    for spec in registered():
        assert re.search(rf"^{spec.id} +{sum(1 for _ in spec.variants())} ", done.out, re.MULTILINE)
    assert "threads*: 64 256\n" in re.sub(" +\n", "\n", done.out)
    assert "negated: false true" in done.out
    assert max(map(len, done.out.splitlines())) <= 100


def test_show_prints_the_rendered_source(scale):
    assert run("show", *CHOICE, "--source").out == load(scale, PARAMS).text
    other = run("show", "scale.plain", "--threads", "64", "--source").out
    assert "constexpr int THREADS = 64;" in other and "value = -value;" not in other


def test_show_prints_ptx_of_the_architecture(scale):
    text = run("show", *CHOICE, "--arch", "sm_120a", "--ptx").out
    assert ".target sm_120a" in text and ".entry scale(" in text
    assert text.encode() == built(scale, "compute_120a").image.rstrip(b"\0")


def test_show_says_what_the_kernel_uses(scale):
    done = run("show", *CHOICE, "--arch", "sm_90a", "--resources")
    registers = built(scale, "sm_90a").meta["resources"]["registers"]
    line = next(line for line in done.out.splitlines() if "sm_90a" in line)
    assert re.search(
        rf"scale.plain fp32 .*sm_90a +{registers} +0 +0 B +256 +100% +\d+ ms +(hit|miss)", line
    )
    assert run("show", *CHOICE, "--arch", "sm_90a").out.count(" hit") == 1


@pytest.mark.skipif(disassemble.disassembler() is None, reason="no nvdisasm or cuobjdump")
def test_show_disassembles(scale):
    text = run("show", *CHOICE, "--sass").out
    assert ".text.scale" in text and re.search(r"\bLDG\b", text) and "EXIT" in text


def test_without_a_disassembler_it_says_how_to_get_one(scale, monkeypatch):
    monkeypatch.setattr(disassemble, "disassembler", lambda: None)
    done = run("show", *CHOICE, "--sass")
    assert (done.status, done.out) == (1, "")
    assert "pip install nvidia-cuda-nvdisasm" in done.err


def test_a_disassembler_that_fails_is_named(scale, monkeypatch, tmp_path):
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\necho 'nvdisasm fatal: unknown cubin' >&2; exit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert disassemble.disassembler() == tool
    done = run("show", *CHOICE, "--sass")
    assert done.status == 1
    assert f"{tool} does not read this cubin (nvdisasm fatal: unknown cubin)" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "scale", "--threads", "96"], "show: threads=96 is not one of [64; 256]"),
        (["show", "scale", "--warps", "4"], "scale.plain has no parameter --warps (has: dtype"),
        (["show", "scale", "threads", "64"], "show: 'threads' is no call and no kernel"),
        (["show", "scale", "--threads"], "'--threads' is not a kernel parameter with its value"),
        (["show", "skale"], "show: 'skale' is no call and no kernel; did you mean scale? (calls: "),
        (["show", "scale", "--arch", "sm_9000x"], "'sm_9000x' is not an architecture"),
        (["show", "scale", "--arch", "sm_80,sm_90a"], "names 2 targets; show takes one"),
        (["compile", "attention.flash", "--arch", "sm_75"], "has no variant for sm_75: needs"),
        (
            ["show", "attention.flash", "--block", "128", "--head-dim", "256", "--arch", "sm_90a"],
            "block=128 needs more registers than a thread has (head_dim=256) (legal here: 16; 32; ",
        ),
        (["warm", "skale"], "warm: 'skale' is no call and no kernel"),
        (["warm", "scale", "--jobs", "0"], "warm: jobs=0; allowed: 1 and above"),
        (["cache", "import", "/nowhere.fkb"], "cache import: path='/nowhere.fkb'"),
    ],
)
def test_a_mistake_is_one_message_on_stderr_and_status_1(scale, arguments, message):
    done = run(*arguments)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("fkjit: ") and message in done.err
    assert "Traceback" not in done.err


def test_show_takes_one_of_its_forms(scale):
    done = run("show", "scale", "--ptx", "--sass")
    assert done.status == 2 and "--sass" in done.err


def test_a_kernel_that_does_not_compile_is_shown_at_its_line(scale, tmp_path):
    source = tmp_path / "kernels" / "scale.cu"
    source.write_text(source.read_text().replace("float value", "flaot value"))
    done = run("compile", "scale")
    line = source.read_text().split("flaot")[0].count("\n") + 1
    assert done.status == 1 and f"kernels/scale.cu:{line}: " in done.err


def test_compile_takes_every_matching_variant_and_writes_images(scale, tmp_path):
    images = tmp_path / "images"
    done = run("compile", "scale", "--dtype", "fp32", "--arch", "sm_80,sm_90a", "-o", str(images))
    assert done.status == 0
    assert done.out.count("scale.plain") == 2 * VARIANTS / 2
    files = sorted(images.glob("*.cubin"))
    assert len(files) == 2 * VARIANTS / 2
    assert len([*images.iterdir()]) == 3 * len(files)  # with manifests and headers
    assert len({f.read_bytes() for f in files}) == len(files)
    name = "scale.plain_fp32_threads=256_negated=True_sm_80.cubin"
    assert (images / name).read_bytes() == built(scale).image


def test_a_bare_op_means_its_first_kernel_that_fits(scale):
    asked = cli_select.selection("show", ["--dtype=fp16", "scale"])
    ((spec, variants),) = asked.variants(target("sm_75"))
    assert spec is scale and len(variants) == VARIANTS / 2
    with pytest.raises(ParameterError, match="dtype=int8 is not one of"):
        cli_select.selection("show", ["scale", "--dtype", "int8"]).variants(target("sm_75"))


def test_values_are_read_as_they_are_written():
    ops.load()
    flash = next(spec for spec in registered() if spec.id == "attention.flash")
    block = next(param for param in flash.params if param.name == "block")
    for declared in block.values:
        assert cli_select.parse("show", flash, block, console.value(declared)) == declared
        assert cli_select.parse("show", flash, block, str(declared)) == declared


def test_the_default_target_is_the_gpu_or_sm_80(monkeypatch):
    from fkjit.runtime import gpus

    blackwell = gpus.Gpu(0, "RTX", (12, 0), 1 << 35)
    monkeypatch.setattr(gpus, "gpus", lambda: ([blackwell], None))
    assert cli_select.targets(None)[0].name == "sm_120a"
    monkeypatch.setattr(gpus, "gpus", lambda: ([], "no driver"))
    assert cli_select.targets(None)[0].name == "sm_80"


def test_the_cache_is_listed_moved_and_cleared(scale, empty_cache, tmp_path):
    bundle = tmp_path / "kernels.fkb"
    assert run("compile", "scale", "--arch", "sm_80").status == 0
    assert f"\n{VARIANTS} entries" in run("cache", "ls").out
    assert f"\n{VARIANTS // 2} entries" in run("cache", "ls", "threads=64").out
    assert re.search(rf"entries +{VARIANTS}\b", run("cache", "stats").out)
    assert f"{VARIANTS // 2} entries" in run("cache", "export", str(bundle), "--match", "fp16").out
    assert "remove 8 entries from" in run("cache", "clear", input="n\n").out
    assert empty_cache.stats().entries == VARIANTS
    assert f"removed {VARIANTS} files" in run("cache", "clear", "--yes").out
    assert empty_cache.stats().entries == 0
    imported = run("cache", "import", str(bundle)).out
    assert imported == f"{VARIANTS // 2} imported, 0 already there\n"
    hits = run("compile", "scale", "--arch", "sm_80").out
    assert (hits.count(" hit"), hits.count(" miss")) == (VARIANTS // 2, VARIANTS // 2)


def test_an_import_that_refuses_an_entry_exits_1(scale, empty_cache, tmp_path):
    assert run("compile", "scale", "--dtype", "fp16").status == 0
    folder = tmp_path / "bundle"
    folder.mkdir()
    for path in Path(empty_cache.directory).glob("??/*.fkc"):
        (folder / path.name).write_bytes(path.read_bytes())
    bad = sorted(folder.iterdir())[0]
    bad.write_bytes(bad.read_bytes()[:-1] + b"!")
    assert run("cache", "clear", "-y").status == 0
    done = run("cache", "import", str(folder))
    assert done.status == 1
    assert done.out == f"{VARIANTS // 2 - 1} imported, 0 already there\n"
    assert f"refused {bad.name[:12]}" in done.err


def test_paths_are_printed_as_they_are(scale, monkeypatch, tmp_path):
    monkeypatch.setenv("FKJIT_CACHE_DIR", str(tmp_path / "[a]" / "x [/red]y"))
    settings.cache_clear()
    default_cache.cache_clear()
    try:
        monkeypatch.chdir(tmp_path)
        choice = (*CHOICE, "--arch", "sm_80")
        assert "\n1 images in [red]i:x:" in run("compile", *choice, "-o", "[red]i:x:").out
        assert "[a]/x [/red]y/v1\n" in run("cache", "ls").out
        assert run("cache", "export", "[bold]z.fkb").out.startswith("[bold]z.fkb: 1 entries")
    finally:
        monkeypatch.undo()
        settings.cache_clear()
        default_cache.cache_clear()


def test_moving_nothing_is_a_mistake(scale, empty_cache, tmp_path):
    bundle, folder = tmp_path / "none.fkb", tmp_path / "none"
    assert run("compile", *CHOICE).status == 0
    done = run("cache", "export", str(bundle), "--match", "bf16")
    assert done.status == 1 and not bundle.exists()
    assert done.err.endswith("has no entry whose description has 'bf16'\n")
    folder.mkdir()
    done = run("cache", "import", str(folder))
    assert (done.status, done.err) == (1, f"fkjit: cache import: {folder} has no entries\n")


def test_sizes_and_durations():
    assert [console.size(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 GiB",
    ]  # fmt: skip
    assert [console.duration(s) for s in (5.4e-6, 0.0123, 2.0)] == ["5.4 us", "12.3 ms", "2.0 s"]
