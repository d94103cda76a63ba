"""Products in step with whoever brings rows or takes them away: counts, what is refused, planted
bugs. That tiles wait is for a GPU to show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fkjit
from fkjit.arch import arch
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from fkjit.jit.render import load
from fkjit.jit.signature import signature
from fkjit.ops.gemm import flagged
from fkjit.ops.gemm.cases_flagged import FLAGGED as CASES
from fkjit.ops.gemm.flagged import FLAGGED, FLAGGED_ALL, MOST_ROWS, counted, linear_flagged
from fkjit.settings import settings
from tests.core.mutations import Bug
from tests.core.sampling import one_in
from tests.core.test_mutations import check_found, each_planted

HOPPER = arch("sm_90a")


@pytest.fixture
def hopper_target(monkeypatch):
    monkeypatch.setenv("FKJIT_TARGET", "compute_90a")
    settings.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()


@one_in(2)
@pytest.mark.parametrize("tile", flagged.TILES, ids=str)
def test_counts_are_those_of_all_warps(hopper_target, tile):
    """Of each chunk as many, whatever the order in which blocks take tiles."""
    block, schedule, cluster = tile
    params = {
        "how": "tells", "dtype": "bf16", "weight_layout": "nk", "activation": "none",
        "gate": False, "block": block, "schedule": schedule, "cluster": cluster,
    }  # fmt: skip
    for problem in CASES.problems(params, "small"):
        arrays = CASES.inputs(params, problem, np.random.default_rng(0))
        arrays |= CASES.outputs(params, problem)
        with quiet():
            fkjit.launch(FLAGGED_ALL, params, problem, arrays)
        assert (arrays["flags"] == counted(params, problem)).all()


@pytest.mark.parametrize("params", list(FLAGGED.variants(HOPPER)), ids=FLAGGED.label)
def test_a_calls_arrays_are_the_first_pointers(params):
    """Behind the maps: a plan on a GPU writes their addresses in one go, others stay null."""
    named = signature(load(FLAGGED, params), FLAGGED.entry)
    behind = [argument for argument in named if not argument.ctype.endswith("TensorMap")]
    assert {argument.name for argument in behind[:3]} == {"bias", "out", "flags"}
    assert all(argument.pointer for argument in behind[:3])


def call(**given: Any) -> Any:
    x, weight = (np.ones((2 * MOST_ROWS, 64), np.float16), np.ones((32, 64), np.float16))
    named = {"how": "waits", "chunk_rows": MOST_ROWS, **given}
    arrays = {
        "x": x, "weight": weight, "bias": None, "flags": np.ones(2, np.int32),
        "out": np.full((2 * MOST_ROWS, 32), np.nan, np.float16),
    }  # fmt: skip
    arrays |= {name: named.pop(name) for name in list(named) if name in arrays}
    linear_flagged(*arrays.values(), **named)
    return arrays["out"]


def test_the_call_takes_rows_from_any_chunk(hopper_target):
    assert (call(from_row=MOST_ROWS) == 64).all()
    assert (call(bias=np.ones(32, np.float16), activation="relu") == 65).all()
    gated = call(weight=np.ones((64, 64), np.float16), activation="relu", gate=True)
    assert (gated == 4096).all()
    assert (call(weight=np.ones((64, 32), np.float16), weight_layout="kn") == 64).all()


def test_what_is_refused(hopper_target):
    rows = np.ones((2 * MOST_ROWS, 64), np.float16)
    for kind, given in (
        (ParameterError, {"chunk_rows": 100}), (ParameterError, {"chunk_rows": 0}),
        (ParameterError, {"from_row": 2 * MOST_ROWS}), (ParameterError, {"from_row": 64}),
        (ParameterError, {"how": "both"}), (ParameterError, {"weight_layout": "kk"}),
        (ParameterError, {"x": rows[:-1]}), (ParameterError, {"x": rows[:, :60]}),
        (ParameterError, {"weight": np.ones((32, 72), np.float16)}),
        (ParameterError, {"flags": np.ones(3, np.int32)}),
        (ArgumentTypeError, {"flags": np.ones(2, np.float32)}),
        (ArgumentTypeError, {"x": rows.astype(np.float32)}),
    ):  # fmt: skip
        with pytest.raises(kind, match=r"linear_flagged: "):
            call(**given)


def test_other_gpus_have_none():
    with pytest.raises(ParameterError):
        FLAGGED.check(next(iter(FLAGGED.variants())), arch("sm_80"))
    assert all(FLAGGED.why_not(params, HOPPER) is None for params in FLAGGED.variants(HOPPER))


HERE = "linear_flagged.wgmma"
ROWS = "templates/gemm/sm90/arrivals.cuh"
BUGS = (
    Bug("every lane counts", ROWS, "lane == 0 && row >= 0", "row >= 0", HERE, "numbers",
        params={"how": "tells"}),
    Bug("the last tile is not told of", "kernels_cu/gemm/wgmma.cu",
        "if (TELLS) finished.tell(lane);\n    pingpong", "pingpong", HERE, "numbers",
        params={"how": "tells"}),
    Bug("rows behind the end", "templates/gemm/groups.cuh", "AROUND && row >= m ? row - m : row",
        "row", HERE, "memory", params={"how": "waits"}),
    Bug("nobody comes", ROWS, "arrived + row / chunk_rows", "arrived + row / chunk_rows + 1", HERE,
        "memory", params={"how": "waits"}),
)  # fmt: skip


@each_planted(BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    check_found(bug, monkeypatch)
