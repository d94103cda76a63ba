"""A word that is not known is answered with the words that are near it, calls before kernels."""

from __future__ import annotations

import pytest

import fkjit
from fkjit.errors import ParameterError, did_you_mean
from fkjit.spec import find
from tests.cli.kit import run


def test_names_that_are_near_come_in_their_order():
    assert did_you_mean("atention", ["attention", "rope"]) == "; did you mean attention?"
    assert did_you_mean("flash", ["attention", "a.flash"]) == "; did you mean a.flash?"
    assert did_you_mean("reduce", ["reduce_sum", "reduce_max"]).endswith(
        "reduce_sum or reduce_max?"
    )
    assert did_you_mean("zzz", ["attention", "rope"]) == ""


@pytest.mark.parametrize("command", ["list", "show", "compile", "warm", "check", "bench", "tune"])
def test_every_command_says_it_of_calls(command):
    done = run(command, "rms_nrom")
    assert done.status == 1 and "did you mean rms_norm" in done.err


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["show", "flash"], "did you mean attention.flash"),
        (["show", "attention.flsh"], "did you mean attention.flash"),
        (["show", "attention.flash", "--blok", "32"], "did you mean --block?"),
        (["check", "attention", "tild"], "did you mean tiled?"),
        (["profile", "attention", "flahs"], "did you mean flash"),
    ],
)
def test_kernels_and_parameters(words, near):
    done = run(*words)
    assert done.status == 1 and near in done.err


def test_python_says_it_too():
    with pytest.raises(AttributeError, match="did you mean rms_norm"):
        fkjit.rmsnorm  # noqa: B018
    with pytest.raises(ParameterError, match="did you mean attention"):
        fkjit.prepare("atention")
    with pytest.raises(ParameterError, match="did you mean attention"):
        find("attentoin")
    with pytest.raises(ParameterError, match="did you mean head_dim"):
        find("attention.flash").canonical({"headdim": 3})


def test_dir_has_public_names_only():
    names = [name for name in dir(fkjit) if name != "__version__"]
    assert set(fkjit.__all__) <= set(names) and not [n for n in names if n.startswith("_")]
    assert not {"import_module", "TYPE_CHECKING", "Any", "annotations"} & set(names)
    assert all(hasattr(fkjit, name) for name in names)
