"""Decode steps of one launch on the CPU: against plain PyTorch, beside steps of many launches, and
who has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fkjit.cpu.run as cpu
from fkjit.arch import arch
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from fkjit.models import ModelConfig
from fkjit.models.plan import StepPlan, model_of
from fkjit.ops.step import whole
from fkjit.settings import settings
from fkjit.spec import registered

torch = pytest.importorskip("torch", reason="needs torch")
from fkjit.models import Decoder, Sampling, random_weights  # noqa: E402
from tests.core.sampling import one_in  # noqa: E402
from tests.models.reference_model import CONFIGS, LLAMA, logits_of, state_of  # noqa: E402
from tests.models.test_decoder import PROMPTS  # noqa: E402

WHOLE = StepPlan(whole=True)
MLP = 64  # a multiple of what a warp takes at a time


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """The interpreter's usual target has no bulk copies."""
    chosen = replace(settings(), target="compute_90a")
    monkeypatch.setattr("fkjit.jit.build.settings", lambda: chosen)


def model(name):
    """A tiny model, and its state."""
    config, state = dict(CONFIGS[name]), state_of(name)
    if name == "gpt2":
        return config, state
    made = torch.Generator().manual_seed(2)
    for n in range(config["num_hidden_layers"]):
        for part, (rows, columns) in {
            "gate": (MLP, 32), "up": (MLP, 32), "down": (32, MLP),
        }.items():  # fmt: skip
            weight = torch.randn(rows, columns, generator=made) * columns**-0.5
            state[f"model.layers.{n}.mlp.{part}_proj.weight"] = weight.half()
    return config | {"intermediate_size": MLP}, state


def decoder_of(name, batch=2, **options):
    config, state = model(name)
    said = {"dtype": "fp16", "device": "cpu", "max_length": 32, "page_size": 8, "plan": WHOLE}
    return Decoder(config, state, max_batch=batch, **said | options)


@pytest.fixture
def launched(monkeypatch):
    """Ids of kernels, as they are launched."""
    kept, build = [], cpu.build

    def recorded(spec, *args, **options):
        kept.append(spec.id)
        return build(spec, *args, **options)

    monkeypatch.setattr(cpu, "build", recorded)
    return kept


@one_in(4)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "gpt2"])
def test_a_step_of_one_launch_has_the_logits_of_pytorch(name, launched):
    """Windows, biases, LayerNorm; three steps, into a second page."""
    decoder, prompt, found = decoder_of(name, 1), PROMPTS[0], []
    with quiet():
        decoder.submit(prompt, max_new_tokens=4)
        decoder.advance()
        made = [int(decoder._slots.state.tokens[0])]
        launched.clear()
        for _ in range(3):
            decoder.advance()
            found.append(decoder._steps._logits.rows(1)[0].double().clone())
            made.append(int(decoder._slots.state.tokens[0]))
    assert launched == ["decode_step.whole"] * 3
    exact = logits_of(name, model(name)[1], prompt + made[:-1])[len(prompt) :]
    assert float((torch.stack(found) - exact).norm() / exact.norm()) < 3e-3
    assert made[1:] == torch.stack(found).argmax(-1).tolist()


def test_sequences_that_come_and_go_have_the_tokens_of_many_launches():
    """Three requests in two slots; one of them draws its tokens."""
    said = [{}, {"sampling": Sampling(0.9, top_k=5, seed=4)}, {}]
    with quiet():
        results = []
        for plan in (WHOLE, StepPlan()):
            decoder = decoder_of("llama", plan=plan)
            for prompt, options in zip(PROMPTS, said, strict=True):
                decoder.submit(prompt, max_new_tokens=3, **options)
            results.append([(one.request, one.token) for one in decoder.stream()])
    assert results[0] == results[1]


def test_models_without_such_a_step_have_many_launches(launched):
    with quiet():
        decoder_of("qwen3", 1).generate([[5]], max_new_tokens=2)
        decoder_of("llama", 1, quantize="int8_group").generate([[5]], max_new_tokens=2)
    assert "decode_step.whole" not in launched


@pytest.mark.parametrize(
    ("dtype", "prompts", "tolerance"), [("fp16", [[3, 4]], 3e-3), ("bf16", [[3, 4], [7, 5]], 2e-2)]
)
def test_a_step_with_weights_of_int4_has_the_logits_of_many_launches(
    dtype, prompts, tolerance, launched
):
    """Numbers with codes; and rows of digits, of two sequences."""
    config = ModelConfig.of(LLAMA | {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32,
    })  # fmt: skip
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    weights, found, rows = random_weights(config, kind, "cpu"), [], len(prompts)
    with quiet():
        for plan in (WHOLE, StepPlan()):
            decoder = Decoder(
                config, weights, dtype=dtype, device="cpu", max_batch=rows, max_length=32,
                page_size=8, plan=plan, quantize="int4_group", quantize_head="int4_group",
            )  # fmt: skip
            for prompt in prompts:
                decoder.submit(prompt, max_new_tokens=3)
            decoder.advance()
            decoder.advance()
            found.append(decoder._steps._logits.rows(rows).double().clone())
    assert launched.count("decode_step.whole") == 1
    assert decoder.weights.head.scheme == "int4_group"
    apart = (found[0] - found[1]).norm(dim=1) / found[1].norm(dim=1)
    assert bool((apart < tolerance).all()), apart


def test_who_fits():
    llama = ModelConfig.of("llama-3.2-1b")

    def fits(rows=1, config=llama, name="sm_90a", **changes):
        one = whole.Model(
            config.heads_q, config.heads_kv, config.head_dim, config.mlp, config.activation,
            config.gated, config.eps, "nhd", 256,
        )._replace(**changes)  # fmt: skip
        return whole.fits(one, rows, config.hidden, config.layers, arch(name), 132)

    assert fits() and fits(4) and fits(config=ModelConfig.of("gpt2"), rows=8)
    assert not fits(9) and not fits(name="sm_80") and not fits(name="sm_120a")
    assert fits(codes=True) and not fits(codes=True, mlp=8192 + 64) and fits(mlp=8192 + 64)
    assert not fits(mlp=8200) and not fits(mlp=96) and not fits(activation="relu")
    assert not fits(heads_q=40) and not fits(rows=2, heads_kv=128, heads_q=128)


def test_work_items_of_attention_are_no_more_than_blocks():
    config = ModelConfig.of("llama-3.2-1b")
    short, long = (model_of(config, "nhd", 256, length=length) for length in (640, 1 << 16))
    found = [(whole.own_heads(one, rows, 132), whole.splits_of(one, rows, 132))
             for one in (short, long) for rows in (1, 2, 4, 8)]  # fmt: skip
    assert found == [(1, 4), (4, 8), (4, 4), (4, 2), (4, 16), (4, 8), (4, 4), (4, 2)]
    gpt2 = ModelConfig.of("gpt2")
    found = [whole.splits_of(model_of(gpt2, "nhd", 256, length=length), 1, 132)
             for length in (1, 160, 161, 640, 1024, 0)]  # fmt: skip
    assert found == [1, 1, 2, 4, 7, 11]


def test_narrow_models_have_a_block_for_eight_columns():
    assert [whole.blocks_of(132, hidden) for hidden in (2048, 1056, 1024, 768, 704, 696)] == [
        132, 132, 128, 96, 88, 132]  # fmt: skip


def test_what_a_step_refuses():
    with pytest.raises(ArgumentTypeError, match=r"plan\.whole=1; allowed: a bool"):
        decoder_of("llama", plan=StepPlan(whole=1))  # pyright: ignore[reportArgumentType]
    with quiet():
        decoder = decoder_of("llama", 1)
        decoder.submit([3, 4], max_new_tokens=3)
        decoder.advance()
        step, state = decoder._steps._whole(), decoder._slots.first(1)
        logits = decoder._steps._logits.rows(1)
        with pytest.raises(ParameterError, match="logits"):
            step(state, logits[:, :-1])
        with pytest.raises(ParameterError, match="exchange"):
            step._exchanges[1] = torch.zeros(8, dtype=torch.int32)
            step(state, logits)


def test_a_variant_without_room_for_the_list_of_products_is_refused():
    [spec] = [spec for spec in registered() if spec.id == "decode_step.whole"]
    params = next(p for p in spec.variants() if p["norm"] == "layer" and p["aside"] == 2)
    problem = spec.verification.problems(params, "small")[0]
    with pytest.raises(ParameterError, match=r"aside=2 KB.* hold 2048 bytes; hidden=8192"):
        spec.arguments(params, {**problem, "hidden": 8192}, {})
