"""Commands for people who read and write kernels."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from fkjit.cli.options import ARCH, VARIANT

commands = typer.Typer()


@commands.command()
def new(
    name: Annotated[str, typer.Argument(help="of the kernel: my_scale")],
    folder: Annotated[Path, typer.Option(help="where its two files go")] = Path("kernels"),
) -> None:
    """A kernel of your own to begin with: NAME.cu and NAME.py, ready for `fkjit check NAME`."""
    import_module("fkjit.cli.new").run(name, folder)


@commands.command()
def playground(
    kernel: Annotated[str | None, typer.Argument(help="to begin with: attention.flash")] = None,
    arch: ARCH = None,
    port: Annotated[int, typer.Option(help="0: any that is free")] = 0,
    browser: Annotated[bool, typer.Option(help="open the page")] = True,
    folder: Annotated[Path, typer.Option(help="where kernels of your own are saved")] = Path(
        "kernels"
    ),
) -> None:
    """A page on this machine to edit, compile, check and compare kernels; needs no GPU.

    Prints its address, which has a token in it; nobody else can open the page.
    """
    server = import_module("fkjit.playground.server")
    server.run(port, browser, folder, server.beginning(kernel, arch))


@commands.command(context_settings=VARIANT)
def clangd(
    ctx: typer.Context,
    write: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="only write DIR/compile_commands.json, and end"),
    ] = None,
) -> None:
    """The language server clangd for editors, which reads templates as a variant renders them.

    Name it to the editor in clangd's place: path `fkjit`, arguments `clangd`. Further arguments are
    clangd's.
    """
    clangd_ = import_module("fkjit.cli.clangd")
    if write is not None:
        return clangd_.write(write)
    raise typer.Exit(clangd_.run(ctx.args))


@commands.command()
def demo() -> None:
    """Attention on real input, each implementation checked against float64."""
    raise typer.Exit(import_module("fkjit.cli.demo").main())
