"""`fkjit run`: one variant with its error and its time."""

from __future__ import annotations

import types

import numpy as np
import pytest

from fkjit import replay
from fkjit.cli import run as run_
from tests.cli.kit import run
from tests.core.user_kernel import registered_kernel, write_kernel


@pytest.fixture
def scale(tmp_path):
    """The kernel of CONTRIBUTING.md."""
    with registered_kernel(write_kernel(tmp_path / "kernels")) as spec:
        yield spec


@pytest.fixture
def wrong(tmp_path):
    """The same, but half as much again."""
    folder = write_kernel(tmp_path / "kernels")
    path = folder / "scale.cu"
    path.write_text(path.read_text().replace("factor * static_cast", "1.5f * factor * static_cast"))
    with registered_kernel(folder) as spec:
        yield spec


def test_right_numbers(scale):
    done = run("run", "scale", "--threads", "256", "--size", "n=70", "--device", "cpu")
    assert done.status == 0, done.err
    assert "scale.plain fp16 threads=256 negated=False" in done.out and "n=70 " in done.out
    assert " ok" in done.out and "CPU interpreter" in done.err


def test_wrong_numbers_are_status_1(wrong):
    done = run("run", "scale", "--device", "cpu")
    assert done.status == 1 and "wrong numbers: y[" in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size", "m=7"], "has no field of a problem of that name (has: n, factor, negated)"),
        (["--size", "n=x"], "--size 'n=x' is not a whole number, as 1000 is"),
        (["--size", "negated=7"], "is not true or false, as False is"),
        (["--device", "gpux"], "--device 'gpux' is not one of gpu, cpu; did you mean gpu"),
        (["--thread", "256"], "has no parameter --thread; did you mean --threads"),
        (["--where", "n=7"], "scale.plain has no problem of these to run"),
    ],
)
def test_what_it_is_told_is_checked(scale, words, said):
    done = run("run", "scale", *words)
    assert done.status == 1 and said in done.err


def test_without_a_gpu_it_says_so(scale, monkeypatch):
    monkeypatch.setattr(run_, "gpus", lambda: ([], "no CUDA device"))
    done = run("run", "scale", "--device", "gpu")
    assert done.status == 1 and "no GPU (no CUDA device); --device cpu" in done.err


class Stream:
    """Notes what happens on it, and is a graph as well."""

    def __init__(self):
        self.seen = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def __getattr__(self, name):
        return lambda *given: self.seen.append(name) or self


class Event:
    """Of a device whose clock stands."""

    def record(self, stream):
        return None

    def synchronize(self):
        return None


def test_a_time_is_a_graphs_and_the_numbers_are_of_the_first_launch(scale, monkeypatch):
    """With a stand-in for CuPy, whose arrays are NumPy's: the interpreter launches."""
    made = []
    cuda = types.SimpleNamespace(
        Stream=lambda non_blocking: made.append(Stream()) or made[-1],
        Event=Event,
        get_elapsed_time=lambda begin, end: 40.0,  # milliseconds
        runtime=types.SimpleNamespace(deviceSynchronize=lambda: None),
    )
    cupy = types.SimpleNamespace(cuda=cuda, asarray=np.array, asnumpy=np.array)
    monkeypatch.setattr(replay, "import_module", lambda name: cupy)
    params = {"dtype": "fp32", "threads": 64, "negated": False}
    problem = {"n": 3, "factor": 2.0, "negated": False}
    arrays = {"x": np.ones(3, np.float32), "y": np.zeros(3, np.float32)}
    found, seconds = run_._execute_on_gpu(scale, params, problem, arrays)
    assert found["y"].tolist() == [2, 2, 2] and seconds == pytest.approx(0.002)
    assert made[0].seen == ["synchronize", "begin_capture", "end_capture", *["launch"] * 7]


@pytest.mark.gpu
def test_on_a_gpu(scale):
    done = run("run", "scale", "--size", "n=100000", "--device", "gpu")
    assert done.status == 0 and " us " in done.out and "on the GPU" in done.err, done.err
