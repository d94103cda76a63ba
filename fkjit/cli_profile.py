"""`fkjit profile`: hands over to the suite's part that runs Nsight Compute."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from fkjit.cli_bench import suite


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status."""
    return import_module(f"{suite()}.profile.command").main(arguments)
