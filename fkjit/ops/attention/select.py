"""Which kernel of attention's forward a problem gets, which variant of it, and which calls are left
to decoding's kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

from fkjit import tuning
from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.attention import select_sm90
from fkjit.ops.attention.feature_kernels import feature_tiles, kernel_with
from fkjit.ops.attention.features import POINTERS, SLOTS, ScoreFeatures
from fkjit.ops.attention.kernels import (
    FLASH,
    FLASH_FP32,
    FLASH_SM75,
    HEAD_DIMS,
    HEAD_DIMS_FLASH,
    NAIVE,
    PAIRS,
    PAIRS_FLASH,
    SIMT_DIMS,
    TILED,
    TILES_WIDEST,
)  # fmt: skip
from fkjit.ops.attention.kernels_sm90 import FLASH_SM90
from fkjit.ops.attention.kernels_sm90 import padded_dims as padded_dims_sm90
from fkjit.ops.attention.options import AttentionOptions
from fkjit.ops.attention.problem import split_block, window
from fkjit.ops.attention.shapes import MAX_HEAD_DIM, WIDEST, padded_pair
from fkjit.runtime.interop import View
from fkjit.spec import KernelSpec, Params, Problem
from fkjit.symbolic import decision

_KEPT = 4096  # choices that are the same for many shapes
_WARPS = 8  # two a scheduler: one computes its softmax while the other keeps the tensor cores busy
_RESERVED = 1024  # bytes of shared memory that the system takes of each block

# Preferred tiles by padded head_dim, fastest first (bench/NOTES.md); the first is taken of which
# enough warps fit on an SM, else the first.
_PREFERENCE: dict[str, dict[int, tuple[Any, ...]]] = {
    "flash": {
        **dict.fromkeys((32, 64), (128, (128, 64), 64, 32, 16)),
        **dict.fromkeys((96, 128), ((128, 64), (128, 48), (64, 32), 64, 32, 16)),
        **dict.fromkeys((192, 256), ((128, 64), (64, 32), 64, 32, 16)),
        WIDEST: TILES_WIDEST,
    },
    "flash_sm75": {
        **dict.fromkeys((32, 64), ((128, 64), 64, (64, 32), 32, 16)),
        **dict.fromkeys((96, 128, 192, 256), (64, (64, 32), 32, 16)),
    },
    "flash_fp32": dict.fromkeys(SIMT_DIMS, (64, (64, 32), 32, 16)),
    "tiled": dict.fromkeys(SIMT_DIMS, (64, 32, 16)),
}


# Few queries: the numbers are those of bench/NOTES.md.
MAX_TOKENS = 16  # as decoding has it
_FEW_ROWS, _LEAST_KEYS = 16, 256  # that fill a small tile at most, and keys for them
_KEYS_A_ROW, _MANY_KEYS = 32, 4096  # for more rows; more keys than many are not asked for
_BUSY = 4  # heads of all sequences for an SM, where flash is no longer idle for long
_COLUMNS = 8  # of a 16-byte copy
_MAX_STRIDE = 2**31
# Decoding is imported by calls that may be its own: a first call is quicker without it.
_DECODE = "fkjit.ops.attention.decode"


def variant(
    problem: Problem, views: Mapping[str, View], features: ScoreFeatures | None, impl: str,
    block: Any, aligned: bool, arch: Arch,
) -> tuple[KernelSpec, dict[str, Any]]:  # fmt: skip
    """The kernel of a problem and its parameters; `aligned`: rows start on 16-byte boundaries.

    ParameterError when the tile is not legal here.
    """
    takes = aligned and select_sm90.takes(problem, views, features, block)
    spec = implementation(impl, problem["dtype"], arch, takes)
    _check_wide(problem, spec, impl, arch)
    if features is not None:
        if spec not in (FLASH, FLASH_SM90):  # flash_sm75 has no score features
            spec = FLASH_FP32
        spec = _kernel_for(spec, features)
    return spec, parameters(spec, problem, block, aligned, arch)


def _check_wide(problem: Problem, spec: KernelSpec, impl: str, arch: Arch) -> None:
    """ParameterError for head dimensions above 256 where flash's kernel is not taken."""
    for name in ("head_dim", "head_dim_v"):
        if problem[name] > MAX_HEAD_DIM and spec is not FLASH:
            raise ParameterError(
                f"attention: {name}={problem[name]} with {problem['dtype']} on {arch.name} and "
                f"impl={impl!r}; allowed above {MAX_HEAD_DIM}: fp16 and bf16 on sm_80 and newer, "
                "impl='auto' or 'flash'"
            )


def implementation(impl: str, dtype: str, arch: Arch, sm90_takes: bool = False) -> KernelSpec:
    """The kernel of an implementation for a dtype on an architecture; "auto" is flash.

    `sm90_takes`: whether these arrays and this problem suit TMA (`select_sm90.takes`).
    """
    if impl in ("naive", "tiled"):
        return NAIVE if impl == "naive" else TILED
    if dtype != "fp32" and sm90_takes and select_sm90.suits(arch):
        return FLASH_SM90
    if dtype != "fp32" and arch.features >= FLASH.features({}):
        return FLASH
    return FLASH_SM75 if dtype == "fp16" else FLASH_FP32


@lru_cache(maxsize=_KEPT)
def _kernel_for(base: KernelSpec, features: ScoreFeatures) -> KernelSpec:
    return kernel_with(base, form_of(base, features))


def form_of(base: KernelSpec, features: ScoreFeatures) -> str:
    """The features as the text that a kernel is compiled for: TMA does not care for pairs."""
    if base is FLASH_SM90:
        features = replace(features, bias_paired=False, mask_paired=False)
    return features.text


def parameters(
    spec: KernelSpec, problem: Problem, block: Any, aligned: bool, arch: Arch
) -> dict[str, Any]:
    """The variant for a problem: its dtype, padded head dimensions, the tile asked for or chosen.

    ParameterError when the tile is not legal here.
    """
    names = _names(spec)
    if "block" not in names and block is not None:
        raise ParameterError(
            f"attention: block={block}: impl={spec.name!r} has no tiles; omit block"
        )
    dims = problem["head_dim"], problem["head_dim_v"]
    params = dict(_fixed(spec, problem["dtype"], *dims, aligned))
    if "block" in names:
        params |= choose_tile(spec, params, problem, arch, block)
    return dict(_checked(spec, tuple(params.items()), arch))


@lru_cache(maxsize=_KEPT)
def _names(spec: KernelSpec) -> tuple[str, ...]:
    return tuple(param.name for param in spec.params)


@decision(_KEPT)
def _fixed(
    spec: KernelSpec, dtype: str, head_dim: int, head_dim_v: int, aligned: bool
) -> tuple[tuple[str, Any], ...]:
    """All parameters but the tile."""
    own = {param.name: param.values for param in spec.params}
    fixed: dict[str, Any] = {"dtype": dtype, "aligned": aligned}
    if "head_dim" in own:
        dims = padded_dims(spec, head_dim, head_dim_v)
        fixed |= dict(zip(("head_dim", "head_dim_v"), dims, strict=True))
    if "form" in own:
        (fixed["form"],) = own["form"]
    return tuple((name, fixed[name]) for name in own if name in fixed)


@lru_cache(maxsize=_KEPT)
def _checked(
    spec: KernelSpec, params: tuple[tuple[str, Any], ...], arch: Arch
) -> tuple[tuple[str, Any], ...]:
    """The same, in the order of the spec."""
    spec.check(dict(params), arch)
    return tuple(spec.canonical(dict(params)).items())


def padded_dims(spec: KernelSpec, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The cheapest compiled pair that holds these head dimensions."""
    if spec.name == FLASH_SM90.name:
        return padded_dims_sm90(head_dim, head_dim_v)
    compiled = next(param.values for param in spec.params if param.name == "head_dim")
    known = {HEAD_DIMS: PAIRS, HEAD_DIMS_FLASH: PAIRS_FLASH}
    pairs = known.get(compiled, [(dim, dim) for dim in SIMT_DIMS])
    if head_dim_v > MAX_HEAD_DIM:  # in parts
        return pairs[-1]
    return padded_pair(pairs, head_dim, head_dim_v)


def choose_tile(
    spec: KernelSpec, fixed: Params, problem: Problem, arch: Arch, block: Any
) -> dict[str, Any]:
    """The tile asked for, else the one for this problem on this GPU: found by `fkjit tune`,
    else by the preferences above, no taller than the queries need."""
    if "form" in fixed:
        if block is not None:
            return {"block": block}
        if spec.name == FLASH_SM90.name:
            return {"block": select_sm90.feature_tile(problem, fixed)}
        return {"block": _feature_tile(spec, tuple(fixed.items()), _tall(problem), arch)}
    tuned = None if block is not None else tuning.lookup(spec, fixed, problem, arch)
    if tuned is not None:
        return tuned
    if spec is FLASH_SM90:  # one block an SM, of warpgroups that hide each other's waiting
        return select_sm90.plain_tile(problem, fixed["head_dim"], fixed["head_dim_v"], block)
    if block is None:
        block = _plain_tile(spec, tuple(fixed.items()), _tall(problem), arch)
    return {"block": block}


def _tall(problem: Problem) -> int:
    """Rows of a tile that the queries fill."""
    return max(16, 1 << (max(problem["seqlen_q"], 1) - 1).bit_length())


@decision(_KEPT)
def _plain_tile(spec: KernelSpec, given: tuple[tuple[str, Any], ...], rows: int, arch: Arch) -> Any:
    """The first that is legal, no taller than `rows` and leaves an SM enough warps."""
    fixed = dict(given)
    legal = spec.legal_values("block", {**fixed, "block": None}, arch)
    if not legal:  # say why
        spec.check({**fixed, "block": 16}, arch)
    order = [b for b in _PREFERENCE[spec.name][fixed["head_dim"]] if b in legal] or legal
    order = [b for b in order if split_block(b)[0] <= rows] or order

    def fills_an_sm(block: Any) -> bool:
        params = {**fixed, "block": block}
        blocks = arch.shared_per_sm // (spec.shared_bytes(params) + _RESERVED)
        return blocks * spec.block(params)[0] // 32 >= _WARPS

    tall = [b for b in order if split_block(b)[0] > 16]  # 16 rows use each key too few times
    return next(filter(fills_an_sm, tall), order[0])


@decision(_KEPT)
def _feature_tile(
    spec: KernelSpec, given: tuple[tuple[str, Any], ...], rows: int, arch: Arch
) -> Any:
    """The first that is legal and no taller than `rows`."""
    fixed = dict(given)
    order = feature_tiles(spec, fixed)
    legal = [b for b in order if spec.why_not({**fixed, "block": b}, arch) is None]
    if not legal:  # say why
        spec.check({**fixed, "block": order[-1]}, arch)
    return ([b for b in legal if split_block(b)[0] <= rows] or legal[-1:])[0]


# ------------------------------------------------------------------ few queries


def decodes(
    problem: Problem, views: Mapping[str, View], features: ScoreFeatures | None,
    options: AttentionOptions, aligned: bool, arch: Arch,
) -> bool:  # fmt: skip
    """Whether decoding's kernel, which shares out the keys, takes a call and is the faster one."""
    if not (aligned and is_for_decode(problem, options.impl, options.block)):
        return False
    if features is not None:
        return _is_accepted(views, options)
    for step in (*views["k"].strides, *views["v"].strides):
        if abs(step) >= _MAX_STRIDE:
            return False
    if _is_for_hopper(problem, views, arch):
        return False
    whole = problem["head_dim"] % _COLUMNS == problem["head_dim_v"] % _COLUMNS == 0
    return whole and _is_compiled(problem, arch)


def _is_for_hopper(problem: Problem, views: Mapping[str, View], arch: Arch) -> bool:
    """Whether Hopper's kernels, which have a group's heads in a tile and share out keys too, are
    the faster ones: for more rows than a small tile has, in all cells of 2 to 16 queries that
    were measured (bench/notes/attention.md)."""
    if _rows(problem) <= _FEW_ROWS or max(problem["head_dim"], problem["head_dim_v"]) > 128:
        return False
    return select_sm90.suits(arch) and select_sm90.readable(problem, views, None)


def _rows(problem: Problem) -> int:
    """Of the queries that share keys."""
    return problem["heads_q"] // problem["heads_kv"] * problem["seqlen_q"]


def is_for_decode(problem: Problem, impl: str, block: Any) -> bool:
    """Whether decoding's kernel would be the faster one, and nothing was asked for by name."""
    if impl != "auto" or block is not None or not 0 < problem["seqlen_q"] <= MAX_TOKENS:
        return False
    if "multiprocessors" not in problem or problem["dtype"] == "fp32":  # on a CPU
        return False
    if max(problem["head_dim"], problem["head_dim_v"]) > MAX_HEAD_DIM:
        return False
    left, right = window(problem)
    return _is_faster(problem, min(problem["seqlen_k"], left + right + problem["seqlen_q"]))


def _is_faster(problem: Problem, keys: int) -> bool:
    """Rows fill a small tile at most; or keys are many for them, where flash leaves SMs idle, or
    reads them too often."""
    rows = _rows(problem)
    if rows <= _FEW_ROWS:
        return keys >= _LEAST_KEYS
    heads, sms = problem["batch"] * problem["heads_q"], problem["multiprocessors"]
    dim = max(problem["head_dim"], problem["head_dim_v"])
    if dim > 128:  # tiles of 16 rows, each of which reads all keys
        few_heads = heads < sms
    else:
        few_heads = dim > 64 or heads <= _BUSY * sms
    return few_heads and keys >= min(_KEYS_A_ROW * rows, _MANY_KEYS)


@lru_cache(maxsize=8)
def _decode(name: str) -> ModuleType:
    """A file of decoding."""
    return import_module(f"{_DECODE}.{name}")


def _is_compiled(problem: Problem, arch: Arch) -> bool:
    spec = _decode("kernels").SPLIT
    if not arch.features >= spec.features({}):
        return False
    try:
        decode_parameters(problem, arch)
    except ParameterError:
        return False
    return True


def decode_parameters(problem: Problem, arch: Arch) -> Params:
    """Of decoding's kernel, for a problem of `attention`."""
    more = {"storage": "same", "longest": problem["seqlen_k"], "page_size": 0}
    return _decode("kernels").select({**problem, **more}, arch)[1]


def _is_accepted(views: Mapping[str, View | None], options: AttentionOptions) -> bool:
    """Not where strides, a GPU before sm_80 or features without registers are in the way."""
    decode = _decode("checks")
    own = {name: getattr(options, name) for name in decode.Options._fields if name != "split_size"}
    try:
        decode.check_contiguous(views, decode.Options(**own))
    except ParameterError:
        return False
    return True


class _Decode:
    """`attention_decode` for a call of attention's Op: what `Request.delegate` is."""

    def __call__(self, inputs: Sequence[Any], outputs: Any, options: Sequence[Any]) -> Any:
        return self._call(_decode("call").attention_decode, inputs, options)

    def prepare(self, inputs: Sequence[Any], options: Sequence[Any]) -> None:
        self._call(_decode("call").attention_decode.prepare, inputs, options)

    @staticmethod
    def _call(call: Any, inputs: Sequence[Any], options: Sequence[Any]) -> Any:
        said, (q, k, v, *more) = AttentionOptions(*options), inputs
        given = dict(zip(POINTERS, more, strict=False))
        named: dict[str, Any] = {
            "causal": said.causal, "softmax_scale": said.softmax_scale, "layout": said.layout,
            "return_lse": said.return_lse,
        }  # fmt: skip
        if more:
            arrays = zip(said.score_names, SLOTS, strict=False)
            args = {name: given[slot] for name, slot in arrays}
            args |= {name: value for name, _, value in said.score_scalars}
            named |= {name: given[name] for name in ("alibi_slopes", "bias", "mask", "sinks")}
            named |= {"window": said.window, "softcap": said.softcap}
            named |= {"score_mod": said.score_mod or None, "score_args": args or None}
        return call(q, k, v, **named)


to_decode = _Decode()
