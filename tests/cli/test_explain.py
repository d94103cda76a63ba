"""`fkjit explain`: what a call of attention takes, without a GPU."""

from __future__ import annotations

import re

import pytest

from fkjit import ops, warm_calls
from fkjit.arch import target
from fkjit.cli import explain
from fkjit.cli.explain import parse
from fkjit.errors import ParameterError
from tests.cli.kit import run


def test_it_names_what_the_call_takes_and_what_limits_it():
    shape = "D128 causal seqlen=4096 heads=32/8"
    done = run("explain", "attention", "--shape", shape, "--arch", "sm_80")
    assert done.status == 0, done.err
    assert re.search(r"kernel +attention\.flash\n", re.sub(" +\n", "\n", done.out))
    assert re.search(r"registers +\d+ a thread, \d+ bytes spilled", done.out)
    assert re.search(r"occupancy +[1-9] blocks an SM, \d+% of its warps", done.out)
    assert "arithmetic, predicted" in done.out
    call = re.search(r'warm it: python -c "(.*)"', done.out)
    assert call is not None and "'bf16[1, 8, 4096, 128]', causal=True, arch='sm_80'" in call[1]
    compile(call[1], "warm", "exec")


def test_few_queries_go_to_decoding():
    shape = "D64 S1/4096 heads=8 batch=2"
    done = run("explain", "attention", "--shape", shape, "--arch", "sm_80")
    assert "attention_decode.split" in done.out and "memory, predicted" in done.out


def test_few_tiles_leave_sms_idle():
    done = run("explain", "attention", "--shape", "S128 heads=4", "--arch", "sm_80")
    assert "idle SMs, predicted: some 4 tiles for 108 SMs" in done.out


def test_words_of_a_shape():
    found = parse("fp16 D64 S1/512 B3 H32/8 causal")
    assert (found["dtype"], found["head_dim"], found["causal"]) == ("fp16", 64, True)
    assert (found["seqlen_q"], found["seqlen_k"], found["batch"]) == (1, 512, 3)
    assert (found["heads_q"], found["heads_kv"]) == (32, 8)
    assert parse("seqlen=64,heads=4")["heads_kv"] == 4
    with pytest.raises(ParameterError, match="did you mean head_dim"):
        parse("headdim=64")


@pytest.mark.parametrize("call", warm_calls.names())
def test_every_call_selects_its_kernels(call):
    ops.load()
    for arch in ("sm_80", "sm_90a"):
        asked, _ = explain._asked(call, None)
        assert explain._taken(asked, target(arch)), (call, arch)


def test_a_call_is_written_with_its_arguments():
    shape = "bf16[512, 4096], bf16[4096, 4096]"
    done = run("explain", "linear", "--shape", shape, "--arch", "sm_90a")
    assert done.status == 0, done.err
    assert "linear.wgmma" in done.out and "17.2 GFLOP, 40.0 MiB: 410 flops a byte" in done.out
    assert "arithmetic, predicted" in done.out
    call = re.search(r'warm it: python -c "(.*)"', done.out)
    assert call is not None and "'bf16[4096, 4096]', arch='sm_90a'" in call[1]
    asked = explain.written("rms_norm", "bf16[8192, 4096], bf16[4096], eps=1e-5")
    assert asked.args == ("bf16[8192, 4096]", "bf16[4096]") and asked.options == {"eps": 1e-5}
    for wrong in ("bf16[8", "q=__import__('os')", "bf16[8], x"):
        with pytest.raises(ParameterError, match="is not the arguments of rms_norm"):
            explain.written("rms_norm", wrong)


def test_what_limits_a_norm_and_an_unknown_call():
    shape = "bf16[8192, 4096], bf16[4096]"
    done = run("explain", "rms_norm", "--shape", shape, "--arch", "sm_80")
    assert "memory, predicted: at least 64.0 MiB" in done.out
    done = run("explain", "liner", "--arch", "sm_80")
    assert done.status == 1 and "did you mean linear" in done.err


def test_few_queries_on_hopper_share_keys_out():
    done = run("explain", "attention", "--shape", "S64/16384 H32/8", "--arch", "sm_90a")
    assert "kernel     attention_few." in done.out and "idle SMs" not in done.out
