"""The warm path of streamed steps: CPU tensors, kernels that only note their arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.ops.attention.decode import settled  # noqa: E402
from fkjit.ops.step import begin, logits, stream  # noqa: E402
from fkjit.ops.step.call import Norm  # noqa: E402
from fkjit.runtime import workspace  # noqa: E402
from fkjit.runtime.tensor_map import BYTES, TensorMap  # noqa: E402
from fkjit.settings import settings  # noqa: E402
from tests.op.plan_kit import Kernel, driver  # noqa: E402, F401

RMS, LAYER = (Norm(torch.ones(128).half(), bias, 1e-5) for bias in (None, torch.ones(128).half()))


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    chosen = replace(settings(), target="compute_90a")
    monkeypatch.setattr("fkjit.jit.build.settings", lambda: chosen)
    monkeypatch.setattr(workspace, "find", lambda *_: (4096, 8192, None))
    monkeypatch.setattr(TensorMap, "encode", lambda one, address: bytes(BYTES))


def half(*shape):
    return torch.zeros(shape, dtype=torch.float16)


def whole(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def calls():
    """(op, inputs, outputs, options) of every launch of a step."""
    cache = fkjit.PagedKVCache(
        2, page_size=8, num_kv_heads=2, head_dim=64, dtype=torch.float16, device="cpu",
        max_sequences=3, max_length=16, framework="torch",
    )  # fmt: skip
    pages = cache.planes[0].arrays[:2]
    tables = (cache.page_table, cache.capacities, cache.lengths)
    ids = torch.zeros(3, dtype=torch.int64)
    for norm in (RMS, LAYER):
        kind = "rms" if norm.bias is None else "layer"
        moments = torch.zeros(2, 3, *(() if norm is RMS else (2,)))
        scaled = (half(3, 128), half(512, 128), None, moments,
                  *((None, None) if norm is RMS else norm[:2]))  # fmt: skip
        learned = None if norm is RMS else half(30, 128)
        yield (begin._OP, (ids, whole(3), whole(3), half(40, 128), learned, norm.weight, *tables),
               (), (8, kind))  # fmt: skip
        table = torch.zeros(20, 64) if norm is RMS else None
        places = (whole(3), None if table is None else whole(3), table, *pages)
        yield stream._APPEND, (*scaled, *places), (), (4, "nhd", 1e-5, None)
        yield (
            stream._LEAVING,
            (half(3, 128), half(128, 128), None, None, None, None, half(3, 128), norm.weight),
            (),
            ("none", False, 0.0, kind, None),
        )
        yield stream._LINEAR, (*scaled, None, None), (), ("silu", True, 1e-5, "none", None)
        yield (logits._LOGITS, (*scaled, None), (torch.zeros(3, 512), None), (1e-5, None))
    yield logits._PICK, (whole(8, 3, 2), ids, whole(3), whole(3)), (), (False,)
    yield (settled._OP, (half(3, 4, 64), *pages, cache.page_table, cache.lengths, whole(3), None,
                         None), (), ("nhd",))  # fmt: skip


@pytest.mark.parametrize("number", range(12))
def test_a_call_that_comes_again_launches_what_its_spec_says(number, driver):  # noqa: F811
    op, inputs, outputs, options = list(calls())[number]
    arrays = [*inputs, *outputs, *(None,) * (len(op.outputs) - len(outputs))]
    request = op.request(arrays, options)
    kernels = [Kernel(launch.spec, launch.params) for launch in request.launches]
    try:
        op.plans.store(arrays, options, request, kernels, op._pairs(request))
        op(inputs, outputs, options)
    finally:
        op.plans.forget()
    (launch,), (kernel,) = request.launches, kernels
    grid = launch.spec.grid(launch.params, launch.problem)
    assert [launched for launched, *_ in kernel.launches] == [grid]
