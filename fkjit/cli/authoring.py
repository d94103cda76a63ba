"""Commands for people who read and write kernels."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from fkjit.cli.options import ARCH, VARIANT

commands = typer.Typer()


def _complete_ladder(incomplete: str) -> list[str]:
    names = import_module("fkjit.gallery.catalog").NAMES
    return [name for name in names if name.startswith(incomplete)]


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
    open_: Annotated[
        str | None,
        typer.Option(
            "--open", metavar="STATE", help="attention/4 of the gallery; a shared address"
        ),
    ] = None,
) -> None:
    """A page on this machine to edit, compile, check and compare kernels; needs no GPU.

    Prints its address, which has a token in it; nobody else can open the page.
    """
    server = import_module("fkjit.playground.server")
    if open_ is not None and (kernel or arch):
        raise typer.BadParameter("--open says which kernel and target")
    if open_ is not None and "=" not in open_:
        open_ = import_module("fkjit.gallery.page").state(open_)
    state = server.beginning(kernel, arch) if open_ is None else server.opened(open_)
    server.run(port, browser, folder, state)


@commands.command()
def gallery(
    name: Annotated[
        str | None,
        typer.Argument(help="attention, gemm …; default: all", autocompletion=_complete_ladder),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help='sizes in place of the ladder\'s: "seqlen=1024 heads=4"')
    ] = None,
    arch: Annotated[str | None, typer.Option(help="target without a GPU; default: sm_90a")] = None,
    diff: Annotated[
        int | None, typer.Option(metavar="STEP", help="what differs from the step before, and end")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write the pages below DIR, and end")
    ] = None,
) -> None:
    """From the plain kernel to the fastest one, step by step, here: `fkjit gallery attention`.

    On a GPU each step is timed; without one it is compiled for --arch, checked in the interpreter,
    and shown beside the time that was measured. Without a name the ladders that there are. Status 1
    where numbers are wrong.
    """
    gallery_ = import_module("fkjit.cli.gallery")
    if (write is not None or diff is not None) and (shape or arch or as_json):
        raise typer.BadParameter("--write and --diff take a name alone")
    if write is not None:
        return gallery_.write(write, name)
    if diff is not None:
        return gallery_.differences(name, diff)
    raise typer.Exit(gallery_.run(name, shape, arch, as_json))


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
