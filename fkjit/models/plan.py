"""How the kernels of a decode step are chosen.

`linear` chooses by a product alone. In a step a product runs beside others, which start early and
fetch their weights meanwhile, and there other kernels may be faster. So a plan names them. It is
given, or stands in a table of what was measured, or is measured here: step by step, as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fkjit.arch import Arch, arch
from fkjit.arguments import one_of, shown
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.models.config import ModelConfig
from fkjit.ops.step import call as step
from fkjit.ops.step import stream
from fkjit.ops.step import whole as whole_step

PRODUCTS = ("qkv", "out", "up", "down", "head")
IMPLS = ("auto", "gemv", "skinny", "wgmma", "mma")
MEASURED = "measured"
_CODES = "int4_group"  # that a step of one launch takes
_FUSED = ("qkv", "up")  # products that a fused layer has otherwise
_TRIED = ("auto", "gemv", "skinny")
_CALL = "Decoder"


class StepPlan(NamedTuple):
    """qkv, out, up, down, head: `linear`'s impl for the products of a layer and of the head.
    early: whether kernels of a CUDA graph start before the one before them is over (PDL). fused:
    five launches a layer in place of eight, where the model (no weights of codes, no norm of heads)
    and the number of sequences (up to eight) permit it: norm, qkv, RoPE and append are one, norm
    and up another; qkv and up then name nothing. whole: the step is one launch, where the model and
    the GPU (Hopper) permit it; then all the others say nothing. streamed: products that fetch their
    weight before the previous kernel is over, RoPE, append and norms among them, of up to 64
    sequences, where the model and the GPU (Hopper) permit it; then no product is named. What the
    model, the GPU or the number of sequences does not permit is as if it were False."""

    qkv: str = "auto"
    out: str = "auto"
    up: str = "auto"
    down: str = "auto"
    head: str = "auto"
    early: bool = True
    fused: bool = False
    whole: bool = False
    streamed: bool = False

    def checked(self) -> StepPlan:
        """Itself. ParameterError, ArgumentTypeError: what no plan may say."""
        for name in PRODUCTS:
            one_of(_CALL, f"plan.{name}", getattr(self, name), IMPLS)
        for name in ("early", "fused", "whole", "streamed"):
            if not isinstance(given := getattr(self, name), bool):
                raise ArgumentTypeError(f"{_CALL}: plan.{name}={shown(given)}; allowed: a bool")
        return self

    @classmethod
    def alike(cls, impl: str, early: bool = True, fused: bool = False) -> StepPlan:
        """One impl for all products."""
        return cls(**dict.fromkeys(PRODUCTS, impl), early=early, fused=fused)


# Steps of Llama-3.2-1B (hidden size 2048) and GPT-2 (768) on an H200, 2026-11-23 and -28, were
# fastest so, of the plans that `best` tries. One launch beats the next best, Llama: of one and two
# sequences by 10 to 20 %; GPT-2: of one and four by 17 to 23 %. Streamed products do of 8, 16, 32
# and 64 sequences of Llama, by 15, 17, 13 and 9 %, and of 8 and 16 of GPT-2, by 7 and 19 %; of 64
# they and `linear`'s own choice were level. Numbers between were not measured, nor other models or
# GPUs; `skinny` is for what cannot be streamed.
_MEASURED_ON = (9, 0)
_WIDE = 2048  # hidden size
_FEW_WIDE = StepPlan(out="gemv", head="skinny", early=False, fused=True)
_FEW_NARROW = StepPlan(head="gemv", fused=True)
_FEW_ROWS = 2
_WHOLE_ROWS = 4  # sequences, up to which one launch was faster than all others
_CODED_ROWS = 4  # with weights of int4: of one by 17 %, of four by 3 % (2026-11-28)
_STREAMED_FROM, _STREAMED_WIDE, _STREAMED_NARROW = 5, 64, 16  # sequences, by hidden size
_HOPPER, _MULTIPROCESSORS = "sm_90a", 132  # of an H200
_SOME, _SOME_ROWS = StepPlan.alike("skinny"), 16


def usual(config: ModelConfig, rows: int, codes: str | None, capability: tuple[int, int] | None
          ) -> StepPlan:  # fmt: skip
    """The plan of a step of so many sequences, where none is given. codes: as a Network's.
    capability: the GPU's; None: the interpreter's."""
    if capability != _MEASURED_ON or config.qk_norm:
        return StepPlan()
    wide = config.hidden >= _WIDE
    streamed = _STREAMED_WIDE if wide else _STREAMED_NARROW
    if _STREAMED_FROM <= rows <= streamed and streams(config, rows, codes, arch(_HOPPER)):
        return StepPlan(streamed=True)
    most = _WHOLE_ROWS if codes is None else _CODED_ROWS
    blocks = whole_step.blocks_of(_MULTIPROCESSORS, config.hidden)
    if rows <= most and fits_whole(config, rows, codes, arch(_HOPPER), blocks):
        return StepPlan(whole=True)
    if codes is not None:
        return StepPlan()
    if rows <= _FEW_ROWS and fits(config, rows, codes):
        return _FEW_WIDE if wide else _FEW_NARROW
    least = _FEW_ROWS if wide else step.ROWS
    return _SOME if least < rows <= _SOME_ROWS else StepPlan()


def fits(config: ModelConfig, rows: int, codes: str | None) -> bool:
    """Whether so many tokens can have five launches a layer."""
    widths = (config.hidden, config.head_dim, config.activation, config.gated)
    return not config.qk_norm and codes is None and step.fits(rows, *widths)


def streams(config: ModelConfig, rows: int, codes: str | None, arch: Arch) -> bool:
    """Whether so many tokens can have `StepPlan(streamed=True)`."""
    widths = (config.hidden, config.mlp, config.heads_q * config.head_dim)
    said = (config.head_dim, config.activation, config.gated)
    plain = codes is None and not config.qk_norm and "wgmma" in arch.features
    return plain and stream.fits(rows, widths, *said)


def model_of(
    config: ModelConfig, layout: str, page_size: int, codes: bool = False, length: int = 0
) -> whole_step.Model:
    """What the kernel is made for. codes: weights of layers are of int4. length: of the longest
    sequence there is room for."""
    return whole_step.Model(
        config.heads_q, config.heads_kv, config.head_dim, config.mlp, config.activation,
        config.gated, config.eps, layout, page_size, codes=codes, length=length,
    )  # fmt: skip


def fits_whole(
    config: ModelConfig, rows: int, codes: str | None, arch: Arch, blocks: int
) -> bool:  # fmt: skip
    """Whether so many sequences can have a step of one launch. codes: as a Network's."""
    if codes not in (None, _CODES) or config.qk_norm:
        return False
    model = model_of(config, "nhd", 1, codes is not None)
    return whole_step.fits(model, rows, config.hidden, config.layers, arch, blocks)


def checked(plan: Any) -> StepPlan | str | None:
    """What a Decoder was given. ParameterError, ArgumentTypeError: no plan."""
    if isinstance(plan, StepPlan):
        return plan.checked()
    if plan not in (None, MEASURED):
        raise ParameterError(
            f"{_CALL}: plan={shown(plan)}; allowed: None, {MEASURED!r}, or a StepPlan"
        )
    return plan


def best(seconds: Callable[[StepPlan], float]) -> StepPlan:
    """The plan of the least time: one launch, streamed products, or one impl for all products; of
    the last, then with another one for each product in turn.

    seconds: of a step; ParameterError for a plan that so many rows cannot have.
    """
    times: dict[StepPlan, float] = {}

    def timed(plan: StepPlan) -> float:
        if plan not in times:
            try:
                times[plan] = seconds(plan)
            except ParameterError:
                times[plan] = float("inf")
        return times[plan]

    found = min(_starts(), key=timed)
    if found.whole or found.streamed:
        return found
    for product in PRODUCTS:
        if not (found.fused and product in _FUSED):
            found = min((found._replace(**{product: impl}) for impl in _TRIED), key=timed)
    return min((found._replace(early=early) for early in (found.early, not found.early)), key=timed)


def _starts() -> Iterator[StepPlan]:
    yield StepPlan(whole=True)
    yield StepPlan(streamed=True)
    for fused in (False, True):
        for early in (True, False):
            for impl in _TRIED:
                yield StepPlan.alike(impl, early, fused)
