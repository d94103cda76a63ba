"""Pictures of a step, out of what its launch says and what the interpreter saw."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from fkjit.arch import target
from fkjit.gallery import svg
from fkjit.gallery.changes import SMS
from fkjit.gallery.fragment_picture import fragments
from fkjit.gallery.ladder import Ladder, Picture, Step
from fkjit.gallery.pipeline import stages
from fkjit.gallery.pipeline_picture import pipeline
from fkjit.gallery.trace import NOBODY, Owners, banks, owners

_CELLS = (40, 96)  # rows and columns of a picture of an array, at most
_BANKS, _WORD = 32, 4
TARGET = target("compute_90a")  # whose PTX is looked at: that of the GPU of all measurements


def draw(ladder: Ladder, step: Step, picture: Picture) -> str:
    """The SVG of one picture."""
    if picture.kind == "grid":
        return _grid(ladder, step, picture.of)
    if picture.kind == "memory":
        return _memory(step)
    if picture.kind == "tiling":
        return _tiling(step, picture.of, owners(ladder, step, picture.of, TARGET))
    if picture.kind == "pipeline":
        return pipeline(step.kernel, stages(ladder, step, picture.sizes, TARGET))
    if picture.kind == "banks":
        return _banks(picture.of, banks(ladder, step, picture.of, TARGET))
    return fragments(step, picture.of, TARGET)


def caption(picture: Picture) -> str:
    """What a picture shows, in a sentence."""
    return {
        "grid": "Tiles of one block, out of the launch",
        "memory": "Shared memory of a block, to scale",
        "tiling": f"Which block touches which element of {picture.of}, as the interpreter saw it",
        "pipeline": "When shared memory is filled and read, in the interpreter's order",
        "banks": f"Which lane of a warp touches which bank in {picture.of}, as the interpreter "
        "saw it",
        "fragments": f"Which lane holds which element in {picture.of}, asked of the interpreter",
    }[picture.kind]


# ------------------------------------------------------------------ who touches what


def _tiling(step: Step, name: str, seen: Owners) -> str:
    high, wide = (-(-n // most) for n, most in zip(seen.block.shape, _CELLS, strict=True))
    block, warp = seen.block[::high, ::wide], seen.warp[::high, ::wide]
    rows, columns = block.shape
    cell = min(20.0, 690 / columns), min(20.0, 300 / rows, 5 * 690 / columns)
    left, top = 34.0, 40.0
    shapes = [svg.text(0, 14, _tiling_title(step, name, seen), 13)]
    shapes.append(svg.text(0, 31, "a colour for each block, a shade for each of its warps", 11))
    most = max(int(seen.warp.max()), 1)
    for row, end, first, last in _runs(block * 64 + warp):
        number, of = int(block[row, first]), int(warp[row, first])
        if number != NOBODY:
            x, y = left + first * cell[0], top + row * cell[1]
            size = (last - first) * cell[0], (end - row) * cell[1]
            title = f"block {number}, warp {of}"
            shapes.append(svg.rect(x, y, *size, svg.colour(number, of / most), title))
    shapes.append(svg.frame(left, top, columns * cell[0], rows * cell[1]))
    shapes.append(svg.text(left - 4, top + 10, "0", 10, "end"))
    shapes.append(svg.text(left - 4, top + rows * cell[1], seen.block.shape[0] - 1, 10, "end"))
    bottom = top + rows * cell[1] + 14
    shapes.append(svg.text(left, bottom, f"columns 0 to {seen.block.shape[1] - 1}", 10))
    return svg.drawing(_tiling_title(step, name, seen), bottom + 8, shapes)


def _tiling_title(step: Step, name: str, seen: Owners) -> str:
    rows, columns = seen.block.shape
    blocks = np.unique(seen.block[seen.block != NOBODY]).size
    return f"{step.kernel}: {name}, {rows} x {columns} elements, touched by {blocks} block" + (
        "s" if blocks > 1 else ""
    )


def _runs(keys: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """Rectangles of cells of one key: (row, end, first, last); rows that are alike go together."""
    row = 0
    while row < len(keys):
        end = row + 1
        while end < len(keys) and np.array_equal(keys[row], keys[end]):
            end += 1
        edges = [0, *(np.flatnonzero(np.diff(keys[row])) + 1).tolist(), keys.shape[1]]
        for first, last in pairwise(edges):
            yield row, end, first, last
        row = end


# ------------------------------------------------------------------ tiles of the launch


def _grid(ladder: Ladder, step: Step, names: str) -> str:
    """Tiles of `block` over two of the sizes; one block's in colour."""
    sizes = ladder.sizes_of(step, False)
    extent = [int(sizes[name]) for name in names.split(",")]
    block = step.params["block"]
    tile = block if isinstance(block, tuple) else (block, block)
    rows, columns = (-(-n // t) for n, t in zip(extent, tile, strict=False))
    launched = step.spec.grid(step.params, ladder.problem_of(step, False, SMS))
    threads = step.spec.block(step.params)[0]
    scale = 280 / max(extent)
    left, top = 40.0, 42.0
    title = f"{rows} x {columns} tiles of {tile[0]} x {tile[1]}"
    by = f"{launched[0] * launched[1] * launched[2]:,} blocks of {threads} threads"
    shapes = [svg.text(0, 14, f"{step.kernel}: {title}, by {by}", 13)]
    shapes.append(svg.text(0, 31, f"{names.replace(',', ' down, ')} across", 11))
    high, wide = (size * scale for size in extent)
    shapes.append(svg.rect(left, top, tile[1] * scale, tile[0] * scale, svg.colour(1), title))
    lines = [f"M{left:g} {top + r * tile[0] * scale:.2f}h{wide:g}" for r in range(1, rows)]
    lines += [f"M{left + c * tile[1] * scale:.2f} {top:g}v{high:g}" for c in range(1, columns)]
    shapes.append(f'<path d="{"".join(lines)}" stroke="{svg.GREY}" stroke-width="0.4"/>')
    shapes.append(svg.frame(left, top, wide, high))
    return svg.drawing(title, top + high + 10, shapes)


# ------------------------------------------------------------------ shared memory


def _memory(step: Step) -> str:
    """The arrays of dynamic shared memory, to the scale of what a block may have on Hopper."""
    layout = step.spec.shared_layout
    parts = [] if layout is None else list(layout(step.params))
    most = target("sm_90a").arch.shared_per_block
    total, scale = sum(size for _, size in parts), svg.WIDTH / most
    kinds = list(dict.fromkeys(_kind(name) for name, _ in parts))
    shapes = [svg.text(0, 14, f"{step.kernel}: {total:,} of {most:,} bytes", 13)]
    x = 0.0
    for name, size in parts:
        width = size * scale
        fill = svg.colour(kinds.index(_kind(name)) + 1)
        shapes.append(svg.rect(x, 24, max(width - 1, 0.5), 34, fill, f"{name}: {size:,} bytes"))
        if width > 46:
            shapes.append(svg.text(x + width / 2, 45, _short(name), 10, "middle", svg.INK))
        x += width
    shapes.append(svg.frame(0.5, 24, svg.WIDTH - 1, 34))
    x = 0.0
    for number, kind in enumerate(kinds, 1):
        some = [size for name, size in parts if _kind(name) == kind]
        words = f"{kind}: {len(some)} x {some[0]:,}" if len(some) > 1 else f"{kind}: {some[0]:,}"
        shapes.append(svg.rect(x, 70, 10, 10, svg.colour(number)))
        shapes.append(svg.text(x + 15, 79, words, 11))
        x += 34 + 6.2 * len(words)
    return svg.drawing(f"Shared memory of {step.kernel}", 88, shapes)


def _kind(name: str) -> str:
    """ "K stage 0" -> "K"."""
    return name.rstrip("0123456789").removesuffix(" stage ").strip()


def _short(name: str) -> str:
    return name.replace(" stage ", " ").replace("weight", "w")


# ------------------------------------------------------------------ banks


def _banks(instruction: str, accesses: list[dict[str, Any]]) -> str:
    """The access as it is, and with tiles in plain rows."""
    shapes: list[str] = []
    y = 0.0
    for access, title in zip(accesses, ("swizzled", "the same in plain rows"), strict=True):
        part, height = _bank_rows(access, title, y)
        shapes += part
        y += height + 16
    return svg.drawing(f"Banks of {instruction}, with the swizzle and without it", y, shapes)


def _bank_rows(access: dict[str, Any], title: str, y: float) -> tuple[list[str], float]:
    wide, high, left = 21.0, 15.0, 64.0
    head = f"{title}: {access['wavefronts']} wavefronts, ideal {access['ideal']}; {access['kind']}"
    where = f" of {access['width']} bytes a lane in {access['where']}"
    shapes = [svg.text(0, y + 14, head + where, 12)]
    words: dict[tuple[int, int], list[int]] = {}
    for lane, byte in zip(access["lanes"], access["bytes"], strict=True):
        for part in range(0, max(access["width"], _WORD), _WORD):
            row, bank = divmod((byte + part) // _WORD, _BANKS)
            words.setdefault((row, bank), []).append(lane)
    rows = sorted({row for row, _ in words})
    cells: list[tuple[float, float, object]] = []
    for number, row in enumerate(rows):
        top = y + 24 + number * high
        shapes.append(svg.text(left - 6, top + 11, f"+{row * _BANKS * _WORD}", 10, "end"))
        shapes.append(svg.frame(left, top + 0.5, _BANKS * wide - 1, high - 2))
        for bank in range(_BANKS):
            lanes = words.get((row, bank))
            if lanes is not None:
                x = left + bank * wide
                shapes.append(svg.rect(x, top, wide - 1, high - 1, svg.colour(lanes[0])))
                cells.append((x + 10, top + 11, lanes[0]))
    shapes.append(svg.labels(10, cells))
    bottom = y + 24 + len(rows) * high
    shapes.append(svg.text(left, bottom + 12, "bank 0", 10))
    shapes.append(svg.text(left + _BANKS * wide, bottom + 12, "bank 31", 10, "end"))
    return shapes, 24 + len(rows) * high + 18
