"""A CPU interpreter of the PTX that NVRTC emits: kernels run, and are checked, without a GPU.

    run(ptx, "add", grid=4, block=256, arguments=[Arg("x", x), Arg("y", y, writable=True), …])

`core` reads the text, `spaces` hold what a launch holds, `machine` decodes: every instruction
becomes a function of groups of lanes, which are rows of NumPy arrays. The opcodes are in `ops`,
`memory`, `threads`, `copies`, `mma` and `wgmma`, each file registering its decoders; `race` finds
accesses that nothing orders. `launch` and `schedule` run batches of blocks. Folders import from
those before them only (tests/interp/test_interp_imports.py has the order).
"""

from fkjit.interp.core.checks import Checks
from fkjit.interp.launch import Arg, Stats, run
from fkjit.interp.spaces.tensor_map import TensorMap

__all__ = ["Arg", "Checks", "Stats", "TensorMap", "run"]
