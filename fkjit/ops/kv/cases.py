"""How the kernels of the KV cache are checked: problems, arrays, references; and what a cache
keeps of numbers, as the kernels round it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.kv.problem import CODES, LAYOUTS, SIDES, page_shape, width
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

GREATEST = {"fp8": 448.0, "int8": 127.0}  # what a code can stand for
_POISON = 7  # in pages, where tests append nothing
_NO_SLOT = -9  # in slots, where tests look for what is not written


def encode(x: np.ndarray, storage: str, scale: np.ndarray) -> np.ndarray:
    """What the cache keeps of x [..., heads, head_dim], as the kernels round it."""
    if storage == "same":
        return x
    scaled = x.astype(np.float32) / scale.astype(np.float32)[:, None]
    top = np.float32(GREATEST[storage])
    if storage == "int8":
        return np.rint(np.clip(scaled, -top, top)).astype(np.int8)
    import ml_dtypes

    return np.clip(scaled, -top, top).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def decode(codes: np.ndarray, storage: str, scale: np.ndarray, dtype: str) -> np.ndarray:
    """x [..., heads, head_dim] of what the cache keeps, in `dtype`."""
    if storage == "same":
        return codes
    if storage == "fp8":
        import ml_dtypes

        codes = codes.view(ml_dtypes.float8_e4m3fn)
    scaled = codes.astype(np.float32) * scale.astype(np.float32)[:, None]
    return scaled.astype(numpy_dtype(dtype))


def kept_dtype(problem: Problem) -> np.dtype:
    """Of the pages."""
    storage = problem["storage"]
    return numpy_dtype(problem["dtype"]) if storage == "same" else np.dtype(CODES[storage])


def by_slot(problem: Problem, pages: np.ndarray) -> np.ndarray:
    """Contiguous pages as [slots, heads, head_dim]: a view for "nhd", else a copy."""
    if problem["layout"] == "hnd":
        pages = pages.transpose(0, 2, 1, 3)
    return pages.reshape(-1, problem["heads"], problem["head_dim"])


def from_slots(problem: Problem, kept: np.ndarray) -> np.ndarray:
    """[slots, heads, head_dim] as contiguous pages."""
    shape = page_shape(
        "nhd", *(problem[n] for n in ("num_pages", "page_size", "heads", "head_dim"))
    )
    pages = kept.reshape(shape)
    return pages if problem["layout"] == "nhd" else pages.transpose(0, 2, 1, 3).copy()


def problem_of(
    params: Params, tokens: int, heads: int, dim: int, page_size: int, num_pages: int,
    layout: str = "nhd", *, gap: int = 0, slot_step: int = 1, skipped: float = 0.2,
) -> dict[str, Any]:  # fmt: skip
    """One problem; k has `gap` elements behind each head, v twice as many."""
    token, head = (heads * dim, dim) if layout == "nhd" else (dim, page_size * dim)
    return {
        **{"dtype": params["dtype"], "storage": params["storage"], "layout": layout},
        **{"tokens": tokens, "heads": heads, "head_dim": dim},
        **{"page_size": page_size, "num_pages": num_pages},
        **{side: (heads * (dim + i * gap), dim + i * gap) for i, side in enumerate(SIDES, 1)},
        **{f"{side}_pages": (page_size * heads * dim, head, token) for side in SIDES},
        **{"slot_step": slot_step, "skipped": skipped},
    }


def problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """One token, ragged numbers of them, tokens wider than a block; both layouts."""
    size = width(params)
    dim, gap = (3 * size, size) if params["vector"] else (5, 1)
    found = [
        problem_of(params, 1, 1, dim, 16, 2, skipped=0.0),
        problem_of(params, 37, 3, dim, 16, 6, "hnd", gap=gap, slot_step=2),
        problem_of(params, 70, 2, dim, 32, 3, gap=gap),
        problem_of(params, 9, 67, 4 * size, 16, 1, "hnd"),
    ]
    if scale == "small":
        return found
    wide = [(4099, 8, 128, 64, 80), (65, 8, 256, 256, 3)]
    return found + [problem_of(params, *sizes, layout=la) for sizes in wide for la in LAYOUTS]


def random_slots(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """Different slots in any order, some of them -1: int32, or int64 where the step is 2."""
    slots = rng.permutation(problem["num_pages"] * problem["page_size"])[: problem["tokens"]]
    slots[rng.random(slots.size) < problem["skipped"]] = -1
    return slots.astype(np.int64 if problem["slot_step"] == 2 else np.int32)


def random_tokens(problem: Problem, rng: np.random.Generator, count: int) -> np.ndarray:
    """N(0, 1), flat, some of them 0 of either sign."""
    values = rng.standard_normal(count, dtype=np.float32)
    values[::29] = np.copysign(0, values[::29])
    return values.astype(numpy_dtype(problem["dtype"]))


def random_scales(problem: Problem, rng: np.random.Generator) -> Arrays:
    """Some that do not fill the range, and some with which numbers beyond it are cut off."""
    if problem["storage"] == "same":
        return {}
    usual = 2.5 / GREATEST[problem["storage"]]
    scales = usual * rng.uniform(0.4, 3.0, (2, problem["heads"]))
    return {f"{side}_scale": scales[i].astype(np.float32) for i, side in enumerate(SIDES)}


def seen_tokens(problem: Problem, buffer: np.ndarray, side: str) -> np.ndarray:
    """[tokens, heads, head_dim] in the buffer that holds them."""
    steps = tuple(step * buffer.itemsize for step in (*problem[side], 1))
    shape = (problem["tokens"], problem["heads"], problem["head_dim"])
    return np.lib.stride_tricks.as_strided(buffer, shape, steps)


def buffer_length(problem: Problem, side: str) -> int:
    """Elements of such a buffer."""
    token, head = problem[side]
    return (problem["tokens"] - 1) * token + (problem["heads"] - 1) * head + problem["head_dim"]


def append_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh tokens, slots and scales."""
    tokens = {
        side: random_tokens(problem, rng, buffer_length(problem, side)) for side in ("k", "v")
    }
    slots = random_slots(problem, rng)
    return {**tokens, "slot_mapping": slots, **random_scales(problem, rng)}


def append_outputs(params: Params, problem: Problem) -> Arrays:
    """Pages with the same number everywhere."""
    shape = page_shape(
        problem["layout"], problem["num_pages"], problem["page_size"], problem["heads"],
        problem["head_dim"],
    )  # fmt: skip
    dtype = kept_dtype(problem)
    return {name: np.full(shape, _POISON, dtype) for name in ("k_pages", "v_pages")}


def appended(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """The pages, in float64; of fp8 the codes."""
    slots = np.asarray(arrays["slot_mapping"])
    found = {}
    for side in ("k", "v"):
        x = seen_tokens(problem, np.asarray(arrays[side]), side)
        scale = np.asarray(arrays.get(f"{side}_scale", np.ones(problem["heads"])))
        shape = (problem["num_pages"] * problem["page_size"], problem["heads"], problem["head_dim"])
        kept = np.full(shape, _POISON, np.float64)
        codes = encode(x, problem["storage"], scale)
        kept[slots[slots >= 0]] = codes[slots >= 0].astype(np.float64)
        found[f"{side}_pages"] = from_slots(problem, kept)
    return found


def read_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Full pages, slots and scales."""
    sizes = [problem[n] for n in ("num_pages", "page_size", "heads", "head_dim")]
    scales = random_scales(problem, rng)
    pages = {}
    for side in ("k", "v"):
        x = random_tokens(problem, rng, int(np.prod(sizes)))
        x = x.reshape(-1, problem["heads"], problem["head_dim"])
        scale = scales.get(f"{side}_scale", np.ones(problem["heads"], np.float32))
        pages[f"{side}_pages"] = from_slots(problem, encode(x, problem["storage"], scale))
    return {**pages, "slot_mapping": random_slots(problem, rng), **scales}


def read_outputs(params: Params, problem: Problem) -> Arrays:
    """k and v, poisoned with NaN."""
    dtype = numpy_dtype(problem["dtype"])
    return {s: np.full(buffer_length(problem, s), np.nan, dtype) for s in ("k", "v")}


def read_back(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """k and v in their buffers in float64, NaN between them."""
    slots = np.asarray(arrays["slot_mapping"])
    found = {}
    for side in ("k", "v"):
        kept = by_slot(problem, np.asarray(arrays[f"{side}_pages"]))
        scale = np.asarray(arrays.get(f"{side}_scale", np.ones(problem["heads"])))
        x = decode(kept[slots], problem["storage"], scale, problem["dtype"]).astype(np.float64)
        x[slots < 0] = 0.0
        buffer = np.full(buffer_length(problem, side), np.nan)
        seen_tokens(problem, buffer, side)[...] = x
        found[side] = buffer
    return found


def copy_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """The smallest pages, and such as need several blocks."""
    sizes = [(2, 9, 16, 4), (3, 5, 17_000 // 16 * 16, 2)]
    if scale == "full":
        sizes.append((4, 40, 256 * 8 * 128 * 2, 20))
    names = ("planes", "num_pages", "page_bytes", "copies")
    return [dict(zip(names, values, strict=True)) for values in sizes]


def copy_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Full pages, and different ones of them in pairs."""
    shape = (problem["planes"], problem["num_pages"], problem["page_bytes"])
    pairs = rng.permutation(problem["num_pages"])[: 2 * problem["copies"]].reshape(-1, 2)
    return {
        "storage": rng.integers(0, 256, shape, dtype=np.uint8),
        "pairs": pairs.astype(np.int32),
    }


def copied(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """All pages afterwards."""
    storage, pairs = np.asarray(arrays["storage"]), np.asarray(arrays["pairs"])
    after = storage.astype(np.float64)
    after[:, pairs[:, 1]] = storage[:, pairs[:, 0]]
    return {"storage": after}


def slot_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Rows of no sequence, sequences without tokens or room, more tokens than a block has threads.

    `counts` is the number of tokens of each sequence, None: one each, without cu_seqlens.
    """
    found = []
    for append in (True, False):
        for size, counts in ((16, None), (16, [0, 3, 40, 1, 700]), (256, [1, 1500, 2, 9, 30])):
            sequences = 5 if counts is None else len(counts)
            tokens = sequences if counts is None else sum(counts)
            found.append(
                {
                    **{"sequences": sequences, "tokens": tokens, "append": append},
                    **{"page_size": size, "max_sequences": 9, "max_pages": 50, "counts": counts},
                }
            )
    return found


def slot_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Tables of which parts are filled; the first row is no sequence."""
    rows = rng.permutation(problem["max_sequences"])[: problem["sequences"]].astype(np.int32)
    rows[0] = -1
    size, most = problem["page_size"], problem["max_pages"]
    pages = rng.integers(0, most + 1, problem["max_sequences"])
    table = rng.permutation(most * problem["max_sequences"]).reshape(-1, most).astype(np.int32)
    table[np.arange(most) >= pages[:, None]] = -1
    lengths = (rng.random(len(pages)) * pages * size).astype(np.int32)
    counts = problem["counts"]
    ends = {} if counts is None else {"cu_seqlens": np.cumsum([0, *counts]).astype(np.int32)}
    return {
        **{"rows": rows, **ends, "page_table": table, "lengths": lengths},
        "capacities": (pages * size).astype(np.int32),
    }


def slot_outputs(params: Params, problem: Problem) -> Arrays:
    """Poisoned."""
    return {"slot_mapping": np.full(problem["tokens"], _NO_SLOT, np.int32)}


def slots_of(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """The slots, and the lengths as they are afterwards, token by token."""
    rows, table, lengths = (np.asarray(arrays[n]) for n in ("rows", "page_table", "lengths"))
    counts = problem["counts"] or [1] * problem["sequences"]
    after, slots = lengths.copy(), []
    for row, count in zip(rows, counts, strict=True):
        if row < 0:
            slots += [-1] * count
            continue
        begin = lengths[row] if problem["append"] else 0
        end = arrays["capacities"][row] if problem["append"] else lengths[row]
        for position in range(begin, begin + count):
            page, place = divmod(position, problem["page_size"])
            inside = position < end
            slots.append(table[row, page] * problem["page_size"] + place if inside else -1)
            after[row] += problem["append"] and inside
    return {"slot_mapping": np.array(slots, np.float64), "lengths": after.astype(np.float64)}


APPEND = Verification(
    problems=problems, inputs=append_inputs, outputs=append_outputs, reference=appended
)
READ = Verification(
    problems=problems, inputs=read_inputs, outputs=read_outputs, reference=read_back
)
COPY = Verification(problems=copy_problems, inputs=copy_inputs, reference=copied)
SLOTS = Verification(
    problems=slot_problems, inputs=slot_inputs, outputs=slot_outputs, reference=slots_of
)
