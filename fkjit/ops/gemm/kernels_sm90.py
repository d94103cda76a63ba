"""Products for Hopper (sm_90a): TMA brings tiles of both operands, wgmma multiplies them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.ops.gemm import problem as shared
from fkjit.ops.gemm.problem import CONTRACT
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, SharedLayout, register

MAX_SHARED = 232_448  # bytes a block may have on sm_90
SMS = 132  # of an H100 or H200, where a problem does not say
BLOCK_K, PANEL = 64, 64
_SWIZZLE_ROWS = 8  # after as many the pattern is the same again
CONSUMERS, _WARP_ROWS = 2, 16
_WARPS = CONSUMERS * 4
_BOX = _WARP_ROWS * PANEL * 2  # bytes of output that a warp stages at a time
_MAX_STAGES, _LEAST_STAGES = 12, 3
_GROUP_ROWS = 2048  # rows of x whose tiles are taken together
_MOST_STEPS = 1 << 31  # of k, of all tiles that blocks share
_MOST_SUMS = 160 * 128  # of a consumer that has more to hold
_MOST_OF_BOX = 256  # rows
_LEAST_STEPS = 4  # of k, of a block that shares tiles
_FRAGMENT = 128 * 16  # bytes of a consumer's fragment of sums, which another block reads
Variant = tuple[str, tuple[int, int], int, int, bool]  # schedule, tile, cluster, split, shares
# The tiles (rows of x, rows of weight) that are compiled, and ns that a block's step of 64 k takes:
# fitted to 396 products of models' layers on an H200.
VARIANTS: dict[Variant, float] = {
    **{("pingpong", (64, n), 1, 1, False): step
       for n, step in ((32, 128), (48, 141), (64, 141), (80, 176), (96, 189), (112, 206),
                       (128, 237), (160, 253), (192, 295), (224, 330), (256, 358))},
    **{("pingpong", (64, n), 1, split, False): step
       for n, split, step in ((32, 2, 84), (64, 2, 154), (80, 2, 170), (64, 3, 149), (64, 4, 169))},
    **{("pingpong", tile, 1, 1, False): step
       for tile, step in (((128, 64), 209), ((128, 112), 335), ((128, 128), 338), ((192, 64), 294),
                          ((192, 80), 348), ((192, 96), 421), ((192, 128), 507))},
    **{("cooperative", (128, n), 1, 1, False): step
       for n, step in ((64, 185), (80, 235), (96, 283), (112, 323), (160, 441), (192, 527),
                       (224, 585), (256, 661))},
    **{("cooperative", (128, n), 1, split, False): step
       for n, split, step in ((64, 2, 211), (96, 2, 333), (64, 3, 223))},
    ("cooperative", (128, 256), 2, 1, False): 710,
    ("pingpong", (64, 128), 2, 1, False): 220,
    ("pingpong", (128, 128), 2, 1, False): 369,
    ("pingpong", (128, 128), 2, 1, True): 383,
}  # fmt: skip


def _swapped_step(m: int, n: int) -> float:
    """Of products, or of loads from L2: fitted to 109 more of 30 to 2000 rows."""
    products, loads = m * n / (49.1 if n == 128 else 46.5), 1.54 * (m + n)
    return (products**8 + loads**8) ** (1 / 8)


# Swapped: of the weight, as many rows as consumers take; of x, any by 16.
VARIANTS |= {
    ("swapped", (m, n), 1, split, False): _swapped_step(m, n)
    for n, split, most in ((128, 1, 256), (128, 2, 192), (128, 3, 112), (256, 1, 192))
    for m in range(80, most + 16, 16)
}  # fmt: skip
VARIANTS |= {("swapped", (m, 128), 1, 1, False): m * 2.9 for m in (288, 320)}
# Parts of k whose sums meet in memory: for tiles that no clusters of three or four have room for.
VARIANTS |= {
    ("swapped", (m, 128), 1, split, True): _swapped_step(m, 128)
    for split, most in ((3, 192), (4, 176)) for m in range(80, most + 16, 16)
}  # fmt: skip
VARIANTS |= {
    ("cooperative", (128, n), 1, split, True): VARIANTS["cooperative", (128, n), 1, 1, False]
    for n in (64, 96) for split in (3, 4)
}  # fmt: skip
# Of [k, n] weights, whose rows come by panels: the only one that is no whole number of them.
_HALF_PANEL: Variant = ("cooperative", (128, 160), 1, 1, False)
_ALL_TILES = tuple(dict.fromkeys(tile for _, tile, *_ in VARIANTS))
_SCHEDULES = ("cooperative", "pingpong", "swapped")


def variant(params: Params) -> Variant:
    """The key of `VARIANTS`."""
    names = ("schedule", "block", "cluster", "split", "shares")
    schedule, block, cluster, split, shares = (params[name] for name in names)
    return schedule, block, cluster, split, shares


def swapped(params: Params) -> bool:
    """Whether the product is out's transpose: weight x^T."""
    return params["schedule"] == "swapped"


def _together(params: Params) -> bool:
    """Whether consumers share each tile."""
    return params["schedule"] != "pingpong"


def stages(params: Params) -> int:
    """How many have room."""
    each = sum(_side_bytes(params).values())
    rest = _WARPS * _boxes(params) * _BOX + _bias_bytes(params) + 16 * (_MAX_STAGES + 1)
    return min((MAX_SHARED - rest) // each, _MAX_STAGES)


def _side_bytes(params: Params) -> dict[str, int]:
    """Of a stage: of each operand; rows that are contiguous come by whole panels."""
    rows, columns = params["block"]
    if params["weight_layout"] == "kn":
        columns = -(-columns // PANEL) * PANEL
    return {"x": rows * BLOCK_K * 2, "weight": columns * BLOCK_K * 2}


def _boxes(params: Params) -> int:
    """Of a warp: two, of which TMA reads one while the other is filled; or all of its tile, where a
    residual comes to them; none where the way out is transposed, and nothing comes."""
    if not (params["residual"] and params["tma_store"]):
        return 0 if swapped(params) else 2
    rows, columns = params["block"][::-1] if swapped(params) else params["block"]
    columns //= 2 if params["gate"] else 1
    blocks = rows // PANEL // (CONSUMERS if _together(params) else 1)
    return max(blocks * -(-columns // PANEL), 2)


def _bias_bytes(params: Params) -> int:
    """Of the columns of two tiles of each consumer."""
    return 2 * CONSUMERS * params["block"][0 if swapped(params) else 1] * 2


# What the template names of rows that come or are wanted while a product runs (flagged.py).
NO_FLAGS: Mapping[str, Any] = {
    "waits": False, "tells": False, "flags": "", "flag_numbers": "", "first_row": "0",
    "arrived": "nullptr, 1", "finished": "nullptr, 1",
}  # fmt: skip


def _derive(params: Params) -> dict[str, Any]:
    tile, k_major = params["block"], (params["x_layout"] == "mk", params["weight_layout"] == "nk")
    if swapped(params):
        tile, k_major = tile[::-1], k_major[::-1]
    return {
        "block_m": tile[0],
        "block_n": tile[1],
        "stages": stages(params),
        "boxes": _boxes(params),
        "cooperative": _together(params),
        "swapped": swapped(params),
        "x_k_major": k_major[0],
        "weight_k_major": k_major[1],
        "groups": "NONE",
        "gather": False,
        **NO_FLAGS,
        **epilogue.values(params["activation"]),
    }


def _illegal(params: Params) -> str | None:
    block_m, block_n = params["block"]
    if params["out_dtype"] not in (params["dtype"], "fp32"):
        return f"has no out_dtype={params['out_dtype']} for {params['dtype']}"
    if variant(params) not in VARIANTS:
        return "is never the fastest"
    if params["gate"] and block_n % 32:
        return "has no whole pieces of gate and up"
    if swapped(params):
        return _illegal_swapped(params)
    sums = block_m * block_n // (CONSUMERS if _together(params) else 1)
    if sums > _MOST_SUMS and any(params[name] for name in ("gate", "pre", "residual")):
        return "has no registers for gate, pre or residual beside so many sums"
    halves = _part(params) % PANEL and (params["gate"] or variant(params) != _HALF_PANEL)
    if params["weight_layout"] == "kn" and halves:
        return "has no whole panels of a weight whose outputs are contiguous"
    if params["tma_store"] and params["out_dtype"] == "fp32":
        return "stores 16-bit outputs by TMA"
    return None


def _illegal_swapped(params: Params) -> str | None:
    if params["gate"] or params["pre"]:
        return "has neither gate nor pre where operands are swapped"
    if not params["tma_store"]:
        return "stores rows of 16-bit outputs on 16-byte boundaries where operands are swapped"
    if params["x_layout"] == "km" and (params["block"][0] % PANEL or _tall(params)):
        return "has no whole panels of an x whose rows are contiguous"
    room = stages(params) * sum(side * BLOCK_K * 2 // _FRAGMENT for side in params["block"])
    left = params["block"][0] * params["block"][1] * 4 // _FRAGMENT * (params["split"] - 1)
    if left > room and not params["shares"]:
        return "has no room for sums of so many parts"
    if params["residual"] and stages(params) < _LEAST_STAGES:
        return f"has no room for a residual beside {_LEAST_STAGES} stages"
    return None


def _part(params: Params) -> int:
    """Rows of the weight that one box brings: all of a tile's, or one of two halves."""
    return params["block"][1] // (2 if params["gate"] or params["cluster"] > 1 else 1)


def _tall(params: Params) -> bool:
    """Whether x's part of a tile is more than a box, or wgmma's columns, may be."""
    return params["block"][0] > _MOST_OF_BOX


def _rows_of_box(params: Params) -> int:
    """Of x: all of a tile's, or half of them."""
    return params["block"][0] // (2 if _tall(params) else 1)


def _shared(params: Params) -> SharedLayout:
    count, sides = stages(params), _side_bytes(params)
    order = reversed(sides) if swapped(params) else sides
    tiles = [(f"{side} stage {stage}", sides[side]) for side in order for stage in range(count)]
    boxes = _boxes(params) * _BOX
    staged = [(f"output of warp {warp}", boxes) for warp in range(_WARPS if boxes else 0)]
    return [*tiles, *staged, ("bias", _bias_bytes(params)), ("mbarriers", 16 * count + 16)]


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    rows, part = _rows_of_box(params), _part(params)
    first = params["block"][1 if swapped(params) else 0]  # of a tile, by consumers
    m, n, k, wide = problem["m"], problem["n"], problem["k"], shared.outputs_of(problem)
    x = (arrays["x"], params["dtype"], problem["x_stride"], m, k, params["x_layout"] == "mk")
    weight = (arrays["weight"], params["dtype"], problem["weight_stride"], wide, k,
              params["weight_layout"] == "nk")  # fmt: skip
    named = {
        **shared.arguments(params, problem, arrays),
        "x_map": _map(*x, rows),
        "x_map_last": _map(*x, _last_box(m, rows)),
        "weight_map": _map(*weight, part),
        "weight_map_last": _map(*weight, _last_box(n, part)),
        "shared_tiles": shared_tiles(params, problem),
        "group_rows": max(_GROUP_ROWS // (first * params["cluster"]), 1),
    }
    if swapped(params):
        return _exchanged(named)
    if params["tma_store"]:
        step = 2 * problem["out_stride"]
        named["out_map"] = TensorMap(
            arrays["out"], params["out_dtype"], (n, m, 1, 1), (step, 0, 0),
            (PANEL, _WARP_ROWS, 1, 1), writable=True,
        )  # fmt: skip
    return named


def _exchanged(named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with x and the weight in each other's place."""
    pairs = (("m", "n"), ("x_map", "weight_map"), ("x_map_last", "weight_map_last"))
    places = {old: new for a, b in pairs for old, new in ((a, b), (b, a))}
    return {places.get(name, name): value for name, value in named.items()}


def _last_box(rows: int, box: int) -> int:
    """Rows of the last of the boxes that cover these, by eights."""
    return ((rows - 1) % box + _SWIZZLE_ROWS) // _SWIZZLE_ROWS * _SWIZZLE_ROWS


def _map(
    array: Any, dtype: str, stride: int, rows: int, k: int, k_major: bool, box: int
) -> TensorMap:
    """Of [rows, k], k contiguous, or of [k, rows]; boxes of `box` rows, or of a panel."""
    dims = (k, rows, 1, 1) if k_major else (rows, k, 1, 1)
    boxes = (BLOCK_K, box, 1, 1) if k_major else (PANEL, BLOCK_K, 1, 1)
    return TensorMap(array, dtype, dims, (2 * stride, 0, 0), boxes)


def tiles_of(params: Params, problem: Problem) -> int:
    """Tiles of a problem, each of `cluster` blocks."""
    block_m, block_n = params["block"]
    columns = block_n // 2 if params["gate"] else block_n
    rows = -(-problem["m"] // (block_m * params["cluster"]))
    return rows * -(-problem["n"] // columns)


def _slots(params: Params, problem: Problem) -> int:
    """Blocks, or clusters, that run at a time."""
    return max(problem.get("multiprocessors", SMS) // params["cluster"], 1)


def shared_tiles(params: Params, problem: Problem) -> int:
    """Tiles whose k blocks share: those that fill no wave, and one wave more if there is one, so
    that shares are not too small."""
    if not params["shares"] or params["split"] > 1:
        return 0
    tiles, slots = tiles_of(params, problem), _slots(params, problem)
    left = tiles % slots
    left = left if tiles < slots or left == 0 else left + slots
    return left if left * -(-problem["k"] // BLOCK_K) < _MOST_STEPS else 0


def _grid(params: Params, problem: Problem) -> Dim3:
    slots, tiles = _slots(params, problem), tiles_of(params, problem)
    if params["split"] > 1:  # each tile has blocks of its own
        return (params["split"] * tiles, 1, 1)
    if params["shares"] and tiles < slots:  # a block has a few steps of k at least
        steps = tiles * -(-problem["k"] // BLOCK_K)
        tiles = max(steps // _LEAST_STEPS, 1)
    return (params["cluster"] * min(tiles, slots), 1, 1)


def memory(params: Params, problem: Problem) -> tuple[int, int]:
    """(bytes of workspace, counters): of sums that blocks leave to one another."""
    if not params["shares"]:
        return 0, 0
    block_m, block_n = params["block"]
    groups = params["cluster"] * (CONSUMERS if _together(params) else 1)
    blocks, split = _grid(params, problem)[0], params["split"]
    if split > 1:
        return 4 * blocks * block_m * block_n, blocks // split * groups
    return 2 * 4 * blocks * block_m * block_n, max(shared_tiles(params, problem), 1) * groups


PARAMS = (
    Param("dtype", ("bf16", "fp16"), "element type of x and weight"),
    Param("out_dtype", ("bf16", "fp16", "fp32"), "element type of out and residual"),
    Param("x_layout", ("mk", "km"), "how x lies: [m, k], or transposed"),
    Param("weight_layout", ("nk", "kn"), "how the weight lies: nn.Linear's [n, k], or [k, n]"),
    *epilogue.PARAMS,
    Param("residual", (False, True), "a residual is added to what the activation gives"),
    Param("pre", (False, True), "what the activation is of is kept for a backward"),
    Param("tma_store", (True, False), "rows of out start on 16-byte boundaries, 16-bit elements"),
    Param("block", _ALL_TILES, "rows of x and of weight in a tile", tunable=True),
    Param("schedule", _SCHEDULES, "how two consumers share tiles", tunable=True),
    Param("cluster", (1, 2), "blocks that share a tile of the weight", tunable=True),
    Param("split", (1, 2, 3, 4), "blocks that share the k of each tile", tunable=True),
    Param(
        "shares",
        (False, True),
        "sums meet in memory: of the last tiles, of all if split",
        tunable=True,
    ),
)

# Every legal variant; what is registered is fewer.
WGMMA_ALL = KernelSpec(
    **{
        **CONTRACT,
        "name": "wgmma",
        "source": "gemm/wgmma.cu",
        "entry": "linear_wgmma",
        "doc": "products for Hopper: TMA, wgmma, a producer and two consumers",
        "params": PARAMS,
        "derive": _derive,
        "illegal": _illegal,
        "features": lambda params: frozenset({"wgmma"}),
        "shared_layout": _shared,
        "block": lambda params: (128 * (1 + CONSUMERS), 1, 1),
        "grid": _grid,
        "pdl": True,
        "arguments": _arguments,
        "verification": "fkjit.ops.gemm.cases_sm90:WGMMA",
    }
)

_PLAIN: Mapping[str, Any] = {
    "dtype": "bf16", "out_dtype": "bf16", "x_layout": "mk", "weight_layout": "nk",
    "activation": "none", "gate": False, "residual": False, "pre": False, "tma_store": True,
    "cluster": 1, "split": 1, "shares": False,
}  # fmt: skip
_WIDE = {"block": (128, 256), "schedule": "cooperative"}
_IN_TURNS = {"block": (128, 128), "schedule": "pingpong"}
_NARROW = {"block": (64, 48), "schedule": "pingpong"}
_TURNED = {"block": (144, 128), "schedule": "swapped"}
# What is compiled ahead and swept: some tiles plain, each thing that an epilogue or a layout does.
_SHOWN: tuple[Mapping[str, Any], ...] = tuple(
    {**_PLAIN, **more}
    for more in (
        _WIDE,
        _IN_TURNS,
        _NARROW,
        *({"block": (128, n), "schedule": "cooperative"} for n in (64, 80, 160)),
        *({"block": (64, n), "schedule": "pingpong"} for n in (32, 128, 224)),
        {**_WIDE, "cluster": 2},
        {**_IN_TURNS, "cluster": 2, "shares": True},
        {**_IN_TURNS, "cluster": 2, "shares": True, "activation": "silu", "gate": True},
        {**_NARROW, "block": (64, 64), "split": 4},
        {**_TURNED, "split": 2, "activation": "gelu_tanh", "residual": True},
        {**_TURNED, "split": 3, "shares": True, "residual": True},
        {"block": (128, 64), "schedule": "cooperative", "split": 4, "shares": True},
        {"block": (144, 256), "schedule": "swapped", "weight_layout": "kn"},
        {"block": (288, 128), "schedule": "swapped"},
        {**_NARROW, "block": (64, 64), "split": 3, "weight_layout": "kn"},
        {"block": (192, 96), "schedule": "pingpong", "residual": True, "pre": True},
        {"block": (192, 128), "schedule": "pingpong"},
        {"block": (128, 64), "schedule": "cooperative", "split": 2, "residual": True},
        {**_IN_TURNS, "cluster": 2, "activation": "gelu_tanh"},
        {**_IN_TURNS, "activation": "gelu_tanh", "pre": True},
        {**_IN_TURNS, "activation": "gelu", "out_dtype": "fp32", "tma_store": False},
        {**_NARROW, "block": (64, 96), "activation": "silu", "gate": True, "residual": True},
        {**_WIDE, "activation": "silu", "gate": True, "pre": True, "residual": True},
        {**_WIDE, "weight_layout": "kn", "cluster": 2},
        {**_WIDE, "block": (128, 160), "x_layout": "km", "weight_layout": "kn"},
        {**_IN_TURNS, "weight_layout": "kn", "residual": True, "tma_store": False},
        {**_IN_TURNS, "dtype": "fp16", "out_dtype": "fp16"},
    )
)


WGMMA = register(replace(WGMMA_ALL, ahead=_SHOWN))
