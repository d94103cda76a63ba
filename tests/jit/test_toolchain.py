"""Toolchains that do not fit: each is one typed error with versions, a path and a command."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fkjit.arch import target
from fkjit.errors import ToolchainError
from fkjit.jit import toolchain

SM_80, PTX_80 = target("sm_80"), target("compute_80")


def test_another_edit_of_a_toolkit_header_changes_the_key(tmp_path, monkeypatch):
    for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "cuda_fp16.hpp"):
        (tmp_path / name).write_text("int a = 1;\n")
    monkeypatch.setattr(toolchain, "header_dirs", lambda: [tmp_path])
    first = toolchain.headers_id.__wrapped__()
    (tmp_path / "cuda_fp16.hpp").write_text("int a = 2;\n")
    assert toolchain.headers_id.__wrapped__() != first
    assert str(tmp_path) not in first


def test_nvrtc_tells_what_it_is():
    info = toolchain.nvrtc_info()
    assert info.version >= (12, 0) and 80 in info.supported
    assert info.library is not None and info.library.is_file()
    assert re.fullmatch(r"[0-9a-f]{40}|\d+ [0-9a-f]{64}", info.build)
    assert info.cupy == sys.modules["cupy"].__version__
    banner = toolchain._compiler_banner(toolchain.nvrtc_module())
    assert re.fullmatch(rf"CL-\d+ V{re.escape(toolchain.dotted(info.version))}\.\d+", banner)


def test_libraries_without_a_build_id_are_told_apart_by_size_and_both_ends(tmp_path):
    library, middle = tmp_path / "libnvrtc.so", bytes(200_000)
    builds = []
    for content in (b"a", b"a" + middle + b"b", b"c" + middle + b"b", b"a" + middle + b"d"):
        library.write_bytes(content)
        builds.append(toolchain._library_build(library))
    assert len(set(builds)) == 4
    assert [build.split()[0] for build in builds] == ["1", "200002", "200002", "200002"]
    assert toolchain._library_build(tmp_path / "none") is None


def test_missing_headers_name_every_folder_and_the_command(tmp_path, monkeypatch):
    half, alien = tmp_path / "half", tmp_path / "alien"
    for folder, names in ((half, ["cuda_fp16.h"]), (alien, toolchain._HEADERS)):
        folder.mkdir()
        for name in names:
            (folder / name).write_text("")
    (alien / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  9020\n")
    folders = [half, alien, tmp_path / "none"]
    monkeypatch.setattr(toolchain, "header_candidates", lambda: folders)
    with pytest.raises(ToolchainError) as info:
        toolchain.header_dirs.__wrapped__()
    message = str(info.value)
    assert f"{half}: lacks cuda_bf16.h, cuda_fp8.h" in message
    assert f"{alien}: is of CUDA 9" in message and f"{folders[2]}: not there" in message
    assert re.search(r"pip install 'nvidia-cuda-runtime(-cu12)?==1\d\.\d+\.\*'", message)


def test_a_toolkit_of_the_right_major_is_found_through_cuda_path(tmp_path, monkeypatch):
    major = toolchain.nvrtc_info().version[0]
    (tmp_path / "include").mkdir()
    for name in toolchain._HEADERS:
        (tmp_path / "include" / name).write_text("")
    (tmp_path / "include" / "cuda_runtime_api.h").write_text(
        f"#define CUDART_VERSION {major * 1000 + 50}\n"
    )
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "_nvidia_packages", lambda: [])
    assert toolchain.header_dirs.__wrapped__() == [tmp_path / "include"]
    assert toolchain.runtime_version(tmp_path / "include") == (major, 5)


def test_two_cupys_are_named_with_versions_folder_and_command(tmp_path, monkeypatch):
    for name, version in (("cupy_cuda12x", "13.4.1"), ("cupy_cuda11x", "12.0.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ToolchainError) as info:
        toolchain.check_one_cupy.__wrapped__()
    message = str(info.value)
    assert "cupy-cuda11x 12.0.0" in message and "cupy-cuda12x 13.4.1" in message
    assert "pip uninstall -y" in message and "&& pip install cupy-cuda" in message


def test_no_cupy_is_a_toolchain_error_with_the_command():
    code = (
        "import sys\nsys.modules['cupy'] = None\n"
        "from fkjit.jit.toolchain import nvrtc_info\nnvrtc_info()\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 1
    assert "fkjit.errors.ToolchainError: CuPy" in done.stderr
    assert "pip install 'fkjit[cuda13]'" in done.stderr


def test_no_nvrtc_library_is_a_toolchain_error_with_the_command(monkeypatch):
    class Missing:
        @staticmethod
        def getVersion():
            raise RuntimeError("CuPy failed to load libnvrtc.so.13: OSError\nmore")

    class Cuda:
        nvrtc = Missing

    monkeypatch.setattr(toolchain, "import_module", lambda name: Cuda)
    with pytest.raises(ToolchainError) as info:
        toolchain.nvrtc_module.__wrapped__()
    assert "finds no NVRTC library (CuPy failed to load libnvrtc.so.13: OSError)" in str(info.value)
    assert "pip install 'fkjit[cuda13]'" in str(info.value)


def test_a_driver_older_than_the_ptx_is_told_both_versions(monkeypatch):
    monkeypatch.setattr(toolchain, "driver_cuda_version", lambda: (12, 4))
    error = RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the provided PTX was compiled with …")
    found = toolchain.explain_load_failure(error, PTX_80, (13, 0))
    assert isinstance(found, ToolchainError)
    message = str(found)
    assert "driver (CUDA 12.4) refused compute_80 made by NVRTC 13.0" in message
    assert "pip install cupy-cuda12x 'nvidia-cuda-nvrtc-cu12<=12.4.999'" in message
    monkeypatch.setattr(toolchain, "driver_cuda_version", lambda: (13, 0))
    message = str(toolchain.explain_load_failure(error, PTX_80, "13.4"))
    assert "pip install 'nvidia-cuda-nvrtc<=13.0.999'" in message


def test_a_cubin_for_another_gpu_and_other_errors_are_told_apart(monkeypatch):
    monkeypatch.setattr(toolchain, "driver_cuda_version", lambda: None)
    refused = RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available")
    message = str(toolchain.explain_load_failure(refused, SM_80))
    assert "driver (CUDA unknown) refused sm_80" in message and "unset FKJIT_TARGET" in message
    assert toolchain.explain_load_failure(RuntimeError("CUDA_ERROR_INVALID_IMAGE"), SM_80) is None


HOMELESS = """
import os
import numpy as np
import fkjit
q = np.ones((1, 1, 16, 32), np.float16)
assert np.array_equal(fkjit.attention(q, q, q), q)
print(os.environ["CUPY_CACHE_DIR"])
"""


def homeless(tmp_path, **more):
    environ = {k: v for k, v in os.environ.items() if k != "CUPY_CACHE_DIR"}
    environ |= {"HOME": "/dev/null", "TMPDIR": str(tmp_path), **more}
    command = [sys.executable, "-c", HOMELESS]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True)


def test_without_a_home_cupy_gets_a_folder_of_the_users_own(tmp_path):
    done = homeless(tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.parent == tmp_path and stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)  # whoever made it so may have put kernels there
    other = Path(homeless(tmp_path).stdout.strip())
    assert other.parent == tmp_path and other != folder


def test_a_cupy_cache_that_cannot_be_is_a_toolchain_error(tmp_path):
    done = homeless(tmp_path, CUPY_CACHE_DIR="/dev/null/kernels")
    assert done.returncode == 1 and "fkjit.errors.ToolchainError: CuPy cannot be" in done.stderr
    assert "set CUPY_CACHE_DIR to a folder it can write" in done.stderr
