"""`fkjit warm --config`: the variants that a model's Decoder takes, and no others."""

from __future__ import annotations

import json

import pytest

import fkjit.cpu.run as cpu
from fkjit.errors import ParameterError
from fkjit.jit.build import quiet
from fkjit.models import warm
from tests.cli.kit import run

torch = pytest.importorskip("torch", reason="needs torch")
from fkjit.models import Decoder  # noqa: E402
from tests.models.reference_model import CONFIGS, state_of  # noqa: E402


def kernels(jobs) -> set[str]:
    return {job.label.split()[0] for job in jobs}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_kernel_that_a_decoder_launches_is_planned(name, monkeypatch):
    """By name: tiles are those of a GPU with its number of SMs."""
    launched, build = set(), cpu.build

    def recorded(spec, *args, **options):
        launched.add(spec.id)
        return build(spec, *args, **options)

    monkeypatch.setattr(cpu, "build", recorded)
    options = {"dtype": "fp16", "device": "cpu", "max_batch": 1, "max_length": 16, "page_size": 8}
    with quiet():
        Decoder(CONFIGS[name], state_of(name), **options).generate([[1, 2, 3]], max_new_tokens=2)
    found = warm.jobs(CONFIGS[name], prompt=3, dtype="fp16", arch="sm_80")
    assert launched <= kernels(found)


def test_heads_of_codes_are_planned(monkeypatch):
    """In a step of many launches and in that of one, whose head comes as elements of 16 bits."""
    launched, build = set(), cpu.build

    def recorded(spec, *args, **options):
        launched.add(spec.id)
        return build(spec, *args, **options)

    monkeypatch.setattr(cpu, "build", recorded)
    options = {"dtype": "fp16", "device": "cpu", "max_batch": 1, "max_length": 16, "page_size": 8}
    with quiet():
        made = Decoder(CONFIGS["llama"], state_of("llama"), quantize_head="int8_group", **options)
        made.generate([[1, 2, 3]], max_new_tokens=2)
    said = {"prompt": 3, "dtype": "fp16", "arch": "sm_80"}
    found = kernels(warm.jobs(CONFIGS["llama"], quantize_head="int8_group", **said))
    codes = {"quantize.spans", "quantized_linear.gemv"}
    assert codes < launched <= found
    assert not codes & kernels(warm.jobs(CONFIGS["llama"], **said))
    for layers in (None, "int4_group"):
        labels = {
            job.label
            for job in warm.jobs("gpt2", arch="sm_90a", quantize=layers, quantize_head="int4_group")
        }
        assert {"codes=True"} == {
            word for label in labels for word in label.split()
            if label.startswith("decode_step.whole") and word.startswith("codes=")
        }  # fmt: skip
    other = warm.jobs("gpt2", arch="sm_90a", quantize="int4_group", quantize_head="int8_group")
    assert "decode_step.whole" not in kernels(other)


@pytest.mark.parametrize("arch, fused", [("sm_90a", True), ("sm_80", False)])
def test_steps_of_five_launches_and_of_one_are_planned_where_a_decoder_has_them(arch, fused):
    step, whole = {"normed_append.gemv", "normed_linear.gemv"}, {"decode_step.whole"}
    assert (step <= kernels(warm.jobs(CONFIGS["gpt2"], prompt=3, batches=[2], arch=arch))) is fused
    for name in ("gpt2", "llama-3.2-1b"):
        assert (whole <= kernels(warm.jobs(name, arch=arch))) is fused
    step |= whole
    assert not step & kernels(warm.jobs("qwen3-0.6b", arch=arch))
    assert not step & kernels(warm.jobs("llama-3.2-1b", arch=arch, quantize="int8_group"))
    coded = step & kernels(warm.jobs("llama-3.2-1b", arch=arch, quantize="int4_group"))
    assert coded == (whole if fused else set())


@pytest.mark.parametrize("name, most", [("gpt2", 28), ("llama-3.2-1b", 28), ("qwen3-0.6b", 22)])
def test_a_model_takes_few_variants(name, most):
    found = warm.jobs(name, batches=[1, 16], arch="sm_90a")
    labels = [job.label for job in found]
    assert 10 < len(labels) == len(set(labels)) <= most
    of_steps = {"settled_attention.split", "streamed_append.stream", "streamed_logits.stream"}
    if name == "qwen3-0.6b":
        of_steps = {"attention_decode.split", "linear.skinny"}
    assert {"attention_form.flash_sm90", "linear.wgmma", "kv_slots.rows"} | of_steps <= kernels(
        found
    )
    assert not kernels(found) & {"moe_route.warp", "attention.flash", "rope.computed"}
    one = {job.label for job in warm.jobs(name, batches=[1], arch="sm_90a")}
    assert one < set(labels)


def test_the_command_plans_a_file_and_says_what_does_not_go_together(tmp_path, monkeypatch):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIGS["gpt2"]))
    planned = []
    monkeypatch.setattr("fkjit.cli.warm.run", lambda work, jobs: planned.extend(work) or 0)
    done = run("warm", "--config", str(path), "--batch", "1,2", "--arch", "sm_90a")
    assert done.status == 0, done.err
    assert {job.target for job in planned} == {"sm_90a"}
    assert "kv_append.tokens" in kernels(planned)
    planned.clear()
    done = run("warm", "--config", str(path), "--weights", "int4_group", "--arch", "sm_90a")
    assert done.status == 0, done.err
    assert {"quantize.spans", "quantized_linear.gemv"} < kernels(planned)
    planned.clear()
    done = run("warm", "--config", str(path), "--head", "int4_group", "--arch", "sm_90a")
    assert done.status == 0, done.err
    assert "quantize.spans" in kernels(planned)
    for words, text in [
        (("--batch", "1"), "go with --config"),
        (("--head", "int4_group"), "go with --config"),
        (("--config", "gpt2", "--head", "int3"), "quantize_head='int3' is not one of"),
        (("--weights", "int4_group"), "go with --config"),
        (("--config", "gpt2", "--weights", "int3"), "quantize='int3' is not one of"),
        (("--config", "gpt2", "--head-dim", "64"), "--config goes with"),
        (("--config", "gpt2", "--batch", "x"), "--batch 'x' is not numbers"),
        (("--config", "gpt3"), "no 'gpt3'"),
    ]:
        done = run("warm", *words)
        assert done.status and text in done.err, done.err


def test_what_is_refused():
    with pytest.raises(ParameterError, match="dtype='fp32' is not one of bf16, fp16"):
        warm.jobs("gpt2", dtype="fp32")
    with pytest.raises(ParameterError, match="warm: batch=0"):
        warm.jobs("gpt2", batches=[0])
    with pytest.raises(ParameterError, match="warm: prompt=2000"):
        warm.jobs("gpt2", prompt=2000)
    with pytest.raises(ParameterError, match="a weight of fp8 needs fp8_mma, which sm_80 has not"):
        warm.jobs("gpt2", arch="sm_80", quantize="fp8_row")
    with pytest.raises(ParameterError, match="in pages; allowed: fp16 and bf16 on GPUs from sm_80"):
        warm.jobs("gpt2", dtype="fp16", arch="sm_75")
    told = []
    found = warm.jobs("gpt2", arch=["sm_80", "sm_89"], quantize="fp8_row", tell=told.append)
    assert len(told) == 1 and told[0].startswith("sm_80 is left out: linear: a weight of fp8 needs")
    assert {job.target for job in found} == {"sm_89"}
