"""`fkjit new`: the files of CONTRIBUTING.md under another name, which pass their check."""

from __future__ import annotations

import pytest

from fkjit import ops, spec
from tests.cli.kit import run
from tests.core.user_kernel import code_blocks


@pytest.fixture
def registry():
    """The registry, put back afterwards."""
    ops.load()
    before = dict(spec._REGISTRY)
    yield
    spec._REGISTRY.clear()
    spec._REGISTRY.update(before)


def test_a_new_kernel_passes_its_check(tmp_path, registry):
    folder = tmp_path / "kernels"
    done = run("new", "twice_as_much", "--folder", str(folder))
    assert done.status == 0 and f"FKJIT_KERNEL_PATH={folder} fkjit check twice_as_much" in done.out
    ops.load_folder(folder)
    checked = run("check", "twice_as_much", "--variants", "2")
    assert checked.status == 0 and "twice_as_much.plain" in checked.out, checked.err


def test_it_is_the_example_of_the_documents(tmp_path):
    run("new", "scale", "--folder", str(tmp_path))
    for name, text in code_blocks("CONTRIBUTING.md").items():
        assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize("name", ["Two", "a-b", "../x", "1a", "attention", "lambda", ""])
def test_names_that_cannot_be(tmp_path, name):
    done = run("new", name, "--folder", str(tmp_path / "kernels"))
    assert done.status == 1 and "new: " in done.err and not list(tmp_path.iterdir())


def test_files_that_are_there_stay(tmp_path):
    (tmp_path / "mine.py").write_text("mine")
    done = run("new", "mine", "--folder", str(tmp_path))
    assert done.status == 1 and "is there already" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    assert (tmp_path / "mine.py").read_text() == "mine"
