"""The command `fkjit`. Each command is a few lines over a function that Python can call as well."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fkjit.cli import authoring, cache
from fkjit.cli.options import ARCH, KERNEL, NAMES, VARIANT, complete
from fkjit.errors import FkjitError


class _Group(TyperGroup):
    """Errors of fkjit are one message on stderr and status 1, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FkjitError as error:
            print(f"fkjit: {error}", file=sys.stderr)  # an error's text is printable
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="CUDA kernels for LLM inference and training, compiled when first called.",
)
app.add_typer(cache.app, name="cache")
app.add_typer(authoring.commands)


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        print(import_module("fkjit").__version__)
        raise typer.Exit


@app.command("list")
def list_(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"{NAMES}; default: all", autocompletion=complete)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="kernels for programs")] = False,
) -> None:
    """One line an op; with names their kernels, what these do, and their parameters' values."""
    import_module("fkjit.cli.listing").run(names or [], as_json)


@app.command(context_settings=VARIANT)
def show(
    ctx: typer.Context,
    kernels: KERNEL,
    arch: ARCH = None,
    source: Annotated[bool, typer.Option("--source", help="rendered CUDA C++")] = False,
    ptx: Annotated[bool, typer.Option("--ptx", help="PTX")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="machine code (needs nvdisasm)")] = False,
    lines: Annotated[
        bool, typer.Option("--lines", help="with --sass: the source line of instructions")
    ] = False,
    resources: Annotated[
        bool, typer.Option("--resources", help="registers, spills, occupancy (default)")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file for source, PTX or SASS")
    ] = None,
) -> None:
    """One variant: `fkjit show attention --block 32 --head-dim 128 --arch sm_120a --sass`.

    Parameters left out take the first legal value; `fkjit list` names them all.
    """
    show_ = import_module("fkjit.cli.show")
    if source + ptx + sass + resources > 1:
        raise typer.BadParameter("one of --source, --ptx, --sass, --resources")
    what = "source" if source else "ptx" if ptx else "sass" if sass or lines else "resources"
    if lines and what != "sass":
        raise typer.BadParameter("--lines goes with --sass")
    if output is not None and what == "resources":
        raise typer.BadParameter("--output goes with --source, --ptx or --sass")
    show_.show([*kernels, *ctx.args], arch, what, lines, output)


@app.command()
def explain(
    call: Annotated[
        str, typer.Argument(help="attention, linear, rms_norm …", autocompletion=complete)
    ],
    shape: Annotated[
        str | None,
        typer.Option(
            help="of attention: dtype, head_dim, causal, seqlen, batch, heads; of any call its "
            "arguments: bf16[512, 4096], bf16[4096, 4096]; default: one of the usual calls"
        ),
    ] = None,
    arch: ARCH = None,
) -> None:
    """What a call will run: `fkjit explain attention --shape "D128 causal S4096 heads=32/8"`.

    Kernel and tile as the call itself selects them, registers, occupancy, what will limit it. Needs
    no GPU.
    """
    import_module("fkjit.cli.explain").run(call, shape, arch)


@app.command("compile", context_settings=VARIANT)
def compile_(
    ctx: typer.Context,
    kernels: KERNEL,
    arch: ARCH = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="folder for images")] = None,
) -> None:
    """Every variant with these values: `fkjit compile attention --dtype bf16 --block 64`."""
    import_module("fkjit.cli.show").compile_all([*kernels, *ctx.args], arch, output)


@app.command(context_settings=VARIANT)
def warm(
    ops: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"{NAMES}; all; default: common, what inference takes by default",
            autocompletion=complete,
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(help='targets, "sm_90a,sm_120a" or "all"; default: this machine\'s'),
    ] = None,
    head_dim: Annotated[str | None, typer.Option(help="of calls: 64,128")] = None,
    dtype: Annotated[str | None, typer.Option(help="of calls: bf16,fp16")] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="an option of calls: window=1024,0 or sinks=true")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="write what a command compiles: --record FILE -- COMMAND"
        ),
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="compile what --record wrote")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="of a model: llama-3.2-1b, gpt2 …, or a config.json")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="of a model: sequences, 1,16")] = None,
    prompt: Annotated[int | None, typer.Option(help="of a model: tokens of prompts")] = None,
    weights: Annotated[str | None, typer.Option(help="of a model: codes, int4_group …")] = None,
    head: Annotated[str | None, typer.Option(help="of a model: the head's codes")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="processes")] = None,
) -> None:
    """Fill the cache ahead of time. Needs no GPU; start again to go on after Ctrl-C.

    `fkjit warm attention_varlen --head-dim 128 --dtype bf16 --where window=1024,0 --arch sm_90a`
    compiles what such calls take at several sizes; `fkjit warm --config llama-3.2-1b --batch 1,16`
    what `fkjit generate` takes of such a model.
    """
    warm_ = import_module("fkjit.cli.warm")
    values = {"head_dim": head_dim, "dtype": dtype}
    if record is not None or from_ is not None:
        others = [arch, head_dim, dtype, where, from_ if record else ops, jobs if record else None]
        if any(others):
            name = "--record" if record else "--from"
            raise typer.BadParameter(f"{name} goes with no other choice of kernels or targets")
    if record is not None:
        raise typer.Exit(warm_.record(record, ops or []))
    model = warm_.Model(config, batch, prompt, weights, head)
    if set(model) != {None}:
        work = warm_.of_model(model, dtype, arch, any((ops, head_dim, where, from_)))
    else:
        read = import_module("fkjit.warm_record").read
        work = read(from_) if from_ else warm_.chosen(ops or [], arch, values, where or [])
    raise typer.Exit(warm_.run(work, jobs))


class _OptionalNumber(TyperCommand):
    """A command whose --banks may stand without its number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        follows = dict(zip(args, args[1:] + [""], strict=True))
        bare = "--banks" in args and not re.fullmatch(r"[\d.]+", follows["--banks"])
        return super().parse_args(
            ctx, ["--banks=0" if bare and a == "--banks" else a for a in args]
        )


@app.command(cls=_OptionalNumber, context_settings=VARIANT)
def check(
    ctx: typer.Context,
    kernels: KERNEL,
    mem: Annotated[bool, typer.Option("--mem", help="memory and barriers")] = False,
    race: Annotated[bool, typer.Option("--race", help="races too")] = False,
    banks: Annotated[
        float | None,
        typer.Option(
            metavar="[TIMES]",
            help="shared-memory conflicts; more than so many times the ideal are a fault",
        ),
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help='targets, "compute_75,sm_90a"; default: compute_80')
    ] = None,
    variants: Annotated[
        int | None, typer.Option(help="so many of each kernel, spread evenly; default: all")
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", help="text; json or sarif for programs")
    ] = "text",
    watch: Annotated[
        bool, typer.Option("--watch", help="again whenever a .cu file or header changes")
    ] = False,
) -> None:
    """Run kernels in the CPU interpreter: right numbers? faults? Default: --mem --race.

    Results are held against the kernel's reference, within its tolerance. Bank conflicts are
    counted, and warned of above 4 times the ideal. Needs no GPU: `fkjit check attention flash
    --variants 5`. Status 1 where numbers are wrong, there is a fault, or nothing was run.
    """
    check_ = import_module("fkjit.cli.check")
    every = not (mem or race or banks is not None)
    looking = check_.Looking(every or mem or race, every or race, banks or None)
    words = [*kernels, *ctx.args]

    def once() -> int:
        return check_.run(words, arch, variants, looking, format_)

    if not watch:
        raise typer.Exit(once())
    specs = import_module("fkjit.cli.select").selection("check", words).specs()
    raise typer.Exit(import_module("fkjit.cli.watch").watch(once, specs))


@app.command(context_settings=VARIANT)
def run(
    ctx: typer.Context,
    kernels: KERNEL,
    device: Annotated[
        str | None, typer.Option(help="gpu or cpu; default: the GPU where there is one")
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="a field of the problems: --size seqlen_q=512"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the numbers that are drawn")] = 0,
) -> None:
    """One variant on its problems: error in tolerances, and on a GPU the time of a launch.

    `fkjit run attention flash --head-dim 128 --size seqlen_q=512`. Without a GPU the kernel runs in
    the CPU interpreter. Parameters left out take the first legal value. Status 1 where numbers are
    wrong.
    """
    run_ = import_module("fkjit.cli.run").run
    raise typer.Exit(run_([*kernels, *ctx.args], device, size or [], seed))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """What there is to compile and run kernels with, and what does not fit; then status 1."""
    found = import_module("fkjit.cli.doctor").diagnose()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        import_module("fkjit.cli.show").print_doctor(found)
    raise typer.Exit(0 if found["ok"] else 1)


@app.command()
def generate(
    config: Annotated[str, typer.Option(help="llama-3.2-1b, gpt2 …, or a config.json")] = "gpt2",
    batch: Annotated[int, typer.Option(min=1, help="sequences")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="tokens of each prompt")] = 512,
    new: Annotated[int, typer.Option(min=1, help="new tokens of each sequence")] = 128,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16")] = "bf16",
    weights: Annotated[str | None, typer.Option(help="products' codes: int4_group …")] = None,
    head: Annotated[str | None, typer.Option(help="the head's codes: int4_group …")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu")] = None,
    layers: Annotated[int | None, typer.Option(help="only so many of the model's")] = None,
    temperature: Annotated[float, typer.Option(help="0: greedy")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="draw from so many tokens")] = None,
    top_p: Annotated[float | None, typer.Option(help="draw from so much probability")] = None,
) -> None:
    """Tokens per second of a model with random weights: prefill and decode.

    `fkjit generate --config llama-3.2-1b --batch 16`. Without a GPU the interpreter runs the
    kernels, which takes minutes for whole models: `--layers 1 --prompt 8 --new 2`.
    """
    generate_ = import_module("fkjit.cli.generate")
    drawn = generate_.Sampling(temperature, top_k, top_p)
    said = (config, batch, prompt, new, dtype, device, layers, drawn)
    generate_.run(generate_.Options(*said, weights=weights, head=head))


@app.command(context_settings=VARIANT, add_help_option=False)
def bench(ctx: typer.Context) -> None:
    """Measure ours beside peers: `fkjit bench attention --quick`; --help, --list, --compare A B."""
    raise typer.Exit(import_module("fkjit.cli.suite").main("bench", ctx.args))


@app.command("report", context_settings=VARIANT, add_help_option=False)
def report_(ctx: typer.Context) -> None:
    """Stored results as one HTML page, PNG and SVG: `fkjit report --out report`; --help."""
    raise typer.Exit(import_module("fkjit.cli.suite").main("report", ctx.args))


@app.command(context_settings=VARIANT, add_help_option=False)
def profile(ctx: typer.Context) -> None:
    """Hardware counters of each kernel (Nsight Compute): `fkjit profile attention`; --help."""
    raise typer.Exit(import_module("fkjit.cli.suite").main("profile", ctx.args))


@app.command(context_settings=VARIANT, add_help_option=False)
def tune(ctx: typer.Context) -> None:
    """Find this GPU's fastest tiles and keep them: `fkjit tune attention`; --help, --show."""
    raise typer.Exit(import_module("fkjit.cli.suite").main("tune", ctx.args))
