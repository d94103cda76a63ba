"""Requests, and the events that they lead to in this process."""

from __future__ import annotations

from typing import Any

from fkjit.playground import catalog
from fkjit.playground.request import variants
from fkjit.playground.stages import Stages

NEW = {
    "kernel": "new_kernel.plain",
    "arch": "sm_90a",
    "params": {"dtype": "fp32", "threads": 64, "negated": True},
}
FLASH = {
    "kernel": "attention.flash",
    "arch": "sm_90a",
    "params": {
        "dtype": "fp16", "head_dim": 64, "head_dim_v": 64, "block": 16, "aligned": True,
    },
}  # fmt: skip


def template_of(asked: dict[str, Any]) -> str:
    """The template as its file has it."""
    return catalog.template(asked["kernel"])["text"]


def events_of(asked: dict[str, Any]) -> dict[str, Any]:
    """The last event of each name; all errors under "errors"."""
    found: dict[str, Any] = {"errors": []}

    def emit(event: str, **data: Any) -> None:
        if event == "error":
            found["errors"].append(data)
        else:
            found[event] = data

    Stages(variants({"a": asked})[0], emit).run()
    return found
