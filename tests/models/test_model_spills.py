"""Many variants that whole models take on Hopper are compiled when they are called, so the sweep
does not know them: here they are compiled, and what they spill is known."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from fkjit.models import warm
from fkjit.warming import compile_jobs
from tests.core.sampling import one_in

# Bytes, by what a variant is called. Products of codes: their tiles of 192 rows are faster than
# those that spill nothing (bench/notes/quantize.md).
KNOWN = {r"quantized_linear\.wgmma .*block=\(192, 128\)": 184}
PARTS = 16


def variants():
    """All, in an order that says nothing of models, each once."""
    found = {}
    for name in ("gpt2", "llama-3.2-1b", "qwen3-0.6b"):
        for scheme in (None, "int4_group", "fp8_row"):
            said = {"batches": [1, 4, 16, 64], "arch": "sm_90a", "quantize": scheme}
            found |= {job.label: job for job in warm.jobs(name, **said)}
    return [found[label] for label in sorted(found, key=lambda label: label[::-1])]


def known(label: str) -> int:
    return next((most for text, most in KNOWN.items() if re.match(text, label)), 0)


@one_in(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_what_models_take_spills_no_more_than_is_known(part):
    done = compile_jobs(list(islice(variants(), part, None, PARTS)), 1, lambda *_: None)
    assert not done.failed and done.total
    for label, problem in done.problems:
        spilled = re.search(r"spills registers: (\d+) bytes stored", problem)
        assert spilled and int(spilled[1]) <= known(label), (label, problem)
