"""A whole mixture of experts: large batches, experts by Zipf's law, decoding, models, drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.errors import FkjitError, ParameterError
from fkjit.spec import KernelSpec, Params, Problem

from ..core.drawn import Drawn
from ..core.op import Arrays, Candidate, Op, Prepared, Refused
from . import layer
from .layer import DECODED, MODELS, SHORT, WIDE, problem
from .peers_moe_layer import PEERS, given

_DRAWN = 24
_LARGE = ((4096, *WIDE), (32_768, *SHORT))
_DECODE = [problem(tokens, *shape) for shape in DECODED for tokens in (1, 8, 64)]

SETS: dict[str, Sequence[Problem]] = {
    "default": [
        *(problem(*shape) for shape in _LARGE),
        *(problem(*shape, skew=1.0) for shape in _LARGE),
        *_DECODE,
    ],
    "quick": [problem(4096, 128, 8, 2048, 768), problem(8, *DECODED[0])],
    "skew": [problem(*shape, skew=skew) for shape in _LARGE for skew in (0.0, 0.5, 1.0, 1.5)],
    "decode": _DECODE,
    "models": [
        problem(tokens, *shape) for shape in MODELS.values() for tokens in (1, 8, 64, 512, 4096)
    ],
    "random": layer.drawn(random.Random(layer.SEED), _DRAWN),
    "drawn": Drawn(lambda rng: layer.drawn(rng, _DRAWN)),
}


def ours(p: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    top_k, arguments = p["top_k"], given(arrays)
    return Prepared(lambda: fkjit.moe_layer(*arguments, top_k))


def _by(impl: str) -> Candidate:
    """A kernel that nothing chooses by itself."""

    def prepare(p: Problem, arrays: Arrays) -> Prepared:
        top_k, arguments = p["top_k"], given(arrays)
        try:
            fkjit.moe_layer(*arguments, top_k, impl=impl)
        except FkjitError as error:
            raise Refused(str(error)) from error
        return Prepared(lambda: fkjit.moe_layer(*arguments, top_k, impl=impl))

    return Candidate(name=f"fkjit {impl}", kind="ours", prepare=prepare)


def choose(spec: KernelSpec, p: Problem, arch: Arch) -> Params:
    """The call is five kernels, each of which is measured under its own name."""
    raise ParameterError("moe_layer has no kernel of its own")


@dataclass(frozen=True, kw_only=True)
class Layers(Op):
    """Work and traffic of the whole call; no kernel is registered under its name."""

    def flops(self, problem: Problem) -> float:
        return layer.flops(problem)

    def bytes(self, problem: Problem) -> float:
        return layer.traffic(problem)

    @property
    def specs(self) -> list[Any]:
        return []


OP = Layers(
    name="moe_layer",
    sets=SETS,
    label=layer.label,
    inputs=layer.inputs,
    expected=layer.expected,
    ours=ours,
    choose=choose,
    peers=(_by("stream"), _by("gather"), *PEERS),
)
