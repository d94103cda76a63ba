"""Ladders on a GPU: numbers right, every step timed."""

from __future__ import annotations

import json

import pytest

from fkjit.gallery import catalog
from tests.cli.kit import run

pytestmark = pytest.mark.gpu
SMALL = {
    "attention": "batch=1 heads=2 seqlen=256",
    "gemm": "m=512 n=512 k=512",
    "reduction": "rows=2 columns=65536",
    "norm": "rows=64",
    "rope": "length=64",
    "moe": "tokens=512",
    "decode": "keys=512",
    "paged_append": "tokens=64",
}


@pytest.mark.parametrize("name", catalog.NAMES)
def test_every_step_is_right_and_timed(name):
    done = run("gallery", name, "--json", "--shape", SMALL[name])
    assert done.status == 0, done.err + done.out
    found = json.loads(done.out)
    assert found["timed"]
    for step in found["steps"]:
        if step["why_not"] is None:
            assert step["microseconds"] > 0 and step["error"] <= 1, step["title"]


def test_the_table():
    done = run("gallery", "reduction", "--shape", "rows=2 columns=65536", env={"COLUMNS": "80"})
    assert done.status == 0 and max(map(len, done.out.splitlines())) <= 80, done.out
    assert " us " in done.out and "CUDA graph" in done.err
