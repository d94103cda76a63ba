"""`fkjit check`: kernels in the interpreter from the command line."""

from __future__ import annotations

import re

import numpy as np
import pytest

import fkjit
from fkjit import KernelSpec, Param
from fkjit import spec as spec_
from tests.cli.kit import run
from tests.core.user_kernel import VARIANTS, registered_kernel, write_kernel


@pytest.fixture
def scale(tmp_path):
    """The kernel of CONTRIBUTING.md."""
    with registered_kernel(write_kernel(tmp_path / "kernels")) as spec:
        yield spec


@pytest.fixture
def broken(tmp_path):
    """The same without its look at n."""
    folder = write_kernel(tmp_path / "kernels")
    path = folder / "scale.cu"
    text = path.read_text()
    assert text.count("  if (i >= n) return;\n") == 1
    path.write_text(text.replace("  if (i >= n) return;\n", "\n"))
    with registered_kernel(folder) as spec:
        yield spec


@pytest.fixture
def wrong(tmp_path):
    """The same, but half as much again."""
    folder = write_kernel(tmp_path / "kernels")
    path = folder / "scale.cu"
    text = path.read_text()
    assert text.count("factor * static_cast") == 1
    path.write_text(text.replace("factor * static_cast", "1.5f * factor * static_cast"))
    with registered_kernel(folder) as spec:
        yield spec


TRANSPOSE = """/* Reads a column of a tile of 32 x 32 floats: 32 lanes meet in one bank. */
extern "C" __global__ void turned(float* __restrict__ y) {
  __shared__ float tile[32][32];
  tile[0][threadIdx.x] = threadIdx.x;
  __syncthreads();
  for (int i = 1; i < 32; ++i) tile[i][threadIdx.x] = tile[0][0];
  __syncthreads();
  y[threadIdx.x] = tile[threadIdx.x][0];
}
"""


@pytest.fixture
def conflicts(tmp_path):
    """A kernel without a reference whose lanes meet in a bank."""
    (tmp_path / "turned.cu").write_text(TRANSPOSE)
    before = dict(spec_._REGISTRY)
    kernel = KernelSpec(
        op="turned", name="plain", source="turned.cu", entry="turned", root=tmp_path,
        params=(Param("dtype", ("fp32",), "of y"),), block=lambda params: (32, 1, 1),
        grid=lambda params, problem: (1, 1, 1), problems=lambda params, scale: [{}],
        outputs=lambda params, problem: {"y": np.zeros(32, np.float32)},
    )  # fmt: skip
    yield fkjit.register(kernel)
    spec_._REGISTRY.clear()
    spec_._REGISTRY.update(before)


def rows(out: str) -> dict[str, str]:
    """Each kernel's row of the table, by its name and target."""
    found = re.findall(r"(?m)^(\S+) +((?:compute)\S+) +(.*?) *$", out)
    return {f"{name} {target}": rest for name, target, rest in found}


def test_all_variants_of_a_kernel_are_run(scale):
    done = run("check", "scale")
    assert done.status == 0, done.err
    (row,) = rows(done.out).items()
    name, rest = row
    assert name == "scale.plain compute_80" and rest.endswith("ok")
    assert rest.startswith(f"{VARIANTS} of {VARIANTS}  ")
    assert re.search(r" 0 +- +ok$", rest), "no error at all: a product with 0.5"
    assert done.err == f"scale.plain compute_80: {VARIANTS} variants\n"


def test_a_sample_on_several_targets_with_banks():
    done = run("check", "attention", "tiled", "attention.naive", "--variants", "1", "--banks",
               "--arch", "sm_75,compute_80")  # fmt: skip
    assert done.status == 0, done.err
    found = rows(done.out)
    names = ("attention.tiled", "attention.naive")
    assert list(found) == [f"{n} {t}" for n in names for t in ("compute_75", "compute_80")]
    for name, row in found.items():
        banks = "2.00" if "tiled" in name else "-"
        assert re.search(rf"\b1 of \d+ +\S+ \w+ +0\.\d+ +{banks} +ok$", row)
    assert "bank" not in done.err, "2 times the ideal is neither a fault nor worth a warning"


def test_wrong_numbers_are_a_fault_whatever_else_is_looked_for(wrong):
    for words in ((), ("--banks",)):
        done = run("check", "scale", "--variants", "1", *words)
        assert done.status == 1
        (row,) = rows(done.out).values()
        assert row.startswith(f"0 of {VARIANTS}") and row.endswith("wrong numbers: y")
        assert float(re.search(r" (\S+) +- +wrong", row)[1]) > 100
        assert re.search(
            r"scale\.plain fp16 threads=64 negated=False: wrong numbers: y\[\d+\] is \S+ where the "
            r"reference has \S+: \S+ times the tolerance \(\S+\); problem: n=1000 factor=0\.5",
            done.err,
        )


def test_bank_conflicts_are_warned_of_and_a_fault_where_a_limit_is_given(conflicts):
    done = run("check", "turned")
    assert done.status == 0 and " 32.00  ok, but has no reference" in done.out
    assert "turned.plain: bank conflicts: 32.00 times the ideal wavefronts at" in done.err
    assert "`--banks 4` makes it a fault" in done.err
    done = run("check", "turned", "--banks", "2")
    assert done.status == 1 and done.out.rstrip().endswith("bank conflicts"), done.out
    assert "32 wavefronts where 1 would" in done.err
    assert run("check", "--banks", "33.5", "turned").status == 0
    done = run("check", "turned", "--banks=0.5")
    assert done.status == 1 and "banks=0.5 is not True, False, or a number from 1 on" in done.err


def test_a_fault_is_reported_and_is_the_status(broken):
    done = run("check", "scale", "--mem")
    assert done.status == 1
    (row,) = rows(done.out).values()
    assert row.startswith(f"0 of {VARIANTS}") and row.endswith("out-of-bounds global read")
    assert "scale.plain fp16 threads=64 negated=False: out-of-bounds global read" in done.err
    assert "kernels/scale.cu:" in done.err and "block (15, 0, 0)" in done.err


def test_a_problem_that_is_too_long_is_a_failure_too(scale, monkeypatch):
    monkeypatch.setattr("fkjit.cpu.run.estimate", lambda *a: 1e9)
    done = run("check", "scale", "--variants", "2")
    assert done.status == 1 and "not run: InterpreterError" in done.out
    assert "FKJIT_INTERPRETER_LIMIT" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "check: 'nothing' is no call and no kernel (calls: "),
        (["attention", "nothing"], "check: 'nothing' is no call and no kernel"),
        (["attention", "--variants", "0"], "check: --variants 0 is not a number above 0"),
        (["attention", "--arch", "sm_1"], "sm_1"),
    ],
)
def test_what_cannot_be_is_refused(words, message):
    done = run("check", *words)
    assert done.status == 1 and done.out == "" and message in done.err
