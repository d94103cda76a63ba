"""Races with what wgmma reads: orders that are missing, and those that are enough."""

from __future__ import annotations

import pytest

from fkjit.errors import SanitizerError
from fkjit.interp import Checks, run
from tests.interp.interp_kit import compile_ptx
from tests.interp.wgmma.test_wgmma_faults import NAME, arguments, calling, filled


def look(source: str) -> None:
    run(
        compile_ptx(source, "compute_90a", NAME), "k", 2, 128, arguments(), checks=Checks(race=True)
    )


def found(source: str) -> str:
    with pytest.raises(SanitizerError) as caught:
        look(source)
    assert f"{NAME}:" in str(caught.value)
    return str(caught.value)


AGAIN = "tile[threadIdx.x] = in[threadIdx.x];"


def test_no_false_report() -> None:
    look(filled())
    look(filled(LATER="__syncthreads(); " + AGAIN))


def test_operands_of_generic_stores_need_a_proxy_fence() -> None:
    source = filled().replace("proxy_fence();\n  __syncthreads", "__syncthreads")
    assert "proxy" in found(source) and calling(source) in found(source)


def test_operands_need_a_barrier_after_the_stores() -> None:
    source = filled().replace("proxy_fence();\n  __syncthreads();", "proxy_fence();")
    assert "race: byte" in found(source)


def test_an_operand_overwritten_in_flight() -> None:
    report = found(filled(AFTER=AGAIN))
    assert "missing wait" in report and "wgmma.wait_group must stand before" in report


def test_operand_a_of_a_warps_own_rows_needs_no_barrier() -> None:
    """Rows of A that a warp alone writes and multiplies; a barrier stands after those of B."""
    own = "__syncthreads(); for (int i = 0; i < 4; ++i) tile[threadIdx.x * 4 + i ROWS] = in[i];"
    source = filled(WHERE=own.replace("ROWS", "") + " proxy_fence();")
    look(source)
    other = own.replace("ROWS", "^ 128")
    assert "race: byte" in found(filled(WHERE=other + " proxy_fence();"))
