"""`fkjit.PagedKVCache`: keys and values of many sequences in pages of one pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fkjit.arguments import as_list, one_of, shown, whole
from fkjit.errors import CaptureError, ParameterError
from fkjit.ops.kv.copy import kv_copy
from fkjit.ops.kv.memory import Memory, dtype_name
from fkjit.ops.kv.planes import Planes, check_layer
from fkjit.ops.kv.pool import Copies, PagePool
from fkjit.ops.kv.problem import CODES, LAYOUTS, PAGE_SIZES, page_shape
from fkjit.ops.kv.read import kv_read
from fkjit.ops.kv.slots import kv_slots
from fkjit.ops.op.checks import check_flag
from fkjit.types import PageLayout

_CALL = "PagedKVCache"
_MAX_SEQUENCES = 256
_MOST = {"num_layers": 1 << 16, "num_kv_heads": 1 << 16, "head_dim": 1 << 16}
_MOST["max_sequences"] = 1 << 20
_SCATTERED = 4096  # changes of the tables that go to the device in one piece, at most


class PagedKVCache:
    """Keys and values in pages, so that sequences grow without memory set aside for them.

    Example:
        >>> cache = fkjit.PagedKVCache(
        ...     8, page_size=16, num_kv_heads=1, head_dim=32, dtype="fp16", device="cpu",
        ...     framework="numpy",
        ... )
        >>> a = cache.allocate()
        >>> slots = cache.extend([a], [20])
        >>> k = v = np.ones((20, 1, 32), np.float16)
        >>> fkjit.kv_append(k, v, cache, slots)
        >>> b = cache.fork(a)  # shares both pages until one of them writes
        >>> q = np.ones((2, 4, 32), np.float16)  # a new token of each
        >>> fkjit.paged_attention(q, cache, rows=cache.rows([a, b])).shape
        (2, 4, 32)

    Args:
        num_pages, page_size: the pool; page_size is a power of two up to 256 tokens.
        num_kv_heads, head_dim: of keys and values; those of a page fill whole 16 bytes.
        dtype: "fp16", "bf16", "fp32" (or torch's, NumPy's); "fp8" (e4m3) and "int8" keep numbers
            divided by the scale of their layer and head.
        layout: "nhd", pages are [page_size, heads, head_dim]; "hnd": [heads, page_size, head_dim].
        device: "cuda", "cuda:1", a number, a torch.device, or "cpu", where the interpreter runs.
        num_layers: layers that share the page tables; each has pages of its own.
        max_sequences, max_length: rows of the page tables, and tokens of the longest sequence;
            default: 256, and all that the pool holds. The tables' memory is their product.
        k_scale, v_scale: fp8 and int8: a number, or [heads], or [layers, heads].
        framework: "torch", "cupy", "numpy": whose arrays these are; default: torch if it was
            imported before, else CuPy, on the CPU NumPy.

    Attributes:
        page_table [max_sequences, max_pages], lengths, capacities [max_sequences]: int32 on the
            device, by the row of a sequence; -1 where there is no page. Valid after `flush`.
        k_scale, v_scale: [layers, heads] fp32 on the device, None without; may be written to.
        all_pages: [layers, 2, …], keys and values of all layers, as `pages` has them of one; fp8 as
            its bytes.

    Sequences are numbers that are never used again. Whatever fails (PoolExhaustedError,
    UnknownSequenceError for what was freed or never allocated, SequenceTooLongError,
    ParameterError) leaves the cache as it was.

    CUDA graphs: `kv_slots`, `kv_append`, `rope_kv_append` and `kv_read` may be captured; they read
    slots, tables and lengths from the device at each replay, and count appended tokens there. All
    methods belong outside: they change tables, and may copy pages. A step of decoding:

        rows = cache.rows(batch)                              # once
        with torch.cuda.graph(graph):
            slots = fkjit.kv_slots(cache, rows)               # one token each
            fkjit.kv_append(k, v, cache, slots)
        for step in steps:
            cache.reserve(batch, 1)                           # a page where one is full: no waiting
            graph.replay()
            cache.advance(batch, 1)                           # the same on the host

    Tokens that were not reserved are not written: their slot is -1. Work on one stream, or order
    streams yourself. Not for several threads at a time.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        page_size: int = 256,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any,
        layout: PageLayout = "nhd",
        device: Any = "cuda",
        num_layers: int = 1,
        max_sequences: int = _MAX_SEQUENCES,
        max_length: int | None = None,
        k_scale: Any = 1.0,
        v_scale: Any = 1.0,
        framework: str | None = None,
    ) -> None:
        sizes = {
            "num_pages": num_pages, "page_size": page_size, "num_kv_heads": num_kv_heads,
            "head_dim": head_dim, "num_layers": num_layers, "max_sequences": max_sequences,
        }  # fmt: skip
        num_pages, page_size, num_kv_heads, head_dim, num_layers, max_sequences = (
            _positive(name, value) for name, value in sizes.items()
        )
        if page_size not in PAGE_SIZES:
            raise ParameterError(
                f"{_CALL}: page_size={page_size} is not one of {', '.join(map(str, PAGE_SIZES))}"
            )
        one_of(_CALL, "layout", layout, LAYOUTS)
        if num_pages * page_size >= 2**31:
            raise ParameterError(f"{_CALL}: num_pages * page_size must be below 2^31")
        self.num_pages, self.page_size, self.num_layers = num_pages, page_size, num_layers
        self.num_kv_heads, self.head_dim, self.layout = num_kv_heads, head_dim, layout
        self.dtype = dtype_name(_CALL, dtype)
        if max_length is None:
            max_length = num_pages * page_size
        max_pages = min(num_pages, -(-_positive("max_length", max_length) // page_size))
        scales = {"k_scale": self._scales("k_scale", k_scale),
                  "v_scale": self._scales("v_scale", v_scale)}  # fmt: skip
        self._memory = Memory(_CALL, framework, device)
        self.pool = PagePool(num_pages, page_size, max_sequences, max_pages)
        self._make_tables()
        self._make_pages(scales)

    def __repr__(self) -> str:
        shape = f"{self.num_pages} pages of {self.page_size} tokens"
        each = f"{self.num_layers} layers, {self.num_kv_heads} heads of {self.head_dim}"
        where = f"{self._memory.framework} on {self._memory.device or 'cpu'}"
        return f"<PagedKVCache {self.dtype} {self.layout}: {shape}, {each}; {where}>"

    def _scales(self, name: str, value: Any) -> np.ndarray | None:
        """[layers, heads] fp32, None where numbers are kept as they are."""
        try:
            given = np.asarray(value, np.float32)
            full = np.array(np.broadcast_to(given, (self.num_layers, self.num_kv_heads)))
        except Exception as error:  # of whatever array it is
            raise ParameterError(
                f"{_CALL}: {name} is not a number, [heads], or [layers, heads]: {error}"
            ) from None
        if not (np.isfinite(full) & (full > 0)).all():
            raise ParameterError(f"{_CALL}: {name}={shown(value)}; allowed: finite, above 0")
        if self.dtype in CODES:
            return full
        if not (full == 1).all():
            raise ParameterError(f"{_CALL}: {name} goes with dtype fp8 and int8, not {self.dtype}")
        return None

    def _make_tables(self) -> None:
        pool = self.pool
        self._state = self._memory.zeros((pool.state.size,), "int32")
        cells = pool.page_table.size
        self.page_table = self._state[:cells].reshape(pool.page_table.shape)
        self.lengths = self._state[cells : cells + pool.max_sequences]
        self.capacities = self._state[cells + pool.max_sequences :]
        self.flush()

    def _make_pages(self, scales: dict[str, np.ndarray | None]) -> None:
        kept = CODES.get(self.dtype, self.dtype)
        shape = page_shape(
            self.layout, self.num_pages, self.page_size, self.num_kv_heads, self.head_dim
        )
        self.all_pages = pages = self._memory.zeros((self.num_layers, 2, *shape), kept)
        flat = self._memory.reinterpret(pages.reshape(-1), "uint8")
        self._bytes = flat.reshape(2 * self.num_layers, self.num_pages, -1)
        k_scale, v_scale = (
            None if scale is None else self._memory.upload(scale) for scale in scales.values()
        )
        self.k_scale, self.v_scale = k_scale, v_scale
        storage = self.dtype if self.dtype in CODES else "same"
        self.planes = []
        for layer in range(self.num_layers):
            k, v = (None if x is None else x[layer] for x in (k_scale, v_scale))
            arrays = (pages[layer, 0], pages[layer, 1], k, v)
            self.planes.append(Planes(arrays, storage, self.layout))

    # ------------------------------------------------------------------ sequences

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return self.pool.free_pages

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences there are, the oldest first."""
        return self.pool.sequences

    def length(self, sequence: int) -> int:
        """Tokens of a sequence, as the host knows it (see `advance`)."""
        return self.pool.length(sequence)

    def allocate(self) -> int:
        """A new, empty sequence. PoolExhaustedError where `max_sequences` are in use."""
        return self.pool.allocate()

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins with the first `length` tokens (default: all) of another.

        They share pages. Before either writes to a page that both have, `reserve` or `extend`
        copies it; so after a fork both need another `reserve` before tokens can be appended.
        """
        return self.pool.fork(sequence, length)

    def free(self, sequence: int) -> None:
        """End a sequence; its pages are free, but for those that others share."""
        self.pool.free(sequence)

    def reserve(
        self, sequences: Sequence[int], tokens: int | Sequence[int] = 1, *, flush: bool = True
    ) -> None:
        """Make room for so many more tokens in each sequence, of which none are written yet.

        Nothing waits for the GPU; tables that change (without `flush`: at the next one) and pages
        that are copied follow on the caller's stream. PoolExhaustedError, SequenceTooLongError;
        ArgumentTypeError: flush; CaptureError under capture.
        """
        self._refuse_capture("reserve")
        follows = check_flag(f"{_CALL}.reserve", "flush", flush)
        self._copy(self.pool.reserve(*_each("reserve", sequences, tokens)))
        if follows:
            self.flush()

    def extend(self, sequences: Sequence[int], tokens: int | Sequence[int] = 1) -> Any:
        """`reserve`, and count the new tokens: [sum of tokens] int32, their slots, sequence by
        sequence, for `kv_append`."""
        sequences, counts = _each("extend", sequences, tokens)
        self.reserve(sequences, counts)
        slots = self._slots(sequences, counts, append=True)
        self.pool.advance(sequences, counts)
        return slots

    def place(self, sequences: Sequence[int], tokens: int | Sequence[int] = 1) -> np.ndarray:
        """`extend` without a launch: [sum of tokens] int32 of NumPy, their slots, sequence by
        sequence, by the lengths that the host knows; the device's tables follow with the next
        `flush`. Errors as of `reserve`."""
        sequences, counts = _each("place", sequences, tokens)
        self.reserve(sequences, counts, flush=False)
        return self.pool.place(sequences, counts)

    def advance(self, sequences: Sequence[int], tokens: int | Sequence[int] = 1) -> None:
        """Count tokens on the host that `kv_slots` counted on the device, in a captured graph."""
        self.pool.advance(*_each("advance", sequences, tokens))

    def defragment(self) -> dict[int, int]:
        """Move pages so that those in use have the lowest numbers; returns where each one went.

        One launch and new tables, in the order of the caller's stream. Slots and FlashInfer indices
        that were made before are void. CaptureError under capture.
        """
        self._refuse_capture("defragment")
        moved = self.pool.defragment()
        self._copy(list(moved.items()))
        self.flush()
        return moved

    # ------------------------------------------------------------------ for kernels

    def rows(self, sequences: Sequence[int]) -> Any:
        """[sequences] int32 on the device: their rows in the tables, until they are freed."""
        self._refuse_capture("rows")
        held = self.pool.batch("rows", sequences)
        return self._memory.upload(np.array([one.row for one in held], np.int32))

    def slots(self, sequences: Sequence[int]) -> Any:
        """[sum of lengths] int32 on the device: slots of all tokens, sequence by sequence."""
        self._refuse_capture("slots")
        sequences = as_list(f"{_CALL}.slots", "sequences", sequences)
        return self._slots(sequences, [self.length(s) for s in sequences], append=False)

    def read(
        self, sequences: Sequence[int], *, layer: int = 0, dtype: str | None = None
    ) -> tuple[Any, Any]:
        """(k, v) of all tokens, [sum of lengths, heads, head_dim] each; see `kv_read`."""
        return kv_read(self, self.slots(sequences), layer=layer, dtype=dtype)

    def pages(self, layer: int = 0) -> tuple[Any, Any]:
        """(k_pages, v_pages) of a layer, [num_pages, page_size, heads, head_dim] ("hnd": heads
        before page_size), sharing memory. fp8 is uint8 in CuPy."""
        held = self.planes[check_layer(f"{_CALL}.pages", layer, self.num_layers)]
        k, v = (self._memory.reinterpret(pages, self.dtype) for pages in held.arrays[:2])
        return k, v

    def flashinfer(self, sequences: Sequence[int]) -> tuple[Any, Any, Any]:
        """(kv_indptr, kv_indices, kv_last_page_len), int32 on the device, as FlashInfer's wrappers
        want them beside `pages()`; of the lengths that the host knows."""
        self._refuse_capture("flashinfer")
        held = self.pool.batch("flashinfer", sequences)
        counts = [-(-one.length // self.page_size) for one in held]
        indices = [page for one, n in zip(held, counts, strict=True) for page in one.pages[:n]]
        last = [one.length - (max(n, 1) - 1) * self.page_size
                for one, n in zip(held, counts, strict=True)]  # fmt: skip
        made = (np.cumsum([0, *counts]), indices, last)
        indptr, pages, lengths = (self._memory.upload(np.array(x, np.int32)) for x in made)
        return indptr, pages, lengths

    def flush(self) -> None:
        """Bring the tables on the device up to date, on the caller's stream; the methods that
        change them do it by themselves, but for `allocate`, `fork`, `free` and `place`."""
        changed = self.pool.changed
        if not changed:
            return
        self._refuse_capture("flush")
        state, few = self.pool.state, []
        for first, last in changed:
            if last - first > _SCATTERED:
                self._state[first:last] = self._memory.upload(state[first:last])
            else:
                few.append(np.arange(first, last))
        if few:
            places = np.unique(np.concatenate(few))
            self._memory.scatter(self._state, places, state[places])
        changed.clear()

    def _slots(self, sequences: Sequence[int], counts: list[int], append: bool) -> Any:
        rows = self.rows(sequences)
        ends = self._memory.upload(np.cumsum([0, *counts]).astype(np.int32))
        return kv_slots(self, rows, ends, num_tokens=sum(counts), append=append)

    def _copy(self, copies: Copies) -> None:
        if copies:
            kv_copy(self._bytes, self._memory.upload(np.array(copies, np.int32)))

    def _refuse_capture(self, call: str) -> None:
        if self._memory.capturing():
            raise CaptureError(
                f"{_CALL}.{call}: the stream is being captured into a CUDA graph, and the tables "
                "cannot change there; call it before the capture, and between replays"
            )


def _each(
    call: str, sequences: Sequence[int], tokens: int | Sequence[int]
) -> tuple[list[int], list[int]]:
    """The sequences, and a count for each of them."""
    call = f"{_CALL}.{call}"
    named = as_list(call, "sequences", sequences)
    if isinstance(tokens, int | np.integer):
        return named, [int(tokens)] * len(named)
    return named, as_list(call, "tokens", tokens)


def _positive(name: str, value: Any) -> int:
    return whole(_CALL, name, value, 1, _MOST.get(name, 2**31 - 1))
