"""The warm path of `fkjit.attention`: which calls the last plan takes, and what it launches."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

import fkjit
from fkjit.errors import DeviceError, LaunchError
from fkjit.ops.op import launches
from fkjit.ops.op import plan as plans
from fkjit.ops.op.plan import MISSED
from fkjit.runtime import device, interop, workspace
from fkjit.runtime.tensor_map import TensorMap
from fkjit.settings import settings
from tests.op.plan_kit import STREAM, Kernel, driver

torch = pytest.importorskip("torch", reason="needs torch")

__all__ = ["driver"]
OP = sys.modules[fkjit.attention.__module__]._ATTENTION
CAUSAL = (True, None, None, "auto", False, "bhsd", True)  # the options of `call`


def call(q, k, v):
    return fkjit.attention(q, k, v, causal=True)


def tensors():
    return [torch.randn(1, heads, 40, 64).half() for heads in (4, 2, 2)]


def whole(inputs):
    """All arrays of the op."""
    return [*inputs, *(None,) * (len(OP.names) - len(inputs))]


def planned(*inputs, options=CAUSAL):
    """The kernel of a plan for these tensors."""
    arrays = whole(inputs)
    request = OP._request(OP._views(arrays), options)
    (launch,) = request.launches
    kernel = Kernel(launch.spec, launch.params)
    OP.plans.store(arrays, options, request, [kernel], OP._pairs(request))  # type: ignore[list-item]
    return kernel


@pytest.fixture
def kernel(driver):
    OP.plans.forget()
    yield planned(*tensors())
    OP.plans.forget()


def last(*inputs, options=CAUSAL):
    """Whether the last plan takes them."""
    try:
        return OP.plans.try_last(inputs, options) is not MISSED
    except TypeError:  # no key
        return False


def test_the_next_call_alike_looks_nothing_up(kernel, monkeypatch):
    q, k, v = tensors()
    assert not last(q, k, v)  # until one was found by its geometry
    o = call(q, k, v)
    assert o.shape == q.shape and o.dtype == q.dtype
    monkeypatch.setattr(OP.plans, "lookup", lambda *a: pytest.fail("looked up"))
    others = tensors()
    others[2] = others[1]
    addresses = [x.data_ptr() for x in (*others, call(*others))]
    assert kernel.launches[-1][1][:5] == (*addresses, 0) and len(kernel.launches) == 2
    assert {stream for *_, stream in kernel.launches} == {STREAM}
    with fkjit.sanitize(), pytest.raises(DeviceError, match="attention: the arrays are on a GPU"):
        call(q, k, v)
    with fkjit.sanitize(mem=False, race=False):
        call(q, k, v)
    assert len(kernel.launches) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:, :, :39],
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: x.bfloat16(),
        lambda x: torch._neg_view(x),
        lambda x: x.detach().requires_grad_(),
        lambda x: torch.nn.Parameter(x, requires_grad=False),
        lambda x: torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape),  # other alignment
        lambda x: x.to("meta"),
        lambda x: x.numpy(),
        lambda x: None,
    ],
)
@pytest.mark.parametrize("which", [0, 2])
def test_other_tensors_are_left_to_the_look_up(kernel, change, which):
    inputs = tensors()
    call(*inputs)
    assert last(*inputs)
    inputs[which] = change(inputs[which])
    assert not last(*inputs)


def test_other_options_and_modes_are_left_to_it(kernel):
    inputs = tensors()
    call(*inputs)
    assert not last(*inputs, options=(False, *CAUSAL[1:]))
    assert not last(*inputs, options=([64], *CAUSAL[1:]))  # no key
    assert not last(*inputs, None, None, torch.rand(4))  # slopes besides
    with torch.autocast("cpu"):
        assert not last(*inputs)
    with torch.no_grad():
        assert last(*inputs)
    assert last(*inputs)


def test_a_block_that_is_no_key_is_still_a_tile():
    x = torch.randn(1, 1, 20, 32).half()
    assert torch.equal(fkjit.attention(x, x, x, block=[16, 16]), fkjit.attention(x, x, x, block=16))


def test_what_autocast_has_made_is_not_expected(kernel):
    inputs = tensors()
    with torch.autocast("cpu", dtype=torch.float16):
        for _ in range(2):
            call(*inputs)
        assert not last(*inputs)
    assert len(kernel.launches) == 2 and not last(*inputs)


def test_results_are_contiguous_whatever_the_queries_are(kernel):
    options = (*CAUSAL[:4], True, *CAUSAL[5:])
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors()]
    kernel = planned(*inputs, options=options)
    with torch.inference_mode():
        o, lse = fkjit.attention(*inputs, causal=True, return_lse=True)
    assert not inputs[0].is_contiguous() and o.is_inference()
    for found, like in ((o, torch.empty(1, 4, 40, 64).half()), (lse, torch.empty(1, 4, 40))):
        assert (found.shape, found.stride(), found.dtype) == (like.shape, like.stride(), like.dtype)
        assert found.untyped_storage().nbytes() == like.untyped_storage().nbytes()
    assert kernel.launches[-1][1][3:5] == (o.data_ptr(), lse.data_ptr())
    assert not fkjit.attention(*inputs, causal=True, return_lse=True)[0].is_inference()


@pytest.mark.parametrize("shape", [(), (0,), (7,), (0, 3), (1, 1), (1, 5, 1), (3, 1, 2, 4)])
def test_outlines_have_no_memory_and_give_what_empty_gives(shape):
    like, expected = interop.outline(shape, "bf16", "cpu"), torch.empty(shape).bfloat16()
    assert like.untyped_storage().nbytes() == 0
    for _ in range(2):
        found = torch.empty_like(like)
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


def test_two_geometries_of_one_call_take_turns(kernel):
    inputs, others = tensors(), [x[:, :, :33] for x in tensors()]
    kernels = kernel, planned(*others)
    for _ in range(3):
        call(*inputs)
        call(*others)
    assert [len(one.launches) for one in kernels] == [3, 3]


def test_score_features_have_plans_of_their_own(kernel):
    inputs, slopes = tensors(), torch.rand(4)
    window = (*CAUSAL, (9, None), None)
    arrays = (*inputs, None, None, slopes, None, None, None)
    other = planned(*arrays, options=window)
    assert other.spec.op == "attention_form"
    for _ in range(3):
        call(*inputs)
        o = fkjit.attention(*inputs, causal=True, window=[9, None], alibi_slopes=slopes)
        given = other.launches[-1][1]
        assert slopes.data_ptr() in given and o.data_ptr() in given
    assert [len(one.launches) for one in (kernel, other)] == [3, 3]
    assert last(*arrays, options=window) and not last(*inputs, options=window)


def test_a_torch_without_that_test_looks_up_each_call(kernel, monkeypatch):
    monkeypatch.setattr(plans, "_guards", lambda: None)
    inputs = tensors()
    for _ in range(3):
        call(*inputs)
    assert len(kernel.launches) == 3 and not last(*inputs)


def test_each_launch_has_the_addresses_and_the_stream_of_its_call(kernel, monkeypatch):
    streams = []  # the last one is the current one
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: streams[-1])
    OP.plans.forget()
    inputs, kernel = tensors(), planned(*tensors())
    for stream in (STREAM, STREAM + 1, STREAM):
        streams.append(stream)
        inputs[1] = inputs[1].clone()
        o = call(*inputs)
        values, found = kernel.launches[-1][1:]
        assert values[:5] == (*[x.data_ptr() for x in (*inputs, o)], 0) and found == stream
    assert len(kernel.launches) == 3 and len({v[5:] for _, v, _ in kernel.launches}) == 1


def test_a_launch_with_tensor_maps_is_kept_by_its_addresses(driver, monkeypatch):
    """Of flash_sm90: to encode four maps and to pack everything takes longer than the launch."""
    encoded: list[int] = []
    note = lambda self, at: encoded.append(at) or at.to_bytes(8, "little") * 16  # noqa: E731
    monkeypatch.setattr(TensorMap, "encode", note)
    monkeypatch.setattr(launches, "MAX_LAUNCHES", 2)
    hopper = replace(settings(), target="compute_90a")
    monkeypatch.setattr("fkjit.jit.build.settings", lambda: hopper)
    OP.plans.forget()
    kernel = planned(*tensors())
    assert kernel.spec.name == "flash_sm90"
    (plan,) = OP.plans.known
    (start,) = plan.steps.starts
    rest, counters = (0,), (0,)  # lse; each tile has a block of its own
    for addresses in ((1, 2, 3, 4), (5, 2, 3, 4), (6, 2, 3, 4), (1, 2, 3, 4)):
        for stream in (STREAM, STREAM + 1):
            start((*addresses, *rest, *counters), stream)
            values, found = kernel.launches[-1][1:]
            maps = tuple(int.from_bytes(value[:8], "little") for value in values[:4])
            assert (maps, found) == (addresses, stream) and values[4:6] == (0, 0)
        assert len(start.launches) <= 2
    assert sorted(encoded) == [1, 2, 3, 4, 5, 6]  # once an address
    OP.plans.forget()


@pytest.mark.parametrize("way", ["launch", "launch_together", "launch_dependent"])
def test_a_kept_launch_goes_the_way_of_its_kernel(kernel, way, monkeypatch):
    seen = []
    for name in ("launch", "launch_together", "launch_dependent"):
        note = lambda *given, name=name: seen.append((name, given))  # noqa: E731
        monkeypatch.setattr(f"fkjit.runtime.device._frame.{name}", note, raising=False)
    kernel.dependent = way == "launch_dependent"
    kernel.spec = replace(kernel.spec, cooperative=way == "launch_together")
    kept = device.KeptLaunch(kernel, (3, 2, 1), b"arguments" * 30)
    kept(STREAM)
    rest = () if way == "launch_together" else (0,)
    assert seen == [(way, (kernel.function, 3, 2, 1, 128, 1, 1, 0, STREAM, kept.at, *rest))]


def test_a_refused_launch_says_which(kernel, monkeypatch):
    def refuse(*given):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr("fkjit.runtime.device._frame.launch", refuse)
    OP.plans.forget()
    planned(*tensors())
    with pytest.raises(LaunchError, match=r"attention\.flash grid=\(4, 1, 1\): CUDA_ERROR_ILLEGAL"):
        call(*tensors())


def test_a_device_is_looked_up_without_making_one_anew(monkeypatch):
    monkeypatch.setattr(workspace, "_devices", {})
    assert workspace._device(3) is workspace._device(3) is not workspace._device(4)
