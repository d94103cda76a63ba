"""Benchmarks of whole mixtures of experts on a CPU: ours, peers, twins in Triton's interpreter."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest

from bench.core.catalog import operations
from bench.core.op import Refused
from bench.core.store import SCHEMA
from bench.moe import cases_grouped_linear as grouped
from bench.moe import cases_moe_layer, layer, layer_tables
from bench.moe import layer_timeline as timeline
from fkjit.arch import arch
from fkjit.jit.build import quiet
from fkjit.spec import find
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
from tests.twins.kit import interpreter  # noqa: E402, F401

DEVICE = SimpleNamespace(torch=torch, place="cpu")
TINY, SKEWED = (9, 4, 2, 32, 16), (21, 5, 2, 64, 24)
LARGE = cases_moe_layer.SETS["default"][0]
LAYERS = [layer.problem(*TINY, dtype="fp32"), layer.problem(*SKEWED, skew=1.0)]
PRODUCTS = [
    grouped.problem(*TINY, dtype="fp32"),
    grouped.problem(*SKEWED, gate=True, skew=1.0),
]
NAMES = {
    "moe_layer": ("ours", "fkjit stream", "fkjit gather", "triton", "grouped_mm",
                  "our rows + grouped_mm",
                  "transformers grouped_mm", "transformers batched_mm"),
    "moe_layer_backward": ("ours", "fkjit recomputed", "grouped_mm", "transformers grouped_mm"),
    "grouped_linear": ("ours", "triton", "grouped_mm", "mm by expert"),
}  # fmt: skip
CASES = [
    pytest.param(op, p, id=f"{op}-{p['dtype']}")
    for op in NAMES
    for p in (PRODUCTS if op == "grouped_linear" else LAYERS)
]


def candidates(op, p):
    """{name: prepare} of those that need no compiling."""
    assert op.ours is not None
    made = {peer.name: peer.prepare for peer in op.peers if peer.slow is None}
    return {"ours": op.ours, **made}


@one_in(3)
@pytest.mark.parametrize(("name", "p"), CASES)
def test_each_candidate_is_right_and_other_numbers_are_found_wrong(interpreter, name, p):  # noqa: F811
    pytest.importorskip("transformers", reason="needs transformers, fkjit[models]")
    op = operations()[name]
    with quiet():
        arrays = op.inputs(p, DEVICE)
        expected, others = op.expected(p, arrays), op.expected(p, op.inputs(p, DEVICE))
        made = candidates(op, p)
        assert set(made) == set(NAMES[name])
        for who, prepare in made.items():
            try:
                prepared = prepare(p, arrays)
            except Refused:  # an fp32 layer, or a kernel for another GPU
                assert who.startswith("fkjit "), who
                continue
            found = prepared.output(prepared.call())
            assert expected.judge(found).why_wrong() is None, who
            assert others.judge(found).why_wrong() is not None, who


def test_a_gradient_that_is_small_is_not_hidden_by_the_others():
    op, p = operations()["moe_layer_backward"], LAYERS[0]
    with quiet():
        arrays = op.inputs(p, DEVICE)
        expected = op.expected(p, arrays)
        prepared = candidates(op, p)["ours"](p, arrays)
        found = prepared.output(prepared.call())
    smallest = min(expected.parts, key=lambda part: part[1].norm())[0]
    found[smallest] *= 1.1
    assert "wrong result" in str(expected.judge(found).why_wrong())


@pytest.mark.parametrize("rows", [16, 64])
def test_tiles_of_the_twin_may_be_parts_of_the_groups_tiles(interpreter, rows):  # noqa: F811
    from bench.moe.triton_grouped_linear import experts

    p = PRODUCTS[0]
    with quiet():
        arrays = operations()["grouped_linear"].inputs(p, DEVICE)
    names = ("x", "weight", "sorted_token_ids", "expert_ids")
    made = experts(*(arrays[name] for name in names), layer.choices(p), rows=rows)
    assert grouped.expected(p, arrays).judge(made).why_wrong() is None


def test_tiles_are_about_as_high_as_an_expert_has_rows():
    from bench.moe.triton_moe_layer import rows_of

    assert [rows_of(*sizes) for sizes in ((8, 8), (512, 128), (32_768, 512), (32_768, 128))] == [
        16, 16, 64, 128,
    ]  # fmt: skip


# ------------------------------------------------------------------ tables and the timeline


def stored(tmp_path):
    """A run in which ours takes 100 us, peers 2 and 3 times that, experts by Zipf's law more."""
    lines = [{"record": "run", "schema": SCHEMA}]
    for name in NAMES:
        op = operations()[name]
        for p in {op.label(p): p for problems in op.sets.values() for p in problems}.values():
            for factor, who, kind in ((1, "fkjit", "ours"), (4, "triton", "twin"),
                                      (3, "grouped_mm", "peer"), (2, "other", "peer")):  # fmt: skip
                time = 0.1 * factor * (1 + 0.1 * p["skew"])
                mode = "warm" if name == "moe_layer_backward" else "graph"
                lines.append({
                    "record": "cell", "op": name, "case": op.label(p), "candidate": who,
                    "kind": kind, mode: {"p50": time, "share_copy": 0.8125},
                })  # fmt: skip
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_tables_of_a_stored_run(tmp_path):
    made = layer_tables.tables([stored(tmp_path)])
    assert list(made) == [
        "layers", "decoding", "skew", "models", "drawn", "gradients", "products",
    ]  # fmt: skip
    case = "bf16 T4096 E128 K8 H7168 F2048"
    row = f"| {case} | 100 | {layer.flops(LARGE) / 1e8:.0f} | 400 | other | 200 | 2.00 |"
    assert row in made["layers"] and made["layers"].count("\n") == 2 + 4
    assert "| bf16 T1 E128 K8 H4096 F768 | 8 | 100 | 1.51 | 0.81 | 400 | other" in made["decoding"]
    padded = layer.padded({**LARGE, "skew": 1.0})
    ratio = 1.1 * layer.padded(LARGE) / padded
    assert (
        f"| {case} zipf1 | {padded:,} | 110 | {1.1e5 / padded:.1f} | {ratio:.3f} |"
        in (made["skew"])
    )
    assert f"| {case} | 100 | {2 * layer.flops(LARGE) / 1e8:.0f} |" in made["gradients"]
    empty = tmp_path / "empty.jsonl"
    empty.write_text(json.dumps({"record": "run", "schema": SCHEMA}) + "\n")
    assert layer_tables.tables([empty]) == {}


def test_a_kernel_s_part_follows_from_its_place_beside_the_products():
    first, up, activation, down, last = timeline.PARTS
    ours = ["moe_route_and_regroup", "moe_permute", "linear_wgmma", "linear_wgmma", "moe_combine"]
    assert timeline.parts_of(ours) == [first, first, up, down, last]
    theirs = ["sort", "index", "prepare_grouped_gemm", "cutlass_x", "silu", "mul", "cutlass_x", "y"]
    assert timeline.parts_of(theirs) == [first] * 2 + [up] * 2 + [activation] * 2 + [down, last]
    assert timeline.parts_of(["_experts"]) == [up] and timeline.parts_of(["copy"]) == [first]


def test_the_timeline_is_of_the_median_replay_and_drawn(tmp_path):
    def event(name, start, end, kind="DeviceType.CUDA"):
        at = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, device_type=kind, time_range=at)

    events = [event("cudaLaunch", 0, 1, "DeviceType.CPU")]
    for n, long in enumerate((4, 9, 5)):
        events += [
            event("linear_mma", 100 * n, 100 * n + long),
            event("y", 100 * n + 20, 100 * n + 30),
        ]
    spans = timeline.typical(timeline.replays(events, 3))
    assert spans == [("linear_mma", 0, 5), ("y", 20, 30)]
    with pytest.raises(ValueError, match="6 kernels are no 4 replays"):
        timeline.replays(events, 4)
    with pytest.raises(ValueError, match="differ in their kernels"):
        timeline.typical([spans, [spans[1], spans[0]]])
    record = {"gpu": "made up", "case": "C", "candidate": "fkjit", "spans": spans}
    drawn = timeline.picture([record, {**record, "candidate": "gone", "spans": None}])
    assert "fkjit: 30 µs" in drawn and "gone" not in drawn and "made up; medians of" in drawn
    assert drawn.count("<rect") == len(timeline.PARTS) + 2
    root = ElementTree.fromstring(drawn)
    assert root.tag.endswith("svg")


# ------------------------------------------------------------------ cases


def test_labels_are_unique():
    for name in NAMES:
        op = operations()[name]
        every = {op.label(p): p for problems in op.sets.values() for p in problems}
        distinct = {tuple(sorted(p.items())) for problems in op.sets.values() for p in problems}
        assert len(every) == len(distinct), name
    assert layer.label(LAYERS[1]) == "bf16 T21 E5 K2 H64 F24 zipf1"
    assert grouped.label(PRODUCTS[1]) == "bf16 T21 E5 K2 k64 n24 swiglu zipf1"


def test_choices_are_the_problem_s_and_follow_zipf_s_law():
    p = layer.problem(4096, 64, 2, 64, 64, skew=1.0)
    counts, even = layer.counts(p), layer.counts({**p, "skew": 0.0})
    assert counts.sum() == even.sum() == layer.choices(p)
    best = torch.from_numpy(layer.logits(p)).topk(2).indices.flatten()
    assert np.array_equal(counts, np.bincount(best.numpy(), minlength=64))
    ranked = np.sort(counts)[::-1]
    assert 1.4 < ranked[0] / ranked[1] < 2.2 and 6 < ranked[0] / ranked[9] < 13
    assert even.max() < 2 * even.min()
    other = layer.counts({**p, "seed": 1})
    assert not np.array_equal(counts, other)


def test_work_is_that_of_the_rows_and_of_the_experts_that_have_some():
    p = layer.problem(1, 128, 8, 4096, 768)
    assert layer.active(p) == 8 and layer.padded(p) == 8 * 64
    op = cases_moe_layer.OP
    assert op.flops(p) == 8 * 6 * 4096 * 768
    assert op.bytes(p) == 2 * (8 * 3 * 4096 * 768 + 2 * 4096) + 4 * 128
    first, plain, last = grouped.products(1, (128, 8, 4096, 768))
    assert grouped.OP.flops(first) == grouped.OP.flops(plain) == 2 * grouped.OP.flops(last)
    assert grouped.OP.bytes(last) == 2 * 8 * (768 * 4096 + 768 + 4096)
    backward = operations()["moe_layer_backward"]
    assert backward.flops(p) == 2 * op.flops(p) and backward.bytes(p) > 16 * op.bytes(p)


def test_drawn_layers_fit_a_gpu():
    made = layer.drawn(random.Random(3), 40)
    assert made == layer.drawn(random.Random(3), 40) != layer.drawn(random.Random(4), 40)
    assert max(layer.weight_bytes(p, p["experts"]) for p in made) <= 8 << 30
    assert {0.0, 0.5, 1.0} == {p["skew"] for p in made}
    assert all(p["top_k"] < p["experts"] and p["hidden"] % 64 == p["width"] % 64 == 0 for p in made)


def test_a_copy_of_too_many_weights_is_refused():
    (peer,) = [one for one in cases_moe_layer.OP.peers if one.name == "transformers batched_mm"]
    with pytest.raises(Refused, match="would copy 1792 GiB of weights"):
        peer.prepare(cases_moe_layer.SETS["default"][0], {})


def test_a_product_is_a_problem_of_the_kernels():
    to, kernel = arch("sm_90a"), grouped.OP.whole(find("grouped_linear.wgmma"))
    for p in grouped.SETS["default"]:
        spec, params = grouped.chosen(p, to)
        assert spec.illegal(params) is None
        assert kernel.illegal(grouped.choose(kernel, p, to)) is None
