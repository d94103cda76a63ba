"""Whole models, timed on a GPU: each module is a command."""

from __future__ import annotations

import argparse
from importlib import import_module


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command's arguments. It ends with a line where PyTorch sees no GPU to time."""
    chosen = parser.parse_args()
    if not import_module("torch").cuda.is_available():
        parser.error("torch sees no CUDA device here (`fkjit doctor` says more)")
    return chosen
