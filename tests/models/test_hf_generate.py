"""`generate` of a patched model: transformers' tokens by a decode loop of ours, and transformers'
own loop for every other call. (fp32, which the loop does not take: tests/models/test_patch.py.)"""

from __future__ import annotations

import copy

import pytest

import fkjit
from fkjit.jit.build import quiet

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers, fkjit[models]")
from fkjit.models.joined import as_one, groups, is_conv1d  # noqa: E402
from tests.core.sampling import one_in  # noqa: E402
from tests.models.test_patch import SEEN, TOKENS, built  # noqa: E402

NEW = 4


@pytest.fixture(scope="module", params=["GPT2", "Llama"])
def model(request):
    """Patched, fp16; `plain`: the same numbers in fp32, as transformers computes them."""
    made = built(request.param).half()
    made.__dict__["plain"] = copy.deepcopy(made).float()  # not as one of its modules
    fkjit.models.patch(made)
    return made


def options(**more):
    return {
        "input_ids": torch.tensor(TOKENS), "attention_mask": torch.tensor(SEEN),
        "max_new_tokens": NEW, "do_sample": False, **more,
    }  # fmt: skip


def generated(model, **more):
    """By our loop: what it does not take would not have made an engine."""
    engines = model.generate.args[1]
    engines.engine = None
    with quiet():
        found = model.generate(**options(**more))
    assert engines.engine is not None
    return found


@one_in(2)
@pytest.mark.parametrize("more", [
    {}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"cache_implementation": "static", "disable_compile": True, "attention_mask": None},
], ids=["greedy", "processors", "static"])  # fmt: skip
def test_tokens_are_those_of_transformers(model, more):
    assert torch.equal(generated(model, **more), model.plain.generate(**options(**more)))


@one_in(2)
def test_inference_mode_leaves_nothing_that_other_calls_cannot_use(model):
    with torch.inference_mode():
        first = generated(model)
    assert not any(one.is_inference() for one in model.parameters())
    with quiet():
        assert torch.equal(model.generate(**options()), first)


@one_in(2)
def test_a_dictionary_has_scores_and_logits(model):
    said = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True,
            "repetition_penalty": 1.3, "max_new_tokens": 2}  # fmt: skip
    made, wanted = generated(model, **said), model.plain.generate(**options(**said))
    assert torch.equal(made.sequences, wanted.sequences) and type(made) is type(wanted)
    for name in ("scores", "logits"):
        torch.testing.assert_close(made[name], wanted[name], rtol=2e-2, atol=2e-2)
    plain = generated(model, return_dict_in_generate=True)
    assert plain.scores is None
    assert torch.equal(plain.sequences, generated(model))


@one_in(2)
@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.0001}], ids=["graph", "processors"])
def test_sequences_end_at_stop_tokens_and_a_streamer_hears_of_each(model, more):
    wanted = model.plain.generate(**options())
    said = {"eos_token_id": wanted[0, 6].item(), "pad_token_id": 47, **more}
    wanted, heard = model.plain.generate(**options(**said)), []
    assert 47 in wanted[0].tolist()

    class Streamer:
        def put(self, tokens):
            heard.append(tokens.reshape(len(TOKENS), -1))

        def end(self):
            heard.append(None)

    assert torch.equal(generated(model, **said, streamer=Streamer()), wanted)
    assert heard.pop() is None and torch.equal(torch.cat(heard, 1)[:, : wanted.shape[1]], wanted)
    for row in range(2):  # alone, what stops is the last token, and nothing is behind it
        said |= {"input_ids": torch.tensor(TOKENS[row : row + 1]),
                 "attention_mask": torch.tensor(SEEN[row : row + 1])}  # fmt: skip
        alone = generated(model, **said)
        assert torch.equal(alone, model.plain.generate(**options(**said)))


@one_in(2)
def test_draws_follow_the_seed_and_keep_to_top_k(model):
    """One sequence 64 times, whose first new token is drawn of three; and a step's tokens."""
    said = {"do_sample": True, "top_k": 3, "temperature": 2.0, "max_new_tokens": 1,
            "input_ids": torch.tensor(TOKENS[:1] * 64), "attention_mask": None}  # fmt: skip
    two = {**said, "max_new_tokens": 2, "input_ids": torch.tensor(TOKENS[:1])}
    found = generated(model, **two)[0]
    last = model.plain(found[None, :-1]).logits[0, -1]
    assert found[-1] in last.topk(3).indices
    made = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        made.append(generated(model, **said)[:, len(TOKENS[0]) :])
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    logits = model.plain(torch.tensor(TOKENS[:1])).logits[0, -1]
    values, likely = logits.topk(3)
    drawn = torch.cat([made[0][:, 0], made[2][:, 0]])
    counts = torch.stack([(drawn == token).float().mean() for token in likely])
    assert counts.sum() == 1
    assert (counts - (values / 2).softmax(-1)).abs().max() < 0.17  # 4 of its deviations


@one_in(3)
@pytest.mark.parametrize("more", [
    {"num_beams": 2}, {"return_dict_in_generate": True, "output_hidden_states": True},
    {"use_cache": False},
    {"attention_mask": torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]])},
    {"max_new_tokens": 62},
], ids=["beams", "hidden states", "no cache", "holes", "long"])  # fmt: skip
def test_other_calls_are_transformers_own(model, more, monkeypatch):
    """No engine is asked for. (Beyond max_length GPT-2 has no positions.)"""
    if "max_new_tokens" in more and model.config.model_type == "gpt2":
        pytest.skip("transformers refuses it as well")
    engines = model.generate.args[1]
    monkeypatch.setattr(engines, "engine", None)
    if "max_new_tokens" not in more:
        more = {"max_new_tokens": 2, **more}
    calls = []
    monkeypatch.setattr(type(engines), "of", lambda *args: calls.append(args))
    if "max_new_tokens" in more and more["max_new_tokens"] > NEW:
        monkeypatch.setattr(type(model), "_sample", lambda *args, **named: "its own")
        assert model.generate(**options(**more)) == "its own"
        return
    with quiet():
        found = model.generate(**options(**more))
    assert calls == []
    found = found if torch.is_tensor(found) else found.sequences
    assert found.shape == (2, len(TOKENS[0]) + 2)


@one_in(2)
def test_hooks_and_dropout_are_for_transformers(model):
    engines = model.generate.args[1]
    engines.engine, heard = None, []
    hook = model.lm_head.register_forward_hook(lambda *args: heard.append(1))
    with quiet():
        model.generate(**options())
    hook.remove()
    assert heard and engines.engine is None


@one_in(2)
def test_new_weights_are_seen_and_nothing_is_there_twice(model):
    """An optimizer writes where the steps read; `half` and a deep copy give parameters other
    memory, which the next call notices."""
    generated(model)
    engine = model.generate.args[1].engine
    held = {one.untyped_storage().data_ptr() for one in model.parameters()}
    layer = engine._network.weights.layers[0]
    assert {one.weight.untyped_storage().data_ptr() for one in (layer.qkv, layer.up)} <= held
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).mul_(0.1).to(parameter.dtype))
    other = copy.deepcopy(model)
    wanted = copy.deepcopy(model)
    fkjit.models.unpatch(wanted)
    wanted = wanted.float().generate(**options())
    with quiet():
        assert torch.equal(model.generate(**options()), wanted)
    assert model.generate.args[1].engine is engine
    model.load_state_dict(before)
    assert torch.equal(model.generate(**options()), model.plain.generate(**options()))
    assert torch.equal(generated(other), wanted)


def test_unpatched_parameters_have_arrays_of_their_own():
    for family in ("GPT2", "Llama"):
        model = built(family)
        state = {name: x.clone() for name, x in model.state_dict().items()}
        fkjit.models.patch(model)
        assert all(
            as_one([part.weight for part in parts]) is not None
            for module in model.modules()
            for parts in groups(module)
        )
        after = model.state_dict()
        assert all(torch.equal(after[name], x) for name, x in state.items())
        fkjit.models.unpatch(model)
        assert "generate" not in model.__dict__
        for parameter in model.parameters():
            assert parameter.is_contiguous()
            assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()
        assert all(module.weight.is_contiguous() for module in model.modules() if is_conv1d(module))
