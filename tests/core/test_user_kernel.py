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
