"""A new kernel is two files: those CONTRIBUTING.md shows, from a folder fkjit knows nothing of."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import fkjit
from fkjit.errors import ParameterError
from fkjit.settings import settings
from fkjit.spec import registered
from fkjit.user_kernels import registers
from tests.core.user_kernel import ROOT, VARIANTS, registered_kernel, write_kernel


@pytest.fixture
def folder(tmp_path):
    return write_kernel(tmp_path / "my_kernels")


@pytest.fixture
def scale(folder):
    with registered_kernel(folder) as spec:
        yield spec


def python(code: str, cwd, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_every_variant_computes_what_its_reference_says(scale):
    variants = list(fkjit.variants("scale.plain"))
    assert len(variants) == VARIANTS
    for params in variants:
        (problem,) = scale.verification.problems(params, "small")
        inputs = scale.verification.inputs(params, problem, np.random.default_rng(0))
        outputs = scale.verification.outputs(params, problem)
        fkjit.launch(scale, params, problem, {**inputs, **outputs})
        expected = scale.verification.reference(problem, inputs)["y"]
        assert np.abs(expected).max() > 1
        error = np.abs(outputs["y"].astype(np.float64) - expected).max()
        assert error <= scale.verification.tolerance(params)


def test_its_parameters_are_checked_like_ours(scale):
    x = np.zeros(4, np.float32)
    params = {"dtype": "fp32", "threads": 96, "negated": False}
    with pytest.raises(ParameterError, match=r"scale: threads=96 is not one of \[64, 256\]"):
        fkjit.launch(scale, params, {"n": 4, "factor": 1.0, "negated": False}, {"x": x, "y": x})


def test_the_template_is_what_errors_and_profilers_name(scale):
    from fkjit.jit.render import load

    text = load(scale, {"dtype": "fp16", "threads": 64, "negated": True}).text
    assert text.startswith('#line 1 "my_kernels/scale.cu"\n')
    assert "constexpr int THREADS = 64;" in text
    assert "value = -value;" in text


def test_a_second_kernel_of_the_same_name_is_refused(scale, folder):
    with pytest.raises(ParameterError, match=r"'scale\.plain' stands already \(scale\.cu\)"):
        fkjit.register(scale)
    assert fkjit.register(scale, replace=True) is scale


def test_a_folder_on_the_kernel_path_is_found_by_its_name(folder, tmp_path):
    code = (
        "import numpy as np, fkjit\n"
        "x = np.arange(1000, dtype=np.float32); y = np.zeros_like(x)\n"
        "fkjit.launch('scale.plain', {'dtype': 'fp32', 'threads': 256, 'negated': True},\n"
        "             {'n': 1000, 'factor': 2.0, 'negated': True}, {'x': x, 'y': y})\n"
        "print(np.array_equal(y, -2 * x))\n"
    )
    done = python(code, tmp_path, FKJIT_KERNEL_PATH=str(folder))
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
    assert "kernel 'scale.plain' is not registered" in python(code, tmp_path).stderr


def test_importing_the_file_registers_it(folder):
    code = (
        "import fkjit, scale\n"
        "print(sorted(p['threads'] for p in fkjit.variants('scale')), scale.SCALE.id)\n"
    )
    done = python(code, folder, PYTHONPATH=f"{ROOT}{os.pathsep}{folder}")
    assert done.stdout == f"{[64] * 4 + [256] * 4} scale.plain\n", done.stderr


SCRIPT = """
import sys
import numpy as np, fkjit
x = np.arange(8, dtype=np.float32); y = np.zeros_like(x)
fkjit.launch('scale.plain', {'dtype': 'fp32', 'threads': 64, 'negated': False},
             {'n': 8, 'factor': 2.0, 'negated': False}, {'x': x, 'y': y})
print(np.array_equal(y, 2 * x))
"""


def test_a_script_beside_the_kernels_runs_once_and_only_where_it_is_started(folder):
    (folder / "a_script.py").write_text(SCRIPT)
    env = {"FKJIT_KERNEL_PATH": str(folder), "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = python("import a_script", folder, **env)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
    done = python("import fkjit; print(len(list(fkjit.variants('scale.plain'))))", folder, **env)
    assert (done.stdout, done.returncode) == (f"{VARIANTS}\n", 0), done.stderr
    assert done.stderr == "", "the script is not run"


@pytest.mark.parametrize("first", ["import scale", "import fkjit; fkjit.variants('scale')"])
def test_a_kernel_on_the_path_may_be_imported_as_well(folder, first):
    env = {"FKJIT_KERNEL_PATH": str(folder), "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = python(f"{first}\nimport scale\n{SCRIPT}", folder, **env)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_a_kernels_file_that_calls_fkjit_finds_it_loading(folder):
    with (folder / "scale.py").open("a") as file:
        file.write(SCRIPT)
    env = {"FKJIT_KERNEL_PATH": str(folder)}
    done = python("import fkjit; list(fkjit.variants('scale.plain'))", folder, **env)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.mark.parametrize(
    ("text", "loaded"),
    [
        ("from fkjit import register\nregister()", True),
        ("from fkjit.spec import register as add\nadd()", True),
        ("import fkjit as f\ndef make(): f.register()", True),
        ("import fkjit.spec\nfkjit.spec.register()", True),
        ("from fkjit import register(", True),
        ("import fkjit, atexit\natexit.register(print)", False),
        ("import fkjit\nfkjit.launch('register')", False),
        ("register = 1", False),
    ],
)
def test_files_that_register_kernels_are_known_by_their_text(tmp_path, text, loaded):
    (tmp_path / "some.py").write_text(text)
    assert registers(tmp_path / "some.py") is loaded


def test_a_broken_file_costs_its_own_kernels_and_a_line(folder):
    (folder / "broken.py").write_text("from fkjit import register\nregister(1 / 0)\n")
    (folder / "worse.py").write_text("from fkjit import register(\n")
    done = python("import fkjit; print(len(list(fkjit.variants('scale.plain'))))", folder,
                  FKJIT_KERNEL_PATH=str(folder))  # fmt: skip
    assert (done.stdout, done.returncode) == (f"{VARIANTS}\n", 0)
    first, second = done.stderr.splitlines()
    missing = "its kernels are missing"
    assert first == f"fkjit: {folder}/broken.py: ZeroDivisionError: division by zero; {missing}"
    assert second.startswith(f"fkjit: {folder}/worse.py: SyntaxError: ")


def test_a_path_that_is_no_folder_is_named(tmp_path, monkeypatch):
    done = python(
        "import fkjit; list(fkjit.variants('attention'))",
        tmp_path,
        FKJIT_KERNEL_PATH=str(tmp_path / "nowhere"),
    )
    assert done.returncode == 1
    assert f"FKJIT_KERNEL_PATH: {tmp_path}/nowhere is not a folder of kernels" in done.stderr


def test_the_commands_know_it(folder, tmp_path):
    def fkjit_(*arguments: str) -> str:
        code = "import sys; from fkjit.cli.app import app; app(sys.argv[1:])"
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "FKJIT_KERNEL_PATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "scale.plain" in fkjit_("list")
    assert "constexpr int THREADS = 256;" in fkjit_("show", "scale", "--threads", "256", "--source")
    warmed = fkjit_("warm", "scale", "--arch", "sm_89", "--jobs", "1")
    assert f"{VARIANTS} variants: {VARIANTS} compiled, 0 already there, 0 failed" in warmed
    assert fkjit_("compile", "scale", "--arch", "sm_89").count(" hit") == VARIANTS


def test_the_registry_is_as_before_without_it():
    assert "scale.plain" not in [spec.id for spec in registered()]
    assert settings().kernel_path == ()
