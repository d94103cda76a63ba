"""run(): copy the arguments in, run all blocks, copy the results out."""

from __future__ import annotations

import gc
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np

from fkjit.errors import InterpreterError, ParameterError, SanitizerError
from fkjit.interp.core import callgraph
from fkjit.interp.core.accesses import Observer
from fkjit.interp.core.checks import Checks
from fkjit.interp.core.inline import inline_calls
from fkjit.interp.core.lanes import WARP, Layout
from fkjit.interp.core.names import source_name
from fkjit.interp.core.parse import parse
from fkjit.interp.core.ptx import Function, Module, Variable
from fkjit.interp.core.report import Reporter
from fkjit.interp.machine.machine import Machine, Memory
from fkjit.interp.schedule import Scheduler
from fkjit.interp.spaces.arena import Allocation, GlobalMemory
from fkjit.interp.spaces.arguments import Arg, Placing
from fkjit.interp.spaces.banks import BankLine
from fkjit.interp.spaces.local import LocalMemory
from fkjit.interp.spaces.shared import CarveOut, SharedMemory
from fkjit.interp.spaces.tensor_map import TensorMap

MAX_LANES = 4096  # threads that run together: more amortise NumPy's overhead, but leave its caches
Dim3 = tuple[int, int, int]
Watch = Callable[[Machine], Observer]
# Decoded kernels kept for their next launch: these few, and more where they are small. A training
# step goes through seven; if one was missing, each launch would drop the kernel that is next.
MIN_IDLE, MAX_IDLE = 4, 32
MAX_IDLE_BYTES = 256 << 20


@dataclass(frozen=True)
class Stats:
    """What a run took."""

    seconds: float
    blocks: int
    threads: int  # of a block
    batches: int  # groups of blocks that ran together
    steps: int  # straight-line runs and control instructions executed for groups of threads
    banks: tuple[BankLine, ...] = ()  # where they were counted: the worst ratio first


def run(
    ptx: str,
    entry: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    arguments: Sequence[Arg],
    dynamic_shared: int = 0,
    checks: Checks = Checks(),
    title: str | None = None,
    progress: Callable[[float], None] | None = None,
    cluster: int | Sequence[int] = 1,
    resident: bool = False,
    carve_outs: Sequence[CarveOut] = (),
    watch: Watch | None = None,
) -> Stats:
    """Run one kernel of a PTX text on the CPU.

    grid, block, cluster (blocks of one; else what __cluster_dims__ say): up to three extents.
    `dynamic_shared`: bytes. `progress` is called with the fraction of blocks done. `resident`: all
    blocks run together, as in a cooperative launch (else batch after batch, so that no block may
    wait for a later one).
    `carve_outs`: the arrays within dynamic shared memory; what is in none is out of bounds.
    `watch`: makes of the machine who is told of every access.

    Raises SanitizerError at a fault (no array is changed then), InterpreterError for PTX that is
    not supported, ParameterError for arguments that do not fit the kernel.
    """
    started = time.perf_counter()
    with _no_collection():
        module = parse(ptx)
    kernel = _kernel(module, entry)
    layout = _layout(
        _dim3("grid", grid), _dim3("block", block), _cluster(kernel, cluster), resident
    )
    if layout.threads > (kernel.max_threads or layout.threads):
        raise ParameterError(
            f"{title or entry}: block={block} has {layout.threads} threads; the kernel's "
            f"__launch_bounds__ allow {kernel.max_threads}"
        )
    stats = None
    while stats is None:
        launch = _Launch(
            module, kernel, layout, arguments, dynamic_shared, checks, title or entry, carve_outs,
            resident, watch,
        )  # fmt: skip
        stats = _execute(launch, progress)
    return replace(stats, seconds=time.perf_counter() - started)


def _execute(launch: _Launch, progress: Callable[[float], None] | None) -> Stats | None:
    """Run and copy back. None: a kernel decoded for another batch size has met a fault; there
    another one may come first, so that the launch has to be repeated as if it were the only one.
    """
    idle = launch.take_idle()
    try:
        with np.errstate(all="ignore"):
            stats = _run_batches(idle or launch.decode(), progress)
    except SanitizerError:
        launch.running.release()
        if idle is None:
            raise
        return None
    launch.copy_back()
    launch.keep()
    return stats


_idle: OrderedDict[tuple[object, ...], Scheduler] = OrderedDict()  # decoded, for a next launch
_idle_lock = Lock()


def _too_many_idle() -> bool:
    size = sum(idle.machine.nbytes for idle in _idle.values())
    return len(_idle) > (MIN_IDLE if size > MAX_IDLE_BYTES else MAX_IDLE)


def _run_batches(scheduler: Scheduler, progress: Callable[[float], None] | None) -> Stats:
    machine, race, counted = scheduler.machine, scheduler.race, scheduler.banks
    batches, layout, before = 0, machine.layout, machine.executed
    if race is not None:
        race.start_launch()
    if counted is not None:
        counted.counts.clear()
    for first in range(0, layout.blocks, layout.ctas):
        scheduler.run_batch(first)
        batches += 1
        if progress is not None:
            progress(min(1.0, (first + layout.ctas) / layout.blocks))
    banks = () if counted is None else counted.lines(machine.reporter.title)
    if counted is not None and machine.checks.bank_limit is not None:
        counted.gate(machine.reporter.title, machine.checks.bank_limit)
    return Stats(0.0, layout.blocks, layout.threads, batches, machine.executed - before, banks)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Parsing and decoding make many objects that stay: going through them for garbage would cost a
    third."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _kernel(module: Module, entry: str) -> Function:
    kernel = module.functions.get(entry)
    if kernel is None or not kernel.entry:
        known = ", ".join(name for name, f in module.functions.items() if f.entry)
        raise InterpreterError(f"interpreter: no kernel {entry!r} in the PTX (it has: {known})")
    return kernel


def _dim3(name: str, value: int | Sequence[int]) -> Dim3:
    parts = (value,) if isinstance(value, int | np.integer) else tuple(value)
    if not 1 <= len(parts) <= 3 or any(int(part) < 1 for part in parts):
        raise ParameterError(f"interp.run: {name}={value!r} is not one to three extents above 0")
    x, y, z = (*(int(part) for part in parts), 1, 1)[:3]
    return x, y, z


def _cluster(kernel: Function, cluster: int | Sequence[int]) -> Dim3:
    """The blocks of a cluster: what the kernel itself says, if it does."""
    given = _dim3("cluster", cluster)
    if kernel.cluster is not None and given not in ((1, 1, 1), kernel.cluster):
        raise ParameterError(
            f"interp.run: cluster={cluster}; the kernel's __cluster_dims__ are {kernel.cluster}"
        )
    return kernel.cluster or given


def _layout(grid: Dim3, block: Dim3, cluster: Dim3, resident: bool) -> Layout:
    """Batches of about MAX_LANES threads, all of one size as far as possible, of whole clusters."""
    threads = block[0] * block[1] * block[2]
    if threads > 1024:
        raise ParameterError(f"interp.run: block={block} has {threads} threads; 1024 is the most")
    padded = -(-threads // WARP) * WARP
    blocks, together = math.prod(grid), math.prod(cluster)
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise ParameterError(f"interp.run: grid={grid} is no multiple of cluster={cluster}")
    clusters = blocks // together
    batches = 1 if resident else -(-clusters // max(1, MAX_LANES // (padded * together)))
    return Layout(grid, block, -(-clusters // batches) * together, cluster)


class _Launch:
    """Memory of one launch: symbols get addresses, arrays get places in the arena."""

    def __init__(
        self, module: Module, kernel: Function, layout: Layout, arguments: Sequence[Arg],
        dynamic_shared: int, checks: Checks, title: str, carve_outs: Sequence[CarveOut] = (),
        resident: bool = False, watch: Watch | None = None,
    ) -> None:  # fmt: skip
        if len(arguments) != len(kernel.params):
            raise ParameterError(
                f"{title}: {len(arguments)} arguments given; {kernel.name} has {len(kernel.params)}"
            )
        self.layout, self.arguments, self.checks = layout, arguments, checks
        self.least = layout.blocks if resident else 1  # blocks that have to run together
        self.kernel = inline_calls(module, kernel)
        self.carve_outs, self.watch = tuple(carve_outs), watch
        self.key = (
            self.kernel, layout.block, layout.cluster, dynamic_shared, checks, self.carve_outs,
        )  # fmt: skip
        self.running: Scheduler
        self.module, self.dynamic_shared = module, dynamic_shared
        self.reporter = Reporter(title, layout)
        self.arena = GlobalMemory(self.reporter, checks.mem)
        self.symbols: dict[str, int] = {}
        self.placing = Placing(self.arena)
        self.symbols.update(callgraph.addresses(module))
        self._variables(module)
        parameters = self._parameters(title)
        self.arena.build()
        self.arena.contents(parameters.place)[:] = np.frombuffer(parameters.data, np.uint8)
        self.placing.find_holes()
        self._relocate(module)

    def take_idle(self) -> Scheduler | None:
        """This kernel as an earlier launch decoded it, if it is idle and of a fitting size."""
        if self.watch is not None:
            return None
        with _idle_lock:
            idle = _idle.pop(self.key, None)
        if idle is None:
            return None
        machine = idle.machine
        if not self._fits(machine):
            idle.release()
            return None
        machine.layout.grid = self.layout.grid
        machine.reporter.title = self.reporter.title
        self.arena.reporter = machine.reporter
        machine.memory.globals = self.arena
        self.running = idle
        return idle

    def _fits(self, machine: Machine) -> bool:
        """Whether what was decoded for this machine runs this launch as well."""
        ctas, known = machine.layout.ctas, machine.memory.symbols
        same = machine.layout.fits(self.layout.ctas) and self.symbols.items() <= known.items()
        return same and ctas >= self.least

    def decode(self) -> Scheduler:
        """The kernel decoded; raises InterpreterError for what is not supported."""
        shared = SharedMemory(
            self._spaced(self.module, "shared"), self.dynamic_shared, self.layout, self.reporter,
            self.checks.mem, self.carve_outs,
        )  # fmt: skip
        private = [v for v in self.kernel.variables if v.space in ("local", "param")]
        local = LocalMemory(private, self.layout, self.reporter, self.checks.mem)
        symbols = {**self.symbols, **shared.offsets, **local.offsets}
        memory = Memory(self.arena, shared, local, symbols)
        with _no_collection():
            machine = Machine(self.kernel, self.layout, memory, self.reporter, self.checks)
            if self.watch is not None:
                machine.observers.append(self.watch(machine))
            self.running = Scheduler(machine)
        return self.running

    def keep(self) -> None:
        """Keep what is decoded for the kernel's next launch; not to be called after a fault."""
        if self.watch is not None:  # its observer is of this launch alone
            self.running.release()
            return
        machine = self.running.machine
        machine.memory.globals = GlobalMemory(machine.reporter, True)
        if self.running.race is not None:
            self.running.race.end_launch()
        dropped = []
        with _idle_lock:
            if self.key in _idle:  # another thread's
                dropped.append(_idle.pop(self.key))
            _idle[self.key] = self.running
            while _too_many_idle():
                dropped.append(_idle.popitem(last=False)[1])
        for idle in dropped:
            idle.release()

    def _spaced(self, module: Module, *spaces: str) -> list[Variable]:
        every = module.variables + self.kernel.variables
        return [variable for variable in every if variable.space in spaces]

    def _variables(self, module: Module) -> None:
        for variable in self._spaced(module, "global", "const"):
            data = np.zeros(max(variable.size, 1), np.uint8)
            data[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
            place = self.arena.add(
                f"variable {source_name(variable.name)}", data, writable=variable.space == "global"
            )
            self.symbols[variable.name] = place.address

    def _relocate(self, module: Module) -> None:
        """Fill in the addresses that initialisers name."""
        for variable in self._spaced(module, "global", "const"):
            place = next(
                p for p in self.arena.allocations if p.address == self.symbols[variable.name]
            )
            for at, name, addend in variable.relocations:
                address = np.uint64(self.symbols[name] + addend).tobytes()
                self.arena.contents(place)[at : at + 8] = np.frombuffer(address, np.uint8)

    def _parameters(self, title: str) -> _Parameters:
        """Lay the parameters out as PTX does and give every array a place."""
        top, offsets = 0, []
        for variable in self.kernel.params:
            top = -(-top // variable.align) * variable.align
            offsets.append(top)
            top += variable.size
        data = bytearray(max(top, 1))  # placed first: its address is decoded into instructions
        place = self.arena.add("kernel parameters", np.zeros(len(data), np.uint8), writable=False)
        each = zip(self.arguments, self.kernel.params, offsets, strict=True)
        for argument, variable, at in sorted(each, key=_order):
            value = self.placing.value(argument)
            if len(value) != variable.size:
                raise ParameterError(
                    f"{title}: argument {argument.name!r} has {len(value)} bytes; the kernel's "
                    f"parameter has {variable.size}"
                )
            data[at : at + variable.size] = value
        for variable, at in zip(self.kernel.params, offsets, strict=True):
            self.symbols[variable.name] = place.address + at
        return _Parameters(bytes(data), place)

    def copy_back(self) -> None:
        """Write the results into the caller's arrays."""
        self.placing.copy_back()


def _order(row: tuple[Arg, Variable, int]) -> int:
    """Arrays first, then tensor maps, those over large arrays before those over parts of
    them; last several maps."""
    value = row[0].value
    if isinstance(value, tuple):
        return 0
    return -1 - value.array.size if isinstance(value, TensorMap) else -(1 << 62)


@dataclass(frozen=True)
class _Parameters:
    data: bytes
    place: Allocation


__all__ = ["Arg", "SanitizerError", "Stats", "run"]
