"""Plans of decode steps: the search for the fastest one, and that steps follow theirs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import fkjit.cpu.run as cpu
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from fkjit.models.config import ModelConfig
from fkjit.models.plan import MEASURED, PRODUCTS, StepPlan, best, usual

torch = pytest.importorskip("torch", reason="needs torch")
from tests.models.test_decoder import PROMPTS, decoder_of  # noqa: E402

US = {"auto": 5.0, "gemv": 3.0, "skinny": 4.0}


@pytest.mark.parametrize("rows, impl", [(8, "gemv"), (16, "skinny")])
def test_each_product_gets_what_is_fastest_in_the_step(rows, impl):
    """The head is best by another kernel than the rest, starting early costs, fusing even more."""
    asked = []

    def seconds(plan):
        asked.append(plan)
        if rows > 8 and "gemv" in plan:
            raise ParameterError("takes up to 8 rows of x")
        head = 9.0 if plan.head != "auto" else 1.0
        return (
            sum(US[getattr(plan, name)] for name in PRODUCTS[:-1])
            + head
            + plan.early
            + 9 * plan.fused
        )

    assert best(seconds) == StepPlan.alike(impl, early=False)._replace(head="auto")
    assert len(asked) == len(set(asked)) < 25


def test_what_a_fused_layer_has_otherwise_is_not_tried_again():
    asked = []
    found = best(lambda plan: asked.append(plan) or 9.0 - 5 * plan.fused - (plan.down == "skinny"))
    assert found.fused and found.down == "skinny"
    assert not any(plan.fused and len({plan.qkv, plan.up}) > 1 for plan in asked)


@pytest.mark.parametrize("name, rows, words", [
    ("llama-3.2-1b", 1, StepPlan(whole=True)), ("llama-3.2-1b", 4, StepPlan(whole=True)),
    ("llama-3.2-1b", 8, StepPlan(streamed=True)), ("gpt2", 8, StepPlan(streamed=True)),
    ("gpt2", 1, StepPlan(whole=True)), ("gpt2", 4, StepPlan(whole=True)),
    ("gpt2", 16, StepPlan(streamed=True)), ("llama-3.2-1b", 64, StepPlan(streamed=True)),
    ("gpt2", 64, StepPlan()), ("llama-3.2-1b", 65, StepPlan()),
    ("qwen3-0.6b", 1, StepPlan()), ("qwen3-0.6b", 16, StepPlan()),
])  # fmt: skip
def test_the_usual_plan_is_that_of_a_table_on_gpus_that_were_measured(name, rows, words):
    config = ModelConfig.of(name)
    assert usual(config, rows, None, (9, 0)) == StepPlan(*words)
    for codes, at in (("int8_group", (9, 0)), ("", (9, 0)), (None, (8, 0)), (None, (10, 0)),
                      (None, None)):  # fmt: skip
        assert usual(config, rows, codes, at) == StepPlan()
    coded = usual(config, rows, "int4_group", (9, 0))
    assert coded == StepPlan(whole=rows <= 4 and "qwen" not in name)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steps_without_a_plan_have_the_usual_one(name, monkeypatch):
    """On the CPU as on a GPU that was measured, with the tokens of `linear`'s own choice."""
    plain, said = decoder_of(name, 1), decoder_of(name, 1)
    table = lambda config, rows, codes, capability: usual(config, rows, codes, (9, 0))  # noqa: E731
    with quiet():
        wanted = plain.generate(PROMPTS[1:2], max_new_tokens=2)
        monkeypatch.setattr("fkjit.models.plan.usual", table)
        assert said.generate(PROMPTS[1:2], max_new_tokens=2) == wanted
    assert plain.plans == {1: StepPlan()} and (said.plans[1].fused or said.plans[1].whole)


def test_steps_have_the_kernels_of_their_plan(monkeypatch):
    launched, build = [], cpu.build

    def recorded(spec, *args, **options):
        launched.append(spec.id)
        return build(spec, *args, **options)

    plan = StepPlan(qkv="skinny", down="mma")
    decoder = decoder_of("llama", 1, plan=plan)
    with quiet():
        decoder.submit(PROMPTS[1], max_new_tokens=3)
        decoder.advance()
        monkeypatch.setattr(cpu, "build", recorded)
        decoder.advance()
    products = [one.removeprefix("linear.") for one in launched if one.startswith("linear.")]
    assert products == ["skinny", "gemv", "gemv", "mma", "gemv"]


@pytest.mark.parametrize("name, norm", [("llama", "rms"), ("gpt2", "layer")])
def test_a_fused_layer_is_five_launches_and_makes_the_same_tokens(name, norm, monkeypatch):
    launched, build = [], cpu.build

    def recorded(spec, params, *args, **options):
        launched.append(spec.id)
        assert params.get("norm", norm) == norm
        return build(spec, params, *args, **options)

    fused, plain = (decoder_of(name, plan=plan) for plan in (StepPlan(fused=True), None))
    with quiet():
        wanted = plain.generate(PROMPTS[:2], max_new_tokens=4)
        assert fused.generate(PROMPTS[:2], max_new_tokens=4) == wanted
        fused.submit(PROMPTS[1], max_new_tokens=3)
        fused.advance()
        monkeypatch.setattr(cpu, "build", recorded)
        fused.advance()
    layer = ["normed_append.gemv", "attention_decode.split", "linear.gemv", "normed_linear.gemv",
             "linear.gemv"]  # fmt: skip
    assert launched == ["kv_slots.rows", *layer, *layer, f"{norm}_norm.rows", "linear.gemv"]


def test_what_no_fused_layer_can_be_has_eight_launches(monkeypatch):
    """Qwen3 normalises heads; so no kernel of the step is asked for."""
    monkeypatch.setattr("fkjit.models.network.normed_append", None)
    with quiet():
        assert decoder_of("qwen3", 1, plan=StepPlan(fused=True)).generate([[5]], max_new_tokens=2)


def test_what_a_plan_may_not_say():
    for error, match, plan in (
        (ParameterError, "plan='fast'; allowed: None, 'measured', or a StepPlan", "fast"),
        (ParameterError, "plan.up='cublas' is not one of auto, gemv", StepPlan(up="cublas")),
        (ArgumentTypeError, "plan.early=1; allowed: a bool", StepPlan(early=1)),  # pyright: ignore[reportArgumentType]
        (ParameterError, "without CUDA graphs", "measured"),
    ):
        with pytest.raises(error, match=match):
            decoder_of("llama", 1, plan=plan)


def test_a_plan_is_measured_once_for_each_number_of_slots(monkeypatch):
    """On stand-ins for graphs, whose times depend on the plan."""
    steps = decoder_of("llama", 1)._steps
    steps._plan, steps._graphs, captured = MEASURED, {}, []

    def capture(size, mode, plan, timed=False):
        captured.append((size, mode, timed))
        return 2.0 - (plan.out == "skinny") if timed else SimpleNamespace(plan=plan)

    monkeypatch.setattr(steps, "_captured", capture)
    modes = ("greedy", "sorted", "greedy")
    graphs = [steps.graph(2, mode) for mode in modes]
    assert {graph.plan.out for graph in graphs} == {"skinny"}
    assert steps.plans == {2: graphs[0].plan} and graphs[2] is graphs[0]
    assert [(size, mode) for size, mode, timed in captured if not timed] == [
        (2, "greedy"), (2, "sorted"),
    ]  # fmt: skip
    assert all(mode == "greedy" for _, mode, timed in captured if timed)
