"""The picture of a decode step: floors by bytes, recorded launches by part."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from bench.models import timeline
from fkjit.models import ModelConfig

LLAMA = ModelConfig.of("llama-3.2-1b")


def test_a_floor_is_the_bytes_of_all_weights_and_little_more():
    found = timeline.floor(LLAMA, 1, context=0, rate=1.0).parts
    weights = 2 * (973_078_528 + 262_668_288)
    assert weights < sum(found.values()) < 1.002 * weights
    assert found["up"] == 16 * 2 * (2 * 8192 * 2048 + 2048 + 8192)
    longer = timeline.floor(LLAMA, 3, context=100, rate=1.0).parts
    assert longer["attention"] == 3 * 100 * 16 * 2 * 8 * 64 * 2
    codes = timeline.floor(LLAMA, 1, scheme="int4_group", rate=1.0).parts
    assert codes["head"] == found["head"] and 3.8 < found["down"] / codes["down"] < 3.9


LAYER = ["norm_rows", "linear_gemv", "rope_kv_append", "attention_decode", "linear_gemv",
         "norm_rows", "linear_skinny", "linear_gemv"]  # fmt: skip
FUSED = ["step_normed_gemv", "attention_decode", "linear_gemv", "step_normed_gemv", "linear_gemv"]
TAIL = ["norm_rows", "linear_wgmma", "reduce_kernel"]


@pytest.mark.parametrize(("layer", "norms"), [(LAYER, 7), (FUSED, 1)])
def test_launches_belong_to_parts_by_their_order(layer, norms):
    """Of two layers, one microsecond each, one after the other."""
    names = ["kv_slots", *layer, *layer, *TAIL]
    found = timeline.shares([(name, float(n), n + 1.0) for n, name in enumerate(names)])
    assert found == {
        "qkv": 2, "attention": 2, "out": 2, "up": 2, "down": 2, "head": 1, "norm, append": norms,
        "rest": 2,
    }  # fmt: skip


def test_time_of_two_launches_is_the_earlier_ones_and_time_of_none_is_the_rest():
    found = timeline.shares([("norm_rows", 5.0, 8.0), ("linear_gemv", 6.0, 10.0),
                             ("norm_rows", 7.0, 9.0), ("linear_gemv", 12.0, 13.0)])  # fmt: skip
    assert {part: us for part, us in found.items() if us} == {
        "norm, append": 3, "qkv": 2, "rest": 2, "head": 1,
    }  # fmt: skip
    assert sum(timeline.shares([]).values()) == 0


def test_a_recorded_step_is_drawn(tmp_path):
    path, out = tmp_path / "step.json", tmp_path / "step.svg"
    launches = [("linear_gemv", 0.0, 3.0), ("sample<float>", 3.0, 4.0)]
    step = {
        "gpu": "NVIDIA H200", "torch": "2", "config": "gpt2", "batch": 4, "fused": True,
        "weights": None, "step_us": 3.7, "launches": launches,
    }  # fmt: skip
    path.write_text(json.dumps(step) + "\n" + json.dumps(step | {"fused": False}) + "\n")
    assert timeline.main(["--times", str(path), "--out", str(out)]) == 0
    text = "".join(ElementTree.parse(out).getroot().itertext())
    assert "gpt2, batch 4, bf16 weights, five launches a layer; 4 us without the profiler" in text
    assert "eight launches a layer" in text and "floor" not in text


def test_the_picture_of_the_docs_is_made_of_floors_and_says_so():
    assert timeline.PICTURE.read_text() == timeline.floors()
    root = ElementTree.fromstring(timeline.floors())
    bars = [e.text or "" for e in root.iter() if (e.text or "").endswith(" us")]
    assert len([bar for bar in bars if bar.startswith("floor, ")]) == len(timeline.SCHEMES)


def test_the_measured_picture_of_the_docs_is_made_of_what_is_stored(tmp_path, monkeypatch):
    assert timeline.MEASURED.read_text() == timeline.measured()
    monkeypatch.setattr(timeline, "STORED", tmp_path / "steps.json")
    lines = [timeline.Line("a step", dict.fromkeys(timeline.PARTS, 0.0) | {"head": 2.04})]
    timeline.store(lines)
    assert timeline.stored() == [lines[0]._replace(parts=lines[0].parts | {"head": 2.0})]
