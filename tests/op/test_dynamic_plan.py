"""Plans for all sizes do what the full check asks for, whatever the sizes, strides and addresses;
what the check refuses they leave to it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fkjit
from fkjit.arch import target
from fkjit.ops.norm.call import gradient
from fkjit.ops.op import request
from fkjit.ops.op.dynamic_plan import MOST, DynamicPlans
from fkjit.ops.op.plan_function import MISSED
from tests.core.sampling import one_in
from tests.op.dynamic_kit import Calls, Recorder, driver, dynamic  # noqa: F401

DTYPES = (torch.bfloat16, torch.float32)


def op_of(function: Any, name: str = "_OP") -> Any:
    return getattr(sys.modules[function.__module__], name)


SMALL = st.sampled_from([1, 2, 4, 2, 4, 0])
LONG = st.sampled_from([1, 2, 7, 8, 16, 63, 64, 65, 100, 128, 300, 512])


@st.composite
def array(draw: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Of this shape; now and then with gaps, transposed, repeated, off a 16-byte boundary, or of
    another shape."""
    way = draw(st.sampled_from(["plain"] * 8 + ["gaps", "turned", "offset", "repeated", "wrong"]))
    if way == "wrong" and shape:
        shape = (*shape[:-1], shape[-1] + 1)
    if way == "gaps" and shape:
        more = draw(st.sampled_from([1, 8]))
        return torch.zeros((*shape[:-1], shape[-1] + more), dtype=dtype)[..., : shape[-1]]
    if way == "turned" and len(shape) > 2:
        return torch.zeros((shape[1], shape[0], *shape[2:]), dtype=dtype).transpose(0, 1)
    if way == "repeated" and len(shape) > 1:
        return torch.zeros((1, *shape[1:]), dtype=dtype).expand(shape)
    if way == "offset":
        count = 1
        for n in shape:
            count *= n
        return torch.zeros(count + 1, dtype=dtype)[1:].view(shape)
    return torch.zeros(shape, dtype=dtype)


@st.composite
def added(draw: Any) -> Any:
    shape = tuple(draw(st.lists(LONG, min_size=1, max_size=2)))
    dtype = draw(st.sampled_from(DTYPES))
    a, b = draw(array(shape, dtype)), draw(array(shape, dtype))
    out = draw(st.sampled_from(["none"] * 3 + ["a", "new"]))
    given = a if out == "a" else draw(array(shape, dtype)) if out == "new" else None
    return [a, b, given], ()


@st.composite
def summed(draw: Any) -> Any:
    shape = tuple(draw(st.lists(LONG, min_size=1, max_size=3)))
    x = draw(array(shape, draw(st.sampled_from(DTYPES))))
    return [x, None], (draw(st.sampled_from([None, -1])), None, draw(st.booleans()))


@st.composite
def normed(draw: Any) -> Any:
    columns = draw(st.sampled_from([8, 64, 100, 1024, 3000, 20_000]))
    shape, dtype = (draw(LONG), columns), draw(st.sampled_from(DTYPES))
    x = draw(array(shape, dtype))
    residual = draw(array(shape, dtype)) if draw(st.booleans()) else None
    weight = draw(array((columns,), dtype)) if draw(st.booleans()) else None
    out = x if draw(st.integers(0, 4)) == 0 else None
    return [x, weight, None, residual, out], (1e-6,)


@st.composite
def routed(draw: Any) -> Any:
    experts = draw(st.sampled_from([8, 16, 60, 64, 128]))
    logits = draw(array((draw(LONG), experts), draw(st.sampled_from(DTYPES))))
    return logits, draw(st.sampled_from([1, 2, 8]))


@st.composite
def turned(draw: Any) -> Any:
    shape = (draw(SMALL), draw(SMALL), draw(LONG), draw(st.sampled_from([64, 128, 100])))
    dtype = draw(st.sampled_from(DTYPES))
    q = draw(array(shape, dtype))
    k = draw(array((shape[0], draw(SMALL), *shape[2:]), dtype)) if draw(st.booleans()) else None
    layout = draw(st.sampled_from(["bhsd", "bhsd", "bshd"]))
    return [q, k], (draw(st.integers(-1, 100)), None, None, None, False, layout, False)


@st.composite
def attended(draw: Any, dense: bool = True) -> Any:
    batch, heads, dim = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4])), 64
    group, dtype = draw(st.sampled_from([1, 2])), draw(st.sampled_from(DTYPES[:1]))
    queries, keys = draw(LONG), draw(LONG)
    q = draw(array((batch, heads * group, queries, dim), dtype))
    k, v = (draw(array((batch, heads, keys, dim), dtype)) for _ in range(2))
    options = (draw(st.booleans()), None, None, "auto", draw(st.booleans()), "bhsd", True)
    features = draw(st.sampled_from(["none", "none", "window", "bias"]))
    if features == "none":
        return [q, k, v], options
    bias = None
    if features == "bias":
        shape = (draw(st.sampled_from([1, batch])), 1, draw(st.sampled_from([1, queries])), keys)
        bias = draw(array(shape, dtype))
    window = (16, 4) if features == "window" else None
    return [q, k, v, None, None, None, bias], (*options, window, None)


@st.composite
def packed(draw: Any) -> Any:
    heads, total = draw(st.sampled_from([1, 2, 4])), draw(LONG)
    q, k, v = (draw(array((total, heads, 64), torch.bfloat16)) for _ in range(3))
    ends = torch.zeros(draw(st.sampled_from([2, 3, 5])), dtype=torch.int32)
    lengths = (draw(LONG), draw(LONG))
    return [q, k, v, ends, ends], (
        *lengths,
        draw(st.booleans()),
        None,
        None,
        False,
        True,
        None,
        None,
    )


@st.composite
def decoded(draw: Any) -> Any:
    batch, heads, group = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    keys, dtype = draw(LONG), torch.bfloat16
    q = draw(array((batch, heads * group, draw(st.sampled_from([1, 1, 2])), 64), dtype))
    k, v = (draw(array((batch, heads, keys, 64), dtype)) for _ in range(2))
    return [q, k, v], ("bhsd", True, None, draw(st.sampled_from([None, 128])), draw(st.booleans()))


@st.composite
def differentiated(draw: Any) -> Any:
    batch, heads, group = (draw(st.sampled_from([1, 2])) for _ in range(3))
    queries, keys, dtype = draw(LONG), draw(LONG), torch.bfloat16
    dout, q, o = (draw(array((batch, heads * group, queries, 64), dtype)) for _ in range(3))
    k, v = (draw(array((batch, heads, keys, 64), dtype)) for _ in range(2))
    lse = draw(array((batch, heads * group, queries), torch.float32))
    return [dout, q, k, v, o, lse], (draw(st.booleans()), None, True, "auto", "bhsd")


@st.composite
def norm_differentiated(draw: Any) -> Any:
    columns, dtype = draw(st.sampled_from([64, 1024, 10_000])), draw(st.sampled_from(DTYPES))
    rows = draw(LONG)
    dy, x = (torch.zeros(rows, columns, dtype=dtype) for _ in range(2))
    weight = torch.zeros(columns, dtype=dtype)
    inputs = [dy, None, x, weight, None, torch.zeros(rows), weight]
    return inputs, (draw(st.booleans()), False)


@st.composite
def regrouped(draw: Any) -> Any:
    ids = draw(array((draw(LONG), draw(st.sampled_from([1, 2, 8]))), torch.int32))
    return [ids], (64, draw(st.sampled_from([1, 16])), None, None)


CASES = {
    "vector_add": (op_of(fkjit.vector_add), added()),
    "reduce_sum": (op_of(fkjit.reduce_sum, "_SUM"), summed()),
    "rms_norm": (op_of(fkjit.rms_norm, "_RMS"), normed()),
    "layer_norm": (op_of(fkjit.layer_norm, "_LAYER"), normed()),
    "moe_route": (
        op_of(fkjit.moe_route),
        routed().map(lambda x: ([x[0]], (x[1], "softmax", False, None, None, 1.0, None))),
    ),
    "moe_route_and_regroup": (
        op_of(fkjit.moe_route_and_regroup),
        routed().map(
            lambda x: ([x[0]], (x[1], "softmax", False, None, None, 1.0, 16, None, None, None))
        ),
    ),
    "rope": (op_of(fkjit.rope), turned()),
    "attention_decode": (op_of(fkjit.attention_decode, "_CONTIGUOUS"), decoded()),
    "attention_backward": (op_of(fkjit.attention_backward, "_PLAIN"), differentiated()),
    "rms_norm_backward": (gradient("rms_norm"), norm_differentiated()),
    "layer_norm_backward": (
        gradient("layer_norm"),
        norm_differentiated().map(lambda x: ([*x[0][:4], x[0][5], *x[0][5:]], x[1])),
    ),
    "moe_regroup": (op_of(fkjit.moe_regroup), regrouped()),
    "attention": (op_of(fkjit.attention, "_ATTENTION"), attended()),
    "attention_varlen": (op_of(fkjit.attention, "_VARLEN"), packed()),
}


def check(name: str, recorder: Recorder) -> None:
    """Series of calls; in some of them a plan answers a call that it was not traced from."""
    op, calls = CASES[name]
    answered = 0

    @settings(
        max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(st.lists(calls, min_size=10, max_size=14))
    def series(several: Any) -> None:
        nonlocal answered
        seen = Calls(op, recorder)
        for arrays, options in several:
            seen.check(arrays, options)
        assert not seen.untraced
        answered += seen.answered

    series()
    assert answered > 5


@one_in(5)
@pytest.mark.parametrize("name", CASES)
def test_any_sizes(name: str, dynamic: Recorder) -> None:  # noqa: F811
    check(name, dynamic)


@one_in(3)
@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_backward"])
def test_any_sizes_on_hopper(
    name: str,
    dynamic: Recorder,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose kernel takes tensor maps."""
    monkeypatch.setattr(request, "interpreter_target", lambda: target("sm_90a"))
    check(name, dynamic)
    assert any("sm90" in kernel for kernel in dynamic.kernels)


def test_a_check_that_reads_an_array_has_no_plan(dynamic: Recorder) -> None:  # noqa: F811
    """As kv_append's does on a CPU."""
    k, slots = torch.zeros(4, 2, 64), torch.arange(4)
    pages = [torch.zeros(4, 16, 2, 64) for _ in range(2)]
    calls = Calls(op_of(fkjit.kv_append), dynamic)
    calls.check([k, k, slots, *pages], ("same", "nhd"))
    assert calls.traces == calls.untraced == 1


def test_plans_are_few_and_the_last_used_stay() -> None:
    plans = DynamicPlans(False)
    takes = lambda n: lambda sizes, pointers: n if sizes == n else MISSED  # noqa: E731
    assert not plans.wants_trace()  # of the first geometry
    for n in range(MOST):
        assert plans.wants_trace()
        plans.add(takes(n))
    assert plans.run(0, [], []) == 0 and plans.hits == 1
    assert not plans.wants_trace()  # each was worth but a call
    plans.add(takes(MOST))
    assert len(plans.plans) == MOST
    assert plans.run(0, [], []) == 0 and plans.run(1, [], []) is MISSED
    plans.hits = 1000
    assert plans.wants_trace()


def test_what_cannot_be_traced_is_tried_once() -> None:
    plans = DynamicPlans(False)
    plans.wants_trace()
    assert plans.wants_trace()
    plans.add(None)
    assert not plans.wants_trace()


def test_gradients_are_not_lost() -> None:
    plans = DynamicPlans(True)
    plans.add(lambda sizes, pointers: "made")
    assert plans.run((), [], []) is MISSED
    with torch.no_grad():
        assert plans.run((), [], []) == "made"
