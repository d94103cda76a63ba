"""A whole decoding step: on the CPU against plain PyTorch, in float64 and in the model's dtype."""

from __future__ import annotations

import pytest

from fkjit.jit.build import quiet

torch = pytest.importorskip("torch", reason="needs torch")
from bench.attention.decode_model import Decoder, Size, textbook, weights  # noqa: E402
from bench.attention.decode_step import advance, line  # noqa: E402

TINY = Size(hidden=48, heads_q=4, heads_kv=2, head_dim=16, mlp=64, layers=2, vocabulary=29)


def texts(lengths, vocabulary=TINY.vocabulary):
    """Random tokens of several sequences."""
    made = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (n,), generator=made).tolist() for n in lengths]


def assert_like_the_textbook(found, kept, text, size=TINY):
    """Logits behind the last tokens of `text`: at most twice PyTorch's error in the same dtype."""
    exact = textbook(size, kept, text, torch.float64)[-len(found) :]
    theirs = textbook(size, kept, text, found.dtype)[-len(found) :].double()
    assert (found.double() - exact).norm() <= 2 * (theirs - exact).norm()


def test_steps_are_those_of_the_textbook():
    """Prompts of three lengths; pages fill up meanwhile, and one sequence gives way to another."""
    kept, steps = weights(TINY, torch.float16, "cpu"), 3
    sequences = [*texts([14 + steps, 1 + steps, 16 + steps]), texts([22])[0]]
    decoder = Decoder(TINY, kept, 3, 12)
    with quiet():
        batch = decoder.prefill([text[:-steps] for text in sequences[:3]])
        decoder.rows.copy_(decoder.cache.rows(batch))
        logits = []
        for at in range(steps):
            decoder.tokens.copy_(torch.tensor([text[at - steps] for text in sequences[:3]]))
            logits.append(advance(decoder, batch, decoder.step))
        for i, text in enumerate(sequences[:3]):
            assert_like_the_textbook(torch.stack([step[i] for step in logits]), kept, text)
        decoder.cache.free(batch[1])
        batch[1:2] = decoder.prefill([sequences[3][:-1]])
        decoder.rows.copy_(decoder.cache.rows(batch))
        decoder.tokens[1] = sequences[3][-1]
        logits = advance(decoder, batch, decoder.step)
    assert_like_the_textbook(logits[1:2], kept, sequences[3])


def test_a_step_without_sequences_writes_nothing():
    """What is run before a capture."""
    decoder = Decoder(TINY, weights(TINY, torch.float16, "cpu"), 2, 4)
    with quiet():
        assert decoder.step().shape == (2, TINY.vocabulary)
    assert not decoder.cache.lengths.any()
    assert not any(pages.any() for layer in (0, 1) for pages in decoder.cache.pages(layer))


def test_the_line_for_people():
    cell = {"case": "bf16 B1 S128", "apart": 0.0}
    cells = [
        {**cell, "candidate": name, "elapsed": {"p50": ms}, "host": {"p50": ms / 2}}
        for name, ms in (("eager", 3.0), ("graph", 1.0), ("decoder", 0.5))
    ]
    assert line(*cells) == (
        "bf16 B1 S128: eager 3000 us a step (host 1500); graph 1000 us a step (host 500), 3.00 "
        "times as fast, logits apart by 0; decoder 500 us a step (host 250), 6.00 times as fast, "
        "logits apart by 0"
    )
