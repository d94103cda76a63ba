"""Running `fkjit` commands inside a test."""

from __future__ import annotations

from dataclasses import dataclass

from typer.testing import CliRunner

from fkjit.cli.app import app


@dataclass(frozen=True)
class Done:
    """What a command left."""

    status: int
    out: str
    err: str


def run(*arguments: str, **more) -> Done:
    """One command in this process."""
    result = CliRunner().invoke(app, list(arguments), **more)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)
