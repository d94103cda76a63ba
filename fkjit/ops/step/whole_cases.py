"""How a whole decode step is checked: small models, their arrays, and the step in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.gemm.cases import TOLERANCE, activated
from fkjit.ops.rope.frequencies import rope_table
from fkjit.ops.step.whole_kernel import exchange_places
from fkjit.ops.step.whole_maps import LAYER_WORDS, NONE, SCALES
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_PAGE, _PAGES, _SEQUENCES = 8, 12, 4  # of the cache: tokens of a page, pages, rows of the tables
_LENGTHS = (9, 0, 17, 3)  # by sequence: into a new page, empty, in a third one, without room
_CAPACITIES = (16, 8, 24, 3)
_LAUNCHES = 3  # that came before
_GROUP = 128  # codes that share a scale
_SPAN = 32  # columns of a product are a multiple of
_SCALES = LAYER_WORDS - SCALES  # where they begin in a layer of the table
_CODED = ("qkv", "out", "up", "down")
_TOKENS, _LOGITS = 264, 552  # of the embedding; of the head, so that a block has many tiles
_NAMES = ("norm", "norm_bias", "qkv", "qkv_bias", "out", "out_bias", "mlp_norm", "mlp_norm_bias",
          "up", "up_bias", "down", "down_bias")  # fmt: skip


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Of a window, biases, one sequence and several, one of which is none."""
    dim, group = params["head_dim"], params["group"]
    full = scale == "full"
    blocks = 132 if full else 4 if params["own"] == group else 8
    least = 2 if params["own"] == group else 1
    heads_kv = max(least, -(-blocks // (group * dim)))  # every block has outputs of each product
    while heads_kv * group * dim % _SPAN:
        heads_kv += 1
    if params["codes"]:
        heads_kv = max(1, _GROUP // (group * dim))
    unit = 256 if params["codes"] else 64  # columns that tensor maps have whole lines of
    while (wide := heads_kv * group * dim) % unit and wide != unit // 2:
        heads_kv += 1
    blocks = max(blocks, heads_kv * group // params["own"])
    hidden, mlp = (256, 1024) if full else (128, 256) if params["codes"] else (64, 320)
    said = {name: params[name] for name in ("dtype", "norm", "rope", "activation", "gate", "codes")}
    found = []
    for m, window, biased in ((1, 5, True), (params["most"], 0, False)):
        found.append({
            **said, "m": m, "layers": 2, "hidden": hidden, "mlp": mlp, "vocabulary": _LOGITS,
            "heads_q": heads_kv * group, "heads_kv": heads_kv, "head_dim": dim, "group": group,
            "eps": 1e-5, "blocks": blocks, "advance": 2 if m > 1 else int(biased),
            "own": params["own"], "splits": blocks if full else 2,
            "head_coded": params["codes"] and biased,
            "logits_stride": _LOGITS + 4, "table_rows": 40 if params["rope"] else 0,
            "max_sequences": _SEQUENCES, "max_pages": 3, "num_pages": _PAGES, "page_size": _PAGE,
            "layout": "nhd", "window": window, "biased": biased,
            "plane": _PAGES * _PAGE * heads_kv * dim,
            "pages": (_PAGE * heads_kv * dim, dim, heads_kv * dim),
        })  # fmt: skip
        heads = m * heads_kv * group // params["own"]
        found[-1]["offsets"] = _offsets(found[-1])
        found[-1]["splits"] = min(found[-1]["splits"], blocks // heads) or 1
    return [
        one for one in found
        if one["m"] * one["heads_q"] <= one["blocks"] * one["own"]
    ]  # fmt: skip


def _shapes(p: Problem) -> dict[str, tuple[int, ...]]:
    """Of a layer's arrays."""
    dim, hidden, mlp = p["head_dim"], p["hidden"], p["mlp"]
    heads, up = (p["heads_q"] + 2 * p["heads_kv"]) * dim, mlp * (2 if p["gate"] else 1)
    made = {
        "norm": (hidden,), "qkv": (heads, hidden), "out": (hidden, p["heads_q"] * dim),
        "mlp_norm": (hidden,), "up": (up, hidden), "down": (hidden, mlp),
    }  # fmt: skip
    if p["norm"] == "layer":
        made |= {"norm_bias": (hidden,), "mlp_norm_bias": (hidden,)}
    if p["biased"]:
        made |= {"qkv_bias": (heads,), "out_bias": (hidden,), "up_bias": (up,),
                 "down_bias": (hidden,)}  # fmt: skip
    return made


def _offsets(p: Problem) -> tuple[tuple[int, ...], ...]:
    """The table of layers: where the arrays of `_inputs` lie."""
    rows, at = [], 0
    for layer in range(p["layers"]):
        row = [NONE] * LAYER_WORDS
        row[len(_NAMES)] = p["window"] if layer == 0 else 0
        for name, (*rest, k) in _shapes(p).items():
            sizes = {_NAMES.index(name): math.prod(rest) * k}
            if p["codes"] and name in _CODED:
                scales = rest[0] * -(-k // (8 * _GROUP)) * 8
                sizes = {_NAMES.index(name): rest[0] * k // 4, _SCALES + _CODED.index(name): scales}
            for place, size in sizes.items():
                row[place] = at
                at += -(-size // 16) * 16
        rows.append(tuple(row))
    return tuple(rows)


def _inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    kind, hidden, m = numpy_dtype(p["dtype"]), p["hidden"], p["m"]

    def drawn(*shape: int) -> np.ndarray:
        if len(shape) == 1:
            return (1 + 0.2 * rng.standard_normal(shape)).astype(kind)
        return (rng.standard_normal(shape) / math.sqrt(shape[-1])).astype(kind)

    flat = []
    for _ in range(p["layers"]):
        for name, shape in _shapes(p).items():
            coded = p["codes"] and name in _CODED
            for array in _coded(rng, shape, kind) if coded else (drawn(*shape),):
                flat.append(np.pad(array.reshape(-1), (0, -array.size % 16)))
    pages = rng.standard_normal(
        (p["layers"], 2, p["num_pages"], p["page_size"], p["heads_kv"], p["head_dim"])
    ).astype(kind)  # fmt: skip
    rows = rng.permutation(_SEQUENCES)[:m].astype(np.int32)
    rows = np.resize(rows, m) if m <= _SEQUENCES else np.full(m, -1, np.int32)
    rows[:_SEQUENCES] = rng.permutation(_SEQUENCES)[: min(m, _SEQUENCES)]
    if m > 1:
        rows[-1] = -1
    elif p["window"]:
        rows[0] = 2  # the longest
    lengths = np.array(_LENGTHS, np.int32)
    positions = np.where(rows >= 0, lengths[rows], 0).astype(np.int32)
    made = {
        "tokens": rng.integers(0, _TOKENS, m, np.int64), "positions": positions,
        "active": (rows >= 0).astype(np.int32), "rows_of_cache": rows,
        "embedding": rng.standard_normal((_TOKENS, hidden)).astype(kind),
        "weights": np.concatenate(flat),
        "table_of_layers": np.array(p["offsets"], np.int64), "norm_weight": drawn(hidden),
        "head": drawn(_LOGITS, hidden),
        "page_table": rng.permutation(_PAGES).reshape(_SEQUENCES, 3).astype(np.int32),
        "capacities": np.array(_CAPACITIES, np.int32), "lengths": lengths, "pages": pages,
        "exchange": _exchange(p), "counters": np.zeros(1, np.uint32),
    }  # fmt: skip
    if p["codes"] and p["biased"]:
        made["head"], made["head_scales"] = _coded(rng, (_LOGITS, hidden), kind)
    if p["norm"] == "layer":
        made |= {"norm_bias": drawn(hidden), "position_embedding": drawn(40, hidden)}
    if p["rope"]:
        made["table"] = rope_table(p["table_rows"], p["head_dim"])
    return made


def _coded(
    rng: np.random.Generator, shape: tuple[int, ...], kind: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Random codes of int4 [n, k / 4], four in 16 bits, and scales of whole sixteens of bytes."""
    n, k = shape
    words = rng.integers(0, 1 << 16, (n, k // 4)).astype(np.uint16)
    for shift in range(0, 16, 4):  # -8 is no code
        words[(words >> shift) & 15 == 8] ^= np.uint16(1 << shift)
    scales = np.zeros((n, -(-k // (8 * _GROUP)) * 8), kind)
    scales[:, : k // _GROUP] = (0.2 + 0.05 * rng.random((n, k // _GROUP))) / math.sqrt(k)
    return words.view(kind), scales


def _decoded(words: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers, float64 [n, k]: of eight codes even ones are the low half of 32 bits."""
    n = words.shape[0]
    both = np.ascontiguousarray(words).view(np.uint16).reshape(n, -1, 2, 1)
    codes = (both >> np.arange(0, 16, 4, dtype=np.uint16) & 15).astype(np.int64)
    codes = np.where(codes > 7, codes - 16, codes).transpose(0, 1, 3, 2).reshape(n, -1)
    return codes * np.repeat(scales.astype(np.float64), _GROUP, 1)[:, : codes.shape[1]]


def _exchange(p: Problem) -> np.ndarray:
    """As launches before leave it: old words, whose tags nobody waits for."""
    made = np.zeros(exchange_places(p)[-1], np.int32)
    made[0] = _LAUNCHES
    return made


def _outputs(params: Params, p: Problem) -> Arrays:
    return {
        "logits": np.full((p["m"], p["logits_stride"]), np.nan, np.float32),
        "largest": np.full(p["m"], -1, np.int64),
    }


class _Step:
    """The step in float64."""

    def __init__(self, p: Problem, arrays: Mapping[str, Any]) -> None:
        self.p = p
        self.arrays: dict[str, Any] = {
            name: np.asarray(x).astype(np.float64) if np.asarray(x).dtype.kind not in "iu" else x
            for name, x in arrays.items() if x is not None and name not in ("weights", "head")
        }  # fmt: skip
        head, scales = np.asarray(arrays["head"]), arrays.get("head_scales")
        self.head = (
            head.astype(np.float64) if scales is None else _decoded(head, np.asarray(scales))
        )
        self.weights = np.asarray(arrays["weights"])
        self.pages = self.arrays["pages"].copy()
        rows, lengths = self.arrays["rows_of_cache"], np.asarray(self.arrays["lengths"])
        self.rows = [int(row) for row in rows]
        self.length = {row: int(lengths[row]) for row in self.rows if row >= 0}

    def layer(self, n: int) -> dict[str, np.ndarray]:
        return {name: self.array(n, name, shape) for name, shape in _shapes(self.p).items()}

    def array(self, n: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Of layer n, in float64."""
        offsets = self.arrays["table_of_layers"][n]
        own = self.weights[offsets[_NAMES.index(name)] :]
        if not self.p["codes"] or name not in _CODED:
            return own[: math.prod(shape)].reshape(shape).astype(np.float64)
        rows, k = shape
        width = -(-k // (8 * _GROUP)) * 8
        scales = self.weights[offsets[_SCALES + _CODED.index(name)] :][: rows * width]
        return _decoded(own[: rows * k // 4].reshape(rows, -1), scales.reshape(rows, width))

    def normed(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        if self.p["norm"] == "layer":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.p["eps"]) * weight
        return x if bias is None else x + bias

    def room(self, row: int) -> bool:
        return row >= 0 and self.length[row] < _CAPACITIES[row]

    def place(self, row: int, position: int) -> tuple[int, int]:
        return int(self.arrays["page_table"][row, position // _PAGE]), position % _PAGE

    def attended(self, heads: np.ndarray, n: int, window: int) -> np.ndarray:
        """heads: [m, all heads, D], turned."""
        p, q_heads, kv = self.p, self.p["heads_q"], self.p["heads_kv"]
        made = np.zeros((p["m"], q_heads, p["head_dim"]))
        for i, row in enumerate(self.rows):
            if row < 0:
                continue
            count = self.length[row] + self.room(row)
            if self.room(row):
                page, token = self.place(row, self.length[row])
                self.pages[n, 0, page, token] = heads[i, q_heads : q_heads + kv]
                self.pages[n, 1, page, token] = heads[i, q_heads + kv :]
            places = [
                self.place(row, t) for t in range(max(count - window, 0) if window else 0, count)
            ]
            k, v = (np.stack([self.pages[n, side, a, b] for a, b in places]) for side in (0, 1))
            for h in range(q_heads):
                own = h // p["group"]
                score = k[:, own] @ heads[i, h] * p["head_dim"] ** -0.5
                weight = np.exp(score - score.max())
                made[i, h] = weight @ v[:, own] / weight.sum()
        return made.reshape(p["m"], -1)

    def turned(self, heads: np.ndarray) -> np.ndarray:
        p, turning = self.p, self.p["heads_q"] + self.p["heads_kv"]
        if not p["rope"]:
            return heads
        table = self.arrays["table"][np.asarray(self.arrays["positions"])]
        cosine, sine = (side[:, None] for side in np.split(table, 2, -1))
        a, b = np.split(heads[:, :turning], 2, -1)
        made = np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)
        return np.concatenate([made, heads[:, turning:]], 1)

    def logits(self) -> np.ndarray:
        p, arrays = self.p, self.arrays
        x = arrays["embedding"][np.asarray(arrays["tokens"])]
        if "position_embedding" in arrays:
            x = x + arrays["position_embedding"][np.asarray(arrays["positions"])]
        for n in range(p["layers"]):
            w = self.layer(n)
            heads = self.normed(x, w["norm"], w.get("norm_bias")) @ w["qkv"].T + w.get(
                "qkv_bias", 0
            )
            heads = self.turned(heads.reshape(p["m"], -1, p["head_dim"]))
            window = int(arrays["table_of_layers"][n, len(_NAMES)])
            x = x + self.attended(heads, n, window) @ w["out"].T + w.get("out_bias", 0)
            up = self.normed(x, w["mlp_norm"], w.get("mlp_norm_bias")) @ w["up"].T + w.get(
                "up_bias", 0
            )
            y = activated(p["activation"], up[:, : p["mlp"]])
            x = (
                x
                + (y * up[:, p["mlp"] :] if p["gate"] else y) @ w["down"].T
                + w.get("down_bias", 0)
            )
        return self.normed(x, arrays["norm_weight"], arrays.get("norm_bias")) @ self.head.T


def _reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    step = _Step(p, arrays)
    logits = np.full((p["m"], p["logits_stride"]), np.nan)
    logits[:, : p["vocabulary"]] = step.logits()
    lengths = np.asarray(arrays["lengths"]).copy()
    for row in step.rows:
        if row >= 0:
            lengths[row] += step.room(row)
    positions = np.asarray(arrays["positions"])
    if p["advance"]:
        positions = positions + np.asarray(arrays["active"])
    return {
        "logits": logits,
        "positions": positions,
        "pages": step.pages,
        "lengths": lengths,
        "counters": np.zeros(1),
    }


WHOLE = Verification(
    problems=_problems, inputs=_inputs, outputs=_outputs, reference=_reference,
    tolerance=lambda params: 0.6 * TOLERANCE[params["dtype"]],
)  # fmt: skip
