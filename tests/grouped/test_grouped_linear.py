"""fkjit.grouped_linear on a CPU: numbers, gradients, layouts of experts, errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from fkjit.settings import settings
from tests.core.sampling import one_in
from tests.gemm.kit import FLOOR
from tests.grouped.kit import arrays, by_choice, choices, grouped


def call(*args, **options):
    with quiet():
        return fkjit.grouped_linear(*args, **options)


def close(found, expected, dtype="fp32"):
    error = (found.double() - expected).abs().max().item() if found.numel() else 0.0
    top = expected.abs().max().item() if found.numel() else 0.0
    assert error <= FLOOR[dtype] * max(1.0, top)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "how"),
    [
        (1, 3, 1, "even"), (37, 5, 2, "even"), (70, 4, 1, "first"), (90, 16, 3, "zipf"),
        (9, 70, 2, "even"),
    ],
)  # fmt: skip
def test_each_row_by_its_expert(tokens, experts, top_k, how):
    """Experts without rows, with a tile or two, and all rows on one."""
    ids = choices(tokens, experts, top_k, how)
    groups = grouped(ids, experts)
    x, weight, bias = arrays(tokens, experts, 40, 24)
    y = call(x, weight, groups, bias, gather=True)
    expected = by_choice(*(a.double() for a in (x, weight, bias)), ids)
    close(y[groups.inverse.long()], expected)


@one_in(3)
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(
    ("activation", "gate"), [("silu", True), ("gelu_tanh", False), (None, True)]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_epilogues_and_layouts(layout, activation, gate, dtype):
    ids = choices(20, 3, 2)
    groups = grouped(ids, 3)
    x, weight, bias = arrays(20, 3, 33, 17, dtype, gate, layout=layout)  # rows on no boundaries
    y = call(x, weight, groups, bias, activation=activation, gate=gate, gather=True,
             weight_layout=layout)  # fmt: skip
    how = {"activation": activation, "gate": gate, "layout": layout}
    expected = by_choice(*(a.double() for a in (x, weight, bias)), ids, **how)
    close(y[groups.inverse.long()], expected, dtype)


def test_weights_put_the_results_together():
    ids, rng = choices(30, 4, 2), np.random.default_rng(5)
    groups = grouped(ids, 4)
    x, weight, _ = arrays(30, 4, 16, 32)
    weights = torch.as_tensor(rng.random((30, 2), np.float32))
    y = call(x, weight, groups, gather=True, weights=weights)
    each = by_choice(x.double(), weight.double(), None, ids)
    close(y, (each * weights.double()[..., None]).sum(1))


def test_numpy_arrays():
    ids = choices(10, 3, 1)
    groups = grouped(ids.numpy(), 3)
    x, weight, _ = arrays(10, 3, 8, 16)
    y = call(x.numpy(), weight.numpy(), groups, gather=True)
    expected = by_choice(x.double(), weight.double(), None, ids)
    assert isinstance(y, np.ndarray)
    close(torch.as_tensor(y)[torch.as_tensor(groups.inverse).long()], expected)


@one_in(4)
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("save", [True, False])
def test_gradients(layout, save):
    """Of x, weight and bias; an expert without rows has zeros."""
    ids = choices(40, 6, 2, "zipf")
    ids[ids == 5] = 0
    groups = grouped(ids, 6)
    given = [a.requires_grad_() for a in arrays(40, 6, 12, 20, gate=True, layout=layout)]
    y = call(*given[:2], groups, given[2], activation="silu", gate=True, gather=True,
             weight_layout=layout, save_pre_activation=save)  # fmt: skip
    wide = [a.detach().double().requires_grad_() for a in given]
    z = by_choice(*wide, ids, activation="silu", gate=True, layout=layout)
    dz = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with quiet():
        y[groups.inverse.long()].backward(dz.float())
    z.backward(dz)
    for one, other in zip(given, wide, strict=True):
        close(one.grad, other.grad)
    assert not given[1].grad[5].any()


def test_rows_are_where_counts_say_when_the_kernel_runs():
    """The same arrays with other counts: nothing of the first call is kept."""
    x, weight, _ = arrays(50, 4, 16, 16)
    for how in ("even", "first", "zipf"):
        ids = choices(50, 4, 2, how)
        groups = grouped(ids, 4)
        y = call(x, weight, groups, gather=True)
        close(y[groups.inverse.long()], by_choice(x.double(), weight.double(), None, ids))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_so_many_rows_of_each_expert(dtype):
    """The masked layout: rows that are not there are NaN, and come into no other."""
    counts = torch.tensor([5, 0, 128, 64], dtype=torch.int32)
    x, weight, bias = arrays(4 * 128, 4, 40, 24, dtype, gate=True)
    x = x.view(4, 128, 24)
    for expert, count in enumerate(counts):
        x[expert, count:] = torch.nan
    y = call(x, weight, counts, bias, activation="silu", gate=True)
    assert y.shape == (4, 128, 40)
    for expert, count in enumerate(counts):
        ids = torch.full((int(count), 1), expert)
        wide = (a.double() for a in (x[expert, :count], weight, bias))
        close(y[expert, :count], by_choice(*wide, ids, activation="silu", gate=True)[:, 0], dtype)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"counts": torch.zeros(3, dtype=torch.int32)}, "groups has shape"),
        ({"x": torch.zeros(4, 65, 24)}, "multiple of 64"),
        ({"x": torch.zeros(2, 64, 24), "counts": torch.zeros(4, dtype=torch.int32)}, "of 4 expe"),
        ({"gather": True}, "without gather"),
        ({"x": torch.zeros(4, 64, 24, requires_grad=True)}, "no gradients"),
    ],
)
def test_bad_masked_input(change, words):
    given = {"x": torch.zeros(4, 64, 24), "counts": torch.zeros(4, dtype=torch.int32), **change}
    with pytest.raises(ParameterError, match=f"grouped_linear: .*{words}"):
        call(given.pop("x"), _WEIGHT, given.pop("counts"), **given)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "how"),
    [(1, 9, 4, "even"), (50, 3, 2, "zipf")],
)
def test_few_rows_of_each_expert(tokens, experts, top_k, how, layout):
    """impl="stream" reads rows of tokens and of places where they are."""
    ids = choices(tokens, experts, top_k, how)
    groups = grouped(ids, experts)
    x, weight, bias = arrays(tokens, experts, 40, 72, "bf16", gate=True, layout=layout)
    said = {"activation": "silu", "gate": True, "weight_layout": layout}
    expected = by_choice(*(a.double() for a in (x, weight, bias)), ids, activation="silu",
                         gate=True, layout=layout)  # fmt: skip
    with quiet():
        rows = fkjit.moe_permute(x, groups)
    for given, gather in ((x, True), (rows, False)):
        y = call(given, weight, groups, bias, gather=gather, impl="stream", **said)
        close(y[groups.inverse.long()], expected, "bf16")


@pytest.mark.parametrize(("how", "layout"), [("zipf", "nk"), ("even", "kn")])
def test_rows_are_gathered_as_they_are_multiplied(how, layout, monkeypatch):
    """impl="gather" on Hopper: rows of x by the choices of places, experts without rows too."""
    monkeypatch.setattr(
        "fkjit.jit.build.settings", lambda: replace(settings(), target="compute_90a")
    )
    ids = choices(90, 5, 2, how)
    ids[ids == 3] = 0
    groups = grouped(ids, 5)
    x, weight, bias = arrays(90, 5, 64, 88, "bf16", gate=True, layout=layout)
    said = {"activation": "silu", "gate": True, "weight_layout": layout, "impl": "gather"}
    expected = by_choice(*(a.double() for a in (x, weight, bias)), ids, activation="silu",
                         gate=True, layout=layout)  # fmt: skip
    y = call(x, weight, groups, bias, gather=True, **said)
    close(y[groups.inverse.long()], expected, "bf16")


def test_all_tokens_on_one_expert_are_more_than_one_part():
    ids = choices(70, 3, 1, "first")
    groups = grouped(ids, 3)
    x, weight, _ = arrays(70, 3, 16, 32, "bf16")
    y = call(x, weight, groups, gather=True, impl="stream")
    close(y[groups.inverse.long()], by_choice(x.double(), weight.double(), None, ids), "bf16")


def test_no_rows():
    groups = grouped(torch.empty(0, 2, dtype=torch.int32), 4)
    x, weight, _ = arrays(0, 4, 16, 16)
    assert call(x, weight, groups, gather=True).shape == (0, 16)


_X, _WEIGHT, _BIAS = arrays(8, 4, 16, 24)
_IDS = choices(8, 4, 1)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"groups": (1, 2)}, ArgumentTypeError, "groups is a tuple"),
        ({"groups": 32}, ParameterError, "multiple of 64"),
        ({"x": _X[:3]}, ParameterError, "a row for each"),
        (
            {"weight": _WEIGHT[:2], "bias": None},
            ParameterError,
            "groups are of 4 experts, weight is of 2",
        ),
        ({"weight": _WEIGHT[:, :, :8]}, ParameterError, "x has 24 columns"),
        (
            {"weight": _WEIGHT.permute(2, 1, 0).contiguous().permute(2, 1, 0)},
            ParameterError,
            "strides",
        ),
        ({"weight": _WEIGHT.bfloat16()}, ArgumentTypeError, "bf16"),
        ({"bias": _BIAS[:, :3]}, ParameterError, "bias has shape"),
        ({"activation": "swish"}, ParameterError, "activation='swish'"),
        ({"weight": _WEIGHT[:, :15].contiguous(), "gate": True}, ParameterError, "even number"),
        ({"impl": "cublas"}, ParameterError, "impl='cublas'"),
        ({"block": (1, 2, 3)}, ParameterError, "block="),
        ({"gate": 2}, ArgumentTypeError, "gate=2"),
        ({"weight_layout": "mk"}, ParameterError, "weight_layout='mk'"),
        ({"impl": "stream"}, ParameterError, "this fp32 product"),
        ({"impl": "gather"}, ParameterError, "impl='gather' does not take"),
        ({"impl": "stream", "gather": True}, ParameterError, "one for each token"),
    ],
)
def test_bad_input(change, error, words):
    given = {"x": None, "weight": _WEIGHT, "groups": 64, "bias": _BIAS, **change}
    groups, x = given.pop("groups"), given.pop("x")
    if isinstance(groups, int):
        groups = grouped(_IDS, 4, groups)
    if x is None:
        with quiet():
            x = _X if isinstance(change.get("groups"), tuple) else fkjit.moe_permute(_X, groups)
    with pytest.raises(error, match=f"grouped_linear: .*{words}"):
        call(x, given.pop("weight"), groups, given.pop("bias"), **given)
