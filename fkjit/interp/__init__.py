"""A CPU interpreter of the PTX that NVRTC emits: kernels run, and are checked, without a GPU.

    run(ptx, "add", grid=4, block=256, arguments=[Arg("x", x), Arg("y", y, writable=True), …])

`parse` reads the text; `machine` runs batches of blocks as lanes of NumPy arrays; the opcodes are
in files of their own (arithmetic, logic, compare, convert, move, loadstore, atomics, warp, barrier,
tensor, async_copy, control), each registering its decoders with `decode.opcode` or `.control`.
What Hopper does asynchronously is in mbarrier, transfers (copies in flight), bulk, tma, cluster and
wgmma; race, clocks and shadow find what nothing orders.
"""

from fkjit.interp.checks import Checks
from fkjit.interp.launch import Arg, Stats, run
from fkjit.interp.tensor_map import TensorMap

__all__ = ["Arg", "Checks", "Stats", "TensorMap", "run"]
