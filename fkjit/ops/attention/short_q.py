"""Few queries in `fkjit.attention`: decoding's kernel takes them, which shares out the keys; with a
form as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.runtime.interop import View
from fkjit.spec import Params, Problem

if TYPE_CHECKING:
    from fkjit.ops.op.op import Request

# As decoding has it. Its modules are imported for calls that may be its own: a first call of
# attention is quicker without them.
MAX_TOKENS = 16
# Rows are query heads of a KV head times queries; the numbers are those of bench/NOTES.md.
_FEW_ROWS, _LEAST_KEYS = 16, 256  # that fill a small tile at most, and keys for them
_KEYS_A_ROW, _MANY_KEYS = 32, 4096  # for more rows; more keys than many are not asked for
_BUSY = 4  # heads of all sequences for an SM, where flash is no longer idle for long
_COLUMNS = 8  # of a 16-byte copy
_MAX_STRIDE = 2**31

# What decoding's kernel reads besides, which `attention` has not.
ABSENT = ("page_table", "seq_lens", "rows", "k_scale", "v_scale")


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
        and _is_faster(problem, problem["seqlen_k"])
        and problem["head_dim"] % _COLUMNS == problem["head_dim_v"] % _COLUMNS == 0
        and all(abs(s) < _MAX_STRIDE for n in ("k", "v") for s in views[n].strides)
        and _is_compiled(problem, arch)
    )


def _is_faster(problem: Problem, keys: int) -> bool:
    """Rows fill a small tile at most; or keys are many for them, where flash leaves SMs idle, or
    reads them too often."""
    rows = problem["heads_q"] // problem["heads_kv"] * problem["seqlen_q"]
    if rows <= _FEW_ROWS:
        return keys >= _LEAST_KEYS
    heads, sms = problem["batch"] * problem["heads_q"], problem["multiprocessors"]
    dim = max(problem["head_dim"], problem["head_dim_v"])
    if dim > 128:  # tiles of 16 rows, each of which reads all keys
        few_heads = heads < sms
    else:
        few_heads = dim > 64 or heads <= _BUSY * sms
    return few_heads and keys >= min(_KEYS_A_ROW * rows, _MANY_KEYS)


def _is_compiled(problem: Problem, arch: Arch) -> bool:
    from fkjit.ops.attention.decode.kernels import SPLIT

    if not arch.features >= SPLIT.features({}):
        return False
    try:
        parameters(problem, arch)
    except ParameterError:
        return False
    return True


def parameters(problem: Problem, arch: Arch) -> Params:
    """Of decoding's kernel, for a problem of `attention`."""
    from fkjit.ops.attention.decode.kernels import select

    more = {"storage": "same", "longest": problem["seqlen_k"], "page_size": 0}
    return select({**problem, **more}, arch)[1]


def takes_form(problem: Problem, impl: str, block: Any) -> bool:
    """Whether decoding's kernel is the faster one for a call with a form."""
    left, right = problem["window"]
    keys = min(problem["seqlen_k"], left + right + problem["seqlen_q"])
    return (
        impl == "auto"
        and block is None
        and "multiprocessors" in problem  # on a GPU
        and problem["dtype"] != "fp32"
        and 0 < problem["seqlen_q"] <= MAX_TOKENS
        and _is_faster(problem, keys)
    )


def form_request(
    views: Mapping[str, View | None], layout: str, options: tuple[Any, ...]
) -> Request | None:
    """A call of `attention` with a form as decoding's kernel has it; None where it has not."""
    from fkjit.ops.attention.decode.checks import Options, check_contiguous

    own = {name: view for name, view in views.items() if not name.startswith("cu_seqlens")}
    causal, softmax_scale, _, return_lse, *form = options
    given = Options(layout, causal, softmax_scale, None, return_lse, *form)
    try:
        return check_contiguous(own | dict.fromkeys(ABSENT), given)
    except ParameterError:  # strides, a GPU before sm_80, a form that has no registers
        return None


class FewPlan:
    """What is left of a call for one geometry."""

    __slots__ = ("call", "options")

    def __init__(
        self, causal: Any, softmax_scale: Any, block: Any, impl: str, return_lse: Any, layout: str
    ) -> None:
        from fkjit.ops.attention.decode.call import attention_decode

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
