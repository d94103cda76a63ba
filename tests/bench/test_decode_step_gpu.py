"""A whole decoding step captured in a CUDA graph: equal to eager, and to plain PyTorch."""

from __future__ import annotations

import pytest

from fkjit.jit.build import quiet

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
from bench.attention.decode_model import Decoder, Size, weights  # noqa: E402
from bench.attention.decode_step import Captured, advance  # noqa: E402
from tests.bench.test_decode_step import assert_like_the_textbook, texts  # noqa: E402

SIZE = Size(hidden=512, heads_q=8, heads_kv=2, head_dim=64, mlp=1024, layers=3, vocabulary=1000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_one_capture_follows_sequences_that_grow_end_and_begin(dtype):
    """40 replays over several pages; the host only reserves pages, and never waits."""
    kept, steps, lengths = weights(SIZE, dtype, "cuda"), 40, [300, 1, 17]
    sequences = texts([n + steps for n in lengths], SIZE.vocabulary)
    with quiet():
        made = []
        for _ in range(2):
            decoder = Decoder(SIZE, kept, 3, 60)
            batch = decoder.prefill([text[:-steps] for text in sequences])
            decoder.rows.copy_(decoder.cache.rows(batch))
            made.append((decoder, batch))
        (eager, batch), (other, others) = made
        captured, logits = Captured(other), []
        fed = torch.tensor([text[-steps:] for text in sequences], device="cuda").T.contiguous()
        for tokens in fed:
            eager.tokens.copy_(tokens)
            expected = advance(eager, batch, eager.step)
            torch.cuda.set_sync_debug_mode("error")
            other.tokens.copy_(tokens)
            found = advance(other, others, captured)
            torch.cuda.set_sync_debug_mode("default")
            assert torch.equal(found, expected)
            logits.append(found.clone())
        for i, text in enumerate(sequences):
            found = torch.stack([step[i] for step in logits])
            assert_like_the_textbook(found, kept, text, SIZE)
        (text,) = texts([50], SIZE.vocabulary)
        for decoder, live in made:  # another sequence in the place of one that ends
            decoder.cache.free(live[0])
            live[0] = decoder.prefill([text[:-1]])[0]
            decoder.rows.copy_(decoder.cache.rows(live))
            decoder.tokens[0] = text[-1]
        found = advance(other, others, captured)
        assert torch.equal(found, advance(eager, batch, eager.step))
        assert_like_the_textbook(found[:1], kept, text, SIZE)
