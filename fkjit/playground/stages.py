"""What the page shows of one variant, stage by stage: source, machine code, PTX, checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import unified_diff
from functools import lru_cache, partial
from math import prod
from typing import Any

from fkjit.arch import BALANCE, Target, target
from fkjit.cache.lookup import Entry
from fkjit.errors import CompileError, FkjitError, RenderError
from fkjit.jit.build import build, quiet
from fkjit.jit.compile import errors_in
from fkjit.jit.disassemble import listing
from fkjit.jit.render import Rendered, load
from fkjit.occupancy import occupancy
from fkjit.playground import fragments
from fkjit.playground.check import Check
from fkjit.playground.listing import Listing, Ptx, of_machine_code, of_source
from fkjit.playground.marks import mark, of_include
from fkjit.playground.mix import mix
from fkjit.playground.request import Variant

_listing = lru_cache(maxsize=8)(listing)  # nvdisasm takes longer than all else
Emit = Callable[..., None]  # emit("source", text=…): one event


class Stages:
    """One variant on its way; each stage tells the page at once; a fault ends its own branch."""

    def __init__(self, variant: Variant, emit: Emit) -> None:
        self.variant, self.emit = variant, emit
        self.load = partial(load, text=variant.text)
        self.rendered: Rendered
        self.texts: dict[str, list[str]] = {}  # lines, for differences
        self.sound = False  # compiled, and checked without a fault
        self._failed: set[str] = set()
        self._told: list[dict[str, Any]] = []  # marks of the last error
        self._telling = threading.Lock()

    def run(self) -> None:
        """Go through all of them; machine code is made beside PTX and checks."""
        with self._faults("source"):
            self.variant.spec.check(self.variant.params, self.variant.to.arch)
            self.rendered = self.load(self.variant.spec, self.variant.params)
            made = of_source(self.rendered)
            self.texts["Rendered"] = made.text
            self.emit("source", name=self.rendered.name, **made.to_json())
        if self._failed:
            return
        beside = threading.Thread(target=self._machine_code, daemon=True)
        beside.start()
        self._work()
        self._ptx()
        beside.join()

    def _machine_code(self) -> None:
        with self._faults("machine code"), quiet():
            variant = self.variant
            entry = build(variant.spec, variant.params, variant.to, load=self.load)
            self.emit("resources", **resources(variant, entry))
            lines = _listing(entry.image)
            made = of_machine_code(self.rendered.name, lines)
            self.texts["SASS"] = [line.text for line in lines]
            self.emit("code", mix=mix(lines), **made.to_json())

    def _ptx(self) -> None:
        to = ptx_target(self.variant.to)
        with self._faults("ptx"), quiet():
            entry = build(self.variant.spec, self.variant.params, to, load=self.load)
            ptx = Ptx(entry.image.decode())
            made: Listing = ptx.listing(self.rendered.name)
            self.texts["PTX"] = made.text
            parts = fragments.found(ptx, self.rendered.name)
            self.emit("ptx", target=to.name, fragments=parts, **made.to_json())
        if "ptx" not in self._failed:
            with self._faults("check"):
                check = Check(self.variant, to, self.rendered, self.load, self.emit)
                check.run()
                self.sound = not check.findings

    def _work(self) -> None:
        """The roofline's place, counted: of the greatest problem that is worth timing."""
        spec, params = self.variant.spec, self.variant.params
        problems = list(spec.work.bench(params)) or list(spec.verification.problems(params, "full"))
        best = max(problems, key=spec.work.bytes, default=None)
        if best is None or not spec.work.bytes(best):
            return
        self.emit(
            "work",
            flops=spec.work.flops(best),
            bytes=spec.work.bytes(best),
            balance=BALANCE.get(self.variant.to.arch.capability),
            problem=" ".join(f"{name}={value}" for name, value in best.items()),
        )

    @contextmanager
    def _faults(self, stage: str) -> Iterator[None]:
        """An error of fkjit becomes an event with marks at lines of the template."""
        begin = time.perf_counter()
        try:
            yield
        except FkjitError as error:
            self._failed.add(stage)
            self._tell(error, stage)
        except (MemoryError, RecursionError) as error:
            self._failed.add(stage)
            self.emit("error", stage=stage, text=f"{stage}: {type(error).__name__}", marks=[])
        self.emit("done", stage=stage, seconds=time.perf_counter() - begin)

    def _tell(self, error: FkjitError, stage: str) -> None:
        """An error as an event; what NVRTC refuses for PTX as well as for a cubin is told once."""
        marks = self._marks(error)
        name = "compile" if isinstance(error, CompileError) else stage
        with self._telling:
            if not marks or marks != self._told:
                self.emit("error", stage=name, text=str(error), marks=marks)
            self._told = marks

    def _marks(self, error: FkjitError) -> list[dict[str, Any]]:
        if isinstance(error, RenderError) and error.location:
            text = str(error).partition("\n")[0].removeprefix(f"{error.location}: ")
            return [mark(int(error.location.rpartition(":")[2]), "template", text)]
        if isinstance(error, CompileError):
            own = self.rendered
            return [
                mark(line if file == own.name else of_include(own, file), "compile error",
                     what if file == own.name else f"{file}:{line}: {what}")
                for file, line, what in errors_in(error.log)
            ]  # fmt: skip
        return []


def ptx_target(to: Target) -> Target:
    """The PTX of a target: "sm_90a" -> "compute_90a"."""
    return target("compute_" + to.name.rpartition("_")[2])


def resources(variant: Variant, entry: Entry) -> dict[str, Any]:
    """Registers, spills, shared memory, occupancy and what limits it."""
    used = entry.meta["resources"]
    threads = prod(variant.spec.block(variant.params))
    shared = used["shared"] + variant.spec.shared_bytes(variant.params)
    held = occupancy(variant.to.arch, used["registers"], shared, threads)
    return {
        "target": variant.to.name,
        "registers": used["registers"],
        "spilled": used["spill_stores"] + used["spill_loads"],
        "stack": used["stack"],
        "shared": shared,
        "threads": threads,
        "blocks": held.blocks,
        "occupancy": held.share,
        "limit": held.limit,
        "problems": list(entry.meta["problems"]),
        "compile_seconds": entry.meta["compile_seconds"],
        "compiled": entry.origin == "compiled",
        "nvrtc": entry.meta["nvrtc"],
    }


def differences(one: Stages, other: Stages) -> str:
    """What differs in source, PTX and machine code, as a unified diff; "" where nothing does."""
    parts = []
    for name in one.texts:
        found = list(unified_diff(one.texts[name], other.texts.get(name, []), n=2, lineterm=""))
        if found:
            parts += [f"@@@ {name} @@@", *found[2:], ""]
    return "\n".join(parts)
