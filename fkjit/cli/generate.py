"""`fkjit generate`: tokens per second of a model with random weights, prefill and decode apart."""

from __future__ import annotations

import math
import time
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn

from fkjit.cli import console as report
from fkjit.errors import DeviceError, ParameterError
from fkjit.models import Decoder, ModelConfig, Sampling, random_weights
from fkjit.models.config import configuration
from fkjit.ops.quantize.schemes import QuantizedTensor
from fkjit.runtime.gpus import gpus

_CALL = "generate"
_FRAMEWORK = "torch"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


class Options(NamedTuple):
    """config: a name, or the path of a config.json. prompt, new: tokens of each sequence. device:
    None: the GPU, without one the CPU. layers: only so many; None: all."""

    config: str
    batch: int = 1
    prompt: int = 512
    new: int = 128
    dtype: str = "bf16"
    device: str | None = None
    layers: int | None = None
    sampling: Sampling = Sampling()
    seed: int = 0
    weights: str | None = None  # the scheme by which products' weights are quantized
    head: str | None = None  # the one by which the head is


class Rates(NamedTuple):
    """Tokens and seconds of prompts, which bring the first new tokens; and of those behind them."""

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float


def run(options: Options) -> None:
    """Generate twice, of which the first time compiles, and print what the second one took."""
    out = report.console()
    config = _shortened(configuration(_CALL, options.config), options.layers)
    options.sampling.checked()
    device = options.device or ("cuda" if gpus()[0] else "cpu")
    decoder = _decoder(config, options, device)
    parameters = sum(math.prod(x.shape) for x in _tensors(decoder))
    out.print(title(parameters, options, device))
    with report.console(stderr=True).status("compiling"):
        chunks = -(-options.batch * options.prompt // decoder.chunk)
        few = min(options.new, chunks + 2)  # all sequences are decoded at the same time once
        measured(decoder, options._replace(new=few), lambda done: None)
    columns = (TextColumn("generating"), BarColumn(), TextColumn("{task.completed} tokens"))
    with Progress(*columns, console=report.console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=options.batch * options.new)
        found = measured(decoder, options, lambda done: bar.update(task, advance=done))
    for line in interpreted(found) if device == "cpu" else lines(found, options):
        out.print(line)


def title(parameters: int, options: Options, device: str) -> str:
    """What is about to be measured."""
    codes = "" if options.weights is None else f", layers' products in {options.weights},"
    codes += "" if options.head is None else f" the head in {options.head},"
    return (
        f"{options.config} with random weights: {parameters / 1e6:,.1f} M parameters in "
        f"{options.dtype}{codes} on {device}; batch {options.batch}, {options.prompt} + "
        f"{options.new} tokens"
    )


def lines(found: Rates, options: Options) -> list[str]:
    """For people."""
    prefill = f"{found.prefill_tokens / found.prefill_seconds:,.0f} tokens/s"
    said = [f"prefill {prefill}: {found.prefill_tokens:,} tokens in "
            f"{report.duration(found.prefill_seconds)}"]  # fmt: skip
    if found.decode_tokens:
        step = found.decode_seconds / (options.new - 1)
        rate = found.decode_tokens / found.decode_seconds
        said.append(f"decode {rate:,.0f} tokens/s: {report.duration(step)} a step")
    return said


def interpreted(found: Rates) -> list[str]:
    """On a CPU a step has run before the token ahead of it is read, so one time stands for all; it
    says nothing of a GPU's."""
    tokens = f"{found.prefill_tokens:,} tokens of prompts and {found.decode_tokens:,} of steps"
    seconds = report.duration(found.prefill_seconds + found.decode_seconds)
    return [f"{tokens} in {seconds}, by the interpreter"]


def measured(decoder: Decoder, options: Options, progress: Any) -> Rates:
    """Prompts of random tokens, and what follows them; `progress` is called with counts."""
    made = np.random.default_rng(options.seed)
    last = decoder.config.vocabulary
    for _ in range(options.batch):
        prompt = made.integers(last, size=options.prompt).tolist()
        decoder.submit(prompt, max_new_tokens=options.new, sampling=options.sampling)
    times, counts = [time.perf_counter()], [0]
    firsts: set[int] = set()
    while len(firsts) < options.batch:
        found = decoder.advance()
        firsts |= {token.request for token in found}
        counts[0] += len(found)
        progress(len(found))
    times.append(time.perf_counter())
    total, unseen = options.batch * options.new, 0
    for _ in decoder.stream():
        unseen += 1
        if unseen == options.batch:  # a bar takes longer than a token
            progress(unseen)
            unseen = 0
    times.append(time.perf_counter())
    return Rates(
        options.batch * options.prompt, times[1] - times[0], total - counts[0], times[2] - times[1]
    )


def _shortened(config: ModelConfig, layers: int | None) -> ModelConfig:
    """With the first layers alone, if so many are asked for."""
    if layers is None:
        return config
    if not 1 <= layers <= config.layers:
        raise ParameterError(f"{_CALL}: layers={layers}; allowed: 1 to {config.layers}")
    return config.with_layers(layers)


def _decoder(config: ModelConfig, options: Options, device: str) -> Decoder:
    try:
        torch = import_module(_FRAMEWORK)
    except ImportError as error:
        raise DeviceError(f"{_CALL}: needs PyTorch: pip install torch ({error})") from error
    if options.dtype not in _DTYPES:
        raise ParameterError(f"{_CALL}: dtype={options.dtype}; allowed: {', '.join(_DTYPES)}")
    dtype = getattr(torch, _DTYPES[options.dtype])
    length = options.prompt + options.new
    if length > config.max_length:
        raise ParameterError(
            f"{_CALL}: {options.prompt} + {options.new} tokens; allowed: up to {config.max_length}"
        )
    return Decoder(
        config, random_weights(config, dtype, device, options.seed), max_batch=options.batch,
        max_length=length, quantize=options.weights, quantize_head=options.head,
    )  # fmt: skip


def _tensors(decoder: Decoder) -> list[Any]:
    """All weights, each once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [decoder.weights]
    while waiting:
        one = waiting.pop()
        if isinstance(one, tuple) and not isinstance(one, QuantizedTensor):
            waiting += one
        elif one is not None:
            found[id(one)] = one
    return list(found.values())
