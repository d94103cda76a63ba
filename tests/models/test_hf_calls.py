"""What is known of earlier calls of a patched model's `generate`: the same as transformers prepares
for them, and nothing of a call or a model that differs. (Tokens: tests/models/test_hf_generate.py.)
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

import fkjit
from fkjit.settings import settings

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers, fkjit[models]")
from fkjit.models import generation, hf_calls  # noqa: E402
from tests.models.test_patch import SEEN, TOKENS, built  # noqa: E402

PREPARED = ("processors", "criteria")  # objects, which a known call has not
OWN = "transformers' own loop"


@pytest.fixture
def model():
    made = built("Llama").half()
    fkjit.models.patch(made)
    return made


@pytest.fixture
def asked(model, monkeypatch):
    """(the call as a loop of ours gets it, or `OWN`; whether transformers has prepared it)."""
    prepared = []

    def read(*args, own=hf_calls.read):
        prepared.append(args)
        return own(*args)

    monkeypatch.setattr(hf_calls, "read", read)
    monkeypatch.setattr(generation, "_answered", lambda model, turn, call, input_ids: call)
    monkeypatch.setattr(type(model), "_sample", lambda *args, **named: OWN)

    def call(**more):
        prepared.clear()
        tokens = {"input_ids": torch.tensor(TOKENS), "attention_mask": torch.tensor(SEEN)}
        said = {**tokens, "max_new_tokens": 4, "do_sample": False, **more}
        found = model.generate(**{name: one for name, one in said.items() if one is not None})
        return found, bool(prepared)

    return call


def same(one, two):
    """But for objects."""
    fields = [name for name in one._fields if name not in ("prompts", *PREPARED)]
    prompts = zip(one.prompts, two.prompts, strict=True)
    return all(map(np.array_equal, *zip(*prompts, strict=True))) and all(
        getattr(one, name) == getattr(two, name) for name in fields
    )


class Streamer:
    """Keeps what it hears."""

    def __init__(self):
        self.heard = []

    def put(self, tokens):
        self.heard.append(tokens.tolist())


@pytest.mark.parametrize("more", [
    {}, {"do_sample": True, "top_k": 7, "top_p": 0.9, "temperature": 0.5},
    {"eos_token_id": [3, 5], "pad_token_id": 9}, {"return_dict_in_generate": True},
    {"cache_implementation": "static"}, {"max_new_tokens": None, "max_length": 9},
    {"generation_config": transformers.GenerationConfig(max_new_tokens=3, eos_token_id=5),
     "max_new_tokens": None, "do_sample": None},
    {"attention_mask": None, "pad_token_id": 40},
], ids=["greedy", "draws", "stops", "fields", "static", "length", "config", "no mask"])  # fmt: skip
def test_a_call_like_an_earlier_one_is_what_transformers_would_prepare(asked, more):
    first, prepared = asked(**more)
    again, twice = asked(**more)
    assert prepared and not twice and same(first, again)
    shorter = {"input_ids": torch.tensor([[4, 2, 8]]), "attention_mask": None}
    asked(**{**more, **shorter})  # one sequence and no mask are another key
    shorter["input_ids"] = torch.tensor([[7, 7, 6]])
    assert asked(**{**more, **shorter})[0].prompts[0].tolist() == [7, 7, 6]
    if more.get("max_new_tokens", 4):
        other, prepared = asked(**{**more, "max_new_tokens": 7})
        assert not prepared and same(other, first._replace(new=7))


@pytest.mark.parametrize("more", [
    {"repetition_penalty": 1.3}, {"num_return_sequences": 2, "do_sample": True},
    {"return_dict_in_generate": True, "output_scores": True}, {"min_new_tokens": 2,
                                                               "eos_token_id": 3},
    {"stopping_criteria": [lambda *args, **named: torch.zeros(2, dtype=torch.bool)]},
    {"eos_token_id": torch.tensor([3])},
], ids=["penalty", "several", "scores", "least", "criteria", "array"])  # fmt: skip
def test_objects_of_transformers_and_other_values_are_prepared_each_time(asked, more):
    assert asked(**more)[1] and asked(**more)[1]


def test_a_known_call_tells_a_streamer_of_the_prompt(asked):
    streamer = Streamer()
    asked()
    assert not asked(streamer=streamer)[1] and streamer.heard == [TOKENS]


@pytest.mark.parametrize("more", [
    {"attention_mask": torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]])},
    {"attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])},
    {"attention_mask": torch.tensor([[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])},
    {"max_new_tokens": 62}, {"use_cache": False},
], ids=["holes", "right padding", "nothing", "long", "no cache"])  # fmt: skip
def test_known_calls_of_other_tokens_may_be_for_transformers(asked, more):
    """Keys of all but the last are those of calls that are known."""
    asked()
    assert asked(**more)[0] == OWN


def test_padding_tokens_without_a_mask_are_for_transformers(asked):
    """It makes a mask of them, where they are no stop tokens."""
    said = {"attention_mask": None, "pad_token_id": 9, "eos_token_id": 3}
    plain = torch.tensor([[5, 2, 7], [4, 8, 1]])
    asked(input_ids=plain, **said)
    assert not asked(input_ids=plain, **said)[1]
    found, prepared = asked(input_ids=torch.tensor([[9, 9, 7], [4, 8, 1]]), **said)
    assert prepared and found.prompts[0].tolist() == [7]


def generation_config(model):
    model.generation_config.eos_token_id = 5


def longest(model):
    model.config.max_position_embeddings = 8


def processors(model):
    model._get_logits_processor = lambda **named: transformers.LogitsProcessorList()


@pytest.mark.parametrize("change", [generation_config, longest, processors])
def test_what_a_call_depends_on_is_looked_at_each_time(asked, model, change):
    asked()
    change(model)
    found, prepared = asked()
    assert prepared and (found == OWN) == (change is longest)
    assert change is not generation_config or found.stops == {5}


def test_a_configuration_that_transformers_refuses_is_refused_of_a_known_call(asked, model):
    asked()
    model.config.num_beams = 3
    with pytest.raises(ValueError, match="modified the pretrained model configuration"):
        asked()


@pytest.mark.parametrize("value", [True, 1, 1.0])
def test_equal_values_of_other_types_are_others(value):
    others = [one for one in (True, 1, 1.0) if type(one) is not type(value)]
    for inside in (lambda x: x, lambda x: [x], lambda x: {"a": x}, lambda x: {"a": (3, [x])}):
        found = generation.frozen(inside(value))
        assert hash(found) == hash(generation.frozen(inside(value)))
        assert found == generation.frozen(inside(value))
        assert all(found != generation.frozen(inside(one)) for one in others)
    assert generation.frozen([1]) != generation.frozen((1,))
    assert generation.frozen({"a": 1}) != generation.frozen({"b": 1})
    assert generation.frozen({"a": [object()]}) is None
    assert generation.frozen({"a": None, "b": [None]}) is not None


def hooked(model):
    model.model.layers[1].mlp.register_forward_hook(lambda *args: None)


def hooked_before(model):
    model.model.norm.register_forward_pre_hook(lambda *args: None)


def other_forward(model):
    model.model.norm.forward = lambda x: x


def in_fp32(model):
    model.model.norm.weight.data = model.model.norm.weight.data.float()


def other_parameter(model):
    model.model.norm.weight = torch.nn.Parameter(torch.ones(32))


def other_module(model):
    model.model.layers[0].self_attn.o_proj = torch.nn.Linear(32, 32, bias=False)


def training(model):
    model.config.attention_dropout = 0.5
    model.train()


CHANGES = [hooked, hooked_before, other_forward, in_fp32, other_parameter, other_module, training]


@pytest.mark.parametrize("change", CHANGES)
def test_a_known_call_of_a_model_that_changed_is_for_transformers(asked, model, change):
    asked()
    assert not asked()[1]
    change(model)
    assert asked() == (OWN, False)


def test_a_known_call_under_autocast_is_for_transformers(asked):
    asked()
    with torch.autocast("cpu", torch.bfloat16):
        assert asked() == (OWN, False)
    assert not asked()[1]


def test_modules_that_were_replaced_are_found_again(model):
    """Of the same numbers, the model is as plain as before."""
    engines = model.generate.args[1]
    before = engines.modules(model)
    assert engines.modules(model) is before
    head = copy.deepcopy(model.lm_head)
    model.lm_head = head
    after = engines.modules(model)
    assert after is not before and after.plain(after.places())
    assert head.weight.data_ptr() in [place[0] for place in after.places()]


def test_where_pages_cannot_be_read_transformers_own_loop_goes_on(model, monkeypatch):
    """GPUs before sm_80, and heads that do not fill whole 16 bytes."""

    def plain():
        modules = hf_calls.Modules(model)
        return modules.plain(modules.places())

    assert model.generate and plain()
    chosen = replace(settings(), target="compute_75")
    monkeypatch.setattr("fkjit.jit.build.settings", lambda: chosen)
    assert not plain()
    assert not fkjit.models.patch(built("Llama", head_dim=20).half()).generate
