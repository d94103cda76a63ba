"""A Decoder with weights of codes: against plain PyTorch with the numbers that codes stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fkjit.cpu.run as cpu
from fkjit.errors import ParameterError
from fkjit.jit.build import quiet
from fkjit.models import warm
from fkjit.settings import settings

torch = pytest.importorskip("torch", reason="needs torch")
import fkjit  # noqa: E402
from fkjit.models import Decoder, StepPlan  # noqa: E402
from tests.models.reference_model import CONFIGS, logits_of, state_of  # noqa: E402
from tests.models.test_decoder import PROMPTS, decoder_of, seen  # noqa: E402, F401

GPT2 = {"qkv": ("attn.c_attn",), "out": ("attn.c_proj",), "up": ("mlp.c_fc",),
        "down": ("mlp.c_proj",)}  # fmt: skip
LLAMA = {
    "qkv": tuple(f"self_attn.{name}_proj" for name in "qkv"), "out": ("self_attn.o_proj",),
    "up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",),
}  # fmt: skip
# The last two quantize x, too: their results are as far off as codes of x are.
CASES = [("gpt2", "int4_group", 2e-3), ("llama", "int8_group", 2e-3), ("qwen2", "int8_row", 0.02),
         ("gpt2", "fp8_block", 0.05)]  # fmt: skip


def numbers(name, decoder):
    """The model's state, its products' weights those that the codes stand for, in float64."""
    state = {key: value.double() for key, value in state_of(name).items()}
    at, parts = ("transformer.h", GPT2) if name == "gpt2" else ("model.layers", LLAMA)
    for n, layer in enumerate(decoder.weights.layers):
        for product, names in parts.items():
            whole = fkjit.dequantize(getattr(layer, product).weight, "fp32").double()
            keys = [f"{at}.{n}.{one}.weight" for one in names]
            whole = whole.t() if name == "gpt2" else whole
            rows = [state[key].shape[0] for key in keys]
            state |= zip(keys, whole.split(rows), strict=True)
    return state


@pytest.mark.sampled(key=lambda name, scheme, error: scheme[:3])
@pytest.mark.parametrize(("name", "scheme", "error"), CASES)
def test_logits_are_those_of_the_numbers(name, scheme, error, seen, monkeypatch):  # noqa: F811
    """And `fkjit warm` knows what is launched, codes of weights and of x included."""
    launched, build = set(), cpu.build

    def recorded(spec, *args, **options):
        launched.add(spec.id)
        return build(spec, *args, **options)

    if scheme.startswith("fp8"):  # the interpreter's usual target has no such products
        chosen = replace(settings(), target="compute_90a")
        monkeypatch.setattr("fkjit.jit.build.settings", lambda: chosen)
    with quiet(), monkeypatch.context() as patch:
        patch.setattr(cpu, "build", recorded)
        decoder = decoder_of(name, max_batch=1, quantize=scheme)
        [made] = decoder.generate(PROMPTS[:1], max_new_tokens=2)
    with quiet():
        state = numbers(name, decoder)
    exact = logits_of(name, state, PROMPTS[0] + made)[len(PROMPTS[0]) - 1 : -1]
    found = torch.cat(seen).double()
    assert float((found - exact).norm() / exact.norm()) < error
    plain = logits_of(name, state_of(name), PROMPTS[0] + made)[len(PROMPTS[0]) - 1 : -1]
    assert float((found - plain).norm() / plain.norm()) > 2e-3
    planned = warm.jobs(decoder.config, prompt=len(PROMPTS[0]), dtype="fp16", quantize=scheme,
                        arch="sm_90a" if scheme.startswith("fp8") else "sm_80")  # fmt: skip
    assert launched <= {job.label.split()[0] for job in planned}
    assert {one.partition(".")[0] for one in launched} > {"quantize", "quantized_linear"}


def test_codes_that_are_there_stay_and_a_step_of_them_is_not_fused():
    with quiet():
        first = decoder_of("gpt2", 1, quantize="int8_group")
    held = first.weights.layers[0]
    again = Decoder(
        first.config, first.weights, quantize="int4_group", plan=StepPlan(fused=True),
        max_batch=2, max_length=32, page_size=8,
    )  # fmt: skip
    assert again.weights.layers[0].qkv.weight is held.qkv.weight
    assert not again._network.fits(1) and decoder_of("gpt2", 1)._network.fits(1)


@pytest.mark.parametrize(("match", "name", "scheme"), [
    ("quantize='int3' is not one of fp8_tensor", "gpt2", "int3"),
    ("quantize='int4_group' and 48 columns of the product 'down'; allowed: a multiple of 32",
     "llama", "int4_group"),
    ("quantize='fp8_block' and a gate of 48 columns", "llama", "fp8_block"),
])  # fmt: skip
def test_what_cannot_be_quantized(match, name, scheme):
    with pytest.raises(ParameterError, match=match):
        decoder_of(name, 1, quantize=scheme)
    with pytest.raises(ParameterError, match=match):
        warm.jobs(CONFIGS[name], prompt=3, arch="sm_90a", quantize=scheme)
