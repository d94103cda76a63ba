"""`fkjit check --watch`: again after a change, in one process."""

from __future__ import annotations

import pytest

from fkjit.cli import watch
from tests.cli.kit import run
from tests.core.user_kernel import registered_kernel, write_kernel


@pytest.fixture
def changes(tmp_path, monkeypatch):
    """What happens to scale.cu while the command waits, one after the other; then Ctrl-C."""
    path = write_kernel(tmp_path / "kernels") / "scale.cu"
    text, steps = path.read_text(), []

    def sleep(seconds):
        if not steps:
            raise KeyboardInterrupt
        old, new = steps.pop(0)
        path.write_text(text.replace(old, new))

    monkeypatch.setattr(watch.time, "sleep", sleep)
    with registered_kernel(path.parent):
        yield steps


def test_each_change_is_checked_and_errors_do_not_end_it(changes):
    changes += [("float value", "flaot value"), ("factor *", "2.f * factor *"), ("", "")]
    done = run("check", "scale", "--variants", "1", "--watch")
    assert done.status == 0
    assert done.out.count("scale.plain") == 3, "the one that does not compile has no table"
    assert "kernels/scale.cu:16: " in done.err and done.err.count("wrong numbers") == 1
    assert done.err.count("waits for a change") == 4


def test_the_status_is_the_last_one(changes):
    changes += [("factor *", "2.f * factor *")]
    assert run("check", "scale", "--variants", "1", "--watch").status == 1


def test_headers_are_watched_too(tmp_path):
    path = write_kernel(tmp_path / "kernels") / "scale.cu"
    path.write_text('#include "mine.cuh"\n' + path.read_text())
    (path.parent / "mine.cuh").write_text("")
    with registered_kernel(path.parent) as spec:
        before = watch.stamps([spec])
        assert {file.name for file in before} == {"scale.cu", "mine.cuh", "prelude.cuh"}
        (path.parent / "mine.cuh").write_text("// changed")
        assert watch.stamps([spec]) != before
