"""`fkjit.models.Decoder`: text generation over a paged cache, with sequences that come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fkjit.arguments import as_list, shown, whole
from fkjit.errors import ArgumentTypeError, ParameterError, UnknownSequenceError
from fkjit.models.config import HEADS, ModelConfig
from fkjit.models.network import Network
from fkjit.models.plan import StepPlan, checked
from fkjit.models.prefill import Piece, Prompts
from fkjit.models.quantized import keeper, with_head
from fkjit.models.readback import Launched
from fkjit.models.sampling import Sampling, mode_of, pick
from fkjit.models.slots import Slots, Starting
from fkjit.models.step import Steps
from fkjit.models.weights import Keep, Weights, arranged, dtype_of, fitting
from fkjit.ops.kv.cache import PagedKVCache
from fkjit.ops.kv.memory import Memory
from fkjit.ops.op import torch_ops

_CALL = "Decoder"
LONGEST = 4096  # tokens of a sequence, where nothing else is said
PAGE_SIZE = 256
CHUNK = 8192


class Token(NamedTuple):
    """A new token of a request. finished: "stop" (the token is a stop token), "length" (it is the
    last of max_new_tokens), or None: more will come."""

    request: int
    token: int
    finished: str | None


@dataclass(eq=False)
class _Request:
    number: int
    prompt: list[int]
    new: int
    sampling: Sampling
    stop: frozenset[int]
    sequence: int = -1  # of the cache
    filled: int = 0  # tokens of the prompt that are in the cache
    launched: int = 0  # new tokens, the last ones perhaps still on their way
    read: int = 0  # new tokens that the caller has
    over: bool = False


class Decoder:
    """A model that generates, with a paged KV cache and its decode step in a CUDA graph.

        decoder = fkjit.models.Decoder(model.config, model.state_dict(), dtype="bf16")
        texts = decoder.generate([[1, 5, 9], [1, 7]], max_new_tokens=64)

        number = decoder.submit([1, 5, 9], max_new_tokens=64, sampling=Sampling(0.8, top_p=0.95))
        for token in decoder.stream():           # more may be submitted meanwhile
            print(token.request, token.token, token.finished)

    Args:
        config: a Hugging Face configuration of GPT-2, Llama, Mistral, Qwen2 or Qwen3, its
            dictionary, or a name of `fkjit.models.named_configs()`; heads of 8, 16 … 256 columns.
        weights: the model's state_dict(), or `fkjit.models.random_weights(...)`.
        dtype, device: of weights, activations and cache: "fp16" or "bf16"; "cuda", "cuda:1", "cpu"
            (the interpreter). Weights of `random_weights` bring their own.
        max_batch: sequences that are decoded at the same time; others wait.
        max_length: tokens of the longest sequence, its new ones included; default: the model's, at
            most 4096.
        num_pages, page_size: of the cache; default: room for max_batch longest sequences.
        chunk: tokens of prompts in one forward pass; between two such passes comes a decode step.
        graphs: False launches every kernel of a step by itself.
        plan: which kernels a decode step has, and whether they start early: a StepPlan; None: on
            Hopper by a table of measured plans (docs/MODELS.md), elsewhere what `linear` chooses
            for each product alone; "measured": the plan that is fastest here, for each power of two
            of sequences, found when it is met for the first time (about a second; compiles other
            variants too). `plans` tells which.
        quantize: a scheme of `fkjit.quantize`, by which the weights of each layer's products become
            codes as they are read; embedding, head, norms and biases stay numbers. "int4_group" and
            "int8_group" leave activations as they are; with the others ("fp8_row", "fp8_block",
            "fp8_tensor", "int8_row") each product quantizes what comes in. None: all are numbers.
        quantize_head: a scheme for the head alone, to which logits are more sensitive than to other
            weights; where it is the embedding as well, that one stays numbers. None: numbers.

    Raises:
        ParameterError, ArgumentTypeError: a configuration or weights that do not fit, other dtypes.
        DeviceError: no such device.

    A sequence starts when the cache has pages for all its tokens, so none runs out of memory on the
    way. The tokens of a step are read while the next one runs, so a sequence that met a stop token
    takes part in one more step, of which nothing is seen. Not for several threads at a time.
    """

    def __init__(
        self,
        config: Any,
        weights: Any,
        *,
        dtype: Any = "bf16",
        device: Any = "cuda",
        max_batch: int = 64,
        max_length: int | None = None,
        num_pages: int | None = None,
        page_size: int = PAGE_SIZE,
        chunk: int = CHUNK,
        graphs: bool = True,
        plan: StepPlan | str | None = None,
        quantize: str | None = None,
        quantize_head: str | None = None,
    ) -> None:
        self.config = ModelConfig.of(config)
        if self.config.head_dim not in HEADS:
            raise ParameterError(
                f"{_CALL}: head_dim={self.config.head_dim}; allowed: multiples of {HEADS.step} up "
                f"to {HEADS[-1]}"
            )
        held = self._weights(weights, dtype, device, keeper(self.config, quantize))
        held = with_head(held, self.config, quantize_head)
        longest = min(self.config.max_length, LONGEST) if max_length is None else max_length
        self.max_batch = whole(_CALL, "max_batch", max_batch, 1, 4096)
        self.max_length = whole(_CALL, "max_length", longest, 2, self.config.max_length)
        self.chunk = whole(_CALL, "chunk", chunk, 1, 1 << 24)
        self.cache = self._cache(held.embedding, num_pages, page_size)
        self._network = Network(self.config, held)
        if not isinstance(graphs, bool):
            raise ArgumentTypeError(f"{_CALL}: graphs={shown(graphs)}; allowed: a bool")
        self._slots = Slots(
            max_batch, self.max_length, self.config.vocabulary, held.embedding.device
        )
        self._steps = Steps(self._network, self.cache, self._slots, graphs, checked(plan))
        self._prompts = Prompts(self._network, self.cache, graphs)
        self._requests: dict[int, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._filling: list[_Request] = []
        self._running: list[_Request] = []  # in the order of their slots
        self._pending: list[tuple[Launched, list[_Request]]] = []  # tokens on their way
        self._next = 0

    @property
    def weights(self) -> Weights:
        """The weights, as the forward pass takes them."""
        return self._network.weights

    @property
    def plans(self) -> dict[int, StepPlan]:
        """Of the steps so far, by number of sequences."""
        return dict(self._steps.plans)

    def _cache(self, like: Any, num_pages: int | None, page_size: int) -> PagedKVCache:
        """Of the dtype and on the device of `like`."""
        if num_pages is None:
            pages = -(-self.max_length // whole(_CALL, "page_size", page_size, 1))
            num_pages = self.max_batch * pages
        return PagedKVCache(
            num_pages, page_size=page_size, num_kv_heads=self.config.heads_kv,
            head_dim=self.config.head_dim, dtype=like.dtype, device=like.device,
            num_layers=self.config.layers, max_sequences=self.max_batch,
            max_length=self.max_length, framework="torch",
        )  # fmt: skip

    def _weights(self, weights: Any, dtype: Any, device: Any, keep: Keep) -> Weights:
        if not isinstance(weights, Weights):
            chosen = dtype_of(_CALL, dtype)
            return arranged(
                self.config, weights, chosen, Memory(_CALL, "torch", device).device, keep
            )
        fitting(self.config, weights)
        return weights._replace(layers=tuple(map(keep, weights.layers)))

    # ------------------------------------------------------------------ requests

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Collection[int] = (),
    ) -> int:
        """A new request; its number, by which `stream` names its tokens.

        Args:
            prompt: tokens, at least one.
            max_new_tokens: as many follow, unless a stop token does before.
            sampling: default: greedy.
            stop: tokens behind which nothing follows.

        Raises:
            ParameterError: no tokens, tokens outside the vocabulary, or a sequence longer than
            max_length or than the cache. ArgumentTypeError: no whole numbers.
        """
        last = self.config.vocabulary - 1
        tokens = as_list(_CALL, "prompt", prompt)
        if set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) > last:
            tokens = [whole(_CALL, "prompt's token", token, 0, last) for token in tokens]
        new = whole(_CALL, "max_new_tokens", max_new_tokens, 1)
        if not tokens:
            raise ParameterError(f"{_CALL}: prompt is empty; allowed: at least one token")
        room = min(self.max_length, self.cache.num_pages * self.cache.page_size)
        if len(tokens) + new > room:
            raise ParameterError(
                f"{_CALL}: a prompt of {len(tokens)} tokens and max_new_tokens={new}; allowed: up "
                f"to {room} together: max_length, or the pages of the cache"
            )
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise ArgumentTypeError(f"{_CALL}: sampling={shown(sampling)}; allowed: a Sampling")
        stops = frozenset(whole(_CALL, "stop", one, 0) for one in as_list(_CALL, "stop", stop))
        made = _Request(self._next, tokens, new, sampling.checked(), stops)
        self._next += 1
        self._requests[made.number] = made
        self._waiting.append(made)
        return made.number

    def cancel(self, request: int) -> None:
        """End a request; none of its tokens are seen from now on.

        UnknownSequenceError for one that is over or never was.
        """
        found = self._requests.get(request) if isinstance(request, Hashable) else None
        if found is None:
            raise UnknownSequenceError(
                f"{_CALL}.cancel: request {shown(request)} is over or never was; allowed: "
                f"{', '.join(map(str, self._requests)) or 'none'}"
            )
        if found in self._waiting:
            self._waiting.remove(found)
        self._finish([found])

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Collection[int] = (),
    ) -> list[list[int]]:
        """The new tokens of each prompt; arguments and errors are those of `submit`. Stop tokens
        are in the result. Requests that were submitted before are finished as well, unseen."""
        said = {"max_new_tokens": max_new_tokens, "sampling": sampling, "stop": stop}
        numbers: list[int] = []
        try:
            for prompt in as_list(_CALL, "prompts", prompts):
                numbers.append(self.submit(prompt, **said))
        except Exception:
            for number in numbers:
                self.cancel(number)
            raise
        made: dict[int, list[int]] = {number: [] for number in numbers}
        for token in self.stream():
            if token.request in made:
                made[token.request].append(token.token)
        return list(made.values())

    def stream(self) -> Iterator[Token]:
        """New tokens of all requests as they come, until none is left. More may be submitted, and
        some cancelled, between two tokens."""
        while self._requests:
            yield from self.advance()

    def advance(self) -> list[Token]:
        """One turn: a decode step is launched, then the tokens of the turn before are read, then a
        chunk of prompts is launched where some wait. The GPU has work while the host waits."""
        torch = torch_ops.torch_seen()
        with torch.no_grad():
            before, self._pending = self._pending, []
            self._launch()
            found = [token for launched, batch in before
                     for token in self._delivered(batch, launched.read())]  # fmt: skip
            self._admit()
            if self._filling:
                self._fill()
            return found

    # ------------------------------------------------------------------ turns

    def _admit(self) -> None:
        """Sequences for requests that wait, as long as there are slots and pages."""
        page_size = self.cache.page_size
        while self._waiting and len(self._filling) + len(self._running) < self.max_batch:
            one = self._waiting[0]
            tokens = len(one.prompt) + one.new
            if -(-tokens // page_size) > self.cache.free_pages:
                return
            one.sequence = self.cache.allocate()
            self.cache.reserve([one.sequence], tokens, flush=False)
            self._filling.append(self._waiting.popleft())

    def _fill(self) -> None:
        """One chunk of prompts; those that are complete have their first new tokens."""
        pieces, parts, room = [], [], self.chunk
        for one in self._filling:
            tokens = one.prompt[one.filled : one.filled + room]
            if tokens:
                pieces.append(Piece(one.sequence, one.filled, tokens))
                parts.append(one)
                room -= len(tokens)
        stream, rows = self._prompts.fill(pieces)
        for one, piece in zip(parts, pieces, strict=True):
            one.filled += len(piece.tokens)
        ready = [i for i, one in enumerate(parts) if one.filled == len(one.prompt)]
        if ready and len(ready) < len(parts):
            stream, rows = stream[ready], rows[ready]
        if ready:
            self._start(stream, rows, [parts[i] for i in ready])

    def _start(self, stream: Any, rows: Any, done: list[_Request]) -> None:
        """Slots for sequences whose prompts are complete, and their first new tokens."""
        starting = [Starting.of(len(one.prompt), one.sampling, one.new) for one in done]
        draws = self._slots.draws(starting)
        mode = mode_of(one.sampling for one in done)
        tokens = pick(self._network.logits(stream), draws, mode)
        self._slots.put(len(self._running), rows, tokens, draws, starting)
        for one in done:
            self._filling.remove(one)
            self._running.append(one)
        self._launched(self._steps.send(tokens), done)

    def _launch(self) -> None:
        """A decode step of what runs."""
        if self._running:
            mode = mode_of(one.sampling for one in self._running)
            step = self._steps.launch(len(self._running), mode)
            self._launched(step, list(self._running))

    def _launched(self, tokens: Launched, batch: list[_Request]) -> None:
        """Tokens that will be read in the next turn. Sequences whose last ones these are leave at
        once: what follows in the stream comes after it."""
        self._pending.append((tokens, batch))
        for one in batch:
            one.launched += 1
        self._leave([one for one in batch if one.launched == one.new])

    def _delivered(self, batch: list[_Request], tokens: list[int]) -> list[Token]:
        """What the caller gets; what is over gets nothing any more."""
        found, ended = [], []
        for one, token in zip(batch, tokens, strict=True):
            if one.over:
                continue
            one.read += 1
            over = "stop" if token in one.stop else "length" if one.read == one.new else None
            found.append(Token(one.number, token, over))
            if over:
                ended.append(one)
        self._finish(ended)
        return found

    def _finish(self, ended: list[_Request]) -> None:
        for one in ended:
            one.over = True
            self._requests.pop(one.number, None)
        self._leave(ended)

    def _leave(self, leaving: list[_Request]) -> None:
        """Give back slots and pages, where they still have some."""
        if not leaving:
            return
        known = set(leaving)
        gone = {at for at, one in enumerate(self._running) if one in known}
        if gone:
            for source, target in self._slots.remove(gone, len(self._running)):
                self._running[target] = self._running[source]
            del self._running[-len(gone) :]
        for one in leaving:
            if one in self._filling:
                self._filling.remove(one)
            if one.sequence >= 0:
                self.cache.free(one.sequence)
                one.sequence = -1
