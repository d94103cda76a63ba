"""`fkjit.prepare(..., arch="sm_90a")`: what a GPU will ask for, without one and without arrays."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.cache import lookup
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.runtime.abstract import described, device_for, taking
from fkjit.settings import settings

QKV = ("bf16[2, 16, 4096, 128]",) * 3
PAGES = ("bf16[64, 16, 8, 128]",) * 2
GROUPS = fkjit.MoeGroups("int32[8192]", "int32[64]", "int32[1]", "int32[1024, 8]", "int32[65]",
                         "int32[64]")  # fmt: skip
CODES = fkjit.QuantizedTensor("uint8[1024, 2048]", "bf16[1024, 32]", "int4_group")


def asked(op, *args, arch="sm_90a", **options):
    """What would be compiled."""
    found = []
    with taking(lambda spec, params, to: found.append(f"{spec.id} {spec.label(params)} {to.name}")):
        fkjit.prepare(op, *args, arch=arch, **options)
    return found


def test_the_kernels_are_those_of_a_call_on_that_gpu():
    plain = "head_dim=128 head_dim_v=128 block=128 optimistic=True"
    assert asked("attention", *QKV, causal=True) == [f"attention.flash_sm90 bf16 {plain} sm_90a"]
    (found,) = asked("attention", *QKV, window=(1024, 0), softcap=30.0)
    assert "form=softcap" in found and found.startswith("attention_form.flash_sm90 bf16 head_dim=1")
    (found,) = asked("attention", *QKV, arch="sm_89")
    assert found.startswith("attention.flash bf16 head_dim=128") and found.endswith(" sm_89")
    (found,) = asked("attention", "bf16[2, 16, 1, 128]", *QKV[1:])
    assert found.startswith("attention_decode.split"), "a delegate's kernels are prepared as well"


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("attention_varlen", (*("bf16[4096, 16, 128]",) * 3, *("int32[9]",) * 2, 1024, 1024)),
        ("attention_backward", (*QKV, *QKV[:2], "fp32[2, 16, 4096]")),
        ("attention_decode", ("fp16[8, 32, 128]", *("fp16[8, 8, 4096, 128]",) * 2, "int32[8]")),
        ("paged_attention", ("bf16[8, 32, 128]", PAGES, "int32[8, 32]", "int32[8]")),
        ("kv_append", ("bf16[8, 8, 128]", "bf16[8, 8, 128]", PAGES, "int64[8]")),
        ("kv_read", (PAGES, "int64[8]")),
        ("rope_kv_append", ("bf16[8, 32, 128]", *("bf16[8, 8, 128]",) * 2, PAGES, "int64[8]",
                            "int64[8]")),
        ("merge_states", ("bf16[8, 32, 1, 128]", "fp32[8, 32, 1]") * 2),
        ("rms_norm", ("bf16[4096, 4096]", "bf16[4096]")),
        ("layer_norm", ("fp32[4096, 4096]",)),
        ("rope", ("bf16[2, 16, 4096, 128]", "bf16[2, 4, 4096, 128]")),
        ("linear", ("bf16[4096, 4096]", "bf16[1024, 4096]")),
        ("gelu_linear", ("bf16[4096, 4096]", "bf16[1024, 4096]", "bf16[1024]")),
        ("reduce_sum", ("bf16[16, 4096]",)),
        ("reduce_max", ("bf16[16, 4096]", -1)),
        ("reduce_mean", ("bf16[16, 4096]",)),
        ("vector_add", ("fp16[16, 4096]", "fp16[16, 4096]")),
        ("moe_route", ("fp32[1024, 64]", 8)),
        ("moe_regroup", ("int32[1024, 8]", 64)),
        ("moe_route_and_regroup", ("fp32[1024, 64]", 8)),
        ("moe_permute", ("bf16[1024, 4096]", GROUPS)),
        ("moe_combine", ("bf16[8192, 4096]", "int32[1024, 8]", "fp32[1024, 8]")),
        ("grouped_linear", ("bf16[8192, 4096]", "bf16[64, 1024, 4096]", GROUPS)),
        ("moe_layer", ("bf16[1024, 4096]", "fp32[1024, 64]", "bf16[64, 2048, 4096]",
                       "bf16[64, 4096, 1024]", 8)),
        ("quantize", ("bf16[1024, 4096]", "fp8_row")),
        ("quantize_rms_norm", ("bf16[1024, 4096]", "bf16[4096]")),
        ("quantize_layer_norm", ("bf16[1024, 4096]", "bf16[4096]", "bf16[4096]", "int8_row")),
        ("quantize_gated", ("bf16[1024, 4096]", "bf16[1024, 4096]", "fp8_block")),
        ("dequantize", (CODES,)),
        ("linear", ("bf16[16, 4096]", CODES)),
        ("quantize_attention", ("bf16[1, 8, 1024, 128]",) * 3),
        ("quantized_attention", ("bf16[1, 8, 1024, 128]",) * 3),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_every_call_can_be_prepared_from_shapes(op, args):
    found = asked(op, *args, arch="sm_100a")
    assert found and all(label.endswith(" sm_100a") for label in found)
    assert found == asked(op, *args, arch="sm_100a"), "and again"


@pytest.mark.parametrize(
    ("rows", "weight", "kernels"),
    [
        (5, CODES, ["quantized_linear.gemv"]),
        (512, CODES, ["dequantize.eights", "linear.wgmma"]),
        (512, fkjit.QuantizedTensor("float8_e4m3fn[1024, 4096]", "fp32[1024]", "fp8_row"),
         ["quantize.spans", "quantized_linear.wgmma"]),
    ],
)  # fmt: skip
def test_what_a_product_with_codes_calls_on_the_way_counts_as_well(rows, weight, kernels):
    found = asked("linear", f"bf16[{rows}, 4096]", weight)
    assert [label.split()[0] for label in found] == kernels


def test_it_compiles_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FKJIT_CACHE_DIR", str(tmp_path))
    settings.cache_clear(), lookup.default_cache.cache_clear()
    try:
        fkjit.prepare("vector_add", "fp16[8, 4]", "fp16[8, 4]", arch="sm_90a")
        (entry,) = lookup.default_cache().entries()
        assert (entry.meta["kernel"], entry.meta["target"]) == ("vector_add.rows", "sm_90a")
        monkeypatch.setenv("FKJIT_TARGET", "sm_89")
        settings.cache_clear()
        x = np.zeros((8, 4), np.float16)
        fkjit.prepare("vector_add", x, x)  # arrays on the CPU, and a target that is a GPU's
        targets = {entry.meta["target"] for entry in lookup.default_cache().entries()}
        assert targets == {"sm_90a", "sm_89"}
    finally:
        monkeypatch.undo()
        settings.cache_clear(), lookup.default_cache.cache_clear()


def test_shapes_strides_and_dtypes_are_taken_from_any_framework():
    device = device_for("sm_90a")
    torch = pytest.importorskip("torch")
    meta = torch.empty(4, 6, dtype=torch.bfloat16, device="meta").t()
    for given, shape, name, strides in (
        (meta, (6, 4), "bfloat16", (2, 12)),
        (np.zeros((6, 4), np.float32)[:, ::2], (6, 2), "float32", (16, 8)),
        ("fp8", None, None, None),
        ("bf16[]", (), "bfloat16", ()),
        ("float8_e4m3fn[2, 3]", (2, 3), "float8_e4m3fn", (3, 1)),
    ):
        seen = described(given, device)
        if shape is None:
            assert seen is given
        else:
            assert (seen.shape, seen.dtype.name, seen.strides) == (shape, name, strides)
    for other in (None, 3, 1.5, (1024, 0), "bhsd", True):
        assert described(other, device) == other


def test_what_is_wrong_is_said_as_by_the_call():
    with pytest.raises(ParameterError, match=r"attention: q has 3 dimensions"):
        asked("attention", "bf16[2, 16, 128]", *QKV[1:])
    with pytest.raises(ArgumentTypeError, match="prepare: 'quad' is the name of no dtype"):
        asked("vector_add", "quad[3]", "quad[3]")
    with pytest.raises(ParameterError, match="'sm_9x' is not an architecture"):
        asked("attention", *QKV, arch="sm_9x")
    with pytest.raises(ParameterError, match=r"attention: block=48 is not one of .*sm_75"):
        asked("attention", *("fp16[2, 16, 64, 64]",) * 3, block=48, arch="sm_75")
