"""`fkjit explain`: what a call of attention takes, without a GPU."""

from __future__ import annotations

import re

import pytest

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
