"""The command line of `fkjit tune`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fkjit import ops as kernels_of_fkjit
from fkjit import tuning
from fkjit.arch import Arch
from fkjit.arch import arch as arch_of
from fkjit.errors import DeviceError, ParameterError
from fkjit.paths import document
from fkjit.spec import KernelSpec

from ..core.cases import Case, select
from ..core.catalog import selected
from ..core.device import Device, TorchDevice
from ..core.method import MODES, Effort
from ..core.run import INTERRUPTED
from ..core.store import Writer, records
from . import show, strategies
from .session import OutOfTime, Session, entry
from .task import Task, kernels, shaped, shown, tasks

_RESULTS = ".jsonl"  # beside the user's file of winners


def parser() -> argparse.ArgumentParser:
    """Every option, with its default."""
    made = argparse.ArgumentParser(
        prog="fkjit tune",
        description="Time the variants of kernels on this GPU and keep the fastest for each class "
        "of shapes. Start it again to go on where it stopped.",
        epilog=document("TUNING.md") + " says what is stored and where.",
    )
    add = made.add_argument
    add("kernels", nargs="+", metavar="OP", help="an op (attention) or a kernel (attention.flash)")
    which = made.add_argument_group("what").add_argument
    which(
        "--shape", action="append", default=[], metavar="TEXT",
        help='"seqlen=4096,batch=2", "D128 causal seqlen=2048": a case of the op, changed; may be '
        "given more than once; default: --set default",
    )  # fmt: skip
    which("--set", action="append", metavar="NAME", help="cases of `fkjit bench --list`")
    which("--where", action="append", default=[], metavar="FIELD=V[,V]", help="of the sets")
    how = made.add_argument_group("how").add_argument
    how("--mode", default="warm", choices=MODES, help="L2 warm or cold, or a CUDA graph (warm)")
    how("--seconds", type=float, default=0.2, metavar="S", help="for a variant, at most (0.2)")
    how("--budget", type=float, metavar="S", help="stop after so long, between two trials")
    how("--strategy", default=strategies.ALL, metavar="NAME", help="all, or kernel_tuner's")
    how("--evaluations", type=int, metavar="N", help="variants a strategy may try for a case")
    how("--again", action="store_true", help="measure what was measured before as well")
    where = made.add_argument_group("results").add_argument
    where("--out", type=Path, metavar="FILE", help="winners go here, not to the user's folder")
    where("--results", type=Path, metavar="FILE", help="every time taken (user's folder)")
    where("--show", action="store_true", help="what is chosen and why; nothing is measured")
    where("--dry-run", action="store_true", help="what would be measured")
    where("--gpu", metavar="NAME", help='of --show and --dry-run: "NVIDIA H200"')
    where("--arch", metavar="TARGET", help="of --show and --dry-run: sm_90a")
    return made


def main(
    arguments: Sequence[str] | None = None, device: Device | None = None, arch: Arch | None = None
) -> int:
    """Run the command; the exit status. Without `device` and `arch` this machine's GPU.

    ParameterError for what the options cannot mean, TuningError for files, ToolchainError where
    torch, a GPU or kernel_tuner is missing.
    """
    chosen = parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    kernels_of_fkjit.load()
    looking = chosen.show or chosen.dry_run
    if not looking and (chosen.gpu or chosen.arch):
        raise ParameterError("tune: --gpu and --arch are for --show and --dry-run")
    asked = _asked(chosen)
    if not looking:
        strategies.check(chosen.strategy)
        device = device or TorchDevice()
    arch = arch or (_asked_arch(chosen) if looking else _device_arch(device))
    todo = [task for specs, cases in asked for task in tasks(specs, cases, arch)]
    if not todo:
        what = " ".join(chosen.kernels)
        raise ParameterError(f"tune: {what} has nothing to choose for these cases on {arch.name}")
    if chosen.show:
        for task in todo:
            print("\n".join(show.explain(task, arch)))
        return 0
    if chosen.dry_run:
        for task in todo:
            print(f"{task.label}: {'; '.join(map(task.shown, task.variants))}")
        return 0
    assert device is not None
    return _tune(chosen, todo, device, arch)


def _asked(chosen: argparse.Namespace) -> list[tuple[list[KernelSpec], list[Case]]]:
    """The kernels of each name that was given, and the cases to tune them for."""
    made = []
    for name in dict.fromkeys(chosen.kernels):
        (op,) = selected([name.partition(".")[0]])
        cases = [shaped(op, text) for text in chosen.shape]
        if chosen.set or not chosen.shape:
            cases += select([op], chosen.set or ["default"], chosen.where, [])
        made.append((kernels(name, op), cases))
    return made


def _asked_arch(chosen: argparse.Namespace) -> Arch:
    """--gpu and --arch, else this machine's GPU, else what the interpreter runs."""
    from fkjit.jit.build import gpu_target, interpreter_target
    from fkjit.runtime.gpus import gpus

    found, _ = gpus()
    if chosen.arch:
        return replace(arch_of(chosen.arch), gpu=chosen.gpu)
    if chosen.gpu:
        same = [gpu for gpu in found if gpu.name == chosen.gpu]
        if not same:
            raise ParameterError(f"tune: --gpu {chosen.gpu!r} is not here: name its --arch as well")
        found = same
    if found:
        return replace(gpu_target(found[0].capability).arch, gpu=found[0].name)
    return interpreter_target().arch


def _device_arch(device: Device | None) -> Arch:
    from fkjit.jit.build import interpreter_target
    from fkjit.runtime.device import device_target

    if isinstance(device, TorchDevice):
        return device_target(device.index).arch
    return replace(interpreter_target().arch, gpu=device.name if device else None)


def _tune(chosen: argparse.Namespace, todo: list[Task], device: Device, arch: Arch) -> int:
    """Case after case; a winner is stored as soon as it is known."""
    gpu = arch.gpu or device.name
    winners = chosen.out or tuning.user_file(gpu)
    tuning.store(winners, gpu, [])  # a file that cannot be used is found before hours go into it
    results = chosen.results or tuning.user_file(gpu).with_suffix(_RESULTS)
    session = _session(chosen, device, results)
    done, reason, status = 0, None, 0
    try:
        for task in todo:
            _say(f"[{done + 1}/{len(todo)}] {task.label}: {len(task.variants)} variants")
            tried = strategies.search(task, session, chosen.strategy, chosen.evaluations)
            made = entry(task, tried)
            if made is None:
                status = 1
                _say("  no variant has a time; the default stays")
            else:
                tuning.store(winners, gpu, [made])
                _say(f"  -> {shown(made['choice'])}")
            done += 1
    except KeyboardInterrupt:
        reason, status = "interrupted", INTERRUPTED
    except OutOfTime:
        reason = "out of time"
    except DeviceError as error:
        reason, status = str(error), 1
    if reason:
        _say(f"{reason}: {done} of {len(todo)} are done; the same command goes on with the rest")
    print(winners)
    return status


def _session(chosen: argparse.Namespace, device: Device, results: Path) -> Session:
    effort = Effort(warmup=20, iterations=400, seconds=chosen.seconds, modes=(chosen.mode,))
    writer = Writer(results, append=True)
    made = Session(device, effort, writer, _say)
    if chosen.budget is not None:
        made.until = device.now() + chosen.budget
    if results.exists() and not chosen.again:
        made.remember(r for r in records(results) if r["record"] == "variant")
    return made


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
