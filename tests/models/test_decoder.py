"""`fkjit.models.Decoder` on the CPU: tiny models of each family against PyTorch in float64."""

from __future__ import annotations

import pytest

import fkjit.cpu.run as cpu
from fkjit.errors import (
    ArgumentTypeError,
    DeviceError,
    ParameterError,
    UnknownSequenceError,
)
from fkjit.jit.build import quiet

torch = pytest.importorskip("torch", reason="needs torch")
from fkjit.models import (  # noqa: E402
    Decoder,
    Sampling,
    prefill,
    random_weights,
)
from fkjit.models.network import Network  # noqa: E402
from fkjit.models.readback import Readback  # noqa: E402
from fkjit.models.slots import Slots  # noqa: E402
from tests.core.sampling import one_in  # noqa: E402
from tests.models.reference_model import CONFIGS, logits_of, state_of  # noqa: E402

PROMPTS = [[5, 9, 2, 7, 11, 3, 8], [4, 1], [30, 2, 2, 40]]


def decoder_of(name: str, layers: int = 2, **options) -> Decoder:
    said = {"dtype": "fp16", "device": "cpu", "max_batch": 2, "max_length": 32, "page_size": 8}
    config = CONFIGS[name] | {"n_layer" if name == "gpt2" else "num_hidden_layers": layers}
    return Decoder(config, state_of(name), **said | options)


def one_layer(**options) -> Decoder:
    """Of a model whose tokens vary."""
    return decoder_of("qwen2", 1, **options)


@pytest.fixture
def seen(monkeypatch):
    """Logits of each call, as rows."""
    kept, original = [], Network.logits

    def noting(self, *args, **options):
        made = original(self, *args, **options)
        kept.append(made.clone())
        return made

    monkeypatch.setattr(Network, "logits", noting)
    return kept


@one_in(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_chunks_and_steps_are_those_of_pytorch(name, seen):
    """A prompt in two chunks; then steps, into a second page."""
    decoder, prompt = decoder_of(name, max_batch=1, chunk=4), PROMPTS[0]
    with quiet():
        [made] = decoder.generate([prompt], max_new_tokens=3)
    exact = logits_of(name, state_of(name), prompt + made)[len(prompt) - 1 : -1]
    found = torch.cat(seen).double()
    assert found.shape == exact.shape
    assert float((found - exact).norm() / exact.norm()) < 3e-3
    assert made == found.argmax(-1).tolist()


def test_sequences_that_come_and_go_have_the_tokens_that_each_has_alone():
    """Three requests in two slots, then one more while they run."""
    decoder, alone = one_layer(), one_layer(max_batch=1)
    fourth = [17, 3, 3]
    with quiet():
        numbers = [
            decoder.submit(p, max_new_tokens=n) for p, n in zip(PROMPTS, (2, 5, 3), strict=True)
        ]
        made: dict[int, list[int]] = {}
        for token in decoder.stream():
            made.setdefault(token.request, []).append(token.token)
            last = len(made[token.request]) == (2, 5, 3, 2)[token.request]
            assert token.finished == ("length" if last else None)
            if token.finished and len(numbers) == 3:
                numbers.append(decoder.submit(fourth, max_new_tokens=2))
        wanted = [alone.generate([p], max_new_tokens=n)[0]
                  for p, n in zip([*PROMPTS, fourth], (2, 5, 3, 2), strict=True)]  # fmt: skip
    assert [made[number] for number in numbers] == wanted
    assert decoder.cache.free_pages == decoder.cache.num_pages
    assert (decoder._slots.state.rows == -1).all() and not decoder._slots.state.active.any()


def test_stop_tokens_and_cancelled_requests():
    decoder = one_layer()
    with quiet():
        [whole] = decoder.generate(PROMPTS[:1], max_new_tokens=5)
        stop = whole[2]
        until = whole[: whole.index(stop) + 1]
        assert decoder.generate(PROMPTS[:1], max_new_tokens=5, stop=[stop]) == [until]
        first, second, third = (decoder.submit(p, max_new_tokens=5) for p in PROMPTS)
        decoder.cancel(third)
        found = []
        for token in decoder.stream():
            found.append(token)
            if token.request == second:
                decoder.cancel(second)
    assert [t.token for t in found if t.request == first] == whole
    assert len([t for t in found if t.request == second]) == 1
    assert not [t for t in found if t.request == third]
    assert decoder.cache.free_pages == decoder.cache.num_pages
    with pytest.raises(
        UnknownSequenceError, match=r"request 0 is over or never was; allowed: none"
    ):
        decoder.cancel(0)


def test_draws_of_a_seed_are_the_same_in_any_batch():
    hot = Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=7)
    decoder, greedy = one_layer(), Sampling()
    with quiet():
        [alone] = decoder.generate(PROMPTS[:1], max_new_tokens=4, sampling=hot)
        [wanted] = decoder.generate(PROMPTS[1:2], max_new_tokens=4)
        said = ((1, greedy), (0, hot))
        numbers = [decoder.submit(PROMPTS[i], max_new_tokens=4, sampling=s) for i, s in said]
        made: dict[int, list[int]] = {number: [] for number in numbers}
        for token in decoder.stream():
            made[token.request].append(token.token)
        [other] = decoder.generate(PROMPTS[:1], max_new_tokens=4, sampling=hot._replace(seed=8))
    assert list(made.values()) == [wanted, alone]
    assert other != alone


def test_slots_that_are_empty_draw_nothing():
    """Three sequences take the graph of four."""
    hot = Sampling(temperature=1.5, top_k=20, seed=7)
    with quiet():
        made = one_layer(max_batch=4).generate(PROMPTS, max_new_tokens=3, sampling=hot)
        alone = one_layer(max_batch=1)
        assert made == [alone.generate([p], max_new_tokens=3, sampling=hot)[0] for p in PROMPTS]


@pytest.mark.parametrize("name, append, norm", [
    ("llama", "rope_kv_append.computed", "rms_norm.rows"),
    ("gpt2", "kv_append.tokens", "layer_norm.rows"),
])  # fmt: skip
def test_a_layer_of_a_step_is_eight_launches(name, append, norm, monkeypatch):
    launched, build = [], cpu.build

    def recorded(spec, *args, **options):
        launched.append(spec.id)
        return build(spec, *args, **options)

    decoder = decoder_of(name, 1)
    with quiet():
        decoder.submit(PROMPTS[1], max_new_tokens=3)
        decoder.advance()
        monkeypatch.setattr(cpu, "build", recorded)
        decoder.advance()
    product = "linear.gemv"
    layer = [norm, product, append, "attention_decode.split", product, norm, product, product]
    assert launched == ["kv_slots.rows", *layer, norm, product]


def test_the_last_sequences_take_the_places_of_those_that_leave():
    slots = Slots(6, 3, 48, "cpu")
    slots.state.tokens[:5] = torch.arange(10, 15)
    slots.state.rows[:5] = torch.arange(5)
    slots.state.uniforms[:5] = torch.arange(5.0)[:, None]
    slots.state.active[:5] = 1
    assert slots.remove({0, 4, 2}, 5) == [(3, 0)]
    assert slots.state.tokens[:2].tolist() == [13, 11]
    assert slots.state.uniforms[:2, 2].tolist() == [3.0, 1.0]
    assert slots.state.rows.tolist() == [3, 1, -1, -1, -1, -1]
    assert slots.state.active.tolist() == [1, 1, 0, 0, 0, 0]
    assert slots.remove({0, 1}, 2) == [] and not slots.state.active.any()


def test_tokens_of_as_many_launches_as_are_under_way_are_kept():
    """Two of the turn that runs, two of the one that is read."""
    readback = Readback(3, torch.device("cpu"))
    sent = [readback.send(torch.tensor([n, n + 1])) for n in range(4)]
    assert [one.read() for one in sent] == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_a_cache_that_is_full_lets_requests_wait():
    decoder = one_layer(num_pages=2)
    with quiet():
        made = decoder.generate(PROMPTS[::2], max_new_tokens=2)
        assert made == [decoder.generate([p], max_new_tokens=2)[0] for p in PROMPTS[::2]]


def refused(error, match, **said):
    """What `submit` raises, with one argument that is wrong."""
    given = {"prompt": [1, 2], "max_new_tokens": 3} | said
    decoder = decoder_of("llama")
    with pytest.raises(error, match=match):
        decoder.submit(given.pop("prompt"), **given)
    assert not decoder._requests


def test_what_submit_refuses():
    refused(ParameterError, "Decoder: prompt is empty; allowed: at least one token", prompt=[])
    refused(ParameterError, "prompt's token.*48.*47", prompt=[1, 48])
    refused(ArgumentTypeError, "prompt's token", prompt=["a"])
    refused(ParameterError, "up to 32 together", max_new_tokens=31)
    refused(ArgumentTypeError, "sampling=0.5; allowed: a Sampling", sampling=0.5)
    refused(ParameterError, "temperature=-1", sampling=Sampling(-1.0))
    refused(ParameterError, r"top_p=1\.5; allowed: above 0", sampling=Sampling(1.0, top_p=1.5))
    refused(ParameterError, r"seed=\d+; allowed", sampling=Sampling(1.0, seed=1 << 70))
    refused(ParameterError, r"temperature=1\d+…; allowed", sampling=Sampling(10**400))
    refused(ArgumentTypeError, "stop=5 is not a list of numbers", stop=5)
    refused(
        ParameterError, "top_k=0; allowed: 1 and above, or None", sampling=Sampling(1.0, top_k=0)
    )
    refused(ArgumentTypeError, "top_k=2.0 is not a whole", sampling=Sampling(1.0, top_k=2.0))
    refused(ArgumentTypeError, "seed='x'", sampling=Sampling(1.0, seed="x"))


def test_generate_takes_back_what_it_submitted_before_a_wrong_prompt():
    decoder = decoder_of("llama")
    with pytest.raises(ParameterError, match="prompt is empty"):
        decoder.generate([[1, 2], []], max_new_tokens=2)
    assert not decoder._requests and not decoder._waiting


def test_weights_that_do_not_fit_are_named():
    state = state_of("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    short = {key: value for key, value in state.items() if key != name}
    options = {"dtype": "fp16", "device": "cpu"}
    with pytest.raises(ParameterError, match=f"state_dict lacks {name}"):
        Decoder(CONFIGS["llama"], short, **options)
    with pytest.raises(ParameterError, match=rf"{name} has shape \(3, 3\); allowed: \(48, 32\)"):
        Decoder(CONFIGS["llama"], state | {name: torch.zeros(3, 3)}, **options)
    with pytest.raises(ParameterError, match="dtype='fp32'; allowed: fp16, bf16"):
        Decoder(CONFIGS["llama"], state, dtype="fp32", device="cpu")
    with pytest.raises(ArgumentTypeError, match="state_dict is a list"):
        Decoder(CONFIGS["llama"], [], **options)
    with pytest.raises(ArgumentTypeError, match=f"{name} is a ndarray; allowed: a torch tensor"):
        Decoder(CONFIGS["llama"], state | {name: state[name].numpy()}, **options)
    with pytest.raises(DeviceError, match='Decoder: device=\'tpu\'; allowed: "cpu", "cuda"'):
        Decoder(CONFIGS["llama"], state, dtype="fp16", device="tpu")


def test_biases_are_those_of_all_of_q_k_and_v():
    state, options = state_of("qwen2"), {"dtype": "fp16", "device": "cpu"}
    name = "model.layers.0.self_attn.k_proj.bias"
    biases = {key for key in state if key.endswith("bias")}
    for gone in ({name}, biases):
        some = {key: value for key, value in state.items() if key not in gone}
        with pytest.raises(ParameterError, match=r"lacks model.layers.0.self_attn.[qk]_proj.bias"):
            Decoder(CONFIGS["qwen2"], some, **options)
    one = {name: torch.zeros(16)}
    with pytest.raises(ParameterError, match=r"lacks model.layers.0.self_attn.q_proj.bias"):
        Decoder(CONFIGS["llama"], state_of("llama") | one, **options)


@pytest.mark.parametrize("kind, match", [
    ("qwen2", r"layers\[0\].qkv.bias is missing"), ("qwen3", r"layers\[0\].q_norm is missing"),
])  # fmt: skip
def test_weights_of_another_family_are_refused(kind, match):
    made = random_weights(CONFIGS["llama"], "fp16", "cpu")
    with pytest.raises(ParameterError, match=match):
        Decoder(CONFIGS["llama"] | {"model_type": kind}, made)


@pytest.mark.parametrize("columns", [12, 15, 264])
def test_heads_that_are_not_read_in_pages_are_refused_at_once(columns):
    config = CONFIGS["llama"] | {"head_dim": columns}
    match = f"head_dim={columns}; allowed: multiples of 8 up to 256"
    with pytest.raises(ParameterError, match=match):
        Decoder(config, random_weights(config, "fp16", "cpu"))


def test_weights_of_another_configuration_are_refused():
    config = CONFIGS["llama"]
    made = random_weights(config, "fp16", "cpu")
    with pytest.raises(ParameterError, match="weights have 2 layers; allowed: 1"):
        Decoder(config | {"num_hidden_layers": 1}, made)
    with pytest.raises(ParameterError, match=r"weights.embedding has shape \(48, 32\); allowed:"):
        Decoder(config | {"vocab_size": 49}, made)
    with pytest.raises(ParameterError, match=r"weights.layers\[0\].up has shape"):
        Decoder(config | {"intermediate_size": 64}, made)
    first = made.layers[0]
    for changed, error, match in [
        (first.down.weight.t().contiguous().t(), ParameterError, "down has gaps; allowed: none"),
        (first.down.weight.float(), ArgumentTypeError, "is torch.float32; allowed: torch.float16"),
        (None, ParameterError, r"weights.layers\[0\].down is missing; allowed: \(32, 48\)"),
    ]:
        other = first._replace(down=first.down._replace(weight=changed))
        with pytest.raises(error, match=match):
            Decoder(config, made._replace(layers=(other, *made.layers[1:])))
    with pytest.raises(ArgumentTypeError, match="graphs='no'; allowed: a bool"):
        Decoder(config, made, graphs="no")


def test_a_temperature_near_0_is_as_good_as_greedy():
    decoder = one_layer()
    with quiet():
        greedy = decoder.generate(PROMPTS[:1], max_new_tokens=2)
        assert decoder.generate(PROMPTS[:1], max_new_tokens=2, sampling=Sampling(1e-42)) == greedy


def test_padded_passes_of_prompts_make_the_same_tokens(monkeypatch):
    """As on a GPU, whose graphs want few sizes; a graph is none here."""
    monkeypatch.setattr(prefill, "_TOKENS", (16, 32))
    monkeypatch.setattr(prefill, "_PIECES", (2,))
    monkeypatch.setattr(prefill.Prompts, "_capture", lambda self, one: None)
    exact, other = one_layer(), one_layer()
    other._prompts._graphs = True
    with quiet():
        for prompts in (PROMPTS[:2], PROMPTS[2:3], PROMPTS[:2]):
            made = [one.generate(prompts, max_new_tokens=2) for one in (exact, other)]
            assert made[0] == made[1]
    assert {size.pieces for size in other._prompts._passes} == {3}
    assert any(one.met for one in other._prompts._passes.values())
