"""A cache of the test run's own, no settings of the user's, and a reason when a GPU is missing."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sys
import tempfile
from functools import lru_cache
from typing import Any

import hypothesis
import pytest

from tests.core.sampling import covering, spread

_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
_CACHE = "FKJIT_CACHE_DIR"
_NO_BYTECODE, _BYTECODE = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
_BEFORE = pytest.StashKey[tuple[str | None, dict[str, str | None], str]]()

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-variant",
        action="store_true",
        help="compile every variant for every target, run every one",
    )
    parser.addoption(
        "--fuzz-calls", type=int, default=2000, help="random calls of public functions"
    )
    parser.addoption("--fuzz-seed", type=int, default=0, help="the first of their seeds")


@pytest.fixture
def every_variant(request: pytest.FixtureRequest) -> bool:
    """Whether sweeps that are sampled otherwise are to leave nothing out."""
    return bool(request.config.getoption("--every-variant"))


def pytest_configure(config: pytest.Config) -> None:
    """An empty kernel cache, which the workers inherit and share: each kernel is compiled once.

    It is in a folder that takes whatever tests leave among the temporary files, and goes with it.
    Without the tests for GPUs Triton interprets, which it decides when it is imported.
    """
    os.environ.pop("COLUMNS", None)  # as wide as in a pipe, whatever pytest-xdist's terminal is
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `… &` in a script, and so in all below
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.markexpr == "not gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if not _IS_WORKER:
        for name in [name for name in os.environ if name.startswith("FKJIT_")]:
            del os.environ[name]
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path is kept
        own = tempfile.mkdtemp(prefix="fkjit-tests-")
        os.chmod(own, 0o1777)  # as /tmp is: some tests have a child process of another user
        before = {name: os.environ.get(name) for name in ("TMPDIR", _NO_BYTECODE, _BYTECODE)}
        config.stash[_BEFORE] = tempfile.tempdir, before, own
        os.environ["TMPDIR"] = tempfile.tempdir = own
        os.environ[_CACHE] = os.path.join(own, "cache")
        if os.environ.pop(_NO_BYTECODE, None):  # else each process compiles torch's Python anew
            os.environ[_BYTECODE] = sys.pycache_prefix = os.path.join(own, "bytecode")
            sys.dont_write_bytecode = False
        _share_the_cpus(getattr(config.option, "numprocesses", None) or 1)
        os.environ["FKJIT_LOG"] = "quiet"
        # Workers have to collect the same names in the same order, those of sets too.
        os.environ.setdefault("PYTHONHASHSEED", str(random.randrange(1 << 32)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `sampled` the first case of each value that the mark's `key` gives of its
    parameters, none where that is None; or one in `share`; or those that have all values of `cover`
    between them. What is asked for by name is not sampled."""
    named = config.option.keyword or any("[" in argument for argument in config.args)
    if named or config.getoption("--every-variant"):
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = [item for cases in tests.values() for item in _not_sampled(cases)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in dropped]


def _not_sampled(cases: list[pytest.Item]) -> list[pytest.Item]:
    mark = cases[0].get_closest_marker("sampled")
    assert mark is not None
    params = [item.callspec.params if hasattr(item, "callspec") else {} for item in cases]
    if "share" in mark.kwargs:
        kept = spread(params, mark.kwargs["share"])
    elif "cover" in mark.kwargs:
        kept = covering([mark.kwargs["cover"](**each) for each in params])
    else:
        values = [mark.kwargs["key"](**each) for each in params]
        kept = {values.index(value) for value in values if value is not None}
    return [item for place, item in enumerate(cases) if place not in kept]


def _share_the_cpus(workers: int) -> None:
    """As many threads a worker as it has CPUs to itself: more only wait for one another."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Unless --dist names another: whole groups of tests, which share kernels and fixtures."""
    if config.getoption("dist") != "load":
        return None
    from tests.core.groups import DearestFirst

    return DearestFirst(config, log)


def pytest_collectstart() -> None:
    """What collection and imports make stays: looking for garbage took a fifth of their time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Looking through all that for garbage again and again took a tenth of CI."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not _IS_WORKER:
        tempfile.tempdir, before, own = config.stash[_BEFORE]
        os.environ.pop(_CACHE, None)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if before[_NO_BYTECODE]:
            sys.pycache_prefix, sys.dont_write_bytecode = before[_BYTECODE], True
        shutil.rmtree(own, ignore_errors=True)


@lru_cache(maxsize=1)
def _no_gpu() -> str | None:
    """Why no GPU can be used, or None."""
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "no CUDA device"
    except Exception as error:  # no CuPy, no driver, no device: each says so itself
        return f"no CUDA device: {error}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = _no_gpu() if item.get_closest_marker("gpu") else None
    if reason:
        pytest.skip(reason)
