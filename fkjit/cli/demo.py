"""`fkjit demo`: causal attention over a real text, by every implementation, checked in float64.

The text is this package's own kernel source: its bytes are embedded, given positions and projected
to queries, keys and values, with grouped-query heads. On a GPU where there is one, else the same
kernels run in the CPU interpreter on a shorter text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from rich.text import Text

from fkjit import paths
from fkjit.arch import Target, target
from fkjit.cli import console as report
from fkjit.errors import FkjitError
from fkjit.jit.build import build, interpreter_target, quiet
from fkjit.ops.attention.checks import check
from fkjit.ops.attention.forward import attention
from fkjit.ops.attention.options import AttentionOptions
from fkjit.ops.op.op import Launch
from fkjit.runtime.device import device_target
from fkjit.runtime.gpus import gpus
from fkjit.runtime.interop import numpy_dtype, view

_COLUMNS = (
    "kernel", "dtype", "tile", "target", ">registers", ">compile", "cache", ">time", ">error", "",
)  # fmt: skip
_RESOURCES_TARGET = "sm_80"  # whose registers are shown where kernels run as PTX
_CASES: tuple[tuple[str, str, Any], ...] = (  # implementation, dtype, tile (None: its own choice)
    ("flash", "fp16", None),
    ("flash", "fp16", 64),
    ("flash", "fp16", 32),
    ("flash", "bf16", None),
    ("flash", "fp32", None),
    ("tiled", "fp16", None),
    ("naive", "fp16", None),
)
_HEADS, _KV_HEADS, _HEAD_DIM, _WIDTH = 4, 2, 64, 256


@dataclass(frozen=True)
class Sizes:
    """What is computed."""

    batch: int
    seqlen: int
    repeats: int  # timed launches, of which the median counts


_ON_CPU = Sizes(batch=1, seqlen=256, repeats=1)
_ON_GPU = Sizes(batch=4, seqlen=2048, repeats=20)


@dataclass(frozen=True)
class Row:
    """One line of the table. Times in seconds."""

    kernel: str
    dtype: str
    tile: str
    target: str
    registers: int | None
    compile_seconds: float
    hit: bool
    seconds: float
    error: float
    bound: float

    @property
    def good(self) -> bool:
        """Whether every output is within the kernel's own tolerance."""
        return self.error <= self.bound


def text_inputs(dtype: str, batch: int, seqlen: int) -> dict[str, np.ndarray]:
    """q [B, 4, S, 64], k and v [B, 2, S, 64] of a text of B*S bytes; components about N(0, 1)."""
    source = sorted(paths.kernels_dir().rglob("*.cu")) + sorted(
        paths.templates_dir().rglob("*.cu*")
    )
    text = b"".join(path.read_bytes() for path in source)
    tokens = np.resize(np.frombuffer(text, np.uint8), (batch, seqlen))
    rng = np.random.default_rng(0)
    angle = np.arange(seqlen)[:, None] / 10_000 ** (np.arange(_WIDTH // 2) / (_WIDTH // 2))
    positions = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)
    x = rng.standard_normal((256, _WIDTH))[tokens] + positions
    x /= np.sqrt((x**2).mean(-1, keepdims=True))  # RMS norm, as a transformer has it here

    def project(heads: int) -> np.ndarray:
        weight = rng.standard_normal((_WIDTH, heads * _HEAD_DIM)) / np.sqrt(_WIDTH)
        split = (x @ weight).reshape(batch, seqlen, heads, _HEAD_DIM).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(split).astype(numpy_dtype(dtype))

    return {"q": project(_HEADS), "k": project(_KV_HEADS), "v": project(_KV_HEADS)}


def main() -> int:
    """Print the table: 0 when every result is right, else 1."""
    out = report.console()
    found, why_none = gpus()
    sizes = _ON_GPU if found else _ON_CPU
    if found:
        major, minor = found[0].capability
        out.print(f"on {found[0].name} (compute capability {major}.{minor})")
    else:
        out.print(f"no GPU ({why_none})")
        out.print("so the CPU interpreter runs the PTX of the same kernels")
    out.print(
        f"causal attention over {sizes.batch * sizes.seqlen} bytes of text: batch {sizes.batch}, "
        f"{_HEADS} heads on {_KV_HEADS} KV heads, length {sizes.seqlen}, head_dim {_HEAD_DIM}\n"
    )
    rows, failed = [], []
    with out.status("compiling and running") as status:
        for title, row in _rows(sizes, on_gpu=bool(found)):
            status.update(f"{title}: done")
            (failed if isinstance(row, str) else rows).append((title, row))
    out.print(_table([row for _, row in rows]))
    for title, error in failed:
        out.print(f"{title}: {error}", style="red")
    out.print(_legend(bool(found)))
    return 0 if rows and not failed and all(row.good for _, row in rows) else 1


def _legend(on_gpu: bool) -> str:
    where = "" if on_gpu else f" (registers: of the same variant for {_RESOURCES_TARGET})"
    return (
        "\nerror: greatest difference from float64; ok: within the kernel's tolerance\n"
        f"cache: miss where a kernel was compiled just now{where}"
    )


def _table(rows: list[Row]) -> Any:
    made = report.table(*_COLUMNS)
    for row in rows:
        cells = (
            row.kernel,
            row.dtype,
            row.tile,
            row.target,
            "-" if row.registers is None else row.registers,
            f"{row.compile_seconds * 1e3:.0f} ms",
            "hit" if row.hit else "miss",
            report.duration(row.seconds),
            f"{row.error:.1e}",
            Text("ok", "green") if row.good else Text(f"> {row.bound:.1e}", "bold red"),
        )
        report.add_rows(made, [cells])
    return made


def _rows(sizes: Sizes, on_gpu: bool) -> Iterator[tuple[str, Row | str]]:
    """(title, row or what went wrong) of every case this machine's target has a kernel for."""
    to = device_target(0) if on_gpu else interpreter_target()
    made: dict[str, _Case] = {}
    seen = set()
    for impl, dtype, block in _CASES:
        if dtype == "bf16" and "bf16_mma" not in to.arch.features:
            continue
        title = f"{impl} {dtype} block={'chosen' if block is None else report.value(block)}"
        try:
            case = made.get(dtype) or _Case(dtype, sizes, to, on_gpu)
            made[dtype] = case
            launch = case.launch(impl, block)
            variant = (launch.spec.id, *launch.params.values())
            if variant not in seen:  # the chosen tile may be one of those asked for
                seen.add(variant)
                yield title, case.row(launch, impl, block)
        except FkjitError as error:
            yield title, str(error)


class _Case:
    """The inputs of one dtype, and what the answer is."""

    def __init__(self, dtype: str, sizes: Sizes, to: Target, on_gpu: bool) -> None:
        self.inputs = text_inputs(dtype, sizes.batch, sizes.seqlen)
        self.to, self.on_gpu, self.repeats = to, on_gpu, sizes.repeats
        self.expected: np.ndarray | None = None
        place = import_module("cupy").asarray if on_gpu else np.asarray
        self.qkv: tuple[Any, Any, Any] = (
            place(self.inputs["q"]),
            place(self.inputs["k"]),
            place(self.inputs["v"]),
        )

    def launch(self, impl: str, block: Any) -> Launch:
        """What `attention` launches."""
        views = {n: view(x, "attention", n) for n, x in zip("qkv", self.qkv, strict=True)}
        options = AttentionOptions(causal=True, impl=impl, block=block)
        (found,) = check(views, options).launches
        return found

    def row(self, launch: Launch, impl: str, block: Any) -> Row:
        """Compile, run, time and check one implementation."""
        spec, params = launch.spec, launch.params
        with quiet():
            entry = build(spec, params, self.to)
            resources = entry.meta["resources"] or self._resources(launch)
        o, seconds = self._run(impl, block)
        expected = self._expected(launch)
        tile = params.get("block")
        return Row(
            kernel=spec.id,
            dtype=params["dtype"],
            tile="-" if tile is None else report.value(tile),
            target=self.to.name,
            registers=resources["registers"],
            compile_seconds=entry.meta["compile_seconds"],
            hit=entry.origin != "compiled",
            seconds=seconds,
            error=float(np.abs(o.astype(np.float64) - expected).max()),
            bound=spec.verification.tolerance(params) * max(1.0, float(np.abs(expected).max())),
        )

    def _resources(self, launch: Launch) -> dict[str, int]:
        """Of the same variant as machine code: PTX has no registers of the machine's yet."""
        return build(launch.spec, launch.params, target(_RESOURCES_TARGET)).meta["resources"]

    def _run(self, impl: Any, block: Any) -> tuple[np.ndarray, float]:
        """The output as NumPy, and seconds of one call: the device's clock on a GPU."""

        def call() -> Any:
            return attention(*self.qkv, causal=True, impl=impl, block=block)

        if self.on_gpu:
            cupy = import_module("cupy")
            return cupy.asnumpy(call()), _gpu_seconds(call, self.repeats)
        begin = time.perf_counter()
        return call(), time.perf_counter() - begin

    def _expected(self, launch: Launch) -> np.ndarray:
        """In float64, one batch element at a time: all scores of one are in memory."""
        reference = launch.spec.verification.reference
        assert reference is not None
        if self.expected is None:
            parts = (
                {name: array[i : i + 1] for name, array in self.inputs.items()}
                for i in range(launch.problem["batch"])
            )
            problem = {**launch.problem, "batch": 1}
            self.expected = np.concatenate([reference(problem, part)["o"] for part in parts])
        return self.expected


def _gpu_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median over single calls, each between two events."""
    cuda = import_module("cupy").cuda
    times = []
    for _ in range(repeats):
        begin, end = cuda.Event(), cuda.Event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(cuda.get_elapsed_time(begin, end) * 1e-3)
    return sorted(times)[len(times) // 2]
