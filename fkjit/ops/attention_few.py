"""Few queries in `fkjit.attention`: decoding's kernel takes them, which shares out the keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.interop import View
from fkjit.spec import Params, Problem

# As decoding has it. Its modules are imported for calls that may be its own: a first call of
# attention is quicker without them.
MAX_TOKENS = 16
_LEAST_KEYS = 256  # with fewer, blocks that share out nothing are as fast
_MANY_KEYS = 4096  # and then few heads, where rows are more than a small tile (bench/NOTES.md)
_FEW_ROWS = 16  # query heads of a KV head times queries
_COLUMNS = 8  # of a 16-byte copy
_MAX_STRIDE = 2**31


def takes(
    problem: Problem, views: Mapping[str, View], impl: str, block: Any, aligned: bool, arch: Arch
) -> bool:
    """Whether decoding's kernel takes this call of `attention`, and is the faster one."""
    return (
        impl == "auto"
        and block is None
        and aligned
        and "multiprocessors" in problem  # on a GPU
        and problem["dtype"] != "fp32"
        and problem["seqlen_q"] <= MAX_TOKENS
        and _is_faster(problem)
        and problem["head_dim"] % _COLUMNS == problem["head_dim_v"] % _COLUMNS == 0
        and all(abs(s) < _MAX_STRIDE for n in ("k", "v") for s in views[n].strides)
        and _is_compiled(problem, arch)
    )


def _is_faster(problem: Problem) -> bool:
    """Rows fill a small tile at most; or flash's tiles would leave SMs idle for long."""
    rows = problem["heads_q"] // problem["heads_kv"] * problem["seqlen_q"]
    if rows <= _FEW_ROWS:
        return problem["seqlen_k"] >= _LEAST_KEYS
    tiles = problem["batch"] * problem["heads_q"]
    return problem["seqlen_k"] >= _MANY_KEYS and tiles < problem["multiprocessors"]


def _is_compiled(problem: Problem, arch: Arch) -> bool:
    from fkjit.ops.decode_kernels import SPLIT

    if not arch.features >= SPLIT.features({}):
        return False
    try:
        parameters(problem, arch)
    except ParameterError:
        return False
    return True


def parameters(problem: Problem, arch: Arch) -> Params:
    """Of decoding's kernel, for a problem of `attention`."""
    from fkjit.ops import decode_checks

    more = {"storage": "same", "longest": problem["seqlen_k"], "page_size": 0}
    return decode_checks.parameters({**problem, **more}, arch)


class FewPlan:
    """What is left of a call for one geometry."""

    __slots__ = ("call", "options")

    def __init__(
        self, causal: Any, softmax_scale: Any, block: Any, impl: str, return_lse: Any, layout: str
    ) -> None:
        from fkjit.ops.decode import attention_decode

        self.call: Any = attention_decode
        self.options = {
            **{"causal": causal, "softmax_scale": softmax_scale},
            **{"return_lse": return_lse, "layout": layout},
        }

    def run(self, q: Any, k: Any, v: Any) -> Any:
        """o, or (o, lse)."""
        return self.call(q, k, v, **self.options)

    def prepare(self, q: Any, k: Any, v: Any) -> None:
        """Compile and load what `run` needs."""
        self.call.prepare(q, k, v, **self.options)
