"""What a `Decoder` of a model compiles, for `fkjit warm --config`: the calls of its passes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from fkjit.arguments import one_of, whole
from fkjit.models.config import ModelConfig
from fkjit.models.decoder import CHUNK, LONGEST, PAGE_SIZE
from fkjit.models.quantized import described, keeper
from fkjit.warm_calls import Call
from fkjit.warm_worker import Job
from fkjit.warming import chosen_targets, plan, planned

_CALL = "warm"
_SLOTS = "kv_slots"  # one variant, whatever it is called with


def jobs(
    config: Any, *, batches: Collection[int] = (1,), prompt: int = 512, dtype: str = "bf16",
    arch: str | None = None, quantize: str | None = None,
) -> list[Job]:  # fmt: skip
    """The variants that a Decoder with its defaults takes, each once.

    Args:
        config: as for `Decoder`.
        batches: sequences at a time; steps of fewer ones, while some end, are in.
        prompt: tokens of prompts: their products take other tiles than those of other lengths.
        dtype: "bf16" or "fp16". arch: targets, as for `fkjit.warm`. quantize: as for `Decoder`.

    ParameterError, ArgumentTypeError: as `ModelConfig.of`; a batch or a prompt below 1; weights as
    `Decoder` refuses them.
    """
    model = ModelConfig.of(config)
    keeper(model, quantize)
    one_of(_CALL, "dtype", dtype, ("bf16", "fp16"))
    sizes = sorted({whole(_CALL, "batch", batch, 1, 4096) for batch in batches})
    length = whole(_CALL, "prompt", prompt, 1, model.max_length)
    targets = list(chosen_targets(arch))
    found = planned(calls(model, sizes, length, dtype, quantize), targets)
    return found + plan([_SLOTS], targets)


def calls(
    model: ModelConfig, batches: Collection[int], prompt: int, dtype: str,
    quantize: str | None = None,
) -> Iterator[Call]:  # fmt: skip
    """Calls of decode steps and of prompts, behind those that quantize weights."""
    maker = _Maker(model, dtype, quantize)
    yield from maker.codes()
    for size in sorted({1 << power for batch in batches for power in range(batch.bit_length())}
                       | set(batches)):  # fmt: skip
        yield from maker.layer(size)
        yield from maker.decode(size)
        yield from maker.head(size)
    for batch in batches:
        rest = batch * prompt
        while rest > 0:
            tokens = min(rest, CHUNK)
            sequences = min(batch, -(-tokens // prompt))
            yield from maker.layer(tokens)
            yield from maker.prefill(tokens, sequences, min(prompt, tokens))
            yield from maker.head(sequences)
            rest = rest - tokens if rest < 2 * CHUNK else rest % CHUNK + CHUNK


class _Maker:
    """Calls of one model, as `Network` makes them."""

    def __init__(self, model: ModelConfig, dtype: str, quantize: str | None) -> None:
        self.model, self.dtype, self.scheme = model, dtype, quantize
        self.pages = (self.array(64, PAGE_SIZE, model.heads_kv, model.head_dim),) * 2

    def array(self, *shape: int, dtype: str | None = None) -> str:
        return f"{dtype or self.dtype}[{', '.join(map(str, shape))}]"

    def layer(self, rows: int) -> Iterator[Call]:
        """All but attention, of so many tokens."""
        model, array = self.model, self.array
        qkv, out, up, down = self.products()
        stream = array(rows, model.hidden)
        yield self.norm(rows, model.hidden)
        yield self.product(rows, *qkv, model.model_type == "qwen2")
        yield self.product(rows, *out, residual=stream)
        yield self.product(rows, *up, activation=model.activation, gate=model.gated)
        yield self.product(rows, *down, residual=stream)
        q, kv = (array(rows, n, model.head_dim) for n in (model.heads_q, model.heads_kv))
        if model.qk_norm:
            yield from (Call("rms_norm", (x, array(model.head_dim)), {}) for x in (q, kv))
        places = array(rows, dtype="int32")
        if model.theta is None:
            yield Call("kv_append", (kv, kv, self.pages, places), {})
        else:
            turning = {"theta": model.theta, "scaling": model.scaling}
            yield Call("rope_kv_append", (q, kv, kv, self.pages, places, places), turning)

    def norm(self, rows: int, columns: int) -> Call:
        x, weight = self.array(rows, columns), self.array(columns)
        if self.model.theta is None:
            return Call("layer_norm", (x, weight, weight), {})
        return Call("rms_norm", (x, weight), {})

    def products(self) -> list[tuple[int, int]]:
        """Outputs and inputs of a layer's, as `quantized.PRODUCTS` has them."""
        model = self.model
        heads = model.heads_q * model.head_dim
        wide = heads + 2 * model.heads_kv * model.head_dim
        up = model.mlp * (2 if model.gated else 1)
        hidden = model.hidden
        return [(wide, hidden), (hidden, heads), (up, hidden), (hidden, model.mlp)]

    def codes(self) -> Iterator[Call]:
        """What makes codes of the weights."""
        if self.scheme is not None:
            for n, k in self.products():
                yield Call("quantize", (self.array(n, k), self.scheme), {"weight": True})

    def weight(self, n: int, k: int) -> Any:
        """Of a layer's product."""
        if self.scheme is None:
            return self.array(n, k)
        return described(self.scheme, n, k, self.dtype)

    def product(self, rows: int, n: int, k: int, biased: bool = False, **options: Any) -> Call:
        arrays = [self.array(rows, k), self.weight(n, k)]
        if biased or self.model.theta is None:
            arrays.append(self.array(n))
        return Call("linear", tuple(arrays), options)

    def head(self, rows: int) -> Iterator[Call]:
        arrays = (self.array(rows, self.model.hidden),
                  self.array(self.model.vocabulary, self.model.hidden))  # fmt: skip
        yield self.norm(rows, self.model.hidden)
        yield Call("linear", arrays, {"out_dtype": "fp32"})

    def decode(self, rows: int) -> Iterator[Call]:
        yield from self._attention((rows, self.model.heads_q, self.model.head_dim), rows, {})

    def prefill(self, tokens: int, sequences: int, longest: int) -> Iterator[Call]:
        ends = self.array(sequences + 1, dtype="int32")
        options = {"cu_seqlens_q": ends, "max_seqlen_q": longest}
        q = (tokens, self.model.heads_q, self.model.head_dim)
        yield from self._attention(q, sequences, options)

    def _attention(
        self, q: tuple[int, ...], sequences: int, options: dict[str, Any]
    ) -> Iterator[Call]:
        """Of each kind of layer."""
        pages = -(-min(self.model.max_length, LONGEST) // PAGE_SIZE)
        table = self.array(sequences, pages, dtype="int32")
        each = self.array(sequences, dtype="int32")
        for seen in dict.fromkeys(self.model.windows):
            window = None if seen is None else (seen - 1, 0)
            yield Call(
                "paged_attention", (self.array(*q), self.pages, table, each),
                {"rows": each, "window": window, **options},
            )  # fmt: skip
