"""The demo checks what it shows: right kernels pass, and a wrong result does not."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fkjit.cli import demo
from tests.cli.kit import run


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(demo, "_ON_CPU", demo.Sizes(batch=1, seqlen=70, repeats=1))
    monkeypatch.setattr(demo, "gpus", lambda: ([], "no driver"))


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("attention.")]


def test_every_case_is_right_and_is_a_hit_the_second_time():
    first = run("demo")
    assert first.status == 0, first.out
    assert len(rows(first.out)) == len(demo._CASES)
    assert all(re.search(r" \d+ +\d+ ms +(hit|miss) .* ok *$", line) for line in rows(first.out))
    assert max(map(len, first.out.splitlines())) <= 100
    assert all(" hit " in line for line in rows(run("demo").out))


def test_a_wrong_result_is_red_and_status_1(monkeypatch):
    right = demo.attention

    def wrong(*arguments, **options):
        o = right(*arguments, **options)
        o[0, 0, -1, 0] += np.float32(0.1).astype(o.dtype)
        return o

    monkeypatch.setattr(demo, "_CASES", demo._CASES[:2])
    monkeypatch.setattr(demo, "attention", wrong)
    done = run("demo")
    assert done.status == 1
    assert all(re.search(r"1\.0e-01 +> \d", line) for line in rows(done.out))


def test_a_case_that_cannot_run_is_told_and_status_1(monkeypatch):
    monkeypatch.setattr(demo, "_CASES", (("flash", "fp16", 17), *demo._CASES[:1]))
    done = run("demo")
    assert done.status == 1 and len(rows(done.out)) == 1
    assert "flash fp16 block=17: attention: block=17 is not one of" in done.out


def test_the_input_is_a_text_of_normal_components():
    inputs = demo.text_inputs("fp32", 2, 128)
    assert inputs["q"].shape == (2, 4, 128, 64)
    assert inputs["k"].shape == inputs["v"].shape == (2, 2, 128, 64)
    for array in inputs.values():
        assert abs(array.mean()) < 0.2 and 0.8 < array.std() < 1.2
    again = demo.text_inputs("fp32", 2, 128)
    assert all(np.array_equal(inputs[name], again[name]) for name in inputs)
