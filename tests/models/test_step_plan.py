"""Plans of decode steps: the search for the fastest one, and that steps follow theirs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import fkjit.cpu.run as cpu
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet
from fkjit.models.plan import PRODUCTS, StepPlan, best

torch = pytest.importorskip("torch", reason="needs torch")
from tests.models.test_decoder import PROMPTS, decoder_of  # noqa: E402

US = {"auto": 5.0, "gemv": 3.0, "skinny": 4.0}


@pytest.mark.parametrize("rows, impl", [(8, "gemv"), (16, "skinny")])
def test_each_product_gets_what_is_fastest_in_the_step(rows, impl):
    """The head is best by another kernel than the rest, and starting early costs."""
    asked = []

    def seconds(plan):
        asked.append(plan)
        if rows > 8 and "gemv" in plan:
            raise ParameterError("takes up to 8 rows of x")
        head = 9.0 if plan.head != "auto" else 1.0
        return sum(US[getattr(plan, name)] for name in PRODUCTS[:-1]) + head + plan.early

    assert best(seconds) == StepPlan.alike(impl, early=False)._replace(head="auto")
    assert len(asked) == len(set(asked)) < 20


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
    steps._plan, steps._graphs, captured = None, {}, []

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
