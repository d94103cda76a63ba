"""What is kept of a profile: our names, Nsight Compute's, the unit, and how to read each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Sections know which counters each GPU has; the metrics are those that no section collects.
SECTIONS = (
    "SpeedOfLight", "LaunchStats", "Occupancy", "SchedulerStats", "WarpStateStats",
    "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables",
)  # fmt: skip
EXTRA = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_bytes.sum",
    "lts__t_sector_hit_rate.pct",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed.sum",
)


@dataclass(frozen=True)
class Metric:
    """`sources`: Nsight Compute's names, the first that is there counts."""

    name: str
    unit: str  # "ns", "%", "bytes", "" for counts
    title: str
    sources: tuple[str, ...]
    reading: str  # one sentence


def _pct(unit: str, kind: str = "active") -> str:
    return f"{unit}.avg.pct_of_peak_sustained_{kind}"


METRICS = (
    Metric(
        "duration", "ns", "duration", ("gpu__time_duration.sum",),
        "Of this launch alone, caches flushed before it and clocks as they were: compare kernels "
        "of one profile, and take times from `fkjit bench`.",
    ),
    Metric(
        "compute", "%", "compute throughput", (_pct("sm__throughput", "elapsed"),),
        "The busiest pipe of the SMs as a share of its peak; above 80 % the kernel is bound by it.",
    ),
    Metric(
        "tensor", "%", "tensor pipe busy",
        (
            _pct("sm__pipe_tensor_cycles_active"),
            _pct("sm__inst_executed_pipe_tensor"),
        ),
        "Share of cycles in which the tensor cores work; what is missing to 100 % is waiting, "
        "softmax, addresses.",
    ),
    Metric(
        "memory", "%", "memory throughput",
        (_pct("gpu__compute_memory_throughput", "elapsed"),),
        "The busiest part of the memory system, shared memory included, as a share of its peak.",
    ),
    Metric(
        "dram", "%", "DRAM throughput",
        (_pct("gpu__dram_throughput", "elapsed"), _pct("dram__throughput", "elapsed")),
        "Share of device memory's peak rate; near 90 % there is nothing left to gain but fewer "
        "bytes.",
    ),
    Metric(
        "dram_read_bytes", "bytes", "read from DRAM", ("dram__bytes_read.sum",),
        "Compare with the inputs' size: more means that something is fetched again.",
    ),
    Metric(
        "dram_write_bytes", "bytes", "written to DRAM", ("dram__bytes_write.sum",),
        "Compare with the output's size; less means that the rest is still in the L2 cache.",
    ),
    Metric(
        "l2_bytes", "bytes", "through L2", ("lts__t_bytes.sum",),
        "Everything the SMs asked of the L2 cache; its ratio to the DRAM bytes is what L2 saves.",
    ),
    Metric(
        "l2_hit", "%", "L2 hit rate", ("lts__t_sector_hit_rate.pct",),
        "Share of L2 requests that did not need DRAM, writes included; counted in several passes, "
        "so that it can come out slightly above 100 %.",
    ),
    Metric(
        "bank_conflicts", "", "bank conflicts",
        ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
        "Extra passes through shared memory; a few % of the wavefronts below do not matter.",
    ),
    Metric(
        "shared_wavefronts", "", "shared wavefronts",
        ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),
        "Passes through shared memory by loads and stores (what wgmma and TMA move is not here).",
    ),
    Metric(
        "occupancy", "%", "occupancy achieved", (_pct("sm__warps_active"),),
        "Warps present on an SM on average; far below the theoretical one: too few blocks, or "
        "some that end late.",
    ),
    Metric(
        "occupancy_limit", "%", "occupancy in theory",
        ("sm__maximum_warps_per_active_cycle_pct",),
        "What registers, shared memory and block size allow; kernels on tensor cores do well with "
        "little.",
    ),
    Metric(
        "issue", "%", "issue slots used", (_pct("smsp__issue_active"),),
        "Share of cycles in which a scheduler issued an instruction; where it is low, the stalls "
        "say what warps wait for.",
    ),
    Metric(
        "instructions", "", "warp instructions",
        ("sm__inst_executed.sum", "smsp__inst_executed.sum"),
        "Compare with the work: addresses and bounds cost issue slots as arithmetic does.",
    ),
    Metric(
        "waves", "", "waves", ("launch__waves_per_multiprocessor",),
        "How often the grid fills the GPU; just above a whole number the last one is nearly empty.",
    ),
    Metric(
        "registers", "", "registers a thread", ("launch__registers_per_thread",),
        "65536 of them an SM; with the block's threads they bound the occupancy.",
    ),
    Metric(
        "shared_bytes", "bytes", "shared a block", ("launch__shared_mem_per_block",),
        "Static, dynamic and the driver's 1 KiB; with the SM's total it bounds the occupancy.",
    ),
)  # fmt: skip

STALLS = {
    "long_scoreboard": "waits for global or local memory: more bytes in flight, earlier loads",
    "short_scoreboard": "waits for shared memory or special functions (exp2)",
    "mio_throttle": "the queue to shared memory and special functions is full",
    "lg_throttle": "the queue to global memory is full: wider loads, fewer of them",
    "math_pipe_throttle": "the pipe it needs is busy: good, where that pipe is the tensor cores",
    "wait": "fixed latency of the last instruction: more independent work in a warp",
    "barrier": "waits at a barrier of the block: uneven warps, or too many barriers",
    "gmma": "waits for wgmma: expected while the tensor cores are busy",
    "membar": "waits for a memory fence",
    "no_instruction": "waits for code: jumps, or a loop larger than the instruction cache",
    "branch_resolving": "waits for a branch's target",
    "dispatch_stall": "the dispatcher holds it back: register-bank conflicts and the like",
    "tex_throttle": "the queue to the texture unit is full",
    "drain": "waits at its end for stores to leave",
    "sleeping": "sleeps (nanosleep), or waits at an mbarrier",
    "imc_miss": "waits for the constant cache",
    "not_selected": "ready, but another warp went first: there are warps enough",
    "misc": "anything else",
}
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def extract(raw: Mapping[str, float]) -> dict[str, Any]:
    """Our metrics of one launch, of Nsight Compute's in base units; what is not there is left out.

    `stalls`: {reason: cycles a warp waits for it between two instructions}, largest first.
    """
    made: dict[str, Any] = {}
    for metric in METRICS:
        value = next((raw[source] for source in metric.sources if source in raw), None)
        if value is not None:
            made[metric.name] = round(value, 2) if value % 1 else int(value)
    if "shared_bytes" not in made:
        parts = [raw.get(f"launch__shared_mem_per_block_{kind}") for kind in _SHARED_KINDS]
        if any(part is not None for part in parts):
            made["shared_bytes"] = int(sum(part or 0 for part in parts))
    stalls = {
        reason: raw[_STALL.format(reason)] for reason in STALLS if _STALL.format(reason) in raw
    }
    ordered = sorted(stalls.items(), key=lambda item: -item[1])
    made["stalls"] = {reason: round(value, 3) for reason, value in ordered if value >= 0.0005}
    return made


_SHARED_KINDS = ("static", "dynamic", "driver")
