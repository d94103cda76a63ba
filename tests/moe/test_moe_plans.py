"""The warm path of routing, on CPU tensors and with kernels that only note their arguments."""

from __future__ import annotations

import itertools
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.runtime import interop  # noqa: E402
from tests.norm.test_norm_plans import plan  # noqa: E402, F401
from tests.op.plan_kit import driver  # noqa: E402, F401

OP = sys.modules[fkjit.moe_route_and_regroup.__module__]._OP
OPTIONS = (2, "softmax", False, None, None, 1.0, 16, None, None)


@pytest.mark.parametrize("views", [True, False])
def test_lists_are_cut_out_of_one_allocation(plan, monkeypatch, views):  # noqa: F811
    if not views:
        monkeypatch.setattr(interop, "fast_view", lambda: None)
    elif interop.fast_view() is None:
        pytest.skip("this PyTorch has no _reinterpret_tensor")
    logits = torch.randn(70, 64)
    (kernel,), request = plan(OP, [logits, *[None] * 11], OPTIONS)
    found = fkjit.moe_route_and_regroup(logits, 2, 16)
    lists = (found.topk_ids, *found.groups)
    shapes = [o.shape for o in request.outputs.values()]
    assert [tuple(x.shape) for x in (found.topk_weights, *lists)] == shapes
    assert all(x.is_contiguous() and x.dtype == torch.int32 for x in lists)
    stores = {x.untyped_storage().data_ptr() for x in lists}
    assert len(stores) == (1 if views else len(lists))
    spans = sorted((x.data_ptr(), x.data_ptr() + 4 * x.numel()) for x in lists)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert all(begin % 64 == spans[0][0] % 64 for begin, _ in spans)
    ((_, values, _),) = kernel.launches
    names = dict(zip(kernel.names, values, strict=False))
    for name, x in zip(("topk_ids", *found.groups._fields), lists, strict=True):
        assert names[name] == x.data_ptr(), name
