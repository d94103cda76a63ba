"""One grammar for every command: `attention flash --block 32 --where causal=true`."""

from __future__ import annotations

import re

import pytest

from fkjit.arch import target
from fkjit.cli import warm
from fkjit.cli.select import selection
from fkjit.errors import ParameterError
from tests.cli.kit import run
from tests.core.user_kernel import registered_kernel, write_kernel

SM80 = target("sm_80")


def chosen(*words: str) -> dict[str, int]:
    """How many variants of each kernel."""
    return {spec.id: len(found) for spec, found in selection("show", words).variants(SM80)}


def test_words_in_any_order_are_the_same():
    wanted = chosen("attention", "flash", "--head-dim", "128", "--dtype=bf16")
    assert list(wanted) == ["attention.flash"]
    assert chosen("--dtype", "bf16", "--head-dim=128", "attention.flash") == wanted
    assert chosen("--where", "head_dim=128", "attention", "flash", "--dtype", "bf16") == wanted


def test_where_takes_any_of_its_values_and_tiles_with_commas():
    one = chosen("attention.flash", "--head-dim", "64")["attention.flash"]
    two = chosen("attention.flash", "--where", "head_dim=64,128")["attention.flash"]
    other = chosen("attention.flash", "--head-dim", "128")["attention.flash"]
    assert two == one + other
    tile = chosen("attention.flash", "--where", "block=128,64")
    assert tile == chosen("attention.flash", "--block", "128,64")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["attention", "--where", "head_dim"], "is not FIELD=VALUE"),
        (["attention", "--block"], "is not a kernel parameter with its value"),
        (["--block", "32"], "no kernel is named"),
    ],
)
def test_what_it_cannot_mean(words, message):
    with pytest.raises(ParameterError, match=message):
        selection("show", words).specs()


def test_check_runs_the_variants_and_problems_that_are_meant(tmp_path):
    with registered_kernel(write_kernel(tmp_path / "kernels")):
        done = run("check", "scale", "plain", "--dtype", "fp32", "--where", "n=1000")
        assert done.status == 0 and re.search(r"scale\.plain +compute_80 +4 of 4 .* ok", done.out)
        none = run("check", "scale", "--dtype", "fp32", "--where", "n=7")
        assert none.status == 1 and "nothing to run" in none.out
        wrong = run("check", "scale", "--where", "m=7")
        assert wrong.status == 1 and "--where m: not one of dtype, factor, n, neg" in wrong.err


def test_bench_takes_kernels_fields_and_tiles():
    words = ("attention", "flash", "--head-dim", "128", "--set", "quick", "--peers", "none")
    cases = run("bench", *words, "--dry-run").out
    assert "D128" in cases and "D64" not in cases and "fkjit flash" in cases
    tiles = run("bench", *words, "--block", "64,32", "--dry-run").out
    assert re.findall(r"fkjit flash \S+", tiles) == ["fkjit flash block=64x32"]
    wrong = run("bench", *words, "--blok", "64", "--dry-run")
    assert wrong.status == 1 and "did you mean block?" in wrong.err


def test_tune_takes_kernels_and_fields():
    words = ("attention", "flash", "--head-dim", "64", "--where", "seqlen_k=1024")
    listed = run("tune", *words, "--dry-run", "--arch", "sm_80").out
    assert listed and all(
        line.startswith("attention.flash bf16 D64 S1024 ") for line in listed.splitlines()
    )


def test_profile_asks_for_the_case_that_is_meant():
    from bench.profile.command import parser, request

    words = ["attention.flash", "--head-dim", "64", "--where", "seqlen_k=4096"]
    asked = request(*parser().parse_known_args(words))
    assert asked["op"] == "attention" and asked["impl"] == "flash"
    assert asked["shapes"] == ["head_dim=64 seqlen_k=4096"]


def test_warm_takes_kernels_and_their_parameters():
    nothing = {"head_dim": None, "dtype": None}

    def jobs(*words, where=(), **values):
        found = warm.chosen(words, "sm_80", {**nothing, **values}, where)
        return [(f"{job.op}.{job.name}", job.params) for job in found]

    wanted = jobs("attention", "flash", "--block", "64,32", "--head-dim", "128")
    assert wanted and {name for name, _ in wanted} == {"attention.flash"}
    assert all(params["block"] == (64, 32) and params["head_dim"] == 128 for _, params in wanted)
    assert jobs("attention", "flash", "--block=64,32", head_dim="128") == wanted
    assert jobs("attention", "flash", where=("block=64,32", "head_dim=128")) == wanted
    with pytest.raises(ParameterError, match="did you mean --block"):
        jobs("attention", "flash", "--blok", "64,32")
    done = run("warm", "--jbos", "4")
    assert done.status == 1 and "warm: " in done.err
