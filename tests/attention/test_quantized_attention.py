"""`fkjit.quantize_attention`, `fkjit.quantized_attention` in the interpreter, against float64."""

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

SCHEMES = ("int8", "int8_fp8", "fp8", "fp8_e5m2")
# Of random numbers: what rounding to codes costs, as the norm of the difference.
ERRORS = {"int8": 0.02, "int8_fp8": 0.045, "fp8": 0.065, "fp8_e5m2": 0.08}


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


@pytest.fixture(autouse=True)
def on(monkeypatch):
    """Run as a GPU of this name would; by default one that has everything."""

    def choose(target):
        monkeypatch.setattr("fkjit.jit.build.settings", lambda: replace(settings(), target=target))

    choose("compute_89")
    return choose


def arrays(q=40, k=133, dim=64, dim_v=64, heads=(4, 2), dtype=torch.bfloat16, offset=0.0):
    """q, k, v; keys have a mean of their own in each column."""
    made = torch.Generator().manual_seed(q + k + dim)
    normal = lambda *shape: torch.randn(*shape, generator=made)  # noqa: E731
    keys = normal(1, heads[1], k, dim) + offset * normal(dim)
    return (normal(1, heads[0], q, dim).to(dtype), keys.to(dtype),
            normal(1, heads[1], k, dim_v).to(dtype))  # fmt: skip


def reference(q, k, v, causal=False, window=None, softmax_scale=None):
    """o and lse in float64, of [B, H, S, D]."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    rows, keys = scores.shape[-2:]
    away = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    left, right = window or (None, None)
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    if causal or right is not None:
        hidden |= away > (0 if causal else right)
    if left is not None:
        hidden |= away < -left
    scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


def error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@one_in(2)
@pytest.mark.parametrize(("scheme", "target"), [
    ("int8", "compute_80"), ("int8_fp8", "compute_89"), ("fp8", "compute_90a"),
    ("fp8_e5m2", "compute_89"), ("fp8_e5m2", "compute_90a"),
])  # fmt: skip
def test_against_float64(on, scheme, target):
    on(target)
    q, k, v = arrays(offset=2.0)
    found, lse = fkjit.quantized_attention(q, k, v, scheme=scheme, causal=True, return_lse=True)
    wanted, wanted_lse = reference(q, k, v, causal=True)
    assert found.dtype == q.dtype and found.shape == wanted.shape
    assert error(found, wanted) < ERRORS[scheme]
    assert (lse.double() - wanted_lse).abs().max() < 0.1


def test_codes_made_before_give_the_same_bits():
    q, k, v = arrays()
    codes = fkjit.quantize_attention(q, k, v, "fp8", rotate=True)
    assert codes.q.dtype == torch.float8_e4m3fn and codes.v.shape == (1, 2, 64, 192)
    assert "fp8" in repr(codes)
    said = {"window": (50, None), "softmax_scale": -0.1}
    before = fkjit.quantized_attention(codes, **said)
    assert torch.equal(
        before, fkjit.quantized_attention(q, k, v, scheme="fp8", rotate=True, **said)
    )
    assert error(before, reference(q, k, v, **said)[0]) < ERRORS["fp8"]


def test_other_layouts_windows_and_heads():
    q, k, v = (x.transpose(1, 2).contiguous() for x in arrays(dim=48, dim_v=40))
    said = {"window": (70, 3), "softmax_scale": 0.3}
    found = fkjit.quantized_attention(q, k, v, layout="bshd", **said)
    wanted, _ = reference(*(x.transpose(1, 2) for x in (q, k, v)), **said)
    assert error(found.transpose(1, 2), wanted) < ERRORS["int8"]


@pytest.mark.parametrize(("scheme", "promote"), [("int8_fp8", 0), ("int8_fp8", 32)])
def test_each_interval_is_right(scheme, promote):
    q, k, v = arrays(q=5)
    found = fkjit.quantized_attention(q, k, v, scheme=scheme, promote=promote)
    assert error(found, reference(q, k, v)[0]) < ERRORS[scheme]


@one_in(2)
@pytest.mark.parametrize(("scheme", "dim"), [("int8", 128), ("int8_fp8", 64), ("fp8", 256)])
def test_hopper_has_a_kernel_of_its_own(on, scheme, dim):
    on("compute_90a")
    q, k, v = arrays(q=140, k=261, dim=dim, dim_v=dim - 8, heads=(2, 1), offset=1.0)
    said = {"scheme": scheme, "window": (150, 20), "return_lse": True}
    found, lse = fkjit.quantized_attention(q, k, v, **said)
    wanted, wanted_lse = reference(q, k, v, window=said["window"])
    assert error(found, wanted) < ERRORS[scheme]
    assert (lse.double() - wanted_lse).abs().max() < 0.1


@one_in(2)
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("jump", [1.0, 400.0])
def test_maxima_that_grow_late(on, scheme, jump):
    """Keys are taken from the last to the first: with these each tile has greater scores than the
    one before, at last beyond fp32's range of powers of two."""
    on("compute_90a")
    q, k, v = arrays(q=40, k=700, heads=(1, 1))
    k = (k * torch.linspace(3 * jump, 0, 700)[:, None]).bfloat16()
    codes = fkjit.quantize_attention(q, k, v, scheme, smooth_k=False)
    found, lse = fkjit.quantized_attention(codes, return_lse=True)
    number = codes.k_scales.repeat_interleave(64, 2)[:, :, :700, None]
    exact = codes.q.double() * codes.q_scales[..., None], codes.k.double() * number
    wanted, wanted_lse = reference(*exact, v)
    assert error(found, wanted) < 0.045
    assert ((lse.double() - wanted_lse).abs() / (1 + wanted_lse.abs())).max() < 1e-3


def test_e5m2_reaches_further_down(on):
    """A column most of whose numbers are far below its greatest: e4m3 has zeros for them."""
    on("compute_89")
    q, k, v = arrays(q=24, k=128, heads=(1, 1))
    v = (v.float() * 2.0**-21).bfloat16()
    v[0, 0, 0] = 1
    last = {"window": (0, 0), "smooth_k": False}
    wanted = reference(q, k, v, window=(0, 0))[0]
    errors = [error(fkjit.quantized_attention(q, k, v, scheme=scheme, **last), wanted)
              for scheme in ("fp8", "fp8_e5m2")]  # fmt: skip
    assert errors[0] == 1.0 and errors[1] < 0.15


def test_promotion_keeps_what_short_sums_lose(on):
    """Values that add up, and sums of e4m3 as Hopper's tensor cores make them."""
    on("compute_90a")
    q, k, v = arrays(q=3, k=2048, heads=(1, 1))
    v = (v.float() + 1).bfloat16()
    codes = fkjit.quantize_attention(q, k, v, "fp8")
    with fkjit.sanitize(race=False):
        right = fkjit.quantized_attention(codes, promote=256)
        never, often = (
            error(fkjit.quantized_attention(codes, promote=n), right.double()) for n in (0, 512)
        )
    assert never > 0.01 and often < never / 3


def test_smooth_keys_and_rotation_leave_less_to_round():
    """A mean of keys, and a column that is far greater than the others."""
    q, k, v = arrays(q=24, offset=4.0)
    q[..., 5] *= 8
    wanted, wanted_lse = reference(q, k, v)
    errors = []
    for more in ({"smooth_k": False}, {}, {"rotate": True}):
        found, lse = fkjit.quantized_attention(q, k, v, return_lse=True, **more)
        errors.append(error(found, wanted))
    assert errors[0] > 2 * errors[1] > 2 * errors[2]
    assert (lse.double() - wanted_lse).abs().max() < 0.05


@pytest.mark.parametrize("scales", ["head", "tensor"])
def test_scales_of_heads_and_tensors(scales):
    q, k, v = arrays()
    codes = fkjit.quantize_attention(q, k, v, scales=scales)
    of_heads = codes.q_scales.amax(2), codes.k_scales.amax(2)
    assert torch.equal(codes.q_scales, of_heads[0][..., None].expand_as(codes.q_scales))
    most = q.float().abs().amax((2, 3) if scales == "head" else (1, 2, 3), keepdim=True)
    assert torch.equal(codes.q_scales, (most / 127)[..., 0].expand_as(codes.q_scales))
    assert codes.k_scales.unique().numel() == (2 if scales == "head" else 1)
    found = fkjit.quantized_attention(codes)
    assert error(found, reference(q, k, v)[0]) < 0.03


@pytest.mark.parametrize("rows", [64, 128])
def test_scales_of_blocks_of_rows(rows):
    """Of q as of k; those of k stand once for each 64 keys."""
    q, k, v = arrays(q=140, k=330, heads=(2, 1))
    codes = fkjit.quantize_attention(q, k, v, scales=f"block{rows}", smooth_k=False)
    for name, x, scales in (("q", q, codes.q_scales), ("k", k, codes.k_scales)):
        most = [part.float().abs().amax((2, 3)) / 127 for part in x.split(rows, dim=2)]
        each = rows if name == "q" else rows // 64
        wanted = torch.stack(most, -1).repeat_interleave(each, -1)[..., : scales.shape[-1]]
        assert torch.equal(scales, wanted), name
    found = fkjit.quantized_attention(codes)
    assert error(found, reference(q, k, v)[0]) < ERRORS["int8"]


def test_a_great_weight_leaves_room_for_small_ones(on):
    """The last key has nearly all of a row's weight, others 2^-16 of it each, and values count
    them: those of its own tile are lost."""
    on("compute_90a")
    q, k, v = torch.ones(1, 1, 4, 64), torch.zeros(1, 1, 640, 64), torch.ones(1, 1, 640, 64)
    k[:, :, -1], v[:, :, -1] = 16 * np.log(2) / 8, 0
    made = [x.bfloat16() for x in (q, k, v)]
    found = fkjit.quantized_attention(*made, scheme="fp8", smooth_k=False)
    assert error(found, reference(*made)[0]) < 0.15


def test_no_keys_and_rows_without_keys():
    q, k, v = arrays(q=70, k=64)
    found, lse = fkjit.quantized_attention(q, k, v, causal=True, return_lse=True)
    assert (found[:, :, :6] == 0).all() and (lse[:, :, :6] == -torch.inf).all()
    none, lse = fkjit.quantized_attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert (none == 0).all() and (lse == -torch.inf).all()
    assert fkjit.quantized_attention(q[:, :, :0], k, v).shape == (1, 4, 0, 64)


def test_a_nan_stays_in_its_rows():
    q, k, v = arrays(q=8, k=64)
    q[0, 1, 3, 7] = float("nan")
    found = fkjit.quantized_attention(q, k, v)
    assert found[0, 1, 3].isnan().all() and found.isnan().sum() == 64


def test_numpy_arrays():
    q, k, v = (x.float().numpy().astype(np.float16) for x in arrays(q=5, k=64))
    found = fkjit.quantized_attention(q, k, v)
    wanted = reference(*(torch.from_numpy(x) for x in (q, k, v)))[0]
    assert isinstance(found, np.ndarray) and found.dtype == np.float16
    assert error(torch.from_numpy(found), wanted) < ERRORS["int8"]


# ------------------------------------------------------------------ errors


def codes(scheme="int8"):
    return fkjit.quantize_attention(*arrays(q=5, k=64), scheme)


@pytest.mark.parametrize(("said", "message"), [
    ({"scheme": "int4"}, "scheme='int4' is not one of int8, int8_fp8, fp8, fp8_e5m2"),
    ({"scales": "row"}, "scales='row' is not one of block, block64, block128, head, tensor"),
    ({"layout": "sbhd"}, "layout='sbhd'"),
    ({"promote": 32}, "promote=32; allowed: 0 or None with a v that is no codes"),
    ({"promote": 48, "scheme": "fp8"}, "promote=48; allowed: 0, 32, 64, 256, 512, 1024 or"),
    ({"block": (32, 32)}, "block="),
    ({"softmax_scale": float("nan")}, "softmax_scale"),
    ({"window": (-3, 0)}, "window"),
])  # fmt: skip
def test_options_are_checked(said, message):
    with pytest.raises(ParameterError) as caught:
        fkjit.quantized_attention(*arrays(q=5, k=64), **said)
    assert message in str(caught.value)


def test_arrays_are_checked():
    q, k, v = arrays(q=5, k=64)
    with pytest.raises(ArgumentTypeError, match="q is a Tensor; allowed without k and v"):
        fkjit.quantized_attention(q)
    with pytest.raises(ArgumentTypeError, match="smooth_k='no' is not True or False"):
        fkjit.quantized_attention(q, k, v, smooth_k="no")
    with pytest.raises(ArgumentTypeError, match="fp32"):
        fkjit.quantize_attention(q.float(), k.float(), v.float())
    with pytest.raises(ParameterError, match="head_dim=56; allowed: multiples of 16"):
        fkjit.quantize_attention(q[..., :56], k[..., :56], v)
    with pytest.raises(ParameterError, match="rotate=True with head_dim=48"):
        fkjit.quantize_attention(*arrays(q=5, k=64, dim=48), rotate=True)
    with pytest.raises(ParameterError, match="k is given beside AttentionCodes"):
        fkjit.quantized_attention(codes(), k)
    with pytest.raises(ParameterError, match="scales is given beside AttentionCodes"):
        fkjit.quantized_attention(codes(), scales="head")
    with pytest.raises(ArgumentTypeError, match="float8_e5m2"):
        fkjit.quantized_attention(codes("fp8_e5m2")._replace(scheme="fp8"))
    with pytest.raises(
        ParameterError, match="scheme='int8' with AttentionCodes of scheme 'fp8'; allowed: theirs"
    ):
        fkjit.quantized_attention(codes("fp8"), scheme="int8")
    made = codes("fp8")
    for name in ("k_scales", "v", "v_scales", "shift"):
        with pytest.raises(ParameterError, match=name):
            fkjit.quantized_attention(made._replace(**{name: getattr(made, name)[..., 1:]}))


def test_what_a_gpu_cannot_is_refused_by_name(on):
    on("compute_80")
    with pytest.raises(ParameterError, match="e4m3 on sm_80; allowed: 'int8' from sm_80"):
        fkjit.quantized_attention(*arrays(q=5, k=64), scheme="int8_fp8")
    on("compute_75")
    with pytest.raises(
        ParameterError, match="quantize_attention: on sm_75; allowed: GPUs from sm_80"
    ):
        fkjit.quantized_attention(*arrays(q=5, k=64, dtype=torch.float16))
    on("compute_90a")  # whose portable kernel, for scales below 0, has no registers for this
    with pytest.raises(ParameterError, match="head_dim=256"):
        fkjit.quantized_attention(*arrays(q=5, k=64, dim=256), scheme="fp8", softmax_scale=-1.0)


def test_gradients_are_refused_by_name():
    q, k, v = arrays(q=5, k=64)
    with pytest.raises(ParameterError, match="quantize_attention: q requires grad"):
        fkjit.quantized_attention(q.requires_grad_(), k, v)
    made = fkjit.quantize_attention(q.detach(), k, v)
    with pytest.raises(ParameterError, match="quantized_attention: v requires grad"):
        fkjit.quantized_attention(made._replace(v=v.clone().requires_grad_()))
