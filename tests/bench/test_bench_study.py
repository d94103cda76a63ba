"""The study of few bits: emulated sums, codes, forms of attention, models, and its page."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import fkjit
from bench.command import main
from bench.core.store import read
from bench.study import (
    attention,
    codes,
    gpu_tables,
    language,
    models,
    needle,
    on_gpu,
    pictures,
    tables,
    train,
)
from bench.study.attention import NAMED, Seen, attend, exact
from bench.study.tensor_core import BITS, EXACT, Sums, product
from fkjit.interp.wgmma.short_sums import summed
from fkjit.jit.build import quiet
from fkjit.ops.quantize.schemes import SCHEMES

RESULTS = sorted((Path(tables.ROOT) / "bench" / "results" / "study").glob("*.jsonl"))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Of several most wait for the next small product."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers])


def power(x: float, least: int = -100) -> float:
    return 2.0 ** max(math.frexp(x)[1] - 1, least) if x else 0.0


def one_by_one(a: list[float], b: list[float], bits: int, interval: int) -> float:
    """The accumulator, with whole numbers of units."""
    register, total = 0.0, 0.0

    def exponent(x):  # of a factor
        return max(math.frexp(x)[1] - 1, -6)

    for at in range(0, len(a), 32):
        pairs = [(x, y) for x, y in zip(a[at : at + 32], b[at : at + 32], strict=True) if x * y]
        powers = [exponent(x) + exponent(y) for x, y in pairs]
        powers += [math.frexp(total)[1] - 1] if total else []
        unit = 2.0 ** (max(powers, default=0) - bits)
        total = sum(int(x * y / unit) for x, y in pairs) * unit + int(total / unit) * unit
        own = 2.0 ** (math.frexp(total)[1] - 1 - bits)
        total = int(total / own) * own
        if interval and (at + 32) % interval == 0:
            register, total = register + total, 0.0
    return register + total


@pytest.mark.parametrize("bits", [6, 14, 20])
@pytest.mark.parametrize("interval", [0, 32, 96])
def test_sums_are_those_of_whole_numbers(bits, interval):
    rng = np.random.default_rng(bits)
    a, b = (codes.as_e4m3(torch.from_numpy(rng.standard_normal((n, 200)) * 40).float())
            for n in (3, 5))  # fmt: skip
    found = product(a, b, Sums(bits, interval))
    padded = [torch.nn.functional.pad(x, (0, 24)).tolist() for x in (a, b)]
    right = [[one_by_one(x, y, bits, interval) for y in padded[1]] for x in padded[0]]
    assert torch.allclose(found, torch.tensor(right), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("small", "right"), [(2.0**-14, 1 + 2.0**-14), (2.0**-15, 1), (-(2.0**-15), 1)]
)
def test_what_is_below_the_last_bit_is_cut_off(small, right):
    ones = row(1.0, 1.0)
    assert product(row(1.0, small), ones, Sums(14)).item() == right
    assert product(row(1.0, small), ones).item() == 1 + small


def test_sums_are_those_of_the_interpreter():
    """Which are an H200's (tests/interp/mma/test_short_sums.py)."""
    rng = np.random.default_rng(5)
    a, b = (codes.as_e4m3(torch.from_numpy(rng.standard_normal((n, 32)) * 40).float())
            for n in (9, 7))  # fmt: skip
    found = product(a, b, Sums(BITS))
    assert torch.equal(found, torch.from_numpy(summed(a.numpy(), b.numpy(), None)))


def test_codes_are_those_of_the_public_call():
    x = torch.from_numpy(np.random.default_rng(0).standard_t(3, (3, 256))).bfloat16()
    for scheme in ("fp8_row", "int8_row"):
        with quiet():
            made = fkjit.quantize(x, scheme)
            right = fkjit.dequantize(made).float()
        own, scale = codes.coded(x.float(), SCHEMES[scheme].code, (-1,))
        assert torch.equal(own, made.data.float())
        assert torch.allclose(scale[:, 0], made.scales)
        assert codes.error(codes.of_scheme(x, SCHEMES[scheme]), right) < 4e-3  # bf16's rounding


def test_wide_numbers_give_what_pytorch_gives():
    seen = attention.drawn(np.random.default_rng(1), "N(0, 1)", 96)
    seen = seen._replace(mask=attention.look_back(96))
    right = torch.nn.functional.scaled_dot_product_attention(*seen[:3], attn_mask=seen.mask)
    assert torch.allclose(exact(seen).float(), right, atol=1e-5)
    assert codes.error(attend(seen, NAMED["fp16"]), right) < 1e-3


def test_a_rotation_keeps_products():
    x, y = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).double()
    turned = attention.rotated(x)
    assert torch.allclose(turned @ attention.rotated(y).T, x @ y.T)
    assert not torch.allclose(turned, x)


def test_smooth_keys_and_rotations_cure_outlier_channels():
    seen = attention.drawn(np.random.default_rng(2), "outlier channels", 512)
    right = exact(seen)
    found = {name: codes.error(attend(seen, form), right) for name, form in NAMED.items()}
    assert found["int8, block, smooth"] < found["int8, block"] / 3
    assert found["int8, block, rotated"] < found["int8, block"] / 2
    assert found["fp8, block, smooth"] < found["fp8, block"]
    assert found["fp16"] < found["bf16"] < min(e for n, e in found.items() if "8" in n)


def test_short_sums_lose_what_promotion_keeps():
    seen = attention.drawn(np.random.default_rng(3), "N(0, 1)", 1024)
    seen = Seen(seen.q, seen.k, seen.v + 1)
    right, form = attend(seen, NAMED["fp8, block"], EXACT), NAMED["fp8, block"]
    never, often = (codes.error(attend(seen, form, Sums(10, n)), right) for n in (0, 64))
    assert never > 0.02 and often < never / 20


def test_a_needle_is_found_where_sums_are_promoted():
    seen, places = needle.planted(np.random.default_rng(4), 4096, 8)
    assert needle.retrieved(exact(seen), seen, places) == 1
    form = NAMED["fp8, block"]
    assert needle.retrieved(attend(seen, form, Sums(8, 64)), seen, places) == 1
    assert needle.retrieved(attend(seen, form, Sums(8, 0)), seen, places) < 0.5


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_outlier_channels_do_not_change_a_model(name):
    shape = language.SMALL[name]._replace(layers=2, context=17)
    weights = {key: x.double() for key, x in models.drawn(shape, 0).items()}
    tokens = torch.arange(34).reshape(2, 17)
    right = models.logits(weights, shape, tokens)
    large = models.with_outliers(weights, shape, 30.0)
    assert torch.allclose(models.logits(large, shape, tokens), right)
    assert codes.error(models.logits(weights, shape, tokens, language.calls(language.WAYS[1])),
                       right) < 0.02  # fmt: skip
    changed = tokens.clone()
    changed[:, -1] = 200  # nobody looks ahead
    assert torch.equal(models.logits(weights, shape, changed)[:, :-1], right[:, :-1])


def test_a_run_is_the_same_again_and_its_tables_have_no_gap(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(language, "WAYS", language.WAYS[:2])
    monkeypatch.setattr(train, "FEW", "a*.py")
    monkeypatch.setattr(attention, "CALLS", dict(list(attention.CALLS.items())[:5]))
    few = ["--only", "needle", "product sums", "attention sums"]
    for name, more in (("one", []), ("two", few)):
        assert main(["study", "--quick", "--out", str(tmp_path / name), *more]) == 0
    files = [next((tmp_path / name).iterdir()) for name in ("one", "two")]
    first, second = (tables.found(path) for path in files)
    assert second == [record for record in first if record["part"] in few]
    assert "models: " in capsys.readouterr().err
    learnt = [r["perplexity"] for r in first if r.get("attention") == "float64"]
    assert learnt[1] < learnt[0] / 2  # ten steps of training
    made = tables.tables(files[0])
    of_page = {name.split(": begin")[0] for name in _markers()}
    assert set(made) == {name for name in of_page if not name.startswith("gpu ")}
    assert all("%" in made[name] for name in ("products", "lengths", "logits"))
    assert all("</svg>" in drawn for drawn in pictures.pictures(first, "here").values())


def _markers() -> list[str]:
    lines = tables.PAGE.read_text().splitlines()
    return [line.removeprefix("<!-- ") for line in lines if ": begin -->" in line]


def test_the_page_has_the_tables_and_pictures_of_its_run():
    path = RESULTS[-1]
    page = tables.PAGE.read_text()
    assert tables.with_tables(page, tables.tables(path)) == page
    for name, drawn in pictures.pictures(tables.found(path), path.name).items():
        assert (tables.PAGE.parent / name).read_text() == drawn
        assert f"({name})" in page
    assert read(path)[0].end is not None


# ------------------------------------------------------------------ on a GPU


def test_causal_queries_stand_where_they_belong():
    """Of the rows that a GPU makes; here the kernel runs in the interpreter."""
    rng = np.random.default_rng(3)
    seen = attention.drawn(rng, "N(0, 1)", 96, 8)
    call = on_gpu.CALLS["int8, block, smooth"]
    for causal in (False, True):
        right = exact(seen._replace(mask=attention.look_back(96, 8) if causal else None))
        assert codes.error(on_gpu._found(call, seen, causal), right) < 0.03


def test_tables_of_a_gpu_are_those_of_the_last_run():
    path = sorted((RESULTS[-1].parent / "gpu").glob("*.jsonl"))[-1]
    page = tables.PAGE.read_text()
    made = gpu_tables.tables(path)
    assert tables.with_tables(page, made) == page
    markers = {name.split(": begin")[0] for name in _markers()}
    assert set(made) == {name for name in markers if name.startswith("gpu ")}
    assert set(gpu_tables.values(tables.found(path), "kernel forms", "scheme")) == set(on_gpu.CALLS)
