"""Every public call's name is one that the commands and `fkjit.warm` understand."""

from __future__ import annotations

import re

import numpy as np
import pytest

import fkjit
from fkjit import ops, warming
from fkjit.errors import ParameterError
from fkjit.spec import find, registered
from tests.cli.kit import run

CALLS = [
    *(name for name in fkjit.__all__ if hasattr(getattr(fkjit, name), "prepare")),
    "PagedKVCache",
]


@pytest.mark.parametrize("name", CALLS)
def test_a_public_call_has_kernels(name):
    found = ops.kernels("show", name)
    assert found and name in ops.calls()
    assert {spec.op for spec in found} == set(ops.OPS_OF_CALLS.get(name, (name,)))
    assert {job.op for job in warming.plan([name], "sm_90a")} == {spec.op for spec in found}


def test_names_of_ops_and_of_kernels_mean_what_they_say():
    ops.load()
    for spec in registered():
        assert ops.kernels("show", spec.id) == [spec]
        assert ops.kernels("show", spec.op) == registered(spec.op)
    assert warming.chosen_specs(["reduce_max", "rope.table", "reduce"]) == [
        *registered("reduce"),
        find("rope.table"),
    ]
    assert warming.chosen_specs([]) == registered()


def test_the_mapping_names_nothing_that_is_not_there():
    ops.load()
    known = {spec.op for spec in registered()}
    assert set(ops.OPS_OF_CALLS) <= set(fkjit.__all__) - known
    assert {op for mapped in ops.OPS_OF_CALLS.values() for op in mapped} <= known


HALF = np.ones((1, 16, 2, 16), np.float16)
ENDS = np.array([0, 9, 16], np.int32)
LAUNCHED = {
    "reduce_sum": lambda: fkjit.reduce_sum(HALF),
    "reduce_max": lambda: fkjit.reduce_max(HALF, -1),
    "reduce_mean": lambda: fkjit.reduce_mean(HALF),
    "attention_varlen": lambda: fkjit.attention_varlen(HALF[0], HALF[0], HALF[0], ENDS, ENDS, 9, 9),
    "paged_attention": lambda: fkjit.paged_attention(
        HALF[0, :1], (HALF, HALF), np.zeros((1, 1), np.int32), np.array([9], np.int32)
    ),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_call_launches_the_kernels_that_its_name_means(name, monkeypatch):
    import fkjit.cpu.run as cpu

    launched, build = [], cpu.build

    def recorded(spec, *args, **options):
        launched.append(spec.id)
        return build(spec, *args, **options)

    monkeypatch.setattr(cpu, "build", recorded)
    LAUNCHED[name]()
    assert launched and set(launched) <= {spec.id for spec in ops.kernels("show", name)}


def test_the_commands_take_a_call():
    listed = run("list", "reduce_mean").out
    assert re.findall(r"(?m)^(\w+\.\w+) ", listed) == ["reduce.blocks", "reduce.lanes"]
    shown = run("show", "reduce_max", "--operation", "max", "--source")
    assert shown.status == 0 and "MaxOrNaN" in shown.out
    done = run("compile", "attention_varlen", "--arch", "sm_75", "--dtype", "fp8")
    assert done.status == 1 and "attention_form" in done.err


@pytest.mark.parametrize("command", ["list", "show", "compile", "warm", "check"])
def test_an_unknown_name_lists_the_public_calls(command):
    done = run(command, "atention")
    assert done.status == 1 and f"{command}: 'atention' is no call and no kernel" in done.err
    assert "did you mean attention" in done.err
    listed = re.search(r"\(calls: ([^;]*); `fkjit list", done.err)
    assert listed is not None and set(CALLS) <= set(listed[1].split(", "))
    with pytest.raises(ParameterError, match="did you mean attention"):
        ops.kernels(command, "atention")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("fkjit show rms", {"rms_norm"}),
        ("fkjit run attention fla", {"flash", "flash_sm75", "flash_sm90", "flash_fp32"}),
        ("fkjit list attention.n", {"attention.naive"}),
        ("fkjit warm paged", {"paged_attention"}),
        ("fkjit explain gelu", {"gelu_linear"}),
    ],
)
def test_a_shell_completes_names(words, found):
    count = str(words.count(" "))
    env = {"_FKJIT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}
    assert set(run(env=env, prog_name="fkjit").out.split()) == found
