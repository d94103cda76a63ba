"""Decoding in all its forms, interpreted on the CPU: compositions against float64, windows whose
pages are gone, and what the kernel without a form is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fkjit
from fkjit.arch import arch
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import build
from fkjit.ops.attention.decode import grid
from fkjit.ops.attention.decode import problem as decoding
from fkjit.ops.attention.decode.kernels import SHIPPED, kernel, select
from tests.attention.decode.kit import Batch
from tests.attention.feature_kit import FEATURES, draw, exact
from tests.attention.feature_kit import own_case as own
from tests.core.sampling import one_in

DATA = Path(__file__).parents[2] / "data" / "decode_without_forms.json"
LIMITS = {"fp16": 4e-3, "bf16": 2e-2}


def check(case, lengths, o, lse, dtype):
    """o [B, H, S, Dv] and lse against float64, sequence by sequence."""
    for b, length in enumerate(lengths):
        want, want_lse = exact(own(case, b, length))
        seen = np.isfinite(want_lse[0])
        limit = LIMITS[dtype] * max(1, np.abs(want).max(initial=0))
        assert np.abs(o[b].astype(np.float64) - want[0]).max() <= limit, b
        assert np.array_equal(np.isneginf(lse[b]), ~seen), b
        assert np.abs(lse[b][seen] - want_lse[0][seen]).max(initial=0) <= 1e-4, b


def poisoned(array, lengths):
    """NaN where no token is."""
    made = array.copy()
    for row, length in zip(made, lengths, strict=True):
        row[..., length:, :] = np.nan
    return made


SHAPES = (  # tokens, heads, head_dim, lengths, dtype, features
    (1, (4, 2), (64, 64), [90, 0, 33, 1], "fp16", {"window", "softcap", "sinks"}),
    (3, (8, 2), (40, 64), [70, 2, 150, 3], "bf16", {"alibi_slopes", "mask", "score_mod"}),
    (16, (6, 1), (64, 48), [131, 40], "fp16", FEATURES),
    (2, (12, 2), (128, 128), [100, 61], "bf16", {"window", "bias", "sinks", "alibi_slopes"}),
    (5, (3, 3), (256, 200), [47], "fp16", {"window", "softcap", "sinks", "score_mod"}),
)


@one_in(3)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda one: " ".join([one[4], *sorted(one[5])]))
def test_compositions(shape, on_sms):
    """Ragged, empty, shorter than the new tokens; heads in several blocks; race checks on."""
    tokens, heads, dims, lengths, dtype, features = shape
    on_sms(5)
    case = draw(len(lengths), len(lengths), heads, (tokens, 150), dims, dtype, features)
    k, v = (poisoned(x, lengths) for x in (case.k, case.v))
    given = (case.q, k, v, np.array(lengths, np.int32))
    for split in (None, 128):
        with fkjit.sanitize(race=True):
            o, lse = fkjit.attention_decode(
                *given, **case.options, split_size=split, return_lse=True
            )
        check(case, lengths, o, lse, dtype)


def gone(batch, left, tokens):
    """Pages before the window belong to nobody, or hold what is not to be read."""
    size = batch.pages[0].shape[1 if batch.layout == "nhd" else 2]
    for b, length in enumerate(batch.lengths):
        first = max(length - tokens - left, 0)
        for page in range(first // size):
            batch.table[b, page] = (-1, 2**31 - 1)[page % 2]
        if first % size and batch.storage == "same":
            page = batch.table[b, first // size]
            for pages in batch.pages:
                kept = pages[page] if batch.layout == "nhd" else pages[page].swapaxes(0, 1)
                kept[: first % size] = np.nan


@one_in(2)
@pytest.mark.parametrize(("page_size", "layout", "storage"), [
    (1, "hnd", "same"), (16, "nhd", "fp8"), (256, "nhd", "same"), (32, "hnd", "int8"),
])  # fmt: skip
def test_pages_before_a_window_are_not_touched(page_size, layout, storage):
    """And a window's result is that of so many keys, to the bit with parts of one size."""
    batch = Batch(
        [700, 30, 401, 0], tokens=2, page_size=page_size, layout=layout, storage=storage,
        dtype="bf16",
    )  # fmt: skip
    sinks = np.array([0.5, -1, 2, 0], np.float32)
    form = {"window": (100, 0), "sinks": sinks, "softcap": 5.0}
    whole = batch.call(**form)
    gone(batch, 100, 2)
    o, lse = batch.call(**form, return_lse=True)
    assert np.array_equal(o, whole)
    for b, length in enumerate(batch.lengths):
        one = (x.astype(np.float64)[None].swapaxes(1, 2)
               for x in (batch.q[b], batch.k[b], batch.v[b]))  # fmt: skip
        case = draw(0, 1, (4, 2), (2, 1), (64, 64), "bf16", ())._replace(
            **dict(zip("qkv", one, strict=True)), options={**form, "causal": True}
        )
        check(case, [length], o[b : b + 1].swapaxes(1, 2), lse[b : b + 1], "bf16")


def test_parts_of_a_fixed_size_do_not_depend_on_the_batch(on_sms):
    batch = Batch([900, 0, 300, 129], tokens=2, heads_q=16)
    form = {"window": (500, 0), "alibi_slopes": np.linspace(0, 0.3, 16, dtype="f4")}
    o = batch.call(**form, split_size=128)
    on_sms(7)
    assert np.array_equal(batch.call(**form, split_size=128), o)
    for b in range(4):
        rows = np.array([b], np.int32)
        alone = fkjit.paged_attention(
            batch.q[b : b + 1], batch.pages, batch.table, batch.lengths, rows=rows,
            split_size=128, **form,
        )  # fmt: skip
        assert np.array_equal(alone[0], o[b])


def test_a_window_is_planned_as_so_many_keys():
    """One sequence of 128k keys takes the grid, the workspace and the tile that one of 4k takes."""
    usual = {
        "dtype": "bf16", "storage": "same", "batch": 1, "heads_q": 32, "heads_kv": 8,
        "seqlen_q": 1, "head_dim": 128, "head_dim_v": 128, "split": 0, "page_size": 16,
    }  # fmt: skip
    many = {**usual, "longest": 131_072, "window": (4095, 0)}
    few = {**usual, "longest": 4096}
    for split in (0, 1024):
        one, other = (
            grid.on_grid(params, {**p, "split": split}, 132, arch("sm_90a"))
            for p in (many, few)
            for params in [select(p, arch("sm_90a"))[1]]
        )
        assert one["blocks"] <= other["blocks"] + 8 * (split > 0)
    assert decoding.keys_read(many, 131_072) <= 4096 + decoding.ROUND
    assert decoding.keys_read(many, 100) == 100


def test_what_the_kernel_rounds_a_window_to_is_what_is_planned():
    text = (DATA.parents[2] / "templates" / "attention/decode/schedule.cuh").read_text()
    assert f"ROUND = {decoding.ROUND};" in text


def test_windows_without_bounds_and_without_keys():
    batch = Batch([50, 3], tokens=4)
    plain = batch.call()
    assert np.array_equal(batch.call(window=(None, None)), plain)
    assert np.array_equal(batch.call(window=(10**9, -1)), plain)
    both = batch.call(window=(None, -1), causal=False)
    assert np.array_equal(both, batch.call(causal=False))
    o, lse = batch.call(window=(0, 0), return_lse=True)
    for token in range(4):
        for head in range(4):
            assert np.array_equal(o[0, token, head], batch.v[0][46 + token, head // 2])
    assert not o[1, 0].any() and np.isneginf(lse[1, :, 0]).all()


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize(
    "features", [{"window"}, {"window", "softcap"}], ids=lambda one: " ".join(sorted(one))
)
def test_any_scale_has_forms(scale, features):
    lengths = [150, 40]
    case = draw(5, 2, (4, 2), (2, 150), (64, 64), "fp16", features)
    given = (case.q, case.k, case.v, np.array(lengths, np.int32))
    o, lse = fkjit.attention_decode(*given, **case.options, softmax_scale=scale, return_lse=True)
    scaled = case._replace(q=case.q.astype(np.float64) * (scale * 8))
    check(scaled, lengths, o, lse, "fp16")


def test_torch_and_its_operator():
    torch = pytest.importorskip("torch", reason="needs torch")
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, h, n, 64).half() for h, n in ((4, 2), (2, 60), (2, 60)))
    slopes, sinks = torch.rand(4), torch.randn(4)
    form = {"window": (20, 0), "alibi_slopes": slopes, "sinks": sinks}
    o = fkjit.attention_decode(q, k, v, **form)
    fkjit.attention_decode.prepare(q, k, v, **form)
    again = torch.ops.fkjit.attention_decode(
        q, k, v, alibi_slopes=slopes, sinks=sinks, window=[20, 0]
    )
    assert torch.equal(o, again)
    flash = fkjit.attention(q, k, v, causal=True, **form)
    assert (o - flash).abs().max().item() <= 4e-3
    slopes.requires_grad_()
    with pytest.raises(ParameterError, match="alibi_slopes"):
        fkjit.attention_decode(q, k, v, **form)


Q, K = np.zeros((2, 4, 3, 64), np.float16), np.zeros((2, 2, 30, 64), np.float16)
F4 = np.zeros(4, np.float32)
WRONG = [  # options, error, words
    ({"window": 5}, ArgumentTypeError, r"window=5 is not a pair \(left, right\)"),
    ({"window": (-2, 0)}, ParameterError, "a side is at least 0"),
    ({"softcap": -1.0}, ParameterError, "softcap=-1.0 is not in 1e-6"),
    ({"alibi_slopes": F4[:3]}, ParameterError, r"allowed: \[Hq\] \(4,\) or \[B, Hq\] \(2, 4\)"),
    ({"sinks": F4.astype("i4")}, ArgumentTypeError, "sinks is int32; allowed: fp32"),
    ({"bias": np.zeros((1, 1, 3, 29), "f4")}, ParameterError, r"broadcast to \(2, 4, 3, 30\)"),
    ({"mask": np.zeros((1, 1, 1, 30), "f4")}, ArgumentTypeError, "mask is fp32; allowed: bool"),
    ({"score_mod": "score; 1"}, ParameterError, "is not one expression"),
    ({"score_mod": "score + z"}, ParameterError, 'does not compile: .*"z" is undefined'),
    ({"score_args": {"a": 1}, "softcap": 1.0}, ParameterError, "no score_mod to read them"),
    ({"causal": 2, "softcap": 1.0}, ArgumentTypeError, "causal=2 is not True or False"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "words"), WRONG, ids=lambda x: str(x)[:40])
def test_bad_forms_are_refused(options, error, words):
    with pytest.raises(error, match=words) as found:
        fkjit.attention_decode(Q, K, K, **options)
    assert str(found.value).startswith("attention_decode: ")
    table, lengths = np.arange(2, dtype=np.int32)[:, None], np.array([30, 4], np.int32)
    with pytest.raises(error, match=words.replace("30", "32")) as found:
        pages = np.zeros((2, 32, 2, 64), np.float16)
        fkjit.paged_attention(Q.swapaxes(1, 2), (pages, pages), table, lengths, **options)
    assert str(found.value).startswith("paged_attention: ")


def test_biases_of_wide_heads_are_refused():
    q, k = np.zeros((1, 4, 1, 200), np.float16), np.zeros((1, 2, 9, 200), np.float16)
    with pytest.raises(ParameterError, match=r"attention_decode: .*head_dim above 128"):
        fkjit.attention_decode(q, k, k, bias=np.zeros((1, 1, 1, 9), np.float32))


SEVERAL = "softcap alibi bias=bf16 mask:paired sinks"
HEAVY = (  # target, head_dim, rows, storage, tile, form: what holds most in registers
    ("sm_90a", 128, 64, "same", (4, 32, 3, 2), SHIPPED[1]),
    ("sm_120a", 128, 16, "int8", (4, 32, 2, 2), SEVERAL),
    ("sm_80", 256, 16, "fp8", (4, 32, 2, 1), "softcap alibi sinks score_mod=score + a; float a"),
)


@one_in(4)
@pytest.mark.parametrize(("to", "dim", "rows", "storage", "tile", "form"), HEAVY)
def test_what_is_compiled_when_called_does_not_spill(to, dim, rows, storage, tile, form):
    from fkjit.arch import target

    params = {"dtype": "bf16", "storage": storage, "head_dim": dim, "rows": rows, "tile": tile}
    spec = kernel(form)
    spec.check({**params, "form": form}, arch(to))
    assert build(spec, {**params, "form": form}, target(to)).meta["problems"] == []


@pytest.mark.parametrize("entry", json.loads(DATA.read_text()), ids=lambda entry: entry["id"])
def test_a_kernel_without_a_form_has_the_instructions_it_had_before_there_were_any(entry):
    """Counted before forms came in, as those of attention are."""
    from tests.attention.test_attention_features import instructions

    params = {**entry["params"], "tile": tuple(entry["params"]["tile"])}
    assert instructions("attention_decode.split", params, "compute_80") == entry["instructions"]
