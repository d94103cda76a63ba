"""What a run does before it measures: variants compiled ahead, peers that take too long."""

from __future__ import annotations

import signal
import time

import pytest

from bench.core import ahead
from bench.core.cases import Case
from bench.core.kernels import ours
from bench.core.op import Candidate, Prepared, Refused
from bench.core.patience import within
from bench.gemm.cases_linear import OP
from bench.gemm.products import problem
from fkjit.arch import target

HOPPER = target("sm_90a")
SIZES = ((4096, 768, 3072), (4100, 768, 3072), (1, 4096, 512))
CASES = [Case(OP, problem(*sizes)) for sizes in SIZES]
CASES.append(Case(OP, problem(64, 64, 64, dtype="fp32")))


def test_each_variant_of_the_public_call_is_compiled_once():
    made = ahead.work(CASES, {"linear": ours(OP, "auto", False, None, HOPPER.arch)}, HOPPER)
    labels = [job.label for job in made]
    assert len(labels) == len(set(labels)) and {job.target for job in made} == {"sm_90a"}
    assert {"wgmma", "fma"} <= {job.name for job in made} and len(made) in (3, 4)


def test_kernels_by_name_and_their_tiles_are_too_as_far_as_they_take_the_case():
    found = ours(OP, "mma", True, None, HOPPER.arch)
    made = ahead.work(CASES[:1], {"linear": found}, HOPPER)
    assert len(made) > 3 and {job.name for job in made} == {"mma"}
    assert {job.params["block"] for job in made} >= {(128, 256, 64), (64, 64, 64)}
    exact = ours(OP, "fma", True, None, HOPPER.arch)
    assert ahead.work(CASES[:1], {"linear": exact}, HOPPER) == []  # bf16 is refused, not raised


def test_candidates_that_do_not_know_are_left_to_their_first_call(capsys):
    unknown = Candidate(name="x", prepare=lambda problem, arrays: Prepared(lambda: None))
    assert ahead.work(CASES, {"linear": [unknown]}, HOPPER) == []
    assert ahead.compile_ahead([]) is None and capsys.readouterr().err == ""


def test_what_takes_too_long_is_refused_and_tells_how_long_it_has_been_at_it():
    said = []
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(Refused, match="took more than 0 s"), within(0.2, "it", 0.05, said.append):
        while True:
            try:
                time.sleep(0.01)
            except Exception:  # as libraries do
                continue
    assert said and all(text.startswith("it: 0 of at most 0 s") for text in said)
    with within(5, "it", say=said.append):
        pass
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
