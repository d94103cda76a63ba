"""`fkjit.warm`: every variant into the cache, by processes, whatever happens to some of them."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from rich.console import Console

import fkjit
from fkjit import warming
from fkjit.arch import DEFAULT_ARCHS, arch, target
from fkjit.cache import lookup
from fkjit.errors import NotCachedError, ParameterError
from fkjit.jit.build import build, quiet
from fkjit.jit.render import load
from fkjit.runtime.gpus import Gpu
from fkjit.settings import settings
from fkjit.spec import find, registered
from fkjit.warm_worker import Job, do
from tests.core.user_kernel import ROOT, VARIANTS, registered_kernel, write_kernel


@pytest.fixture
def scale(tmp_path):
    with registered_kernel(write_kernel(tmp_path / "kernels")) as spec:
        yield spec


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    def clear():
        settings.cache_clear()
        lookup.default_cache.cache_clear()

    monkeypatch.setenv("FKJIT_CACHE_DIR", str(tmp_path / "cache"))
    clear()
    yield tmp_path / "cache"
    monkeypatch.undo()
    clear()


def entries(folder) -> int:
    return len(list(folder.glob("v1/??/*.fkc")))


def break_one(tmp_path, condition: str) -> None:
    """The template no longer compiles where `condition` (over its values) holds."""
    source = tmp_path / "kernels" / "scale.cu"
    source.write_text(
        source.read_text() + f"//% if {condition}\nint broken = nothing;\n//% endif\n"
    )


def test_everything_is_compiled_once_and_found_by_a_build(scale, empty_cache):
    done = fkjit.warm("scale", arch="sm_80,sm_90a", jobs=2)
    assert (done.total, done.compiled, done.present) == (2 * VARIANTS, 2 * VARIANTS, 0)
    assert (done.failed, done.problems, done.unsaved) == ([], [], 0)
    assert entries(empty_cache) == 2 * VARIANTS
    with quiet():
        for name in ("sm_80", "sm_90a"):
            for params in scale.variants(arch(name)):
                entry = build(scale, params, target(name))
                assert entry.origin == "disk"
                assert entry.meta["label"] == scale.label(params)
                assert entry.meta["params"] == params
    again = fkjit.warm("scale.plain", arch=["sm_80", "sm_90a"], jobs=1)
    assert (again.compiled, again.present) == (0, 2 * VARIANTS)


def test_it_resumes_where_some_are_missing(scale, empty_cache):
    with quiet():
        build(scale, next(scale.variants()), target("sm_80"))
    done = fkjit.warm("scale", arch="sm_80", jobs=2)
    assert (done.compiled, done.present) == (VARIANTS - 1, 1)


def test_failures_are_reported_and_the_others_are_kept(scale, empty_cache, tmp_path):
    break_one(tmp_path, "dtype == 'fp16' and threads == 64 and negated")
    seen = []
    done = fkjit.warm("scale", arch="sm_80", jobs=2, progress=lambda *a: seen.append(a))
    assert (done.compiled, len(done.failed)) == (VARIANTS - 1, 1)
    label, error = done.failed[0]
    assert label == "scale.plain fp16 threads=64 negated=True sm_80"
    assert "kernels/scale.cu:" in error
    assert [count for count, _, _ in seen] == list(range(1, VARIANTS + 1))
    assert {total for _, total, _ in seen} == {VARIANTS} and label in [item[2] for item in seen]


def test_the_command_exits_1_after_a_failure_and_says_which(scale, tmp_path):
    from tests.cli.kit import run

    break_one(tmp_path, "threads == 64")
    done = run("warm", "scale", "--arch", "sm_80", "-j", "2")
    assert done.status == 1
    assert done.out.startswith("8 variants: 4 compiled, 0 already there, 4 failed, in ")
    assert done.err.count("failed: scale.plain") == 4


class _Crash:
    """Kills whichever process unpickles it."""

    def __reduce__(self):
        return os._exit, (41,)


def test_a_process_that_dies_fails_its_variant_only(scale):
    jobs = warming.plan(["scale"], "sm_80")
    broken = Job(**{**vars(jobs[1]), "derived": {"x": _Crash()}})
    work = [jobs[0], broken, *jobs[2:]]
    outcomes = list(warming._run(work, processes=1))
    failed = [outcome for outcome in outcomes if outcome.origin == "failed"]
    assert [outcome.job for outcome in failed] == [broken]
    assert "its process ended with status 41" in failed[0].error
    assert sum(outcome.origin == "compiled" for outcome in outcomes) == VARIANTS - 1


def test_what_no_process_can_be_sent_fails_too(scale):
    jobs = warming.plan(["scale"], "sm_80")[:1]
    local = Job(**{**vars(jobs[0]), "derived": {"x": lambda: 0}})
    (outcome,) = warming._run([local], processes=1)
    assert outcome.origin == "failed" and "cannot be sent to a process" in outcome.error


def test_spills_are_reported_not_failed(scale, tmp_path):
    source = tmp_path / "kernels" / "scale.cu"
    lines = source.read_text().replace(
        "__launch_bounds__(THREADS)", "__launch_bounds__(THREADS, 32)"
    )
    body = (
        "  float a[200];\n#pragma unroll\n"
        "  for (int j = 0; j < 200; ++j) a[j] = x[(i + j * j) % n];\n"
        "  __syncthreads();\n#pragma unroll\n"
        "  for (int j = 0; j < 200; ++j) value += a[j] * a[(j * 7) % 200];\n"
    )
    source.write_text(lines.replace("//% if negated", body + "//% if negated", 1))
    params = {"dtype": "fp32", "threads": 64, "negated": False}
    job = next(job for job in warming.plan(["scale"], "sm_80") if job.params == params)
    outcome = do(job)
    assert outcome.origin == "compiled", outcome.error
    assert any("spills registers" in problem for problem in outcome.problems)


def test_a_cache_that_cannot_be_written_is_told(scale, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FKJIT_CACHE_DIR", str(tmp_path / "file"))
    settings.cache_clear()
    lookup.default_cache.cache_clear()
    done = fkjit.warm("scale", arch="sm_80", jobs=1)
    assert (done.compiled, done.unsaved, done.failed) == (VARIANTS, VARIANTS, [])


def test_what_is_warmed_without_an_architecture(scale, monkeypatch):
    assert warming.chosen_targets(None) == ["compute_80"]
    cards = [Gpu(0, "H200", (9, 0), 1), Gpu(1, "H200", (9, 0), 1), Gpu(2, "L4", (8, 9), 1)]
    monkeypatch.setattr(warming, "gpus", lambda: (cards, None))
    assert warming.chosen_targets(None) == ["sm_90a", "sm_89"]


def test_architectures_are_read_and_named_once():
    assert warming.chosen_targets("90a, 9.0, sm_90a,compute_80") == [
        "sm_90a",
        "sm_90",
        "compute_80",
    ]
    assert warming.chosen_targets("all") == list(DEFAULT_ARCHS)
    with pytest.raises(ParameterError, match=r"warm: arch=' , ' names no target"):
        warming.chosen_targets(" , ")
    with pytest.raises(ParameterError, match="'sm_9x' is not an architecture"):
        fkjit.warm("attention", arch="sm_9x")


def test_unknown_names_and_process_counts_are_refused():
    with pytest.raises(
        ParameterError, match=r"'atention' is no call and no kernel; did you mean attention"
    ):
        fkjit.warm("atention", arch="sm_80")
    with pytest.raises(ParameterError, match="warm: jobs=-1; allowed: 1 and above"):
        fkjit.warm("attention", arch="sm_80", jobs=-1)


def test_the_plan_is_what_the_registry_has():
    for name in DEFAULT_ARCHS:
        found = warming.plan(arch=name)
        expected = [
            (spec.id, spec.label(params))
            for spec in registered()
            for params in spec.variants(target(name).arch)
        ]
        assert [(f"{j.op}.{j.name}", j.spec.label(j.params)) for j in found] == expected
    assert {job.op for job in warming.plan(["attention"], "sm_80")} == {"attention"}


def test_a_job_has_the_sources_of_its_kernel():
    for job in warming.plan(arch="sm_75,sm_90a")[::9]:
        spec = find(f"{job.op}.{job.name}")
        assert load(job.spec, job.params).identity() == load(spec, job.params).identity()


def test_ptx_is_compiled_as_the_interpreter_wants_it_too(empty_cache, monkeypatch):
    (job,) = [
        job
        for job in warming.plan(["attention.tiled"], "compute_80")
        if job.params == {"dtype": "fp16", "head_dim": 64, "head_dim_v": 64, "block": 16}
    ]
    assert do(job).origin == "compiled" and entries(empty_cache) == 2
    assert do(job).origin == "memory" and entries(empty_cache) == 2
    monkeypatch.setattr(lookup.default_cache(), "require_cached", True)
    q = np.random.default_rng(8).standard_normal((1, 1, 16, 64)).astype("f2")
    fkjit.attention(q, q, q, impl="tiled", block=16)
    with fkjit.sanitize(mem=False, race=False):
        fkjit.attention(q, q, q, impl="tiled", block=16)
    with pytest.raises(NotCachedError):
        fkjit.attention(q, q, q, impl="tiled", block=32)


def test_ctrl_c_keeps_what_is_done(scale, empty_cache, tmp_path):
    body = "".join(f"template <int N> struct S{i} {{ char c[N]; }};\n" for i in range(400))
    source = tmp_path / "kernels" / "scale.cu"
    source.write_text(source.read_text() + body)
    code = (  # a test run in the background of a shell is started with SIGINT ignored
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from fkjit.cli.app import app; app(sys.argv[1:])"
    )
    archs = ",".join(DEFAULT_ARCHS)
    process = subprocess.Popen(
        [sys.executable, "-c", code, "warm", "scale", "--arch", archs, "--jobs", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "FKJIT_KERNEL_PATH": str(source.parent)},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while entries(empty_cache) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    kept = entries(empty_cache)
    assert process.returncode == 130, (out, err)
    assert 2 <= kept < len(DEFAULT_ARCHS) * VARIANTS
    assert "done and kept; start again to go on" in err and "Traceback" not in err
    done = fkjit.warm("scale", arch=archs, jobs=2)
    assert (done.present, done.compiled) == (kept, len(DEFAULT_ARCHS) * VARIANTS - kept)


@pytest.mark.parametrize("width", [50, 80])
def test_progress_keeps_its_numbers_on_a_narrow_terminal(width):
    from fkjit.cli.warm import _progress

    out = io.StringIO()
    bar = _progress(Console(file=out, width=width, force_terminal=True, color_system=None))
    bar.add_task("attention.flash_sm90 bf16 head_dim=128 " * 4, total=75, completed=8)
    bar.console.print(bar)
    (line,) = (line for line in out.getvalue().splitlines() if line.strip())
    assert "8/75" in line and "atten" in line and len(line) <= width
