"""A program in C launches an image by its header, through the driver."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.cli.c_program import ADD, PROGRAM, compiled, written


@pytest.mark.gpu
def test_a_program_in_c_launches_it(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no cc on this machine")
    _, header = written(tmp_path, *ADD)
    done = subprocess.run(
        [str(compiled(PROGRAM, header, tmp_path)), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "1048576 right\n", done.stderr
