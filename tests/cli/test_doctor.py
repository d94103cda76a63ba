"""`fkjit doctor` finds what does not fit, names the fix, and never raises."""

from __future__ import annotations

import json

import pytest

import fkjit
from fkjit import ops, user_kernels
from fkjit.cache import lookup
from fkjit.cli import doctor
from fkjit.errors import ParameterError
from fkjit.jit import toolchain
from fkjit.runtime import gpus
from fkjit.settings import Settings, from_environment, settings
from tests.cli.kit import run


@pytest.fixture
def fresh(monkeypatch):
    """Settings and cache are read anew, and again after the test."""

    def clear():
        settings.cache_clear()
        lookup.default_cache.cache_clear()

    clear()
    yield clear
    monkeypatch.undo()
    clear()


def problems(environ=None) -> str:
    return "\n".join(doctor.diagnose(environ)["problems"])


def test_it_tells_what_kernels_are_compiled_with():
    found = doctor.diagnose()
    info = toolchain.nvrtc_info()
    assert found["nvrtc"]["version"] == toolchain.dotted(info.version)
    assert "sm_80" in found["nvrtc"]["targets"]
    assert found["headers"]["folder"] == str(toolchain.header_dirs()[0])
    assert found["cupy"]["version"] == info.cupy
    assert found["fkjit"]["version"] == fkjit.__version__
    assert found["cache"]["writable"] is True
    assert json.loads(json.dumps(found)) == found


def test_every_setting_is_shown_and_there_are_eight_at_most():
    shown = doctor.diagnose()["settings"]["values"]
    assert list(shown) == list(map(Settings.variable, Settings.names()))
    assert len(shown) <= 8 and all(name.startswith("FKJIT_") for name in shown)
    given = doctor.diagnose({"FKJIT_TARGET": "sm_90a"})["settings"]["values"]
    assert given["FKJIT_TARGET"] == {"value": "sm_90a", "set": True}
    assert given["FKJIT_LOG"] == {"value": "normal", "set": False}


def test_a_misspelt_variable_is_a_problem_that_lists_the_right_ones():
    text = problems({"FKJIT_CACHEDIR": "/tmp", "CUDA_HOME": "/usr"})
    assert "settings: FKJIT_CACHEDIR means nothing" in text and "FKJIT_CACHE_DIR" in text
    assert "CUDA_HOME" not in text


def test_a_setting_that_makes_no_sense_is_a_problem(fresh, monkeypatch):
    monkeypatch.setenv("FKJIT_LOG", "loud")
    fresh()
    found = doctor.diagnose()
    assert found["ok"] is False
    assert "settings: FKJIT_LOG='loud' is not one of normal, quiet" in found["problems"]
    assert found["nvrtc"]["version"]


@pytest.mark.parametrize("name", ["FKJIT_CACHE_DIR", "FKJIT_BUNDLE_PATH", "FKJIT_KERNEL_PATH"])
def test_the_home_of_nobody_is_an_error_that_names_the_variable(name):
    with pytest.raises(ParameterError, match=f"^{name}='~no-such-user/x': .*in full$"):
        from_environment({name: "~no-such-user/x"})


def test_two_cupys_are_a_problem_with_the_command(monkeypatch):
    two = {"cupy-cuda12x": "13.6.0", "cupy-cuda13x": "14.2.0"}
    monkeypatch.setattr(toolchain, "installed_cupys", lambda: two)
    monkeypatch.setattr(toolchain, "_site_of", lambda name: "/site/cupy")
    toolchain.check_one_cupy.cache_clear()
    text = problems()
    assert "two CuPys are installed (cupy-cuda12x 13.6.0, cupy-cuda13x 14.2.0)" in text
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install cupy-cuda13x" in text


def test_headers_of_another_minor_version_are_told(monkeypatch):
    monkeypatch.setattr(toolchain, "runtime_version", lambda folder: (13, 9))
    version = toolchain.dotted(toolchain.nvrtc_info().version)
    assert f"headers: of CUDA 13.9, NVRTC is {version}" in problems()
    assert f"=={version}.*'" in problems()


def test_a_cache_that_cannot_be_written_is_a_problem(fresh, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FKJIT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("FKJIT_BUNDLE_PATH", str(tmp_path / "none.fkb"))
    fresh()
    text = problems()
    assert (
        f"cache: {tmp_path}/file/cache/v1 cannot be written" in text and "FKJIT_CACHE_DIR" in text
    )
    assert (
        f"bundle {tmp_path}/none.fkb does not exist, or is out of reach; correct FKJIT_BUNDLE_PATH"
        in text
    )


def test_gpus_are_listed_with_what_is_compiled_for_them(monkeypatch):
    h200 = gpus.Gpu(0, "NVIDIA H200", (9, 0), 150 << 30)
    monkeypatch.setattr(doctor, "gpus", lambda: ([h200], None))
    monkeypatch.setattr(toolchain, "driver_cuda_version", lambda: (13, 0))
    found = doctor.diagnose()["gpu"]
    assert found["devices"][0]["target"] == "sm_90a"
    assert (found["devices"][0]["capability"], found["driver_cuda"]) == ("9.0", "13.0")
    assert "GPU 0" in run("doctor").out and "compiled for sm_90a" in run("doctor").out


def test_a_driver_without_a_usable_gpu_is_a_problem_unless_they_are_hidden(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "gpus", lambda: ([], "cudaErrorInsufficientDriver: too old"))
    monkeypatch.setattr(doctor, "driver_version", lambda: "550.54")
    assert "gpu: the NVIDIA driver 550.54 is here but no GPU can be used" in problems()
    assert "pip install 'fkjit[cuda12]' in place of cupy-cuda13x" in problems()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "gpu:" not in problems()


def test_a_target_nvrtc_does_not_know_is_a_problem():
    assert "settings: FKJIT_TARGET='sm_9x': " in problems({"FKJIT_TARGET": "sm_9x"})
    known = problems({"FKJIT_TARGET": "sm_190"})
    assert "settings: FKJIT_TARGET='sm_190': NVRTC" in known and "compiles for sm_75" in known


def test_a_kernel_that_cannot_be_loaded_is_a_problem(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("FKJIT_KERNEL_PATH", str(tmp_path))
    monkeypatch.setattr(ops, "_begun", False)
    monkeypatch.setattr(user_kernels, "_failures", {})
    broken = tmp_path / "broken.py"
    broken.write_text("from fkjit import register\nimport no_such_module\n")
    fresh()
    expected = f"{broken}: ModuleNotFoundError: No module named 'no_such_module'"
    assert f"kernels: {expected}" in problems()
    monkeypatch.setattr(ops, "_begun", False)
    done = run("list", "vector_add")
    assert (done.status, done.err) == (0, f"fkjit: {expected}; its kernels are missing\n")
    assert "attention.flash" in doctor.diagnose()["kernels"]["registered"]


@pytest.mark.parametrize("broken", ["_fkjit", "_gpu", "_cupy", "_nvrtc", "_headers", "_cache"])
def test_whatever_breaks_the_rest_is_found(monkeypatch, broken):
    def breaks(found):
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(doctor, broken, breaks)
    found = doctor.diagnose()
    name = broken.removeprefix("_")
    assert found[name] == {"error": "the disk is on fire"}
    assert f"{name}: the disk is on fire" in found["problems"]
    others = [part for part in ("fkjit", "nvrtc", "cache") if part != name]
    assert all("error" not in found[part] for part in others)
    assert run("doctor").status == 1 and run("doctor", "--json").status == 1


def test_without_cupy_it_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(toolchain, "import_module", missing)
    monkeypatch.setattr(toolchain, "installed_cupys", dict)
    for function in (toolchain.nvrtc_module, toolchain.nvrtc_info, toolchain.header_dirs):
        function.cache_clear()
    try:
        text = problems()
    finally:
        for function in (toolchain.nvrtc_module, toolchain.nvrtc_info, toolchain.header_dirs):
            function.cache_clear()
    assert "nvrtc: CuPy is not installed" in text
    assert "pip install 'fkjit[cuda13]' ('fkjit[cuda12]' for a driver before 580)" in text


def test_json_is_what_diagnose_says():
    done = run("doctor", "--json")
    assert done.status == (0 if json.loads(done.out)["ok"] else 1)
    assert json.loads(done.out)["nvrtc"] == doctor.diagnose()["nvrtc"]


def test_the_text_has_every_finding_within_100_columns():
    done = run("doctor")
    for part in ("fkjit", "gpu", "cupy", "nvrtc", "headers", "disassembler", "cache", "settings"):
        assert f"\n{part}" in "\n" + done.out
    assert "FKJIT_CACHE_DIR" in done.out
    assert max(map(len, done.out.splitlines())) <= 100
