"""Tuning on a GPU: measured there, and taken by the public call."""

from __future__ import annotations

import json

import pytest

from bench.tune.command import main
from fkjit import tuning
from fkjit.ops.attention.checks import check
from fkjit.ops.attention.options import AttentionOptions
from fkjit.runtime import interop
from fkjit.runtime.device import device_target
from fkjit.runtime.gpus import gpus

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's folder of this test's own."""
    monkeypatch.setattr(tuning, "user_folder", lambda: tmp_path / "tuning")
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    tuning.forget()
    yield
    tuning.forget()


def request(seqlen):
    q = torch.randn(1, 4, seqlen, 64, device="cuda", dtype=torch.float16)
    (launch,) = check(
        {n: interop.view(q, "attention", n) for n in "qkv"}, AttentionOptions()
    ).launches
    return launch


def test_every_part_calls_the_gpu_by_the_same_name():
    name = torch.cuda.get_device_properties(0).name
    assert device_target(0).arch.gpu == name == gpus()[0][0].name


def test_attention_takes_the_tile_that_a_file_names(home):
    found = request(1000)
    arch = device_target(0).arch
    legal = found.spec.legal_values("block", found.params, arch)
    other = next(block for block in legal if block != found.params["block"])
    entry = {
        **tuning.key(found.spec, found.params, found.problem, arch),
        "choice": {**tuning.free(found.spec, found.params), "block": other},
    }
    tuning.store(tuning.user_file(arch.gpu), arch.gpu, [entry])
    assert request(1000).params["block"] == request(1024).params["block"] == other
    assert request(2000).params == found.params


def test_a_small_case_is_tuned_and_found_again(home, capsys):
    name = request(512).spec.id
    shape = "D64 full dtype=fp16,seqlen=512,batch=1,heads=4"
    assert main([name, "--shape", shape, "--seconds", "0.02"]) == 0
    gpu = device_target(0).arch.gpu
    (entry,) = json.loads(tuning.user_file(gpu).read_text())["entries"]
    assert entry["ms"] > 0 and entry["tried"] >= 2
    found = request(512)
    assert json.loads(json.dumps(tuning.free(found.spec, found.params))) == entry["choice"]
    capsys.readouterr()
    assert main([name, "--shape", shape]) == 0  # at once: everything is known
    assert " us" not in capsys.readouterr().err
