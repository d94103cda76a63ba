"""The score features that each kernel of a backward is rendered with, and which of them makes the
gradient of a bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fkjit.ops.attention.backward.problem import Options
from fkjit.ops.attention.features import EXAMPLE_ARGS, EXAMPLE_MOD, ScoreFeatures, parse
from fkjit.runtime.interop import ITEMSIZE, View

Views = Mapping[str, View | None]
CPU_MULTIPROCESSORS = 8  # what the interpreter shares work out for
_RUN = 8  # neighbouring keys that a lane reads, at the most: 16 bytes of 16 bits
_LEAST_SCALE = 1e-3  # what a bias is divided by
_SHARERS = 2  # batches that add to one dbias from zeros, in any order
_BATCHES_IN_ORDER = 4  # that add to one dbias, one after the other: it is rounded each time
# What is compiled ahead: every feature, and those where accumulators start from a bias and a mask
# whose gradient is made on the way; for Hopper, of one head dimension each.
_EVERY = ScoreFeatures(
    True, True, "fp32", False, True, False, True, True, EXAMPLE_MOD, EXAMPLE_ARGS,
    score_mod_grad="1 + 0 * score", dalibi=True,
)  # fmt: skip
SHOWN, SHOWN_DENSE = _EVERY.text, replace(_EVERY, varlen=False).text
SHOWN_SEEDED = ScoreFeatures(bias="bf16", mask=True, dbias=True, seeded=True).text
SHOWN_SLOPES_SM90 = ScoreFeatures(alibi=True, mask=True, dalibi=True).text
SHOWN_SM90 = {
    ScoreFeatures(alibi=True, mask=True).text: 64,
    ScoreFeatures(softcap=True, varlen=True).text: 128,
    ScoreFeatures(alibi=True, bias="bf16", dbias=True).text: 128,
}
SHOWN_WIDE_SM90 = ScoreFeatures(softcap=True, mask=True, varlen=True).text


class KernelFeatures:
    """Of one call.

    dbias: "queries" (dS is stored where dq is made) or "keys" (sums of its columns where dk is),
    else "": a kernel of its own makes the gradient of a bias, if it is wanted.

    adds: Hopper's kernel adds to zeros.

    seeded: accumulators start from bias and mask, where no rule stands before these and their rows
    hold whole runs of keys.
    """

    def __init__(
        self, problem: dict[str, Any], options: Options, views: Views, tensor_cores: bool
    ) -> None:
        """Puts bias_shape into `problem` where a bias has a gradient."""
        self._problem, self._views, self._wanted = problem, views, options.wanted
        self._options = options
        self.seeded, self.dbias, self.adds = False, "", False
        self._features = self._paired = None
        if not options.features:
            return
        self._features = self._paired = parse(options.features)
        if tensor_cores:
            self._paired = replace(self._features, **self._in_runs(2))
            self.seeded = self._may_seed()
        bias = views.get("bias")
        if bias is not None and "bias" in options.wanted:
            problem |= {"bias_shape": tuple(bias.shape[:3]), "bias_parts": 1}
            self.dbias = self._maker() if self.seeded else ""

    def of(self, name: str) -> str:
        """The text for a kernel."""
        if self._features is None or self._paired is None:
            return ""
        if self.seeded:
            made = self.dbias == name.replace("sums", "keys")
            return replace(self._features, seeded=True, dbias=made, dalibi=False).text
        return (self._paired if name in ("queries", "bias") else self._features).text

    def of_sm90(self) -> str:
        """The text for Hopper's kernel; with it go `dbias`, which it makes itself where sums are of
        one head's queries, or where two batches share an element at most, and `adds`."""
        self.dbias, one = "", self._problem
        if self._features is None:
            return self._options.features
        features, bias = replace(self._features, dalibi=False), self._views.get("bias")
        if bias is None or "bias" not in self._wanted or "total_q" in one:
            return features.text
        longest = max(one["seqlen_q"], one["seqlen_k"])
        batches, heads, rows = one["bias_shape"]
        alone = batches == one["batch"]
        own = (heads, rows) == (one["heads_q"], one["seqlen_q"])
        own = own and (alone or one["batch"] <= _SHARERS)
        if one["bias_shape"][2] == 1:
            self.dbias, one["warps_alike"] = "keys", 1
        elif own and one["seqlen_k"] % _RUN == 0 and bias.dtype == one["dtype"]:
            self.dbias, self.adds = "queries", not alone or min(one["window"]) < longest
        return replace(features, dbias=bool(self.dbias), dbias_sums=self.dbias == "keys").text

    def _maker(self) -> str:
        """The kernel that makes the gradient of a bias on the way."""
        one, batch = self._problem, self._problem["batch"]
        bias_batch, heads, rows = one["bias_shape"]
        if rows == 1:
            return "keys" if {"k", "v"} & set(self._wanted) else ""
        whole = (heads, rows) == (one["heads_q"], one["seqlen_q"]) and "total_q" not in one
        blocks = one["heads_q"] * -(-one["seqlen_q"] // 128)
        enough = blocks >= one.get("multiprocessors", CPU_MULTIPROCESSORS)
        in_order = bias_batch == batch or (batch <= _BATCHES_IN_ORDER and enough)
        return "queries" if "q" in self._wanted and whole and in_order else ""

    def _may_seed(self) -> bool:
        features = self._features
        assert features is not None
        runs = self._in_runs(_RUN)
        return (
            bool(runs) and all(runs.values())
            and not (features.softcap or features.score_mod or features.alibi)
            and abs(self._problem["softmax_scale"]) >= _LEAST_SCALE
        )  # fmt: skip

    def _in_runs(self, length: int) -> dict[str, bool]:
        """Of a bias and a mask, whether all rows hold whole runs, and start where one may."""
        found = {}
        for name in ("bias", "mask"):
            view = self._views.get(name)
            if view is None:
                continue
            apart = [s for s, n in zip(view.strides[:3], view.shape[:3], strict=True) if n > 1]
            odd = view.shape[3] % length or any(step % length for step in apart)
            size = min(length * ITEMSIZE.get(view.dtype, 1), 16)
            found[f"{name}_paired"] = not (odd or view.pointer % size)
        return found
