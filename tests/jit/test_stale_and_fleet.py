"""Never a stale kernel, and where all is cached no compiler: neither is there or is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fkjit
from fkjit.arch import target
from fkjit.cache.lookup import Cache, default_cache
from fkjit.cache.toolchains import Toolchain, gather
from fkjit.cli import doctor
from fkjit.errors import CompileError, FkjitError, NotCachedError, ToolchainError
from fkjit.jit import build as building
from fkjit.jit import includes, toolchain
from fkjit.jit.build import build_source
from fkjit.jit.compiler import compilers
from fkjit.jit.render import load_text
from fkjit.settings import settings

ROOT = Path(__file__).resolve().parents[2]
KERNEL = 'extern "C" __global__ void k(int* out) { *out = VALUE; }\n'
# Ways to a file by its path; {path} is that, and what begins with < a value of the template.
FORMS = {
    "plain": '#include "{path}"\n',
    "brackets": "#include <{path}>\n",
    "macro": '#define FILE "{path}"\n#include FILE\n',
    "macro in brackets": "#define FILE <{path}>\n#include FILE\n",
    "digraph": '%:include "{path}"\n',
    "comment": '#/**/include/**/"{path}"\n',
    "continued": '#inc\\\nlude "{path}"\n',
    "value": '#include "${{path}}"\n',
}


def compiled(text: str, cache: Cache, **values: str):
    rendered = load_text("kernels_cu/k.cu", text, Path("/nowhere/k.cu"), values)
    what = {"kernel": "test.k", "label": "", "params": {}}
    return build_source(rendered, "k", target("sm_80"), what, cache)


@pytest.mark.parametrize("confined", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_by_its_path_is_refused_in_every_form(form, confined, tmp_path, monkeypatch):
    """It would be served as it was after it has changed."""
    if not confined:
        monkeypatch.setattr(compilers, "_usable", False)
    header = tmp_path / "value.h"
    header.write_text("#define VALUE 1\n")
    with pytest.raises(FkjitError, match=r"include|open source file") as info:
        compiled(FORMS[form].format(path=header) + KERNEL, Cache(None), path=str(header))
    assert "kernels_cu/k.cu" in str(info.value) and "Too many" not in str(info.value)


def test_a_file_by_a_path_from_the_kernel_is_in_the_key(tmp_path):
    (tmp_path / "value.h").write_text("#define VALUE 1\n")
    text, cache = f'#include "{"../" * 12}{tmp_path}/value.h"\n' + KERNEL, Cache(None)
    first = compiled(text, cache)
    (tmp_path / "value.h").write_text("#define VALUE 2\n")
    assert compiled(text, cache).image != first.image


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A toolkit with two more headers, one of which includes the other."""
    real, folder = toolchain.header_dirs()[0], tmp_path / "include"
    (folder / "cccl" / "cub").mkdir(parents=True)
    for name in toolchain._HEADER_FILES:
        (folder / name).symlink_to(real / name)
    (folder / "cccl" / "cub" / "cub.cuh").write_text('#include "detail.cuh"\n')
    (folder / "cccl" / "cub" / "detail.cuh").write_text("#define VALUE 1\n")
    monkeypatch.setattr(includes, "header_dirs", lambda: [folder])
    return folder / "cccl" / "cub"


def test_a_changed_header_of_the_toolkit_is_compiled_anew(toolkit, tmp_path):
    text = "#include <cuda_fp16.h>\n#include <cub/cub.cuh>\n" + KERNEL
    cache = Cache(tmp_path / "cache")
    first = compiled(text, cache)
    assert sorted(first.meta["toolkit"]) == ["cub/cub.cuh", "cub/detail.cuh"]
    assert str(tmp_path) not in str(first.meta)
    assert compiled(text, cache).origin == "memory"
    assert compiled(text, Cache(tmp_path / "cache")).origin == "disk"
    (toolkit / "detail.cuh").write_text("#define VALUE 2\n")
    for again in (cache, Cache(tmp_path / "cache")):
        second = compiled(text, again)
        assert second.image != first.image
    assert second.origin == "disk" and compiled(text, cache).origin == "memory"
    (toolkit / "detail.cuh").unlink()
    with pytest.raises(CompileError, match=r"detail\.cuh"):
        compiled(text, cache)


def test_two_headers_of_one_name_are_not_taken_for_each_other(toolkit, tmp_path):
    (toolkit.parent / "thrust").mkdir()
    (toolkit.parent / "thrust" / "t.cuh").write_text('#include "detail.cuh"\n')
    (toolkit.parent / "thrust" / "detail.cuh").write_text("#define OTHER 1\n")
    text = "#include <cub/cub.cuh>\n#include <thrust/t.cuh>\n" + KERNEL
    with pytest.raises(CompileError, match=r"'detail\.cuh' is cub/detail\.cuh in one"):
        compiled(text, Cache(None))


def test_kernels_of_ours_read_what_is_in_the_key(tmp_path):
    entry = compiled("#include <cuda_fp8.h>\n#define VALUE 3\n" + KERNEL, Cache(None))
    assert "toolkit" not in entry.meta


# A process in which neither NVRTC nor headers nor CuPy can be had, or is looked for.
FLEET = """
import sys
import numpy as np
sys.modules["cupy"] = None
import fkjit
x = np.arange(6, dtype=np.float32).reshape(2, 3)
print(fkjit.vector_add(x, x).sum())
maps = open("/proc/self/maps").read()
print("nvrtc" in maps, "fkjit.jit.compile" in sys.modules, "jinja2" in sys.modules)
"""


def fleet(**environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FKJIT_")}
    return subprocess.run(
        [sys.executable, "-c", FLEET],
        cwd=ROOT, env={**kept, **environ}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """With one kernel in it: (the bundle, the directory it is of)."""
    folder = tmp_path_factory.mktemp("fleet")
    cache, x = Cache(folder / "cache" / "v1"), np.arange(6, dtype=np.float32).reshape(2, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "default_cache", lambda: cache)
        assert fkjit.vector_add(x, x).sum() == 30
    return cache.export(folder / "one.fkb").path, folder / "cache"


def test_what_is_cached_needs_no_compiler(bundle, tmp_path):
    path, directory = map(str, bundle)
    empty = str(tmp_path)
    for environ in (
        {"FKJIT_BUNDLE_PATH": path, "FKJIT_CACHE_DIR": empty},
        {"FKJIT_BUNDLE_PATH": directory, "FKJIT_CACHE_DIR": empty, "FKJIT_REQUIRE_CACHED": "1"},
        {"FKJIT_CACHE_DIR": directory, "FKJIT_REQUIRE_CACHED": "1"},
    ):
        done = fleet(**environ)
        assert done.stdout == "30.0\nFalse False False\n", done.stderr


def test_what_is_not_cached_says_so_without_a_compiler(bundle, tmp_path):
    done = fleet(FKJIT_CACHE_DIR=str(tmp_path), FKJIT_REQUIRE_CACHED="1")
    assert done.returncode == 1 and "NotCachedError: FKJIT_REQUIRE_CACHED=1: vector" in done.stderr
    done = fleet(FKJIT_CACHE_DIR=str(tmp_path))
    assert done.returncode == 1 and "ToolchainError: CuPy" in done.stderr


def test_a_gpus_target_is_what_the_bundle_has(bundle, monkeypatch):
    """And NVRTC's choice where that is not in there."""
    made = [Toolchain("13.0 a", "h", (75, 80, 90), ("sm_90a",))]
    cache = Cache(None, require_cached=True)
    monkeypatch.setattr(building, "default_cache", lambda: cache)
    monkeypatch.setattr(cache, "toolchains", lambda anew=False: made)
    monkeypatch.setattr(toolchain, "nvrtc_info", None)
    assert building.gpu_target((9, 0)).name == "sm_90a"
    made.clear()
    assert building.gpu_target((8, 9)).name == "sm_89"
    with pytest.raises(NotCachedError, match="0 entries"):
        compiled(KERNEL, cache)


def test_toolchains_of_entries_and_of_anything():
    fields = {"nvrtc": "13.0 abc", "cuda_headers": "13.0 def"}
    old = {"fields": {**fields, "nvrtc": "9.2 x"}, "target": "sm_90a"}  # tells no architectures
    metas = [{"fields": fields, "target": "sm_80", "archs": [75, 80]}, old, {"fields": {}}, {}]
    metas.append({"fields": {**fields, "nvrtc": "unknown"}, "target": "sm_80"})
    assert gather(metas) == [
        Toolchain("13.0 abc", "13.0 def", (75, 80), ("sm_80",)),
        Toolchain("9.2 x", "13.0 def", (90,), ("sm_90a",)),
    ]
    for wrong in ({}, {"nvrtc": "", "cuda_headers": ""}, {"nvrtc": "13", "cuda_headers": ""}):
        with pytest.raises((KeyError, ValueError)):
            Toolchain.from_dict(wrong)


def _as_new() -> None:
    """Settings, and the cache that they ask for, are found again."""
    settings.cache_clear()
    default_cache.cache_clear()


def test_doctor_misses_no_compiler_where_none_is_needed(monkeypatch):
    def missing():
        raise ToolchainError("no NVRTC")

    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "nvrtc_info", missing)
        patch.setenv("FKJIT_REQUIRE_CACHED", "1")
        _as_new()
        report = doctor.diagnose()
    _as_new()
    assert report["nvrtc"] == {"error": "no NVRTC"}
    assert not [problem for problem in report["problems"] if "NVRTC" in problem]
