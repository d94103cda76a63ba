"""Attention in all its forms without a GPU: compositions against float64, packed sequences, and
what a kernel without a form is."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

import fkjit
from fkjit.arch import arch, target
from fkjit.jit.build import build, quiet
from fkjit.jit.compile import compile_source
from fkjit.jit.render import render
from fkjit.ops.attention.feature_kernels import kernel_with
from fkjit.ops.attention.features import SHIPPED, ScoreFeatures, parse
from fkjit.settings import settings
from fkjit.spec import find
from tests.attention.feature_kit import FEATURES, Case, draw, exact
from tests.attention.kit import assert_close, normal
from tests.core.sampling import one_in

DATA = Path(__file__).parents[1] / "data" / "attention_without_forms.json"
# batch, heads, lengths, dims, dtype
SHAPES = (
    (2, (4, 2), (113, 203), (32, 32), "fp16"),
    (1, (2, 2), (108, 256), (40, 40), "bf16"),
    (1, (3, 1), (1, 339), (59, 96), "fp16"),
    (2, (2, 1), (3, 300), (111, 64), "bf16"),
    (1, (2, 2), (40, 70), (192, 128), "fp16"),
    (1, (1, 1), (33, 50), (256, 256), "bf16"),
    (2, (2, 1), (37, 53), (40, 24), "fp32"),
    (1, (2, 2), (70, 34), (96, 96), "fp16"),
    (1, (2, 1), (20, 41), (59, 59), "fp32"),
)


def run(case, **more):
    with quiet(), fkjit.sanitize(race=True):
        return fkjit.attention(*case[:3], **case.options, return_lse=True, **more)


@one_in(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_compositions(shape, seed):
    case = draw(seed * 100 + shape[2][0], *shape)
    o, lse = run(case)
    assert_close(o, lse, *exact(case), shape[-1])


@one_in(2, feature=FEATURES, dtype=["bf16", "fp32"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_each_feature_alone(feature, dtype):
    case = draw(len(feature), 2, (4, 2), (37, 83), (64, 48), dtype, {feature})
    o, lse = run(case)
    assert_close(o, lse, *exact(case), dtype)


def test_all_together_in_the_other_layout():
    case = draw(8, 2, (4, 2), (45, 60), (64, 64), "fp16", FEATURES)
    o, lse = run(case)
    assert_close(o, lse, *exact(case), "fp16")
    swapped = case._replace(**{n: getattr(case, n).swapaxes(1, 2) for n in "qkv"})
    other, other_lse = run(swapped, layout="bshd")
    assert np.array_equal(other.swapaxes(1, 2), o) and np.array_equal(other_lse, lse)


@one_in(2)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_gpus_without_the_tensor_cores_of_a_form_use_their_fp32_units(dtype, monkeypatch):
    turing = replace(settings(), target="sm_75")
    monkeypatch.setattr("fkjit.jit.build.settings", lambda: turing)
    case = draw(21, 1, (2, 1), (35, 50), (40, 32), dtype, FEATURES)
    o, lse = run(case)
    assert_close(o, lse, *exact(case), dtype)


# ------------------------------------------------------------------ packed sequences


def packed(cases):
    """q, k, v [total, H, D] of cases with one batch each, and the running sums of their lengths."""
    rows = [np.concatenate([c[i][0].swapaxes(0, 1) for c in cases]) for i in range(3)]
    ends = [np.cumsum([0, *(c[i].shape[2] for c in cases)]).astype(np.int32) for i in (0, 1)]
    return rows, ends


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_packed_sequences_are_what_each_is_alone(dtype):
    lengths = [(33, 50), (0, 7), (5, 0), (64, 64), (1, 90), (0, 0), (70, 3)]
    cases = [draw(9, 1, (4, 2), pair, (40, 24), dtype, {"softcap"}) for pair in lengths]
    slopes, sinks = np.linspace(0, 0.2, 4, dtype="f4"), np.zeros(4, "f4")
    more = {"causal": True, "alibi_slopes": slopes, "sinks": sinks, "window": (40, 0)}
    cases = [c._replace(options={**cases[0].options, **more}) for c in cases]
    (q, k, v), ends = packed(cases)
    with quiet(), fkjit.sanitize(race=True):
        o, lse = fkjit.attention_varlen(
            q, k, v, *ends, 70, 90, return_lse=True, **cases[0].options
        )  # fmt: skip
    for index, case in enumerate(cases):
        rows = slice(*ends[0][index : index + 2])
        if lengths[index][0]:
            expected, sums = exact(case)
            assert_close(o[rows].swapaxes(0, 1)[None], lse[None, :, rows], expected, sums, dtype)


def of_batch(mod, b):
    """A score_mod in NumPy where b is one batch."""
    return lambda score, _, *rest: mod(score, b, *rest)


def test_bias_and_mask_of_packed_sequences_stand_at_the_beginning_of_their_rows():
    wide = draw(3, 3, (2, 2), (20, 36), (32, 32), "bf16", {"bias", "mask", "score_mod"})
    lengths = [(20, 36), (7, 30), (13, 11)]
    parts = []
    for b, (sq, sk) in enumerate(lengths):
        own = {n: wide.options[n] for n in ("causal", "score_mod", "score_args")}
        for name in ("bias", "mask"):
            array = wide.options[name]
            array = array[b : b + 1] if len(array) > 1 else array
            own[name] = array[:, :, :sq, :sk]
        cut = (wide.q[b : b + 1, :, :sq], *(x[b : b + 1, :, :sk] for x in wide[1:3]))
        parts.append(
            wide._replace(
                **dict(zip("qkv", cut, strict=True)), options=own, mod=of_batch(wide.mod, b)
            )
        )
    (q, k, v), ends = packed(parts)
    with quiet():
        o = fkjit.attention_varlen(q, k, v, *ends, 20, 36, **wide.options)
    for index, case in enumerate(parts):
        rows = slice(*ends[0][index : index + 2])
        assert_close(o[rows].swapaxes(0, 1)[None], None, *exact(case), "bf16")


def test_rows_beyond_the_longest_length_are_left_out():
    q, k, v = (normal((12, 2, 32), "fp16", i) for i in range(3))
    ends = np.array([0, 9, 12], np.int32)
    with quiet():
        o = fkjit.attention_varlen(q, k, v, ends, ends, 16, 16)
        less = fkjit.attention_varlen(q, k, v, ends, ends, 16, 4)
        first = fkjit.attention(*(x[:9].swapaxes(0, 1)[None] for x in (q, k, v)))
        four = fkjit.attention(*(x[:n].swapaxes(0, 1)[None] for x, n in ((q, 9), (k, 4), (v, 4))))
    assert np.array_equal(o[:9].swapaxes(0, 1), first[0])
    assert np.array_equal(less[:9].swapaxes(0, 1), four[0])
    assert np.array_equal(less[9:], o[9:])


def test_nothing_to_do_gives_empty_outputs():
    q = np.zeros((0, 2, 32), np.float16)
    o, lse = fkjit.attention_varlen(q, q, q, *[np.zeros(1, np.int32)] * 2, 0, 0, return_lse=True)
    assert o.shape == (0, 2, 32) and lse.shape == (2, 0)
    x = np.zeros((1, 2, 0, 32), np.float16)
    assert fkjit.attention(x, x, x, window=(1, 1)).shape == x.shape


# ------------------------------------------------------------------ corners


def test_windows_that_hide_everything_or_nothing():
    q, k, v = normal((1, 2, 9, 32)), normal((1, 2, 4, 32), seed=1), normal((1, 2, 4, 32), seed=2)
    with quiet():
        o, lse = fkjit.attention(q, k, v, window=(0, 0), return_lse=True)
        assert not o[:, :, :5].any() and np.isneginf(lse[:, :, :5]).all()
        assert np.array_equal(o[:, :, 5:], v)
        wide = fkjit.attention(q, k, v, window=(10**9, 10**9))
        assert np.array_equal(wide, fkjit.attention(q, k, v, window=(None, -1)))
        sinks = np.array([-np.inf, 2.0], np.float32)
        o, lse = fkjit.attention(q, k, v, window=(0, 0), sinks=sinks, return_lse=True)
    assert not o[:, :, :5].any() and np.isneginf(lse[:, 0, :5]).all() and (lse[:, 1, :5] == 2).all()


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-40])
def test_any_scale_has_rules(scale):
    case = draw(4, 1, (2, 2), (20, 40), (32, 32), "fp16", {"bias", "softcap"})
    o, lse = run(case, softmax_scale=scale)
    scaled = case._replace(q=case.q.astype(np.float64) * (scale * 32**0.5))
    assert_close(o, lse, *exact(scaled), "fp16")


def test_infinite_and_nan_biases():
    case = draw(5, 1, (1, 1), (20, 40), (32, 32), "fp16", {"bias"})
    case.options["bias"] = np.zeros((1, 1, 20, 40), np.float32)
    case.options["bias"][0, 0, 3] = -np.inf
    case.options["bias"][0, 0, 4, 2:5] = np.nan
    case.options["causal"] = False
    o, lse = run(case)
    assert not o[0, 0, 3].any() and np.isneginf(lse[0, 0, 3]) and np.isnan(o[0, 0, 4]).all()
    assert np.isfinite(np.delete(o[0, 0], 4, 0)).all()


def test_a_number_of_a_score_mod_is_no_new_kernel_and_results_follow_it():
    q, k, v = (normal((1, 1, 20, 32), "fp16", i) for i in range(3))
    found = [
        fkjit.attention(q, k, v, score_mod="score * n", score_args={"n": n}) for n in (0, 1, 2)
    ]
    assert not np.array_equal(found[0], found[1]) and not np.array_equal(found[1], found[2])
    assert np.array_equal(found[1], fkjit.attention(q, k, v, score_mod=" score  *\n1 "))


# ------------------------------------------------------------------ forms as text, and kernels


@pytest.mark.parametrize("text", SHIPPED)
def test_a_form_is_its_text(text):
    assert parse(text).text == text


def test_the_example_of_the_docs_is_right():
    text = (DATA.parents[2] / "docs" / "ATTENTION.md").read_text()
    (code,) = re.findall(r"(?s)```python\n(.*?)```", text)
    names: dict = {}
    with quiet():
        exec(compile(code, "ATTENTION.md", "exec"), names)
    kind = names["document"]
    mod = lambda s, b, h, q, k, sq, sk: np.where(  # noqa: E731
        kind[q] == kind[k], s + 0.05 * (k - q), -np.inf
    )
    case = Case(*(names[n] for n in "qkv"), {"causal": True}, mod)
    assert_close(names["o"], None, *exact(case), "fp16")


def test_different_forms_have_different_texts():
    forms = [
        ScoreFeatures(), ScoreFeatures(softcap=True), ScoreFeatures(bias="fp16"),
        ScoreFeatures(bias="fp16", bias_paired=True), ScoreFeatures(bias="bf16"),
        ScoreFeatures(mask=True), ScoreFeatures(mask=True, mask_paired=True),
        ScoreFeatures(varlen=True),
        ScoreFeatures(score_mod="score + a", score_args=(("a", "float"),)),
        ScoreFeatures(score_mod="score + a", score_args=(("a", "int"),)),
    ]  # fmt: skip
    assert len({form.text for form in forms}) == len(forms)
    assert all(parse(form.text) == form for form in forms)


EACH = "softcap alibi {} sinks varlen"
HEAVY = (  # kernel, target, head_dim, tile, form: what holds most in registers
    ("flash", "sm_90a", 128, 64, EACH.format("bias=fp32:paired")),
    ("flash", "sm_80", 128, (64, 32), EACH.format("bias=fp16:paired mask:paired")),
    ("flash", "sm_120a", 256, (64, 16), "bias=fp32 mask"),
    ("flash", "sm_100a", 192, 64, EACH.format("").replace("  ", " ")),
    ("flash_fp32", "sm_100a", 128, 32, SHIPPED[-1]),
)


@one_in(6)
@pytest.mark.parametrize(("name", "to", "dim", "block", "form"), HEAVY)
def test_what_is_compiled_when_called_does_not_spill(name, to, dim, block, form):
    dtype = "fp32" if name == "flash_fp32" else "bf16"
    dims = {"head_dim": dim, "head_dim_v": dim}
    params = {"dtype": dtype, **dims, "block": block, "aligned": True, "form": form}
    spec = kernel_with(find(f"attention.{name}"), form)
    spec.check(params, arch(to))
    with quiet():
        assert build(spec, params, target(to)).meta["problems"] == []


def instructions(name, params, to):
    """How often the PTX has each instruction; moves depend on the order NVRTC happens to take."""
    spec = find(name)
    image = compile_source(render(spec, params), spec.entry, target(to), describe=name).image
    body = image.decode().split(".visible .entry")[1]
    found = Counter(re.findall(r"(?m)^\t(?:@!?%p\d+ )?([a-z][\w.]*)", body))
    text = " ".join(f"{op} {n}" for op, n in sorted(found.items()) if not op.startswith("mov"))
    return [found.total() - sum(n for op, n in found.items() if op.startswith("mov")),
            sha256(text.encode()).hexdigest()]  # fmt: skip


@pytest.mark.parametrize("entry", json.loads(DATA.read_text()), ids=lambda entry: entry["id"])
def test_a_kernel_without_a_form_has_the_instructions_it_had_before_there_were_any(entry):
    """Counted before forms came in. A change of the kernel itself is a new count: `python -m
    tests.attention.test_attention_features` writes it."""
    compiled = (instructions(entry["kernel"], of(entry), entry["target"]) for _ in range(4))
    assert entry["instructions"] in compiled  # NVRTC makes one more of fp32 now and then


def of(entry):
    block = entry["params"]["block"]
    return {**entry["params"], "block": tuple(block) if isinstance(block, list) else block}


def test_a_form_is_in_the_kernel_only_where_it_is_asked_for():
    spec = find("attention_form.flash")
    for text in SHIPPED[:-1]:
        source = render(spec, next(p for p in spec.variants() if p["form"] == text)).text
        flags = dict(re.findall(r"\b([A-Z_]+) = (true|false)", source))
        assert (flags["SOFTCAP"] == "true") == ("softcap" in text)
        assert (flags["VARLEN"] == "true") == ("varlen" in text)
        assert ("score_slope" in source) == ("slope" in text)


if __name__ == "__main__":
    fkjit.ops.load()
    stored = json.loads(DATA.read_text())
    for one in stored:
        one["instructions"] = instructions(one["kernel"], of(one), one["target"])
    DATA.write_text(json.dumps(stored, indent=1) + "\n")
