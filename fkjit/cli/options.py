"""What several commands take: kernels, their parameters, a target."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

VARIANT = {"allow_extra_args": True, "ignore_unknown_options": True}
NAMES = "public calls (reduce_sum), ops (attention) or kernels (attention.flash)"


def complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """For shells: names of calls, ops and kernels."""
    given = [word for value in ctx.params.values() if isinstance(value, list) for word in value]
    return import_module("fkjit.cli.select").completions(given, incomplete)


KERNEL = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME... [--PARAMETER VALUE]... [--where FIELD=V[,V]]...",
        help="a call or op (attention) and kernels of it (flash), or op.kernel; values of their "
        "parameters (--block 32); --where head_dim=64,128: any of these",
        autocompletion=complete,
    ),
]
ARCH = Annotated[
    str | None,
    typer.Option(help="target, e.g. sm_90a; default: this machine's GPU, else sm_80"),
]
