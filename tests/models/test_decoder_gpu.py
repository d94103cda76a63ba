"""Decode steps on a GPU: fewer launches a layer and weights of codes, in CUDA graphs, where kernels
start early, beside the same kernels one by one."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from fkjit.models import Decoder, ModelConfig, StepPlan, random_weights  # noqa: E402
from fkjit.models.prefill import Piece, Prompts  # noqa: E402
from fkjit.models.quantized import PRODUCTS  # noqa: E402

DEVICE, LENGTH = "cuda", 160
FUSED, EIGHT, WHOLE = StepPlan(fused=True), StepPlan(), StepPlan(whole=True)
STREAMED = StepPlan(streamed=True)
PROMPT = [(7919 * n) % 50000 for n in range(1, 101)]


def model(name):
    config = ModelConfig.of(name).with_layers(3)
    return config, random_weights(config, torch.bfloat16, DEVICE, seed=3)


def decoder_of(config, weights, batch, **options):
    return Decoder(config, weights, max_batch=batch, max_length=LENGTH, **options)


def prompts(batch):
    """Of different lengths, so that positions differ."""
    return [PROMPT[n : 40 + 7 * n] for n in range(batch)]


def logits(decoder, batch):
    """Of the first decode step, fp32."""
    with quiet():
        for prompt in prompts(batch):
            decoder.submit(prompt, max_new_tokens=3)
        for _ in range(2):
            decoder.advance()
        size = 1 << (batch - 1).bit_length()
        return decoder._steps._logits.rows(size)[:batch].clone()


def apart(one, other):
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2"])
def test_five_launches_a_layer_have_the_logits_of_eight(name, batch):
    config, weights = model(name)
    plain = logits(decoder_of(config, weights, batch, plan=EIGHT), batch)
    assert apart(logits(decoder_of(config, weights, batch, plan=FUSED), batch), plain) < 2e-2


@pytest.mark.parametrize("name, batch", [("llama-3.2-1b", 1), ("llama-3.2-1b", 3), ("gpt2", 1),
                                         ("gpt2", 8)])  # fmt: skip
def test_a_step_of_one_launch_has_the_logits_of_eight(name, batch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("its kernel is for Hopper")
    config, weights = model(name)
    plain = logits(decoder_of(config, weights, batch, plan=EIGHT), batch)
    whole = decoder_of(config, weights, batch, plan=WHOLE)
    assert apart(logits(whole, batch), plain) < 2e-2
    assert whole._steps._one_launch is not None


@pytest.mark.parametrize("batch", [3, 16, 64])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2"])
def test_products_that_fetch_their_weight_early_have_the_logits_of_eight_launches(name, batch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("their kernel is for Hopper")
    config, weights = model(name)
    plain = logits(decoder_of(config, weights, batch, plan=EIGHT), batch)
    assert apart(logits(decoder_of(config, weights, batch, plan=STREAMED), batch), plain) < 2e-2


@pytest.mark.parametrize("batch", [1, 3, 8, 16])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2"])
def test_the_usual_plan_has_the_logits_of_what_linear_chooses(name, batch):
    config, weights = model(name)
    plain = logits(decoder_of(config, weights, batch, plan=EIGHT), batch)
    assert apart(logits(decoder_of(config, weights, batch), batch), plain) < 2e-2


def filled(decoder, batch):
    """The residual stream behind the prompts, which come in two pieces each."""
    cache, made = decoder.cache, []
    sequences = [cache.allocate() for _ in range(batch)]
    for part in (slice(0, 20), slice(20, None)):
        pieces = [
            Piece(one, part.start, prompt[part])
            for one, prompt in zip(sequences, prompts(batch), strict=True)
        ]
        with quiet():
            made.append(decoder._prompts.fill(pieces)[0].clone())
    for one in sequences:
        cache.free(one)
    return torch.cat(made)


@pytest.mark.parametrize(
    "options", [{}, {"quantize": "int4_group"}, {"quantize": "fp8_row"}], ids=str
)
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2"])
def test_captured_passes_of_prompts_have_the_stream_of_launches(name, options):
    if options.get("quantize") == "fp8_row" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("e4m3 products need sm_89")
    config, weights = model(name)
    plain, captured = (decoder_of(config, weights, 8, graphs=g, **options) for g in (False, True))
    numbers = decoder_of(config, weights, 8, graphs=False)
    for batch in (1, 3, 8, 1, 3, 8, 1, 3, 8):
        wanted = filled(plain, batch)
        # Other tiles round otherwise, and then codes of what comes in may be the next ones.
        assert apart(filled(captured, batch), wanted) < max(
            2e-2, apart(wanted, filled(numbers, batch))
        )
    assert all(one.graph is not None for one in captured._prompts._passes.values())


@pytest.mark.parametrize("scheme", ["int4_group", "int8_group"])
@pytest.mark.parametrize("batch", [1, 8, 16])
def test_weights_of_codes_have_the_logits_of_their_numbers(scheme, batch):
    config, weights = model("llama-3.2-1b")
    coded = decoder_of(config, weights, batch, quantize=scheme)
    layers = tuple(
        layer._replace(**{
            name: part._replace(weight=fkjit.dequantize(part.weight))
            for name in PRODUCTS for part in [getattr(layer, name)]
        })
        for layer in coded.weights.layers
    )  # fmt: skip
    plain = decoder_of(config, weights._replace(layers=layers), batch, plan=EIGHT)
    assert apart(logits(coded, batch), logits(plain, batch)) < 2e-2


@pytest.mark.parametrize("options", [
    {"plan": FUSED}, {"quantize": "int4_group"}, {"quantize": "fp8_row"}, {"plan": EIGHT}, {},
    {"plan": WHOLE},
], ids=str)  # fmt: skip
def test_kernels_that_start_early_make_the_tokens_of_those_launched_one_by_one(options):
    """Again and again: what is read too early is not always wrong."""
    if options.get("quantize", "").startswith("fp8") and torch.cuda.get_device_capability() < (
        8,
        9,
    ):
        pytest.skip("e4m3 products need sm_89")
    config, weights = model("llama-3.2-1b")
    for batch in (1, 8):
        early, alone = (
            decoder_of(config, weights, batch, graphs=graphs, **options) for graphs in (True, False)
        )
        alone._prompts = Prompts(alone._network, alone.cache, True)  # the same bits behind prompts
        with quiet():
            wanted = alone.generate(prompts(batch), max_new_tokens=48)
            for _ in range(5):
                assert early.generate(prompts(batch), max_new_tokens=48) == wanted
