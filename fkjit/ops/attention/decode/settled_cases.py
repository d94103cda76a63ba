"""How attention of a decode step is checked: as decoding, told how many keys come before the new
ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fkjit.ops.attention.decode import cases
from fkjit.spec import Arrays, Params, Problem


def _inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    made = cases.inputs(params, problem, rng)
    return made | {"seq_lens": made["seq_lens"] - np.int32(problem["seqlen_q"])}


def _reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    lengths = np.asarray(arrays["seq_lens"]) + problem["seqlen_q"]
    return cases.reference(problem, {**arrays, "seq_lens": lengths})


SETTLED = replace(cases.SPLIT, inputs=_inputs, reference=_reference)
