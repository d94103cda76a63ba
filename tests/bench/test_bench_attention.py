"""Attention in the suite, on CPU tensors: cases, our calls, every peer's layout, its reference."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from bench.attention import peers_fa4, peers_flashinfer, peers_torch
from bench.attention.cases_attention import OP, SETS, label, problem
from bench.core.cases import Case, select
from bench.core.op import Candidate, Refused
from fkjit.ops.attention import cases as attention_cases
from tests.bench.kit import FakeDevice

torch = pytest.importorskip("torch")

SMALL = problem(2, 4, 32, 32, True, heads_kv=2)


class CpuDevice(FakeDevice):
    """The fake with torch's tensors; no dtype is converted."""

    torch = torch
    place = "cpu"

    def spoil(self, output):
        output.fill_(float("nan"))

    def array(self, values):
        return torch.from_numpy(values.copy())


def arrays_of(given):
    return OP.inputs(given, CpuDevice())


def judged(candidate: Candidate, given):
    """The accuracy of one candidate on fresh inputs."""
    arrays = arrays_of(given)
    prepared = candidate.prepare(given, arrays)
    return OP.expected(given, arrays).judge(prepared.output(prepared.call()))


def by_name(peers, name) -> Candidate:
    return next(peer for peer in peers if peer.name == name)


# ------------------------------------------------------------------ cases


def test_the_sets_are_what_they_are_for():
    fields = ("batch", "seqlen_k", "head_dim", "dtype", "causal")
    grid = {tuple(p[f] for f in fields) for p in SETS["grid"]}
    assert len(grid) == 4 * 3 * 3 * 3 * 2
    scaling = [(p["batch"], p["seqlen_k"]) for p in SETS["scaling"]]
    assert sorted(scaling) == [(b, s) for b in (1, 2, 4) for s in (512, 1024, 2048, 4096)]
    assert {p["seqlen_q"] == 1 for p in SETS["decode"]} == {True, False}
    assert {p["batch"] * p["seqlen_k"] for p in SETS["peers"]} == {16_384}
    assert {p["heads_q"] * p["head_dim"] for p in SETS["peers"] + SETS["default"]} == {2048}
    assert {p["seqlen_k"] for p in SETS["long"]} == {8192, 16_384}


def test_labels_are_unique_and_name_what_differs():
    every = {label(p): p for problems in SETS.values() for p in problems}
    distinct = {tuple(sorted(p.items())) for problems in SETS.values() for p in problems}
    assert len(every) == len(distinct)
    assert label(problem(4, 16, 4096, 128, True)) == "bf16 D128 S4096 B4 H16 causal"
    decode = problem(1, 32, 4096, 128, False, heads_kv=8, seqlen_q=1)
    assert label(decode) == "bf16 D128 S1/4096 B1 H32/8 full"


def test_cases_are_chosen_by_set_value_and_word():
    found = select([OP], ["default"], ["head_dim=128", "seqlen_k=512,4096"], ["causal"])
    assert [case.label for case in found] == [
        "bf16 D128 S512 B4 H16 causal",
        "bf16 D128 S4096 B4 H16 causal",
    ]
    assert len(select([OP], ["all"], [], [])) == len({label(p) for s in SETS.values() for p in s})
    assert len(select([OP], ["quick", "default"], [], [])) == 16  # each once


# ------------------------------------------------------------------ the reference and ours


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 40, 300])
def test_the_checked_rows_are_those_of_the_whole_reference(causal, seqlen_q):
    given = problem(2, 4, 300, 16, causal, "fp32", heads_kv=2, seqlen_q=seqlen_q)
    arrays = arrays_of(given)
    whole = attention_cases.reference(given, {n: a.numpy() for n, a in arrays.items()})["o"]
    parts = OP.expected(given, arrays).parts
    assert {index[:2] for index, _ in parts} == {(0, 0), (1, 3)}
    for index, want in parts:
        assert np.abs(want.numpy() - whole[index]).max() < 1e-12
        assert len(index[2]) >= min(seqlen_q, 64) and seqlen_q - 1 in index[2]


def test_ours_is_right_and_a_different_mask_is_not():
    ours = Candidate(name="fkjit", kind="ours", prepare=OP.ours)
    assert judged(ours, SMALL).why_wrong() is None
    unmasked = Candidate(name="u", prepare=lambda p, a: OP.ours({**p, "causal": False}, a))
    assert "wrong result" in str(judged(unmasked, SMALL).why_wrong())


def test_work_and_traffic_come_from_the_kernels_specs():
    given = problem(4, 16, 4096, 128, False)
    assert OP.flops(given) == 4 * 4 * 16 * 4096**2 * 128
    assert OP.bytes(given) == 2 * 4 * 4 * 16 * 4096 * 128 + 4 * 4 * 16 * 4096


# ------------------------------------------------------------------ peers


@pytest.mark.parametrize("name", ["eager", "sdpa", "sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("heads_kv", [2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_pytorch_is_right(name, heads_kv, causal):
    given = problem(2, 4, 48, 32, causal, "fp32", heads_kv=heads_kv)
    assert judged(by_name(peers_torch.PEERS, name), given).why_wrong() is None


def test_what_pytorch_cannot_do_is_refused_not_wrong():
    sdpa = by_name(peers_torch.PEERS, "sdpa")
    offset = problem(1, 2, 64, 32, True, "fp32", seqlen_q=8)
    with pytest.raises(Refused, match="top left"):
        judged(sdpa, offset)
    assert judged(by_name(peers_torch.PEERS, "eager"), offset).why_wrong() is None
    for name in ("eager", "compile", "sdpa-math"):
        with pytest.raises(Refused, match=r"would take (96|192) GiB"):
            by_name(peers_torch.PEERS, name).prepare(problem(1, 16, 32_768, 128, False), {})


def textbook(q, k, v, scale, causal):
    """[S, H, D] each."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scale
    if causal:
        hidden = torch.ones(scores.shape[1:]).triu(1 + scores.shape[2] - scores.shape[1]).bool()
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v.repeat_interleave(group, 0)).transpose(0, 1)


class Ragged:
    """FlashInfer's prefill of a batch, as far as it is used."""

    def __init__(self, workspace, layout):
        assert layout == "NHD" and not workspace.any()

    def plan(self, q_at, k_at, heads, heads_kv, dim, *, causal, sm_scale, q_data_type):
        assert q_at.dtype == k_at.dtype == torch.int32 and q_data_type == torch.bfloat16
        self.at, self.causal, self.scale = (q_at.tolist(), k_at.tolist()), causal, sm_scale

    def run(self, q, k, v):
        q_at, k_at = self.at
        made = [
            textbook(
                q[q_at[i] : q_at[i + 1]],
                k[k_at[i] : k_at[i + 1]],
                v[k_at[i] : k_at[i + 1]],
                self.scale,
                self.causal,
            )
            for i in range(len(q_at) - 1)
        ]
        return torch.cat(made).to(q.dtype)


class Paged:
    """FlashInfer's paged decoding, as far as it is used."""

    def __init__(self, workspace, layout, use_tensor_cores):
        assert layout == "NHD" and not workspace.any()

    def plan(self, at, pages, last, heads, heads_kv, dim, page, *, sm_scale, q_data_type):
        assert at.dtype == pages.dtype == last.dtype == torch.int32
        assert (last == page).all()
        self.at, self.pages, self.scale = at.tolist(), pages.long(), sm_scale

    def run(self, q, cache):
        made = []
        for i in range(len(q)):
            mine = self.pages[self.at[i] : self.at[i + 1]]
            k, v = (x[mine].flatten(0, 1) for x in cache)
            made.append(textbook(q[i : i + 1], k, v, self.scale, False))
        return torch.cat(made).to(q.dtype)


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins with the layouts of the real ones."""

    def flash_attn_func(q, k, v, *, softmax_scale, causal):
        made = [textbook(a, b, c, softmax_scale, causal) for a, b, c in zip(q, k, v, strict=True)]
        return torch.stack(made).to(q.dtype), None

    def single(q, k, v, *, causal, sm_scale):
        return textbook(q, k, v, sm_scale, causal).to(q.dtype)

    flash = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    flashinfer = types.SimpleNamespace(
        single_prefill_with_kv_cache=single,
        BatchPrefillWithRaggedKVCacheWrapper=Ragged,
        BatchDecodeWithPagedKVCacheWrapper=Paged,
    )
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", flash)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)


PREFILL, ONE = problem(3, 4, 32, 32, True, heads_kv=2), problem(1, 4, 32, 32, True, heads_kv=2)
DECODE = problem(3, 4, 512, 32, False, heads_kv=2, seqlen_q=1)


@pytest.mark.parametrize(
    ("peers", "name", "given"),
    [
        (peers_fa4.PEERS, "fa4", PREFILL),
        (peers_fa4.PEERS, "fa4", DECODE),
        (peers_flashinfer.PEERS, "flashinfer-single", ONE),
        (peers_flashinfer.PEERS, "flashinfer-batch", PREFILL),
        (peers_flashinfer.PEERS, "flashinfer-decode-p16", DECODE),
        (peers_flashinfer.PEERS, "flashinfer-decode-p256", DECODE),
    ],
)
def test_inputs_reach_other_libraries_in_their_layout(libraries, peers, name, given):
    assert judged(by_name(peers, name), given).why_wrong() is None


@pytest.mark.parametrize(
    ("peers", "name", "given", "why"),
    [
        (peers_fa4.PEERS, "fa4", {**PREFILL, "dtype": "fp32"}, "fp16 and bf16"),
        (peers_flashinfer.PEERS, "flashinfer-single", PREFILL, "one sequence"),
        (peers_flashinfer.PEERS, "flashinfer-batch", DECODE, "more than one query"),
        (peers_flashinfer.PEERS, "flashinfer-decode-p16", PREFILL, "one query a sequence"),
        (
            peers_flashinfer.PEERS,
            "flashinfer-decode-p256",
            {**DECODE, "seqlen_k": 300},
            "whole pages of 256",
        ),
    ],
)
def test_what_they_do_not_take_is_refused(libraries, peers, name, given, why):
    with pytest.raises(Refused, match=why):
        judged(by_name(peers, name), given)


def test_a_peer_that_is_not_installed_says_so():
    for peer in (*peers_fa4.PEERS, *peers_flashinfer.PEERS):
        missing = peer.missing()
        assert missing is None or missing.startswith("not installed") or ":" in missing
        assert (peer.version() is None) == (missing is not None and "not installed" in missing)
    broken = Candidate(name="b", prepare=OP.ours, module="tests.data.no_such_module")
    assert broken.missing().startswith("ModuleNotFoundError")


def test_one_case_from_end_to_end():
    """Ours in the interpreter beside PyTorch, all checked; times are the fake clock's."""
    from bench.core.method import Effort
    from bench.core.trial import Trial

    effort = Effort(warmup=1, iterations=2, turns=1, modes=("warm",))
    ours = Candidate(name="fkjit", kind="ours", prepare=OP.ours)
    peers = [by_name(peers_torch.PEERS, name) for name in ("eager", "sdpa-cudnn")]
    device = CpuDevice()
    device.mark = lambda: Ticking(device)
    records = Trial(device, Case(OP, problem(1, 2, 16, 32, True)), effort, None).run([ours, *peers])
    found = {record["candidate"]: record for record in records}
    assert found["fkjit"]["accuracy"]["relative"] < 2.5e-2
    assert found["fkjit"]["warm"]["count"] == found["eager"]["warm"]["count"] == 2
    assert found["sdpa-cudnn"]["missing"] == "no kernel of this backend for this problem"
    assert found["fkjit"]["flops"] == found["eager"]["flops"] > 0


class Ticking:
    """An event on a device where each one takes a millisecond."""

    def __init__(self, device):
        self.device, self.at = device, 0.0

    def record(self):
        self.device.clock += 1e-3
        self.at = self.device.clock
