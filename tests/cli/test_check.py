"""`fkjit check`: kernels in the interpreter from the command line."""

from __future__ import annotations

import re

import pytest

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
    assert done.err == f"scale.plain compute_80: {VARIANTS} variants\n"


def test_a_sample_on_several_targets_with_banks():
    done = run("check", "attention", "tiled", "attention.naive", "--variants", "1", "--banks",
               "--arch", "sm_75,compute_80")  # fmt: skip
    assert done.status == 0, done.err
    found = rows(done.out)
    names = ("attention.tiled", "attention.naive")
    assert list(found) == [f"{n} {t}" for n in names for t in ("compute_75", "compute_80")]
    for name, row in found.items():
        assert re.search(r"\b1 of \d+ +2 +.* ok +" + ("2.00" if "tiled" in name else "-"), row)
    assert re.search(
        r"attention\.tiled: 2\.00 times the ideal wavefronts at kernels_cu/attention/tiled\.cu:\d+",
        done.out,
    )


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
