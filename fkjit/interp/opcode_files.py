"""Every file whose decoders register themselves (see `machine.opcodes`)."""

# ruff: noqa: F401

from fkjit.interp.copies import bulk, cp_async, distributed, mbarrier_ops, tma
from fkjit.interp.memory import atomics, fences, loadstore
from fkjit.interp.mma import ldmatrix, mma, wmma
from fkjit.interp.ops import (
    arithmetic,
    carry,
    compare,
    convert,
    fields,
    logic,
    move,
    timers,
    video,
)
from fkjit.interp.threads import barrier, calls, cluster_barrier, control, output, warp
from fkjit.interp.wgmma import registers, wgmma
