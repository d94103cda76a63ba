"""Two prompts and three decoding steps out of a paged KV cache, against attention without pages."""

import torch

import fkjit

HEADS, KV_HEADS, DIM = 4, 2, 64
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def new(tokens):
    """q, k and v of so many tokens, as a model's projections would give them."""
    shapes = (tokens, HEADS, DIM), (tokens, KV_HEADS, DIM), (tokens, KV_HEADS, DIM)
    return [torch.randn(shape, device=device).half() for shape in shapes]


cache = fkjit.PagedKVCache(
    num_pages=16, page_size=16, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float16,
    device=device, max_sequences=2, max_length=64, framework="torch",
)  # fmt: skip
ids = [cache.allocate(), cache.allocate()]
seen = {sequence: ([], []) for sequence in ids}  # what a cache without pages would hold


def step(counts):
    """One forward pass of so many new tokens of each sequence; the outputs of the last of each."""
    slots = cache.extend(ids, counts)
    q, k, v = new(sum(counts))
    fkjit.kv_append(k, v, cache, slots)
    ends = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device=device)
    rows = cache.rows(ids)
    out = fkjit.paged_attention(q, cache, rows=rows, cu_seqlens_q=ends, max_seqlen_q=max(counts))
    for sequence, keys, values in zip(ids, k.split(counts), v.split(counts), strict=True):
        seen[sequence][0].append(keys)
        seen[sequence][1].append(values)
    last = [counts[0] - 1, sum(counts) - 1]
    return q[last], out[last]


for counts in ([20, 7], [1, 1], [1, 1], [1, 1]):
    q, out = step(counts)
    for i, sequence in enumerate(ids):
        keys, values = (torch.cat(parts).transpose(0, 1)[None] for parts in seen[sequence])
        alone = fkjit.attention(q[i, None, :, None], keys, values)
        torch.testing.assert_close(out[i], alone[0, :, 0], atol=4e-3, rtol=0)
    print(f"{counts} new tokens, {cache.free_pages} pages free, lengths",
          [cache.length(sequence) for sequence in ids])  # fmt: skip
