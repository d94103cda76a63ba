"""What a `Decoder` of a model compiles, for `fkjit warm --config`: the calls of its passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from fkjit.api import prepare
from fkjit.arch import target
from fkjit.arguments import one_of, whole
from fkjit.errors import ParameterError
from fkjit.models.config import ModelConfig
from fkjit.models.decoder import CHUNK, LONGEST, PAGE_SIZE
from fkjit.models.plan import StepPlan, fits, model_of, usual
from fkjit.models.prefill import Size, padded
from fkjit.models.quantized import check_head, described, keeper, one_scheme
from fkjit.ops.attention.decode import settled
from fkjit.ops.quantize.schemes import QuantizedTensor
from fkjit.ops.step import stream
from fkjit.ops.step.begin import prepare as prepare_begin
from fkjit.ops.step.call import Norm, prepare_append, prepare_linear
from fkjit.ops.step.logits import prepare_logits, prepare_pick
from fkjit.ops.step.whole import LAYER_WORDS, Arrays, scales_columns
from fkjit.ops.step.whole import prepare as prepare_whole
from fkjit.runtime import abstract
from fkjit.warm_calls import Call
from fkjit.warm_worker import Job
from fkjit.warming import chosen_targets, plan, planned

_CALL = "warm"
_SLOTS = "kv_slots"  # one variant, whatever it is called with
_OWN = {
    "normed_append": prepare_append,
    "normed_linear": prepare_linear,
    "step_begin": prepare_begin,
    "streamed_append": stream.prepare_append,
    "settled_attention": settled.prepare,
    "streamed_linear": stream.prepare_linear,
    "streamed_logits": prepare_logits,
    "pick_largest": prepare_pick,
    "decode_step": prepare_whole,
}  # fmt: skip  (not public)
_PLAN = StepPlan()


class Codes(NamedTuple):
    """The schemes of the layers' products and of the head; None: numbers."""

    layers: str | None = None
    head: str | None = None

    @property
    def both(self) -> str | None:
        """As a Network's `codes`."""
        return one_scheme(self)


def jobs(
    config: Any, *, batches: Collection[int] = (1,), prompt: int = 512, dtype: str = "bf16",
    arch: str | None = None, quantize: str | None = None, quantize_head: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Job]:  # fmt: skip
    """The variants that a Decoder with its defaults takes, each once.

    Args:
        config: as for `Decoder`.
        batches: sequences at a time; steps of fewer ones, while some end, are in.
        prompt: tokens of prompts: their products take other tiles than those of other lengths.
        dtype: "bf16" or "fp16". arch: targets, as for `fkjit.warm`. quantize, quantize_head: as for
            `Decoder`.
        tell: called with a line for each target that is left out, since it has no kernel for one of
            the calls, where others have.

    ParameterError, ArgumentTypeError: as `ModelConfig.of`; a batch or a prompt below 1; weights as
    `Decoder` refuses them; no target is left.
    """
    model = ModelConfig.of(config)
    keeper(model, quantize)
    if quantize_head is not None:
        check_head(model, quantize_head)
    one_of(_CALL, "dtype", dtype, ("bf16", "fp16"))
    sizes = sorted({whole(_CALL, "batch", batch, 1, 4096) for batch in batches})
    length = whole(_CALL, "prompt", prompt, 1, model.max_length)
    targets, found, refused = list(chosen_targets(arch)), [], {}
    for name in targets:
        codes, capability = Codes(quantize, quantize_head), target(name).arch.capability
        asked = calls(model, sizes, length, dtype, codes, capability)
        try:
            found += planned(asked, [name], _prepare, strict=True)
        except ParameterError as error:  # the others may have kernels for it
            refused[name] = error
    if refused and not found:
        raise next(reversed(refused.values()))
    for name, error in refused.items():
        tell(f"{name} is left out: {error}")
    return found + plan([_SLOTS], dict.fromkeys(job.target for job in found))


def _prepare(op: str, *args: Any, arch: str, **options: Any) -> None:
    """`fkjit.prepare`, also of the calls that models alone make."""
    if op not in _OWN:
        return prepare(op, *args, arch=arch, **options)
    _OWN[op](*abstract.described(args, abstract.device_for(arch)), **options)


def calls(
    model: ModelConfig, batches: Collection[int], prompt: int, dtype: str,
    codes: Codes, capability: tuple[int, int] | None,
) -> Iterator[Call]:  # fmt: skip
    """Calls of decode steps and of prompts, behind those that quantize weights."""
    maker = _Maker(model, dtype, codes)
    yield from maker.codes()
    for size in sorted({1 << power for batch in batches for power in range(batch.bit_length())}
                       | set(batches)):  # fmt: skip
        steps = usual(model, size, codes.both, capability)
        if steps.whole:
            yield from (maker.step(size, length) for length in (prompt, LONGEST))
        elif steps.streamed:
            yield from maker.streamed(size)
        else:
            yield from maker.layer(size, steps)
            yield from maker.decode(size)
            yield from maker.head(size, steps)
        yield from maker.head(size)  # behind prompts
    for batch in batches:
        rest = batch * prompt
        while rest > 0:
            tokens = min(rest, CHUNK)
            sequences = min(batch, -(-tokens // prompt))
            yield from maker.prompts(Size(tokens, sequences), min(prompt, tokens))
            size = padded(tokens, sequences, codes.both)  # where it becomes a graph
            if size is not None:
                yield from maker.prompts(size, size.tokens)
            yield from maker.head(sequences)
            rest = rest - tokens if rest < 2 * CHUNK else rest % CHUNK + CHUNK


class _Maker:
    """Calls of one model, as `Network` makes them."""

    def __init__(self, model: ModelConfig, dtype: str, schemes: Codes) -> None:
        self.model, self.dtype, self.schemes = model, dtype, schemes
        self.pages = (self.array(64, PAGE_SIZE, model.heads_kv, model.head_dim),) * 2

    def array(self, *shape: int, dtype: str | None = None) -> str:
        return f"{dtype or self.dtype}[{', '.join(map(str, shape))}]"

    def layer(self, rows: int, plan: StepPlan = _PLAN) -> Iterator[Call]:
        """All but attention, of so many tokens."""
        _, out, _, down = self.model.products().values()
        stream = self.array(rows, self.model.hidden)
        yield self.product(rows, *out, residual=stream, impl=plan.out)
        yield self.product(rows, *down, residual=stream, impl=plan.down)
        fused = plan.fused and fits(self.model, rows, self.schemes.both)
        yield from self._five(rows) if fused else self._eight(rows, plan)

    def step(self, rows: int, length: int) -> Call:
        """All of a step, in one launch, of a Decoder with room for sequences of that length."""
        model, array, learned = self.model, self.array, self.model.theta is None
        vector, table = array(model.hidden), array(model.vocabulary, model.hidden)
        each, all_rows = array(rows, dtype="int32"), array(rows, dtype="int32")
        pages = array(model.layers, 2, 64, PAGE_SIZE, model.heads_kv, model.head_dim)
        longest = -(-min(model.max_length, LONGEST) // PAGE_SIZE)
        head, scales = table, None
        if self.schemes.head is not None:  # codes as elements of 16 bits, rows of scales padded
            head = array(model.vocabulary, model.hidden // 4)
            scales = array(model.vocabulary, scales_columns(model.hidden))
        arrays = Arrays(
            array(rows, dtype="int64"), each, each, each, table,
            array(model.max_length, model.hidden) if learned else None, table,
            array(model.layers, LAYER_WORDS, dtype="int64"), vector, vector if learned else None,
            head, scales, None if learned else array(LONGEST, model.head_dim, dtype="fp32"),
            array(rows, longest, dtype="int32"), all_rows, all_rows, pages, None,
        )  # fmt: skip
        said = (self.schemes.both is not None, min(model.max_length, length))
        return Call("decode_step", (arrays, model_of(model, "nhd", PAGE_SIZE, *said)), {})

    def streamed(self, rows: int) -> Iterator[Call]:
        """A step whose products fetch their weight early."""
        model, array, learned = self.model, self.array, self.model.theta is None
        qkv, out, up, down = model.products().values()
        vector, x, places = array(model.hidden), array(rows, model.hidden), array(
            rows, dtype="int32")  # fmt: skip
        norm = Norm(vector, vector if learned else None, model.eps)
        table = None if learned else array(LONGEST, model.head_dim, dtype="fp32")
        scaled = stream.Scaled(x, array(1, rows, *((2,) if learned else ()), dtype="fp32"), norm)
        qkv_bias = self.bias(qkv[0], model.model_type == "qwen2")
        tokens, counts = array(rows, dtype="int64"), array(rows, dtype="int32")
        tables = (array(rows, -(-min(model.max_length, LONGEST) // PAGE_SIZE), dtype="int32"),
                  counts, counts)  # fmt: skip
        embedding = array(model.vocabulary, model.hidden)
        learned_ones = array(model.max_length, model.hidden) if learned else None
        yield Call("step_begin", (tokens, places, places, embedding, learned_ones, norm, tables),
                   {"page_size": PAGE_SIZE})  # fmt: skip
        yield Call(
            "streamed_append",
            (scaled, array(*qkv), qkv_bias, self.pages, places,
             None if table is None else places, table),
            {"heads_q": model.heads_q},
        )  # fmt: skip
        q = (rows, model.heads_q, model.head_dim)
        if any(seen is not None for seen in model.windows):
            yield from self.decode(rows)
        if settled.fits(model.head_dim, model.heads_q // model.heads_kv):
            arrays = (array(*q), self.pages, tables[0], places, places)
            yield Call("settled_attention", arrays, {})
        for n, k in (out, down):
            arrays = (array(rows, k), array(n, k), self.bias(n), x, norm)
            yield Call("streamed_linear", arrays, {})
        said = {"activation": model.activation, "gate": model.gated}
        yield Call("streamed_linear", (scaled, array(*up), self.bias(up[0]), None, None), said)
        yield Call("streamed_logits", (scaled, embedding), {})
        tiles = -(-model.vocabulary // stream.tile_for(model.vocabulary, model.hidden)[0])
        largest = array(tiles, rows, 2, dtype="int32")
        yield Call("pick_largest", (largest, tokens, places, places), {})

    def _five(self, rows: int) -> Iterator[Call]:
        """What a layer of five launches has of its own."""
        model, array = self.model, self.array
        qkv, _, up, _ = model.products().values()
        vector, x = array(model.hidden), array(rows, model.hidden)
        norm = Norm(vector, vector if model.theta is None else None, model.eps)
        places = array(rows, dtype="int32")
        table = None if model.theta is None else array(LONGEST, model.head_dim, dtype="fp32")
        yield Call(
            "normed_append",
            (x, array(*qkv), self.bias(qkv[0], model.model_type == "qwen2"), norm, self.pages,
             places, None if table is None else places, table),
            {"heads_q": model.heads_q},
        )  # fmt: skip
        said = {"activation": model.activation, "gate": model.gated}
        yield Call("normed_linear", (x, array(*up), self.bias(up[0]), norm), said)

    def _eight(self, rows: int, plan: StepPlan) -> Iterator[Call]:
        """What a layer of eight launches has of its own."""
        model, array = self.model, self.array
        qkv, _, up, _ = model.products().values()
        yield self.norm(rows, model.hidden)
        yield self.product(rows, *qkv, model.model_type == "qwen2", impl=plan.qkv)
        yield self.product(rows, *up, activation=model.activation, gate=model.gated, impl=plan.up)
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

    def codes(self) -> Iterator[Call]:
        """What makes codes of the weights."""
        model = self.model
        asked = [(self.schemes.layers, *sizes) for sizes in model.products().values()]
        for scheme, n, k in (*asked, (self.schemes.head, model.vocabulary, model.hidden)):
            if scheme is not None:
                yield Call("quantize", (self.array(n, k), scheme), {"weight": True})

    def weight(self, n: int, k: int, scheme: str | None) -> str | QuantizedTensor:
        """Of a product."""
        return self.array(n, k) if scheme is None else described(scheme, n, k, self.dtype)

    def product(self, rows: int, n: int, k: int, biased: bool = False, **options: Any) -> Call:
        weight = self.weight(n, k, self.schemes.layers)
        return Call("linear", (self.array(rows, k), weight, self.bias(n, biased)), options)

    def bias(self, n: int, biased: bool = False) -> str | None:
        return self.array(n) if biased or self.model.theta is None else None

    def head(self, rows: int, plan: StepPlan = _PLAN) -> Iterator[Call]:
        sizes = self.model.vocabulary, self.model.hidden
        arrays = (self.array(rows, sizes[1]), self.weight(*sizes, self.schemes.head))
        yield self.norm(rows, sizes[1])
        yield Call("linear", arrays, {"out_dtype": "fp32", "impl": plan.head})

    def decode(self, rows: int) -> Iterator[Call]:
        yield from self._attention((rows, self.model.heads_q, self.model.head_dim), rows, {})

    def prompts(self, size: Size, longest: int) -> Iterator[Call]:
        """A pass of prompts."""
        yield from self.layer(size.tokens)
        yield from self.prefill(size.tokens, size.pieces, longest)

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
