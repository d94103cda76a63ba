"""`fkjit tune`: hands over to the suite's part that times variants."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from fkjit.cli_bench import suite


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status."""
    return import_module(f"{suite()}.tune.command").main(arguments)
