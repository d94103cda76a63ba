"""rope in the suite and its Triton twin, on CPU tensors: cases, ours, peers, the reference."""

from __future__ import annotations

import sys
import types

import pytest

from bench.core import twins
from bench.core.op import Candidate, Refused
from bench.rope.cases_rope import OP, SETS, label, problem
from bench.rope.peers_rope import PEERS
from fkjit.arch import arch
from fkjit.errors import ParameterError
from fkjit.ops.rope import kernels
from tests.bench.kit import FakeDevice

torch = pytest.importorskip("torch")
from tests.twins.kit import interpreter, normal  # noqa: E402, F401

LAYOUTS = ("bshd", "bhsd", "thd")


class CpuDevice(FakeDevice):
    """The fake with torch's tensors."""

    torch = torch
    place = "cpu"


def small(layout="bshd", dtype="bf16", **options):
    return problem(layout, 1 if layout == "thd" else 2, 9, 3, 2, dtype, head_dim=16, **options)


def judged(candidate, given, k=True):
    """The accuracy of one candidate on fresh inputs; k's rows are judged as q's are."""
    arrays = OP.inputs(given, CpuDevice())
    prepared = candidate.prepare(given, arrays)
    returned = prepared.call()
    wrong = OP.expected(given, arrays).judge(prepared.output(returned)).why_wrong()
    swapped = {**arrays, "q": arrays["k"]}
    other = OP.expected({**given, "heads_q": given["heads_k"]}, swapped)
    as_k = returned[1].view_as(arrays["k"])
    return wrong or (other.judge(as_k).why_wrong() if k else None)


OURS = Candidate(name="fkjit", kind="ours", prepare=OP.ours)


def test_labels_are_unique_and_name_what_differs():
    every = [p for problems in SETS.values() for p in problems]
    assert len({label(p) for p in every}) == len({tuple(p.items()) for p in every})
    assert label(problem("bshd", 4, 4096, 32, 32)) == "bf16 bshd B4 S4096 H32/32 D128"
    table = problem("thd", 1, 8, 32, 8, interleaved=True, source="table")
    assert label(table) == "bf16 thd S8 H32/8 D128 interleaved table"


@pytest.mark.parametrize("source", ["fused", "table"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ours_is_right_and_the_other_kind_of_pairs_is_not(layout, interleaved, source):
    given = small(layout, source=source, interleaved=interleaved)
    assert judged(OURS, given) is None
    turned = Candidate(
        name="w", prepare=lambda p, a: OP.ours({**p, "interleaved": not interleaved}, a)
    )
    assert "wrong result" in str(judged(turned, given))


def test_each_kernel_is_for_cases_of_its_own_source():
    here = arch("sm_90a")
    params = OP.choose(kernels.TABLE, SETS["default"][3], here)
    assert kernels.TABLE.why_not(params, here) is None and params["unroll"] == 2
    assert OP.choose(kernels.FUSED, SETS["decode"][0], here)["unroll"] == 1
    with pytest.raises(ParameterError, match=r"not for cases of rope\.table"):
        OP.choose(kernels.FUSED, SETS["default"][3], here)


def test_work_and_traffic_come_from_the_kernels_specs():
    given = problem("bshd", 4, 4096, 32, 32)
    assert OP.bytes(given) == 2 * 2 * 4 * 4096 * 64 * 128
    assert OP.flops(given) == 3 * 4 * 4096 * 64 * 128


@pytest.mark.parametrize("source", ["fused", "table"])
def test_in_place_what_is_judged_is_turned_once(source, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer())
    given = small("thd", source=source, inplace=True)
    assert label(given).endswith("in place")
    for candidate in (OURS, PEERS[2]):
        arrays = OP.inputs(given, CpuDevice())
        right, prepared = OP.expected(given, arrays), candidate.prepare(given, arrays)
        for _ in range(2):
            found = prepared.output(prepared.call())
            assert right.judge(found).why_wrong() is None
    for peer in (PEERS[0], twins.twin("rope")):
        with pytest.raises(Refused, match="new arrays"):
            peer.prepare(given, OP.inputs(given, CpuDevice()))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pytorch_is_right(layout, dtype):
    assert judged(PEERS[0], small(layout, dtype)) is None
    with pytest.raises(Refused, match="turns halves"):
        judged(PEERS[0], small(layout, interleaved=True))


def flashinfer():
    """Its two calls, as it documents them, by our reference in fp32."""
    fake = types.ModuleType("flashinfer")

    def turned(x, cosine, sine, interleaved):
        x, dim = x.float(), x.shape[-1]
        one = slice(0, dim, 2) if interleaved else slice(0, dim // 2)
        two = slice(1, dim, 2) if interleaved else slice(dim // 2, dim)
        made = torch.empty_like(x)
        made[..., one] = x[..., one] * cosine - x[..., two] * sine
        made[..., two] = x[..., two] * cosine + x[..., one] * sine
        return made

    def apply_rope_pos_ids(q, k, pos_ids, interleave=False, rope_theta=1e4):
        assert pos_ids.dtype == torch.int32
        dim = q.shape[-1]
        angle = pos_ids[:, None, None] * rope_theta ** (-torch.arange(0, dim, 2) / dim)
        return tuple(turned(x, angle.cos(), angle.sin(), interleave).to(x) for x in (q, k))

    def apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox):
        c, s = (x[:, None] for x in cos_sin_cache[positions.long()].chunk(2, -1))
        heads = [x.view(len(x), -1, head_size) for x in (query, key)]
        return tuple(turned(x, c, s, not is_neox).to(x).flatten(1) for x in heads)

    def into(call, places):
        def made(*given, **options):
            for at, turned in zip(places, call(*given, **options), strict=True):
                given[at].copy_(turned)

        return made

    fake.apply_rope_pos_ids_inplace = into(apply_rope_pos_ids, (0, 1))  # type: ignore[attr-defined]
    fake.apply_rope_with_cos_sin_cache_inplace = into(  # type: ignore[attr-defined]
        apply_rope_with_cos_sin_cache, (1, 2)
    )
    fake.apply_rope_pos_ids = apply_rope_pos_ids  # type: ignore[attr-defined]
    fake.apply_rope_with_cos_sin_cache = apply_rope_with_cos_sin_cache  # type: ignore[attr-defined]
    return fake


@pytest.mark.parametrize("source", ["fused", "table"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_flashinfer_is_called_as_it_documents(source, interleaved, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer())
    given = small("thd", source=source, interleaved=interleaved)
    assert judged(PEERS[2], given) is None
    for other in (small("bshd"), small("thd", "fp32")):
        with pytest.raises(Refused, match="takes flat"):
            judged(PEERS[2], other)


# ------------------------------------------------------------------ the twin


@pytest.mark.parametrize("source", ["fused", "table"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_twin_is_right(interpreter, layout, dtype, source):  # noqa: F811
    twin = twins.twin("rope")
    assert twin is not None and judged(twin, small(layout, dtype, source=source)) is None


def test_the_twin_refuses_what_it_does_not_take(interpreter):  # noqa: F811
    twin = twins.twin("rope")
    assert twin is not None
    part = {**small(), "rotary_dim": 8}
    for given in (small(interleaved=True), part, {**small(), "inverse": True}):
        with pytest.raises(Refused, match="turns whole heads"):
            twin.prepare(given, {"q": normal(2, 9, 3, 16)})
    with pytest.raises(Refused, match="positions of rows"):
        twin.prepare({**small(), "positions": "starts"}, {"q": normal(2, 9, 3, 16)})
