"""The form that each kernel of a backward is rendered with, and which of them makes dbias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fkjit.ops.attention.backward import kernels as plain
from fkjit.ops.attention.features import parse
from fkjit.ops.op.op import Launch
from fkjit.runtime.interop import ITEMSIZE, View

Views = Mapping[str, View | None]
_RUN = 8  # neighbouring keys that a lane reads, at the most: 16 bytes of 16 bits
_LEAST_SCALE = 1e-3  # what a bias is divided by
_TURNS = 4  # batches that add to one dbias in turn: it is rounded each time
_CPU_MULTIPROCESSORS = 8


class Forms:
    """dbias: "queries" (dS stored where dq is made) or "keys" (sums of its columns where dk is),
    else "": a kernel of its own makes it.

    seeded: sums of products start from bias and mask, where no rule stands before these and their
    rows hold whole runs.
    """

    def __init__(
        self, text: str, views: Views, problem: dict[str, Any], products: list[Launch],
        wanted: tuple[str, ...],
    ) -> None:  # fmt: skip
        self._form, self._views = parse(text), views
        self._problem = problem
        half = bool(products) and products[0].spec is plain.KEYS
        self._paired = replace(self._form, **self._in_runs(2)) if half else self._form
        self.seeded = half and self._may_seed()
        self.dbias = ""
        bias = views["bias"]
        if bias is not None and "bias" in wanted:
            problem |= {"bias_shape": tuple(bias.shape[:3]), "bias_parts": 1}
            self.dbias = self._maker(wanted) if self.seeded else ""

    def of(self, name: str) -> str:
        """The text for a kernel."""
        if self.seeded:
            made = self.dbias == name.replace("sums", "keys")
            return replace(self._form, seeded=True, dbias=made, dalibi=False).text
        return (self._paired if name in ("queries", "bias") else self._form).text

    def in_turn(self, launch: Launch) -> list[Launch]:
        """Of the kernel that stores dS: one for all batches, or each adds to what is there."""
        batches = self._problem["batch"]
        if self._problem["bias_shape"][0] == batches:
            return [launch]
        own = ({**launch.problem, "batch": 1, "first_batch": b} for b in range(batches))
        return [Launch(launch.spec, launch.params, one) for one in own]

    def _maker(self, wanted: tuple[str, ...]) -> str:
        one, batch = self._problem, self._problem["batch"]
        bias_batch, heads, rows = one["bias_shape"]
        if rows == 1:
            return "keys" if {"k", "v"} & set(wanted) else ""
        whole = (heads, rows) == (one["heads_q"], one["seqlen_q"]) and "total_q" not in one
        blocks = one["heads_q"] * -(-one["seqlen_q"] // 128)
        enough = blocks >= one.get("multiprocessors", _CPU_MULTIPROCESSORS)
        in_turn = bias_batch == batch or (batch <= _TURNS and enough)
        return "queries" if "q" in wanted and whole and in_turn else ""

    def _may_seed(self) -> bool:
        form = self._form
        curved = form.softcap or form.score_mod or form.alibi
        runs = self._in_runs(_RUN)
        return (
            bool(runs) and all(runs.values()) and not curved
            and abs(self._problem["softmax_scale"]) >= _LEAST_SCALE
        )  # fmt: skip

    def _in_runs(self, length: int) -> dict[str, bool]:
        """Of a bias and a mask, whether all rows hold whole runs, and start where one may."""
        found = {}
        for name in ("bias", "mask"):
            view = self._views[name]
            if view is None:
                continue
            apart = [s for s, n in zip(view.strides[:3], view.shape[:3], strict=True) if n > 1]
            odd = view.shape[3] % length or any(step % length for step in apart)
            size = min(length * ITEMSIZE.get(view.dtype, 1), 16)
            found[f"{name}_paired"] = not (odd or view.pointer % size)
        return found
