"""`fkjit warm` by calls: the common set, head dimensions and options, and what a run has used."""

from __future__ import annotations

import json
import sys

import pytest

import fkjit
from fkjit import warm_calls, warm_record
from fkjit.cache import lookup
from fkjit.errors import ParameterError
from fkjit.jit.render import load
from fkjit.runtime.abstract import taking
from fkjit.settings import settings
from fkjit.spec import find
from fkjit.warming import estimate, plan, planned
from tests.cli.kit import run
from tests.core.user_kernel import ROOT


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    def clear():
        settings.cache_clear()
        lookup.default_cache.cache_clear()

    monkeypatch.setenv("FKJIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    clear()
    yield clear
    monkeypatch.undo()
    clear()


@pytest.mark.parametrize("name", ["sm_75", "sm_90a", "sm_120a"])
def test_the_common_set_is_of_every_family_and_takes_less_than_a_minute(name):
    work = plan(["common"], name)
    found = {job.op for job in work}
    decode = {"attention_decode"} if name != "sm_75" else set()  # it needs bf16's instructions
    assert found >= {"attention", "attention_form", "rms_norm", "layer_norm", "rope"} | decode
    assert found >= {"kv_append", "rope_kv_append", "moe_route", "moe_permute", "linear"}
    assert {job.params["dtype"] for job in work if job.op == "attention"} == {"bf16", "fp16"}
    assert len({job.label for job in work}) == len(work)
    assert 5 < estimate(work, 2) < 45


def test_it_is_what_calls_take(monkeypatch):
    seen = {}
    with taking(lambda spec, params, to: seen.update({spec.label(params): (spec, params)})):
        for dim in (64, 128):
            q = f"bf16[4, 16, 2048, {dim}]"
            fkjit.prepare("attention", q, q, q, causal=True, arch="sm_90a")
            fkjit.prepare("attention", q, q, q, window=(256, 0), arch="sm_90a")
    calls = warm_calls.calls("attention", where={"window": (256, 0)})
    jobs = {
        job.spec.label(job.params): job
        for job in [*plan(["common"], "sm_90a"), *planned(calls, ["sm_90a"])]
    }
    for label, (spec, params) in seen.items():
        assert (
            load(jobs[label].spec, jobs[label].params).identity() == load(spec, params).identity()
        )


def test_options_of_calls_are_compiled_in():
    def forms(op, **where):
        jobs = planned(warm_calls.calls(op, ("bf16",), (128,), where), ["sm_90a"])
        return {job.params.get("form") or job.params.get("activation") for job in jobs}

    assert forms("attention_varlen", window=(1024, 0)) == {"varlen"}
    assert forms("attention", softcap=30.0) == {"softcap"}
    assert forms("attention", alibi_slopes=True, sinks=True) == {"alibi sinks"}
    assert forms("attention", bias=True, mask=True).pop().startswith("bias=bf16")
    assert forms("paged_attention", mask=True) == forms("attention_decode", mask=True) != {None}
    assert forms("linear", activation="silu") == {"silu"}


def test_the_command_compiles_them_and_says_how_long_it_takes(empty_cache):
    words = ("rms_norm", "--dtype", "bf16", "--where", "eps=1e-5", "--arch", "sm_90a", "-j", "1")
    done = run("warm", *words)
    assert done.status == 0 and "2 variants: 2 compiled" in done.out
    assert done.err.startswith("2 variants: about 0 s on 1 core, less for what the cache has\n")
    settings.cache_clear()
    lookup.default_cache().require_cached = True
    for rows in (1, 4096):
        fkjit.prepare("rms_norm", f"bf16[{rows}, 4096]", "bf16[4096]", arch="sm_90a")
    assert "2 already there" in run("warm", *words).out


def test_what_a_run_used_is_recorded_and_compiled_again(tmp_path, empty_cache):
    code = "import fkjit; fkjit.prepare('rms_norm', 'fp16[8, 64]', 'fp16[64]', arch='sm_90a')"
    file = tmp_path / "used.json"
    done = run(
        "warm", "--record", str(file), "--", sys.executable, "-c", code + "; raise SystemExit(3)"
    )
    assert (done.status, done.out) == (3, f"1 variants in {file}\n")
    (row,) = json.loads(file.read_text())["variants"]
    assert (row["kernel"], row["target"]) == ("rms_norm.rows", "sm_90a")
    assert isinstance(row["params"]["tile"], list), "a tuple is read again as one"
    assert "1 already there" in run("warm", "--from", str(file), "-j", "1").out
    empty_cache(), lookup.default_cache().clear()
    assert "1 compiled" in run("warm", "--from", str(file), "-j", "1").out
    again = tmp_path / "again.json"
    assert run("warm", "--record", str(again)).status == 0
    assert again.read_text() == file.read_text(), "without a command: what the cache has"


def test_variants_that_only_calls_have_can_be_recorded(tmp_path):
    form = "softcap alibi"
    params = {**next(fkjit.variants("attention_form.flash_sm90")), "head_dim": 128, "form": form}
    row = {"kernel": "attention_form.flash_sm90", "params": params, "target": "sm_90a"}
    (tmp_path / "file").write_text(json.dumps({"variants": [row]}))
    (job,) = warm_record.read(tmp_path / "file")
    assert job.params == params and job.derived["softcap"] and job.derived["alibi"]
    assert job.spec.source == find("attention_form.flash_sm90").source


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--head-dim", "64"], "warm: --head-dim, --dtype and --where are of a call: name it"),
        (["attention", "--head-dim", "wide"], "warm: --head-dim 'wide' is not numbers: 64,128"),
        (["attention", "--where", "causal"], "warm: --where 'causal' is not an option with its"),
        (["vector_add", "--dtype", "fp16"], "warm: 'vector_add' has no --head-dim, --dtype or"),
        (["attention", "--dtype", "int8", "--arch", "sm_90a"], "attention: "),
        (["--from", "/no/such/file"], "warm: --from /no/such/file is no file that `fkjit warm"),
        (["--from", __file__], "is no file that `fkjit warm --record` wrote: JSONDecodeError"),
        (["--record", "f", "--", "/no/such/program"], "--record: /no/such/program cannot be run"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(words, message):
    done = run("warm", *words)
    assert done.status == 1 and message in done.err, done.err


def test_record_and_from_choose_alone():
    assert run("warm", "--from", "x", "attention").status == 2
    assert run("warm", "--from", "x", "--arch", "sm_90a").status == 2


def test_calls_that_a_target_has_no_kernel_for_are_an_error_where_no_other_is_left():
    with pytest.raises(ParameterError, match="which sm_75 has not"):
        planned(warm_calls.calls("attention_decode"), ["sm_75"])
