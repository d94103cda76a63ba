"""The command line of `fkjit bench` and `python -m bench`."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fkjit.arch import Arch
from fkjit.errors import FkjitError, ParameterError
from fkjit.paths import document

from .core import compare, host, kernels, listing
from .core.cases import Case, select
from .core.catalog import selected
from .core.device import Device, TorchDevice
from .core.drawn import Drawn
from .core.method import MODES, QUICK, Effort
from .core.op import Candidate, Op
from .core.run import INTERRUPTED, Plan, execute
from .core.store import Writer, file_name, in_help, results_folder
from .core.words import Values, fields_and_tiles, kernels_named

_EPILOG = document("BENCHMARKS.md") + " says how it measures and how a result line is read."


def parser() -> argparse.ArgumentParser:
    """Every option, with its default."""
    made = argparse.ArgumentParser(
        prog="fkjit bench", description="Measure our kernels beside their peers.", epilog=_EPILOG
    )
    add = made.add_argument
    add(
        "ops", nargs="*", metavar="OP",
        help="operations, kernels of one (attention flash), --FIELD and --PARAMETER VALUE of them "
        "(--head-dim 128 --block 64); default: all; host: what calls cost it; "
        "study: what few bits cost in accuracy; distributed: several GPUs",
    )  # fmt: skip
    which = made.add_argument_group("what").add_argument
    which("--set", action="append", metavar="NAME", help="cases: see --list; or all")
    which("--where", action="append", default=[], metavar="FIELD=V[,V]", help="head_dim=64,128")
    which("--only", action="append", default=[], metavar="WORDS", help='of a case: "D128 causal"')
    which("--impl", default="auto", help="auto (the public call), all, or kernels: naive,tiled")
    which("--variants", action="store_true", help="every legal tile of these kernels")
    which("--tiles", action="append", default=[], metavar="WORDS",
          help='with --variants, these of each kernel: "wgmma cluster=2"')  # fmt: skip
    which("--peers", metavar="NAMES", help="all, none, or names: sdpa-cudnn,fa4; default: not slow")
    how = made.add_argument_group("how").add_argument
    how("--quick", action="store_true", help="10 + 100 iterations, not 100 + 1000; --set quick")
    how("--warmup", type=_count, metavar="N", help="warm-up calls")
    how("--iterations", type=_count, metavar="N", help="timed calls of each mode")
    how("--cell-seconds", type=_seconds, metavar="S", help="at most, for each mode and candidate")
    how(
        "--seed", type=int, metavar="N", help="of sets that are drawn; without it, another each run"
    )
    how("--budget", type=_seconds, metavar="S", help="for the whole run; reduces iterations")
    how("--modes", default=",".join(MODES), help=f"of {','.join(MODES)}")
    how("--nvtx", action="store_true", help="NVTX ranges around each timed case")
    where = made.add_argument_group("results").add_argument
    where(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"default: {in_help(results_folder())}/DATE-GPU-COMMIT.jsonl",
    )
    where("--commit", metavar="TEXT", help="what was measured, for a copy without its .git")
    where("--append", action="store_true", help="add a run to a file that exists")
    where("--list", action="store_true", help="operations, sets, kernels, peers")
    where("--dry-run", action="store_true", help="what would run")
    where("--compare", nargs=2, type=Path, metavar=("A", "B"), help="what moved from A to B")
    where("--threshold", type=float, default=compare.THRESHOLD, help="of --compare (0.03)")
    where("--relative", action="store_true", help="--compare less what the peers moved by")
    return made


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def main(arguments: Sequence[str] | None = None, device: Device | None = None) -> int:
    """Run the command; the exit status. Without `device` this machine's GPU is measured.

    ParameterError for what the options cannot mean, ToolchainError where torch or a GPU is missing.
    """
    begin = time.perf_counter()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["host"]:
        return host.main(given[1:])
    if given[:1] == ["study"]:
        from .study import command as study

        return study.main(given[1:])
    if given[:1] == ["distributed"]:
        from .distributed import run

        return run.main(given[1:])
    chosen, words = parser().parse_known_args(given)
    if chosen.seed is not None:
        Drawn.seed = chosen.seed
    if chosen.compare:
        return compare.main(chosen.compare, chosen.threshold, chosen.relative)
    names, named = kernels_named(chosen.ops)
    ops = selected(names)
    where, tiles = fields_and_tiles("bench", words, ops)
    if named and chosen.impl == "auto":
        chosen.impl = ",".join(named)
    if chosen.list:
        listing.print_operations(ops)
        return 0
    sets = chosen.set or ["quick" if chosen.quick else "default"]
    cases = select(ops, sets, [*chosen.where, *where], chosen.only)
    ops = [op for op in ops if any(case.op is op for case in cases)]
    if device is None and not chosen.dry_run:
        device = TorchDevice(chosen.nvtx)
    candidates, left_out = _candidates(ops, chosen, device, tiles)
    if chosen.dry_run:
        listing.print_plan(cases, candidates, left_out)
        return 0
    assert device is not None
    return _measure(chosen, given, cases, candidates, left_out, device, begin)


def _measure(
    chosen: argparse.Namespace,
    given: list[str],
    cases: list[Case],
    candidates: dict[str, list[Candidate]],
    left_out: dict[str, str],
    device: Device,
    begin: float,
) -> int:
    from .core.environment import environment

    effort = effort_of(chosen)
    where = environment()
    header = {
        **where,
        "commit": chosen.commit or where["commit"],
        "gpu": device.name,
        "command": shlex.join(["fkjit", "bench", *given]),
        "configuration": {
            **vars(effort),
            "modes": list(effort.modes),
            "budget": chosen.budget,
            "seed": Drawn.seed,
        },
        "nvml": getattr(getattr(device, "clocks", None), "missing", None) or "here",
    }
    path = chosen.out or results_folder() / file_name(header)
    writer = Writer(path, chosen.append)
    _compile_ahead(cases, candidates, device)
    limits = _ceilings(device)
    spent = time.perf_counter() - begin
    budget = None if chosen.budget is None else max(chosen.budget - spent, 1.0)
    plan = Plan(cases, candidates, effort, budget, left_out)
    status = execute(plan, device, writer, header, limits)
    print(path)
    return status


def _compile_ahead(
    cases: Sequence[Case], candidates: dict[str, list[Candidate]], device: Device
) -> None:
    """On the machine's GPU."""
    if isinstance(device, TorchDevice):
        from fkjit.runtime.device import device_target

        from .core.ahead import compile_ahead, work

        compile_ahead(work(cases, candidates, device_target(device.index)))


def _ceilings(device: Device) -> dict[str, Any] | None:
    """Measured where there is a GPU; another device has none."""
    if not isinstance(device, TorchDevice):
        return None
    from .core.ceilings import ceilings

    found = ceilings(device)
    gemm = ", ".join(f"{name} {rate:.0f}" for name, rate in found["gemm_tflops"].items())
    line = f"{device.name}: copy {found['copy_gbs']:.0f} GB/s; GEMM TFLOP/s: {gemm}"
    print(line, file=sys.stderr, flush=True)
    return found


def effort_of(chosen: argparse.Namespace) -> Effort:
    """How much is measured, of the options. ParameterError for an unknown mode."""
    base = QUICK if chosen.quick else Effort()
    modes = [mode.strip() for mode in chosen.modes.split(",") if mode.strip()]
    for mode in modes:
        if mode not in MODES:
            raise ParameterError(f"bench: --modes {mode!r} is not one of {', '.join(MODES)}")
    return replace(
        base,
        warmup=chosen.warmup or base.warmup,
        iterations=chosen.iterations or base.iterations,
        seconds=chosen.cell_seconds or base.seconds,
        modes=modes or MODES,
    )


def _candidates(
    ops: Sequence[Op], chosen: argparse.Namespace, device: Device | None, tiles: Values
) -> tuple[dict[str, list[Candidate]], dict[str, str]]:
    """Ours first, then peers; and the peers left out, with the reason."""
    arch = _arch()
    known = [peer.name for op in ops for peer in op.peers]
    names = None if chosen.peers is None else [n.strip() for n in chosen.peers.split(",")]
    for name in names or ():
        if name not in {"all", "none", *known}:
            allowed = ", ".join(["all", "none", *known])
            raise ParameterError(f"bench: --peers {name!r} is not one of {allowed}")
    found: dict[str, list[Candidate]] = {}
    left_out = {}
    for op in ops:
        own = kernels.ours(op, chosen.impl, chosen.variants, device, arch, tiles)
        found[op.name] = _with_words(own, chosen.tiles)
        for peer in op.peers:
            if names is None and peer.slow:
                left_out[peer.name] = f"{peer.slow}; --peers all or {peer.name}"
            elif names is None or "all" in names or peer.name in names:
                found[op.name].append(peer)
    return found, left_out


def _with_words(candidates: list[Candidate], tiles: Sequence[str]) -> list[Candidate]:
    """The public call, and those whose names have all words of one of `tiles`. ParameterError for
    words of none."""
    for text in tiles:
        if not any(_has(candidate, text) for candidate in candidates):
            names = ", ".join(candidate.name for candidate in candidates)
            raise ParameterError(f"bench: --tiles {text!r} is none of {names}")
    if not tiles:
        return candidates
    return [one for one in candidates if one.name == "fkjit" or any(_has(one, t) for t in tiles)]


def _has(candidate: Candidate, words: str) -> bool:
    return set(words.split()) <= set(candidate.name.split())


def _arch() -> Arch:
    """This machine's GPU, else what the interpreter runs."""
    from fkjit.jit.build import gpu_target, interpreter_target
    from fkjit.runtime.gpus import gpus

    found, _ = gpus()
    if not found:
        return interpreter_target().arch
    return replace(gpu_target(found[0].capability).arch, gpu=found[0].name)


def command() -> int:
    """`python -m bench`: errors of fkjit are one message and status 1."""
    try:
        return main()
    except FkjitError as error:
        print(f"fkjit: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
