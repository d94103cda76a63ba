"""Fragments of the tensor cores: which lane holds which element of an operand."""

from __future__ import annotations

from typing import Any

from fkjit.arch import Target
from fkjit.gallery import svg
from fkjit.gallery.ladder import Step
from fkjit.jit.build import build, quiet
from fkjit.jit.render import load
from fkjit.playground.fragments import found
from fkjit.playground.listing import Ptx

_WIDE, _HIGH, _LEFT = 40.0, 15.0, 26.0
_MOST = 16  # columns of an operand that are drawn


def fragments(step: Step, instruction: str, to: Target) -> str:
    """The operands of the first form of an instruction ("mma", "wgmma") in a step's PTX."""
    with quiet():
        text = build(step.spec, step.params, to).image.decode()
    forms = found(Ptx(text), load(step.spec, step.params).name)
    form = next(one for one in forms if one["instruction"].startswith(instruction))
    shapes = [svg.text(0, 14, form["instruction"], 12)]
    words = "lane:register.part; a colour for each lane"
    shapes.append(svg.text(0, 30, words, 11))
    y = 40.0
    for operand in form["operands"]:
        part, height = _operand(operand, y)
        shapes += part
        y += height
    return svg.drawing(f"Fragments of {form['instruction']}", y, shapes)


def _operand(operand: dict[str, Any], y: float) -> tuple[list[str], float]:
    owners = [row[:_MOST] for row in operand["owners"]]
    cut = f", columns 0 to {_MOST - 1}" if len(operand["owners"][0]) > _MOST else ""
    shapes = [svg.text(0, y + 12, operand["title"] + cut, 12)]
    for column in range(len(owners[0])):
        shapes.append(svg.text(_LEFT + (column + 0.5) * _WIDE, y + 28, column, 9, "middle"))
    cells: list[tuple[float, float, object]] = []
    for number, row in enumerate(owners):
        top = y + 32 + number * _HIGH
        shapes.append(svg.text(_LEFT - 5, top + 11, number, 9, "end"))
        for column, (lane, register, part) in enumerate(row):
            x = _LEFT + column * _WIDE
            words = f"{lane}:{register}.{part}" if operand["parts"] > 1 else f"{lane}:{register}"
            shapes.append(svg.rect(x, top, _WIDE - 1, _HIGH - 1, svg.colour(lane % 32)))
            cells.append((x + _WIDE / 2, top + 11, words))
    shapes.append(svg.labels(9, cells))
    return shapes, 32 + len(owners) * _HIGH + 14
