"""`paged_attention` for packed queries and many new tokens, in the interpreter with race checks:
portable kernel and Hopper's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from fkjit.ops.attention import paged_checks
from fkjit.ops.attention.features import CASTS
from fkjit.ops.attention.paged import attend_pages
from fkjit.ops.op.casts import casting
from fkjit.ops.op.plan import Plans
from fkjit.settings import settings
from fkjit.spec import registered
from tests.core.sampling import one_in

TARGETS = ("compute_80", "compute_90a")
LENGTHS = ((40, 100), (1, 33), (0, 5), (70, 70), (3, 0))  # new tokens, keys


class Case(NamedTuple):
    """Packed queries, pages that hold NaN where no key is, and the keys themselves."""

    q: Any
    pages: tuple[Any, Any]
    table: Any
    lengths: Any
    ends: Any
    keys: list[tuple[Any, Any]]

    def given(self) -> tuple[Any, ...]:
        return self.q, self.pages, self.table, self.lengths

    @property
    def longest(self) -> int:
        return int(np.diff(self.ends).max())


def draw(
    seed: int, page: int, layout: str = "nhd", dim: int = 64, heads: tuple[int, int] = (4, 2),
    lengths: tuple[tuple[int, int], ...] = LENGTHS, dtype: str = "f2",
) -> Case:  # fmt: skip
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, dtype="f4").astype(dtype)  # noqa: E731
    width = max(-(-k // page) for _, k in lengths) + 1
    count = len(lengths) * width
    pages = [np.full((count, page, heads[1], dim), np.nan, dtype) for _ in "kv"]
    table, free, keys = np.full((len(lengths), width), -1, "i4"), iter(rng.permutation(count)), []
    for row, (_, length) in enumerate(lengths):
        keys.append((normal(length, heads[1], dim), normal(length, heads[1], dim)))
        for at, first in enumerate(range(0, length, page)):
            table[row, at] = next(free)
            for held, own in zip(pages, keys[-1], strict=True):
                part = own[first : first + page]
                held[table[row, at], : len(part)] = part
    if layout == "hnd":
        pages = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in pages]
    ends = np.cumsum([0, *(n for n, _ in lengths)]).astype("i4")
    sizes = np.array([n for _, n in lengths], "i4")
    return Case(normal(ends[-1], heads[0], dim), tuple(pages), table, sizes, ends, keys)


def textbook(case: Case, row: int, causal: bool = True, left: int = -1) -> tuple[Any, Any]:
    """o [S, Hq, D] and lse [Hq, S] of a sequence, in float64."""
    q = case.q[case.ends[row] : case.ends[row + 1]].astype("f8").swapaxes(0, 1)
    k, v = (x.astype("f8").swapaxes(0, 1) for x in case.keys[row])
    k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
    scores = q @ k.swapaxes(1, 2) * q.shape[-1] ** -0.5
    apart = np.arange(k.shape[1]) - (np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1])
    hidden = (apart > 0) & causal | (apart < -left) & (left >= 0)
    scores = np.where(hidden, -np.inf, scores)
    top = scores.max(-1, initial=-1e30, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, np.log(total) + top, -np.inf)[..., 0]
    return (weights / np.where(total == 0, 1, total) @ v).swapaxes(0, 1), lse


def check(case: Case, made: Any, causal: bool = True, left: int = -1) -> None:
    o, lse = made
    for row in range(len(case.lengths)):
        own = slice(case.ends[row], case.ends[row + 1])
        expected, sums = textbook(case, row, causal, left)
        assert np.abs(o[own] - expected).max(initial=0) <= 2e-3
        there = np.isfinite(sums)
        assert np.array_equal(np.isfinite(lse[:, own]), there)
        assert np.abs(lse[:, own][there] - sums[there]).max(initial=0) <= 1e-5


@pytest.fixture(params=TARGETS)
def target(request, monkeypatch):
    found = replace(settings(), target=request.param)
    monkeypatch.setattr("fkjit.jit.build.settings", lambda: found)


@one_in(3, target=TARGETS, page=(16, 64, 8, 1, 256))
@pytest.mark.parametrize(
    "page, layout, dim, options",
    [
        (16, "nhd", 64, {}),
        (64, "hnd", 64, {"window": (20, 0)}),
        (8, "nhd", 40, {"causal": False}),
        (1, "hnd", 64, {}),
        (256, "nhd", 128, {}),
    ],
)
def test_each_sequence_sees_its_pages_alone(target, page, layout, dim, options):
    case = draw(page, page, layout, dim)
    with quiet(), fkjit.sanitize(race=True):
        made = fkjit.paged_attention(
            *case.given(), cu_seqlens_q=case.ends, max_seqlen_q=case.longest, layout=layout,
            return_lse=True, **options,
        )  # fmt: skip
    check(case, made, options.get("causal", True), options.get("window", (-1,))[0])


def test_rows_name_the_tables_rows(target):
    case = draw(5, 16)
    order = np.array([3, 1, -1, 0], "i4")
    parts = [case.q[case.ends[r] : case.ends[r + 1]] for r in (3, 1, 0, 0)]
    ends = np.cumsum([0, *map(len, parts)]).astype("i4")
    with quiet():
        o, lse = fkjit.paged_attention(
            np.concatenate(parts), *case.given()[1:], rows=order, cu_seqlens_q=ends,
            max_seqlen_q=70, return_lse=True,
        )  # fmt: skip
    for at, row in enumerate(order):
        own = slice(ends[at], ends[at + 1])
        if row < 0:
            assert not o[own].any() and np.isneginf(lse[:, own]).all()
        else:
            assert np.abs(o[own] - textbook(case, row)[0]).max() <= 2e-3


def test_more_than_sixteen_tokens_of_each_sequence_need_no_ends():
    case = draw(7, 16, lengths=((20, 50), (20, 33)))
    q = case.q.reshape(2, 20, 4, 64)
    with quiet():
        packed, sums = fkjit.paged_attention(
            *case.given(), cu_seqlens_q=case.ends, max_seqlen_q=20, return_lse=True
        )
        o, lse = fkjit.paged_attention(q, *case.given()[1:], return_lse=True)
    assert o.shape == q.shape and np.array_equal(o.reshape(packed.shape), packed)
    assert lse.shape == (2, 4, 20)
    assert np.array_equal(lse.swapaxes(0, 1).reshape(4, 40), sums)


def test_pages_of_a_cache():
    torch = pytest.importorskip("torch", reason="needs torch")
    cache = fkjit.PagedKVCache(
        8, page_size=16, num_kv_heads=2, head_dim=64, dtype="fp16", device="cpu"
    )
    rng = np.random.default_rng(3)
    k, v = (torch.tensor(rng.standard_normal((40, 2, 64)), dtype=torch.float16) for _ in "kv")
    mine = [cache.allocate()]
    with quiet():
        fkjit.kv_append(k, v, cache, cache.extend(mine, 40))
        q = torch.tensor(rng.standard_normal((1, 30, 4, 64)), dtype=torch.float16)
        made = fkjit.paged_attention(q, cache, rows=cache.rows(mine))
        other = fkjit.attention(
            q.transpose(1, 2), *(x[None].transpose(1, 2) for x in (k, v)), causal=True
        )
    assert (made.transpose(1, 2) - other).abs().max() <= 2e-3


WRONG = {
    "no max_seqlen_q": ({"max_seqlen_q": None}, ParameterError, "max_seqlen_q"),
    "a split": ({"split_size": 128}, ParameterError, "split_size is 128"),
    "a place for the result": ({"out": np.zeros((4,))}, ParameterError, "out is an array"),
    "scales": ({"k_scale": np.ones(2, "f4")}, ParameterError, "k_scale is given, but"),
    "rows of another number": ({"rows": np.zeros(3, "i4")}, ParameterError, "rows"),
    "ends of another dtype": (
        {"cu_seqlens_q": np.zeros(6, "f4")}, ArgumentTypeError, "cu_seqlens_q"
    ),
    "other ends": ({"cu_seqlens_q": np.zeros(3, "i4")}, ParameterError, "2 sequences"),
    "a layout": ({"layout": "bshd"}, ParameterError, "layout"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_one_error_for_what_is_wrong(what):
    more, kind, named = WRONG[what]
    case = draw(1, 16)
    options: dict[str, Any] = {"cu_seqlens_q": case.ends, "max_seqlen_q": 70, **more}
    with pytest.raises(kind, match=f"^paged_attention: .*{named}"):
        fkjit.paged_attention(*case.given(), **options)


BATCH = ((1, 200), (40, 70), (0, 5), (1, 1), (20, 33))


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that calls take from now on."""
    seen, usual = [], paged_checks.check_pages

    def check_pages(*given):
        made = usual(*given)
        seen.append([launch.spec.name for launch in made.launches])
        return made

    monkeypatch.setattr(attend_pages, "check", casting(lambda: attend_pages, check_pages, CASTS))
    monkeypatch.setattr(
        attend_pages, "plans", Plans("paged_attention", attend_pages.names, attend_pages.outputs)
    )
    return seen


KERNELS = {"compute_80": ["split", "flash"], "compute_90a": ["flash_sm90"]}


@one_in(2, target=TARGETS, page=(16, 64))
@pytest.mark.parametrize(
    "page, options", [(16, {"window": (50, 0), "sinks": np.array([1, -1, 0, 2], "f4")}), (64, {})]
)
def test_mixed_batches(page, options, target, launched, request):
    """As sequence by sequence; rows of a batch of other lengths are found on the device."""
    case = draw(page, page, lengths=BATCH)
    said: dict[str, Any] = {
        "cu_seqlens_q": case.ends, "max_seqlen_q": case.longest, "return_lse": True, **options,
    }  # fmt: skip
    with quiet(), fkjit.sanitize(race=True):
        o, lse = fkjit.paged_attention(*case.given(), mixed=True, **said)
    with quiet():
        expected, sums = fkjit.paged_attention(*case.given(), **said)
    assert launched[0] == KERNELS[request.node.callspec.params["target"]]
    assert np.abs(o - expected).max() <= 2e-3
    assert np.abs(lse - sums).max() <= 1e-5
    if not options:
        check(case, (o, lse))


@pytest.mark.parametrize("target", ["compute_90a"], indirect=True)
def test_batches_of_single_tokens_and_of_none(launched, target):
    case = draw(2, 16, lengths=((1, 100), (1, 7), (0, 3)))
    said: dict[str, Any] = {"cu_seqlens_q": case.ends, "return_lse": True}
    with quiet():
        check(case, fkjit.paged_attention(*case.given(), max_seqlen_q=1, **said))
        long = draw(4, 16, lengths=((20, 50), (0, 33)))
        said["cu_seqlens_q"] = long.ends
        made = fkjit.paged_attention(*long.given(), max_seqlen_q=20, mixed=True, **said)
        check(long, made)
        said["cu_seqlens_q"] = case.ends
        check(case, fkjit.paged_attention(*case.given(), max_seqlen_q=40, mixed=True, **said))
    assert launched == [["split"], ["split", "flash"], KERNELS["compute_90a"]]


def test_torch_compile_traces_packed_queries():
    torch = pytest.importorskip("torch", reason="needs torch")
    case = draw(6, 16, lengths=((1, 20), (20, 33)))
    q, *tables, ends = map(torch.tensor, (case.q, case.table, case.lengths, case.ends))
    pages = tuple(map(torch.tensor, case.pages))

    def call(q):
        return fkjit.paged_attention(
            q * 1, pages, *tables, cu_seqlens_q=ends, max_seqlen_q=20, mixed=True
        )

    with quiet():
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert torch.equal(call(q), compiled(q))


STORED = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}


@one_in(9)
@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize(
    "dim, page, dtype, options",
    [
        (64, 16, "f2", {}), (64, 8, "bfloat16", {"sinks": np.array([1, -1], "f4")}),
        (40, 16, "f2", {"window": (20, 0), "softcap": 3.0}), (36, 16, "f2", {}),
        (128, 64, "bfloat16", {"window": (20, 0)}), (64, 1, "f2", {}), (192, 16, "bfloat16", {}),
    ],
)  # fmt: skip
def test_quantized_pages(storage, dim, page, dtype, options, target, launched, request):
    """Beside pages of the numbers that codes and scales mean; no code of a token that there is not
    is read: here they are NaN or far off."""
    case = draw(3, page, dim=dim, heads=(2, 2), dtype=dtype)
    scales = [np.array(pair, "f4") for pair in ((0.02, 0.05), (0.03, 0.01))]
    codes, numbers = [], []
    for held, scale in zip(case.pages, scales, strict=True):
        scaled = held.astype("f4") / scale[:, None]
        if storage == "int8":
            scaled = np.where(np.isnan(scaled), 127, np.clip(np.rint(scaled), -127, 127))
        code = scaled.astype(STORED[storage])
        codes.append(code.view("u1") if storage == "fp8" and dim == 36 else code)
        numbers.append(code.astype("f4") * scale[:, None])
    said: dict[str, Any] = {
        "cu_seqlens_q": case.ends, "max_seqlen_q": case.longest, "return_lse": True, **options,
    }  # fmt: skip
    tables = (case.table, case.lengths)
    with quiet():
        with fkjit.sanitize(race=dim == 64):
            o, lse = fkjit.paged_attention(
                case.q, tuple(codes), *tables, k_scale=scales[0], v_scale=scales[1], **said
            )
        pages = tuple(x.astype("f2") for x in numbers)
        expected, sums = fkjit.paged_attention(case.q.astype("f2"), pages, *tables, **said)
    on_hopper = request.node.callspec.params["target"] == "compute_90a"
    on_hopper = on_hopper and page > 1 and dim % 16 == 0 and "softcap" not in options
    assert launched[0] == ["flash_sm90" if on_hopper else "flash"]
    bound = 4e-3 if dtype == "f2" else 2e-2
    assert np.abs(o.astype("f4") - expected).max() <= bound
    there = np.isfinite(sums)
    assert np.array_equal(np.isfinite(lse), there)
    assert np.abs(lse[there] - sums[there]).max() <= bound


@one_in(2)
@pytest.mark.parametrize("dtype", ["f2", "bfloat16"])
@pytest.mark.parametrize("target", ["compute_90a"], indirect=True)
def test_every_code_is_its_number(target, dtype):
    """One key whose values are all codes, which NaN of another key or column does not change."""
    rng = np.random.default_rng(8)
    kept = np.arange(256, dtype="u1").reshape(2, 1, 2, 64).repeat(8, 1)  # pages, tokens, heads, D
    q = rng.standard_normal((34, 2, 64)).astype(dtype)
    k, one = np.zeros((2, 8, 2, 64), "u1"), np.ones(2, "f4")
    table, lengths = np.array([[0], [1]], "i4"), np.array([1, 1], "i4")
    for kind in (np.int8, ml_dtypes.float8_e4m3fn):
        with quiet():
            o = fkjit.paged_attention(
                q, (k.view(kind), kept.view(kind)), table, lengths, k_scale=one, v_scale=one,
                cu_seqlens_q=np.array([0, 1, 34], "i4"), max_seqlen_q=33, causal=False,
            )  # fmt: skip
        meant = kept.view(kind).astype("f4")[:, 0]
        assert np.array_equal(o[0].astype("f4"), meant[0], equal_nan=True)
        assert np.array_equal(o[1].astype("f4"), meant[1], equal_nan=True)


def test_kernels_with_pages_are_swept():
    """Where `fkjit warm`, the sweep and the sanitizer look for them."""
    shown = {
        spec.name
        for spec in registered()
        for params in spec.variants()
        if "paged" in str(params.get("form", ""))
    }
    assert shown == {"flash", "flash_sm90"}
