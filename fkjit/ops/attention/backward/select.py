"""Which kernels a call of attention's backward takes, in which order, and what they hand on."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.attention.backward import kernels_sm90 as sm90
from fkjit.ops.attention.backward import mask_bits
from fkjit.ops.attention.backward import problem as shared
from fkjit.ops.attention.backward.features import CPU_MULTIPROCESSORS, KernelFeatures, Views
from fkjit.ops.attention.backward.kernels import (
    DKDV,
    DKDV_DQ,
    DKDV_ORDERED,
    DQ,
    with_features,
)
from fkjit.ops.attention.backward.kernels_bias import DBIAS, DBIAS_FP32, DBIAS_SUM, HEADS, ZEROS
from fkjit.ops.attention.backward.kernels_fp32 import DKDV_FP32, DQ_FP32
from fkjit.ops.attention.backward.kernels_preprocess import (
    POSTPROCESS,
    POSTPROCESS_PACKED,
    PREPROCESS,
    PREPROCESS_PACKED,
)
from fkjit.ops.attention.backward.kernels_slopes_sm90 import SLOPES_SM90
from fkjit.ops.attention.backward.kernels_wide_sm90 import FLASH_WIDE_SM90
from fkjit.ops.attention.backward.problem import Options
from fkjit.ops.attention.backward.schedule_sm90 import draws
from fkjit.ops.attention.backward.tiles import PAIRS, PAIRS_FP32, block_q_sm90, tiles
from fkjit.ops.op.op import Launch
from fkjit.runtime.interop import View
from fkjit.spec import KernelSpec, Problem
from fkjit.tuning import tuned

IMPLEMENTATIONS = ("auto", "portable", "flash_sm90")
# Head dimensions, with score features, on Hopper: slower, and not timed.
_SLOWER = [(192, 128), (192, 192)]


class Selected(NamedTuple):
    """The launches of a call, and shapes of the fp32 arrays that they hand on to one another."""

    launches: tuple[Launch, ...]
    scratch: Mapping[str, tuple[int, ...]]
    counters: int = 0


def select(
    problem: dict[str, Any], options: Options, views: Views, aligned: bool, arch: Arch
) -> Selected:
    """First what each row brings along, then what makes dk, dv and dq of it, then what only score
    features have gradients of.

    Puts into `problem` the sizes of what kernels hand on. aligned: rows start on 16-byte
    boundaries.
    """
    call = _Call(problem, options, views, aligned, arch)
    bias = views.get("bias")
    takes = options.impl in _allowed(problem, options)
    takes = takes and sm90.takes(problem, options, aligned, arch, bias)
    if options.impl == "flash_sm90" and not takes:
        raise ParameterError(
            f"attention_backward: impl='flash_sm90' does not take this call on {arch.name}; pass "
            "impl='auto' (it is for sm_90a, fp16 and bf16, head dimensions up to 256, more than 32 "
            "queries, rows on 16-byte boundaries, a positive softmax_scale)"
        )
    launches = call.on_sm90() if takes else call.portable()
    if bias is not None and "bias" in options.wanted:
        launches += call.of_bias(bias)
    if "sinks" in options.wanted or "alibi_slopes" in options.wanted:
        launches.append(Launch(HEADS, {"varlen": call.packed}, problem))
    made = tuple(one for one in launches if prod(one.spec.grid(one.params, one.problem)))
    counted = takes or problem.get("ordered", False)
    return Selected(made, _scratch(problem, options.wanted), sm90.COUNTERS * counted)


def _allowed(problem: Problem, options: Options) -> tuple[str, ...]:
    """Values of impl that Hopper's kernel is taken with: above head dimension 128 "auto" leaves
    score features with which it was not seen to be faster to the portable kernels."""
    dims = sm90.padded_dims(problem) or {}
    slower = options.features and (dims.get("head_dim"), dims.get("head_dim_v")) in _SLOWER
    return ("flash_sm90",) if slower else ("auto", "flash_sm90")


def _scratch(problem: Problem, wanted: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Arrays that kernels hand on: for each what has sized it."""
    rows = shared.rows_shape(problem)
    found: dict[str, tuple[int, ...]] = {"lse_log2": rows, "delta": rows}
    if "sum_columns" in problem:
        found["dq_sum"] = shared.sums_shape(problem)
    if "bits_shape" in problem:
        found["mask_bits"] = problem["bits_shape"]
    if problem.get("ordered"):
        found["turns"] = shared.order_shape(problem)
    if "alibi_slopes" in wanted:
        found["dalibi_rows"] = rows
    if "parts_shape" in problem:
        found["dbias_parts"] = problem["parts_shape"]
    return found


def ordered_pays(one: Problem, head_dim: int) -> bool:
    """Whether one kernel whose blocks wait for one another beats two: seen where an SM has one or
    two causal blocks of keys."""
    if head_dim != 128 or not one["causal"]:
        return False
    blocks = -(-one["seqlen_k"] // tiles("ordered", head_dim)[0][0])
    workers = one.get("multiprocessors", CPU_MULTIPROCESSORS)
    return bool(workers < blocks * one["batch"] * one["heads_kv"] <= 2 * workers)


class _Call:
    """What launches of one call are made from."""

    def __init__(
        self, problem: dict[str, Any], options: Options, views: Views, aligned: bool, arch: Arch
    ) -> None:
        self.problem, self.options, self.views, self.arch = problem, options, views, arch
        self.aligned, self.packed = aligned, "total_q" in problem
        self.tensor_cores = problem["dtype"] != "fp32" and arch.features >= DKDV.features({})
        if not self.tensor_cores and problem["dtype"] != "fp32":
            aligned = False  # of 16 bits in FMAs there is one variant for both
        pairs = PAIRS if self.tensor_cores else PAIRS_FP32
        if not aligned:
            pairs = tuple(pair for pair in pairs if pair[0] == pair[1])
        d, dv = problem["head_dim"], problem["head_dim_v"]
        self.dims = min((pair for pair in pairs if pair[0] >= d and pair[1] >= dv), key=sum)
        self.chunks = aligned  # whether tiles are copied in whole 16-byte chunks
        self.features = KernelFeatures(problem, options, views, self.tensor_cores)

    def on_sm90(self) -> list[Launch]:
        """One kernel for dk, dv and sums of dq."""
        problem, dims = self.problem, sm90.padded_dims(self.problem) or {}
        dim = dims["head_dim"]
        problem["sum_columns"] = sm90.width(dim)
        problem["ordered"] = ordered = sm90.in_order(problem, self.options)
        text = self.features.of_sm90() or self._drawn({**dims, "deterministic": ordered})
        params: dict[str, Any] = {
            "dtype": problem["dtype"], **dims, "deterministic": ordered,
        }  # fmt: skip
        if text:
            params["form"] = text
        base = FLASH_WIDE_SM90 if sm90.is_wide(problem) else sm90.FLASH_SM90
        zeros = 0 if ordered else sm90.width(dim)  # in order the first one to come stores
        return [
            *self._mask_bits(block_q_sm90(dims)),
            *self._zeros(),
            self._preprocess({**problem, "sum_columns": zeros}),
            Launch(with_features(base, text), params, problem),
            self._postprocess(),
            *self._slopes(dim),
        ]

    def _drawn(self, params: dict[str, Any]) -> str:
        """The text of a band of keys that is no more than the causal mask: with it blocks are
        drawn, not dealt out to teams."""
        one = self.problem
        if not draws(params, one):
            return ""
        longest = max(one["seqlen_q"], one["seqlen_k"])
        one |= {"window": (longest, 0), "softcap": 0.0, "score_scalars": {}}
        return "window"

    def _slopes(self, dim: int) -> list[Launch]:
        """What rows add to the gradient of slopes: with keys as rows Hopper's kernel has no sums
        over a row."""
        if "alibi_slopes" not in self.options.wanted:
            return []
        text = self.features.of("queries")
        params = {"dtype": self.problem["dtype"], "head_dim": dim, "form": text}
        return [Launch(with_features(SLOPES_SM90, text), params, self.problem)]

    def _mask_bits(self, block_q: int) -> list[Launch]:
        mask = self.views.get("mask")
        if mask is None:
            return []
        self.problem["mask_shape"] = mask_bits.own_shape(mask)
        self.problem["bits_shape"] = shared.bits_shape(block_q, self.problem)
        return [Launch(mask_bits.MASK, {"block_q": block_q}, self.problem)]

    def _zeros(self) -> list[Launch]:
        """Before dS is added to the gradient of a bias, or is not there for every element."""
        if not self.features.adds:
            return []
        return [Launch(ZEROS, {"bias_dtype": self.problem["dtype"]}, self.problem)]

    def portable(self) -> list[Launch]:
        """dk and dv, and dq in a kernel of its own: the same bits at every call; or, where any
        order will do, dq as sums by atomics."""
        if self._may_sum():
            self.problem["sum_columns"] = self.dims[0]
            return [self._preprocess(self.problem), self._launch(DKDV_DQ), self._postprocess()]
        if self._may_order():
            self.problem |= {"sum_columns": self.dims[0], "ordered": True}
            first = self._preprocess({**self.problem, "sum_columns": 0})
            return [first, self._launch(DKDV_ORDERED), self._postprocess()]
        made, wanted = [self._preprocess(self.problem)], set(self.options.wanted)
        if {"k", "v"} & wanted:
            made.append(self._launch(DKDV if self.tensor_cores else DKDV_FP32))
        if {"q", "alibi_slopes"} & wanted:
            one = self._launch(DQ if self.tensor_cores else DQ_FP32)
            made += self._in_order(one) if self.features.dbias == "queries" else [one]
        return made

    def _may_sum(self) -> bool:
        """Whether dq may be added up in any order, and there is a kernel that does it beside dk
        and dv: where other head dimensions have registers left for it."""
        wanted = self.options.wanted
        if self.options.deterministic or not self.tensor_cores or not self.chunks:
            return False
        if not {"q", "k"} <= set(wanted) or "alibi_slopes" in wanted:
            return False
        if self.features.dbias == "queries" or self.dims[0] != self.dims[1]:
            return False
        if self.features.seeded and self.dims[0] > 64:  # two kernels of wider tiles are faster
            return False
        return bool(tiles("sums", self.dims[0], self.features.of("sums")))

    def _may_order(self) -> bool:
        """Whether dq is added up beside dk and dv by blocks that wait for one another, without
        score features."""
        one = self.problem
        if not self.tensor_cores or not self.chunks or self.options.features:
            return False
        if not {"q", "k"} <= set(self.options.wanted) or self.dims[0] != self.dims[1]:
            return False
        return ordered_pays(one, self.dims[0])

    def _in_order(self, launch: Launch) -> list[Launch]:
        """The kernel that stores dS: once for all batches, or each adds to what is there."""
        batches = self.problem["batch"]
        if self.problem["bias_shape"][0] == batches:
            return [launch]
        own = ({**launch.problem, "batch": 1, "first_batch": b} for b in range(batches))
        return [Launch(launch.spec, launch.params, one) for one in own]

    def _preprocess(self, problem: dict[str, Any]) -> Launch:
        spec = PREPROCESS_PACKED if self.packed else PREPROCESS
        return Launch(spec, {"dtype": problem["dtype"], "aligned": self.aligned}, problem)

    def _postprocess(self) -> Launch:
        spec = POSTPROCESS_PACKED if self.packed else POSTPROCESS
        return Launch(spec, {"dtype": self.problem["dtype"]}, self.problem)

    def _launch(self, base: KernelSpec) -> Launch:
        """A kernel of products: the tile found by `fkjit tune`, else the first that is legal."""
        text = self.features.of(base.name)
        spec, names = with_features(base, text), {param.name for param in base.params}
        fixed = {
            "dtype": self.problem["dtype"], "head_dim": self.dims[0], "head_dim_v": self.dims[1],
        }  # fmt: skip
        if "aligned" in names:
            fixed["aligned"] = self.chunks
        if text:
            fixed["form"] = text
        made = [{**fixed, "tile": tile} for tile in tiles(base.name, self.dims[0], text)]
        legal = [params for params in made if spec.why_not(params, self.arch) is None]
        if not legal:  # say why
            spec.check(made[-1], self.arch)
        params = tuned(spec, legal[0], self.problem, self.arch)
        if base.name in ("keys", "sums"):
            self.problem["warps_alike"] = params["tile"][3]  # each leaves sums of its own
        return Launch(spec, params, self.problem)

    def of_bias(self, bias: View) -> list[Launch]:
        """The gradient of a bias, or what is left of it to do: in parts where that keeps a GPU
        busy."""
        problem, heads = self.problem, self.problem["heads_q"]
        batch, own, rows = problem["bias_shape"]
        if self.features.dbias == "queries":
            return []
        if self.features.dbias == "keys":
            parts = heads // own * problem["warps_alike"]
            sizes = (batch, problem["batch"] // batch, own, parts, problem["seqlen_k"])
            return [self._bias_sum(bias, sizes)]
        made = self._launch(DBIAS if self.tensor_cores else DBIAS_FP32)
        tiles_of = prod(made.spec.grid(made.params, problem))
        if not tiles_of:
            return []
        steps = problem["batch"] // batch * (heads // own)
        if rows == 1:
            steps *= -(-problem["seqlen_q"] // made.params["tile"][0])
        wished = -(-2 * problem.get("multiprocessors", CPU_MULTIPROCESSORS) // tiles_of)
        problem["bias_parts"] = max(1, min(wished, steps // 2))
        if problem["bias_parts"] == 1:
            return [made]
        sizes = (1, problem["bias_parts"], 1, 1, shared.bias_size(problem))
        return [made, self._bias_sum(bias, sizes)]

    def _bias_sum(self, bias: View, sizes: tuple[int, ...]) -> Launch:
        """What adds up its parts."""
        self.problem["parts_shape"] = sizes
        names = ("bias_batch", "batches", "heads", "shared", "columns")
        one: dict[str, Any] = dict(zip(names, sizes, strict=True))
        return Launch(DBIAS_SUM, {"bias_dtype": bias.dtype}, one)
