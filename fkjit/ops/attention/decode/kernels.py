"""The kernel of decoding: one for `attention_decode` and `paged_attention`."""

from __future__ import annotations

from fkjit.ops.attention.decode import grid as grid
from fkjit.ops.attention.decode import problem as problem
from fkjit.ops.kv.problem import STORAGES
from fkjit.spec import KernelSpec, Param, register

SPLIT = register(
    KernelSpec(
        op="attention_decode",
        name="split",
        source="attention/decode.cu",
        entry="attention_decode",
        pdl=True,
        doc="new tokens against all keys, in pages or not, shared out evenly; one launch",
        params=(
            Param("dtype", ("bf16", "fp16"), "element type of q and o"),
            Param("storage", STORAGES, "what k and v are kept as: the same, e4m3 or int8"),
            Param("head_dim", grid.HEAD_DIMS, "of q, k, v and o, padded to this"),
            Param("rows", grid.ROWS, "of a tile: query heads of a KV head times new tokens"),
            Param(
                "tile", grid.TILES, "warps, keys of a step, steps in a ring, blocks of an SM",
                tunable=True,
            ),
        ),
        derive=grid.derive,
        illegal=grid.illegal,
        features=lambda params: frozenset({"cp_async", "ldmatrix", "bf16_mma"}),
        shared_layout=grid.shared_layout,
        block=lambda params: (32 * params["tile"][0], 1, 1),
        grid=lambda params, problem: (problem["blocks"], 1, 1),
        flops=grid.flops,
        interpreter_flops=1.5e9,
        interpreter_work=grid.padded_flops,
        bytes=grid.traffic,
        shape_class=grid.shape_class,
        arguments=grid.arguments,
        problems=problem.problems,
        inputs=problem.inputs,
        outputs=problem.outputs,
        reference=problem.reference,
        tolerance=problem.tolerance,
    )
)  # fmt: skip
