"""`fkjit show`, `fkjit compile` and the text of `fkjit doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from fkjit.arch import Target, target
from fkjit.cache.lookup import Entry
from fkjit.cli import console as report
from fkjit.cli.select import selection, targets
from fkjit.errors import CacheError, ParameterError
from fkjit.jit.build import build, quiet
from fkjit.occupancy import occupancy
from fkjit.spec import KernelSpec, Params

_COLUMNS = ("kernel", "target", ">regs", ">spills", ">shared", ">threads",
            ">occupancy", ">compile", "cache")  # fmt: skip
Row = tuple[Any, ...]


def show(
    words: Sequence[str], arch: str | None, what: str, lines: bool, output: Path | None
) -> None:
    """One variant's "source", "ptx", "sass" (with its source `lines`) on stdout or in a file, or
    its "resources" as a table."""
    to, *more = targets(arch)
    if more:
        raise ParameterError(f"show: --arch {arch} names {1 + len(more)} targets; show takes one")
    chosen = selection("show", words)
    chosen.check_fields(())
    spec, (params, *_) = chosen.variants(to)[0]
    if what == "resources":
        _print_variants([(spec, params, _as_cubin(to))])
        return
    text = _text(spec, params, to, what, lines)
    if output is None:
        print(text, end="")
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CacheError(f"show: --output {output} cannot be written: {error}") from error


def _text(spec: KernelSpec, params: Params, to: Target, what: str, lines: bool) -> str:
    if what == "ptx":
        return _built(spec, params, _as_ptx(to)).image.decode().rstrip("\0")
    from fkjit.jit.render import load

    rendered = load(spec, params)
    if what == "source":
        return rendered.text
    from fkjit.jit.disassemble import sass

    return sass(_built(spec, params, _as_cubin(to)).image, rendered if lines else None)


def compile_all(words: Sequence[str], arch: str | None, output: Path | None) -> None:
    """Compile the matching variants for each target and print a table; images go to `output`."""
    chosen = selection("compile", words)
    chosen.check_fields(())
    work = [
        (spec, params, to)
        for to in targets(arch)
        for spec, variants in chosen.variants(to)
        for params in variants
    ]
    entries = _print_variants(work)
    if output is not None:
        _write(work, entries, output)


def _print_variants(work: Sequence[tuple[KernelSpec, Params, Target]]) -> list[Entry]:
    made, entries = report.table(*_COLUMNS), []
    try:
        for spec, params, to in work:
            entries.append(_built(spec, params, to))
            report.add_rows(made, [_row(spec, params, to, entries[-1])])
    finally:
        if entries:
            report.console().print(made)
    return entries


def _built(spec: KernelSpec, params: Params, to: Target) -> Entry:
    with quiet():
        return build(spec, params, to)


def _row(spec: KernelSpec, params: Params, to: Target, entry: Entry) -> Row:
    used = entry.meta["resources"] or {}
    spilled = used.get("spill_stores", 0) + used.get("spill_loads", 0)
    threads = prod(spec.block(params))
    shared = used.get("shared", 0) + spec.shared_bytes(params)
    held = occupancy(to.arch, used["registers"], shared, threads) if used else None
    return (
        f"{spec.id} {spec.label(params)}",
        to.name,
        used.get("registers", "-"),
        report.size(spilled) if spilled else 0,
        report.size(shared),
        threads,
        f"{held.share:.0%}" if held else "-",
        f"{entry.meta['compile_seconds'] * 1e3:.0f} ms",
        "miss" if entry.origin == "compiled" else "hit",
    )


def _as_ptx(to: Target) -> Target:
    return target(to.name.replace("sm_", "compute_"))


def _as_cubin(to: Target) -> Target:
    return target(to.name.replace("compute_", "sm_"))


def _write(
    work: Sequence[tuple[KernelSpec, Params, Target]], entries: Sequence[Entry], folder: Path
) -> None:
    """Each image, its manifest and its header, named by kernel, parameters and target."""
    from fkjit.cli.manifest import write

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for (spec, params, _), entry in zip(work, entries, strict=True):
            write(spec, params, entry, folder)
    except OSError as error:
        raise CacheError(f"compile: --output {folder} cannot be written: {error}") from error
    text = f"{len(entries)} images in {folder}, each with a JSON manifest and a C header"
    report.console().print(text, soft_wrap=True)


def print_doctor(found: dict[str, Any]) -> None:
    """A finding a line, then the problems."""
    out = report.console()
    made = report.table("", "", "")
    for part in found:
        if part not in ("settings", "problems", "ok"):
            report.add_rows(made, _finding(part, found[part]))
    report.add_rows(made, _settings(found["settings"]))
    out.print(made)
    for problem in found["problems"]:
        out.print(f"problem: {problem}", style="red")
    out.print("no problems found" if found["ok"] else f"{len(found['problems'])} problems")


def _finding(part: str, value: Any) -> list[Row]:
    if not isinstance(value, dict):
        return [(part, "", _show(value))]
    if part == "gpu":
        value = {**{f"GPU {d['index']}": _gpu(d) for d in value.get("devices", [])}, **value}
        value["none"] = value.pop("none_because", None)
        value.pop("devices", None)
    names = [name for name in value if value[name] not in (None, [], {})] or list(value)[:1]
    rows = [("", name.replace("_", " "), _show(value[name])) for name in names]
    return [(part, *rows[0][1:]), *rows[1:]]


def _settings(found: dict[str, Any]) -> list[Row]:
    rows = [
        ("", name, _show(setting["value"]) + ("" if setting["set"] else "  (default)"))
        for name, setting in found.get("values", {}).items()
    ] or [("", "error", found.get("error"))]
    return [("settings", *rows[0][1:]), *rows[1:]]


def _gpu(device: dict[str, Any]) -> str:
    return (
        f"{device['name']}, compute capability {device['capability']}, "
        f"{report.size(device['memory'])}, kernels are compiled for {device['target']}"
    )


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
