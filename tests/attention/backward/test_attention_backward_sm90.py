"""Attention's backward for Hopper without a GPU: whole calls in the interpreter, when it is chosen,
how its tensor maps are kept, and planted bugs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from fkjit.arch import arch  # noqa: E402
from fkjit.errors import ParameterError  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from fkjit.ops.attention.backward.problem import Options  # noqa: E402
from fkjit.ops.attention.backward.select import select  # noqa: E402
from fkjit.ops.op.launches import ready  # noqa: E402
from fkjit.ops.op.request import Launch  # noqa: E402
from fkjit.runtime.tensor_map import TensorMap  # noqa: E402
from fkjit.settings import settings  # noqa: E402
from tests.attention.backward.test_attention_backward import check, tensors  # noqa: E402
from tests.core.mutations import Bug  # noqa: E402
from tests.core.sampling import one_in  # noqa: E402
from tests.core.test_mutations import check_found, each_planted  # noqa: E402

KERNEL, D = "kernels_cu/attention/backward_sm90.cu", "templates/attention/backward_sm90/"
SM90 = {
    "kernel": "attention_backward.flash_sm90",
    "params": {"dtype": "bf16", "head_dim": 128, "deterministic": True},
}


@one_in(2)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 1, 70, 140, 48, 96), {"causal": True, "layout": "bshd", "impl": "flash_sm90"}),
        ((1, 1, 140, 50, 40, 64), {"causal": True, "impl": "flash_sm90"}),  # rows without keys
        ((1, 1, 100, 70, 128, 72), {"deterministic": False}),
        ((1, 1, 70, 70, 160, 256), {"causal": True, "layout": "bshd", "impl": "flash_sm90"}),
    ],
)
def test_whole_calls(sizes, options, monkeypatch):
    monkeypatch.setattr(
        "fkjit.jit.build.settings", lambda: replace(settings(), target="compute_90a")
    )
    with quiet():
        check(*tensors(*sizes, dtype="bf16"), **options)


PROBLEM = {
    "dtype": "bf16", "batch": 1, "heads_q": 2, "heads_kv": 1, "seqlen_q": 100, "seqlen_k": 200,
    "head_dim": 128, "head_dim_v": 128, "softmax_scale": 0.1, "causal": False,
    "strides": dict.fromkeys(("q", "k", "v", "dout"), (51200, 25600, 128)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"softmax_scale": -0.1}, False),
        ({"seqlen_q": 16}, False),
        ({"strides": PROBLEM["strides"] | {"k": (51200, 0, 128)}, "heads_kv": 2}, False),
    ],
)
def test_hopper_takes_what_tma_can_read_and_suits_it(changes, taken):
    problem = {**PROBLEM, **changes}
    for deterministic in (False, True):
        options = Options(deterministic=deterministic)
        chosen = select(dict(problem), options, {}, True, arch("sm_90a"))
        assert ("flash_sm90" in [launch.spec.name for launch in chosen.launches]) is taken
    for other in (("sm_80", "auto", True), ("sm_90a", "portable", True), ("sm_90a", "auto", False)):
        options = Options(deterministic=False, impl=other[1])
        chosen = select(dict(problem), options, {}, other[2], arch(other[0]))
        assert "flash_sm90" not in [launch.spec.name for launch in chosen.launches]
    if not taken:
        with pytest.raises(ParameterError, match="does not take"):
            select(dict(problem), Options(impl="flash_sm90"), {}, True, arch("sm_90a"))


@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (72, 136)])
def test_above_128_there_is_another_kernel_of_hopper(dims):
    problem = {**PROBLEM, "head_dim": dims[0], "head_dim_v": dims[1], "window": (9, 9)}
    for options, wide in (
        ({}, True), ({"impl": "flash_sm90"}, True), ({"impl": "portable"}, False),
        ({"deterministic": False}, True), ({"features": "window"}, dims[0] > 192),
        ({"features": "window", "impl": "flash_sm90"}, True),
    ):  # fmt: skip
        chosen = select(dict(problem), Options(**options), {}, True, arch("sm_90a"))
        assert ("flash_wide_sm90" in [one.spec.name for one in chosen.launches]) is wide, options
    for aligned, gpu in ((False, "sm_90a"), (True, "sm_80")):
        chosen = select(dict(problem), Options(), {}, aligned, arch(gpu))
        assert not any(one.spec.name.endswith("sm90") for one in chosen.launches)
    with pytest.raises(ParameterError, match="dimensions up to 256"):
        select(dict(problem), Options(impl="flash_sm90"), {}, False, arch("sm_90a"))


def test_maps_are_encoded_once_an_address(monkeypatch):
    made, packed, launched = [], [], []
    monkeypatch.setattr(TensorMap, "encode", lambda self, at: made.append(at) or bytes([at]))
    k = object()
    one = TensorMap(k, "bf16", (64,), (), (64,))
    spec = SimpleNamespace(
        id="x", arguments=lambda *_: {"k_map": one, "n": 7}, grid=lambda *_: (3, 1, 1)
    )
    packing = SimpleNamespace(pack=lambda *values: packed.append(values) or values)
    kernel = SimpleNamespace(names=("k_map", "y", "n"), spec=spec, packing=packing)
    whole: Any = (kernel, Launch(spec, {}, {}), {"k": k})  # type: ignore[arg-type]
    monkeypatch.setattr(
        "fkjit.ops.op.launches.KeptLaunch",
        lambda kernel, grid, values: lambda stream: launched.append((grid, values, stream)),
    )
    launch, places = ready(*whole, ("y", "k"))
    assert places == [1, 0]
    for y, k in ((1, 2), (3, 2), (3, 4), (1, 2)):
        launch((k, y), 5)
    assert made == [2, 4] and len(packed) == 3
    assert launched[1] == ((3, 1, 1), (b"\x02", 3, 7), 5)
    with pytest.raises(AssertionError, match="first arguments"):
        ready(*whole, ("n", "k"))
    with pytest.raises(AssertionError, match="k_map: a map of no array"):
        ready(*whole[:2], {"k": object()}, ("y", "k"))


BUGS = (
    Bug("dS is not fenced for wgmma", KERNEL, "proxy_fence();", "", by="race", **SM90),
    Bug("tiles are free before both warpgroups are done", D + "barriers.cuh",
        "mbarrier_init(q_empty(stage), READERS)", "mbarrier_init(q_empty(stage), 4)", by="race",
        **SM90),
    Bug("dQ is staged over a copy that is under way", D + "copies.cuh",
        "bulk_wait_read(), mbarrier", "mbarrier", by="race", **SM90),
    Bug("K is overwritten while dQ is multiplied", D + "loads.cuh",
        "mbarrier_wait(barriers.k_empty(place.stage), place.parity ^ 1);", "", by="race",
        problem={"seqlen_q": 60, "seqlen_k": 700, "causal": False}, **SM90),
    Bug("delta is overwritten before it has been read", D + "loads.cuh",
        "rows(Rings::ROWS_WITH_Q ? q_ring.stage : do_ring.stage)", "rows(0)", by="race", **SM90),
    Bug("one score too many is hidden", D + "tile.cuh", "key + shift", "key + shift + 1",
        by="numbers", **SM90),
    Bug("dK is not scaled", KERNEL, "dk_sum, softmax_scale,",
        "dk_sum, 1.f,", by="numbers", **SM90),
)  # fmt: skip
WIDE = {
    "kernel": "attention_backward.flash_wide_sm90",
    "params": {"dtype": "bf16", "head_dim": 192, "head_dim_v": 128, "deterministic": True},
}
ANY_ORDER = WIDE | {"params": WIDE["params"] | {"deterministic": False}}
WIDE_KERNEL = "kernels_cu/attention/backward_wide_sm90.cu"
WIDE_BUGS = (
    Bug("P^T is read before the other half is there", WIDE_KERNEL,
        "named_barrier_wait_aligned<2 * WARPGROUP>(P_READY);", "", by="race", **WIDE),
    Bug("dS^T is read before the other half is there", WIDE_KERNEL,
        "named_barrier_wait_aligned<2 * WARPGROUP>(DS_READY);", "", by="race", **WIDE),
    Bug("P^T over one that is read", WIDE_KERNEL,
        "named_barrier_wait_aligned<2 * WARPGROUP>(P_READ);", "", by="race",
        problem={"seqlen_q": 250}, **WIDE),
    Bug("one P^T where two are under way", WIDE_KERNEL, "step % P_STAGES * Layout", "0 * Layout",
        by="race", problem={"seqlen_q": 250}, **ANY_ORDER),
    Bug("halves are not fenced for wgmma", WIDE_KERNEL, "proxy_fence();", "", by="race", **WIDE),
    Bug("Q is free while dK is multiplied", WIDE_KERNEL, "wgmma_wait<1>();\n        if (signals &&",
        "if (signals &&", by="race", problem={"seqlen_q": 250}, **WIDE),
    Bug("dS^T over one that dQ is made of", WIDE_KERNEL,
        "mbarrier_wait(barriers.ds_empty(ds_ring.stage), ds_ring.parity ^ 1);", "", by="race",
        problem={"seqlen_q": 250}, **WIDE),
    Bug("both halves hide the same queries", WIDE_KERNEL, "tile.shift -= own_query<Layout>();", "",
        by="numbers", problem={"causal": True}, **WIDE),
    Bug("both halves of columns are the same", D + "halves.cuh", "target + first", "target",
        by="race", **WIDE),
    Bug("what the other block gives is read before it is there", D + "dq_pairs.cuh",
        "mbarrier_wait(pair.given(warp), parity);", "", by="race", **WIDE),
    Bug("a gift over one that has not been read", D + "dq_pairs.cuh",
        "mbarrier_wait(pair.free(warp), parity ^ 1);", "", by="race", **WIDE),
    Bug("dQ is added before its turn", D + "dq_pairs.cuh",
        "while (load_acquire(counter) < Half::SHARERS * rank) {", "while (false) {", by="race",
        problem={"seqlen_k": 200, "multiprocessors": 4}, **WIDE),
    Bug("both halves of the last panel are the same", D + "halves.cuh",
        "2 * WHOLE * PANEL_BYTES, 64", "2 * WHOLE * PANEL_BYTES, 0", by="numbers", **WIDE),
    Bug("lse of a tile of Q that is not there", D + "loads.cuh",
        "rows(Rings::ROWS_WITH_Q ? q_ring.stage : do_ring.stage)", "rows(do_ring.stage)",
        by="race", problem={"seqlen_q": 250}, **WIDE),
)  # fmt: skip


@each_planted((*BUGS, *WIDE_BUGS))
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)
