"""`fkjit generate`: what it prints of a tiny model on the CPU, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest

from tests.cli.kit import run

pytest.importorskip("torch", reason="needs torch")
TINY = {
    "model_type": "gpt2", "vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 2,
    "n_positions": 16,
}  # fmt: skip
PARAMETERS = 40 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def test_the_interpreters_time_is_printed(tiny):
    done = run("generate", "--config", tiny, "--device", "cpu", "--batch", "2", "--prompt", "3",
               "--new", "2", "--temperature", "1", "--top-k", "5")  # fmt: skip
    assert done.status == 0, done.err
    first, both = done.out.splitlines()[-2:]
    assert first.endswith("parameters in bf16 on cpu; batch 2, 3 + 2 tokens")
    said = r"6 tokens of prompts and \d+ of steps in [\d.]+ m?s, by the interpreter"
    assert re.fullmatch(said, both)


def test_rates_are_tokens_by_seconds():
    from fkjit.cli.generate import Options, Rates, lines

    assert lines(Rates(1024, 0.5, 30, 0.03), Options("x", batch=2, new=16)) == [
        "prefill 2,048 tokens/s: 1,024 tokens in 500.0 ms",
        "decode 1,000 tokens/s: 2.0 ms a step",
    ]


def test_the_title_says_what_the_weights_are():
    from fkjit.cli.generate import Options, title

    assert title(124_400_000, Options("gpt2", weights="int4_group"), "cuda") == (
        "gpt2 with random weights: 124.4 M parameters in bf16, layers' products in int4_group, on "
        "cuda; batch 1, 512 + 128 tokens"
    )


@pytest.mark.parametrize("words, text", [
    (("--config", "gpt-2"), "no 'gpt-2'; did you mean gpt2?"),
    (("--config", "/none/config.json"), "config=/none/config.json: "),
    (("--layers", "13"), "layers=13; allowed: 1 to 12"),
    (("--dtype", "fp32"), "dtype=fp32; allowed: bf16, fp16"),
    (("--prompt", "1000"), "1000 + 128 tokens; allowed: up to 1024"),
    (("--temperature", "-1", "--layers", "1"), "temperature=-1.0; allowed: from 0 on"),
])  # fmt: skip
def test_what_is_refused(words, text):
    done = run("generate", "--device", "cpu", *words)
    assert done.status == 1 and text in done.err and "Traceback" not in done.err
