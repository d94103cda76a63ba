"""A stderr that takes nothing costs the line, never the result."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fkjit import messages
from tests.core.sampling import one_in

ROOT = Path(__file__).resolve().parents[2]
# A first call, which says that it compiles, on a CPU that says it takes long.
CALL = """
import os, sys
import numpy as np, fkjit, fkjit.cpu.run as run
progress = run._progress
run._progress = lambda name, seconds: progress(name, 2.0)
x = np.ones(64, np.float32)
{before}
assert (fkjit.vector_add(x, x) == 2).all()
print("result")
"""
WAYS = {
    "a full disk": ("", "2>/dev/full"),
    "nobody reads": ("", "2> >(exec 0<&-)"),
    "closed": ("", "2>&-"),
    "closed later": ("os.close(2)", ""),
}


@one_in(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_stderr_that_cannot_be_written_costs_no_result(way, tmp_path):
    before, redirect = WAYS[way]
    environ = {name: value for name, value in os.environ.items() if name != "FKJIT_LOG"}
    environ |= {"FKJIT_CACHE_DIR": str(tmp_path), "CODE": CALL.format(before=before)}
    if way == "nobody reads":  # and is gone by the time of the call
        environ["CODE"] = "import time; time.sleep(0.2)\n" + environ["CODE"]
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$CODE" {redirect}', sys.executable],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "result\n"), done.stderr


def test_lines_go_to_whatever_stands_for_stderr(capsys, monkeypatch):
    messages.write("one", end=" ")
    messages.write("two")
    assert capsys.readouterr() == ("", "one two\n")
    closed = io.StringIO()
    closed.close()
    for nothing in (None, object(), closed):
        monkeypatch.setattr(sys, "stderr", nothing)
        messages.write("three")
        assert capsys.readouterr().out == "" and not messages.to_terminal()
