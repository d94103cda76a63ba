"""The gallery's pages: Markdown, with pictures beside it, all of it out of the ladders."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlencode

from fkjit.gallery import catalog, pictures
from fkjit.gallery.changes import SMS, launch_changes, one_file, source_changes
from fkjit.gallery.ladder import Ladder, Step
from fkjit.gallery.measured import Measured, measured, ratios

ARCH = "sm_90a"  # that pages open the playground with
INDEX = "GALLERY.md"
NOT_MEASURED = "not measured"
_MADE = "<!-- Made by `fkjit gallery --write docs`; what it says stands in fkjit/gallery. -->\n"


def write(folder: Path, ladders: list[Ladder]) -> list[Path]:
    """Write the pages of ladders and their pictures below `folder`/gallery, and the index; the
    paths, the index first."""
    made: dict[str, str] = {INDEX: index()}
    for ladder in ladders:
        made[f"gallery/{ladder.name}.md"] = page(ladder)
        made |= {f"gallery/{name}": text for name, text in drawn(ladder)}
    (folder / "gallery").mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in made]


def drawn(ladder: Ladder) -> Iterator[tuple[str, str]]:
    """Its pictures: (file, SVG)."""
    for number, step in enumerate(ladder.steps, 1):
        for picture in step.pictures:
            yield _file(ladder, number, picture.kind), pictures.draw(ladder, step, picture)


def _file(ladder: Ladder, number: int, kind: str) -> str:
    return f"{ladder.name}-{number}-{kind}.svg"


def state(name: str, arch: str = ARCH) -> str:
    """The playground's state for a step, "attention/4": its variant, and beside it the one before,
    where that is of the same kernel."""
    step, before = catalog.step(name)
    found = {"kernel": step.kernel, "arch": arch, "params": _json(step.params)}
    if before is not None and before.kernel == step.kernel and before.params != step.params:
        found["b"] = _json({"arch": arch, "params": before.params, "source": "file"})
    return urlencode(found)


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, separators=(",", ":"))


# ------------------------------------------------------------------ one ladder


def page(ladder: Ladder) -> str:
    """The Markdown of a ladder."""
    found = [measured(ladder, step) for step in ladder.steps]
    parts = [
        _MADE,
        f"# {ladder.title}\n",
        f"{ladder.about}\n",
        _table(ladder, found),
        f"Counted, {counted(ladder)}.\n",
        _sources(found),
        f"`fkjit gallery {ladder.name}` goes up this ladder on your own machine; "
        "[GALLERY.md](../GALLERY.md) has the others.\n",
    ]
    for number, step in enumerate(ladder.steps, 1):
        before = ladder.steps[number - 2] if number > 1 else None
        parts += _section(ladder, number, step, before)
    return "\n".join(parts)


def _table(ladder: Ladder, found: list[Measured | None]) -> str:
    times = [None if one is None else one.microseconds for one in found]
    lines = [
        f"| | step | kernel | time | {ladder.unit} | vs first | vs step before |",
        "|---:|---|---|---:|---:|---:|---:|",
    ]
    both = zip(ladder.steps, found, ratios(ladder, times), strict=True)
    for number, (step, one, (first, before)) in enumerate(both, 1):
        speed = "" if one is None or one.speed is None else figure(one.speed)
        cells = (
            number, step.title, _source(step),
            NOT_MEASURED if one is None else duration(one.microseconds), speed,
            times_as_fast(first), times_as_fast(before),
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def counted(ladder: Ladder, given: Mapping[str, object] | None = None) -> str:
    """What the kernels count of their work, whatever the GPU: "steps 1 to 4: 34.4 GFLOP, …"."""
    groups: dict[str, list[int]] = {}
    for number, step in enumerate(ladder.steps, 1):
        words = _work(*ladder.work_of(step, SMS, given))
        groups.setdefault(words, []).append(number)
    return "; ".join(f"{_steps(numbers)}: {words}" for words, numbers in groups.items())


def _work(flops: float, moved: float) -> str:
    size = f"{figure(moved / 1e6)} MB" if moved < 1e9 else f"{figure(moved / 1e9)} GB"
    if not flops:
        return f"{size} to move"
    return f"{figure(flops / 1e9)} GFLOP, {size} to move, {figure(flops / moved)} flops a byte"


def _steps(numbers: list[int]) -> str:
    """ "step 2", "steps 2 and 3", "steps 1 to 4", "steps 2, 5, 6"."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"step {first}"
    if numbers == list(range(first, last + 1)):
        return f"steps {first} {'and' if last == first + 1 else 'to'} {last}"
    return f"steps {', '.join(map(str, numbers))}"


def _sources(found: list[Measured | None]) -> str:
    """Where and when the times were measured."""
    one = next((one for one in found if one is not None), None)
    where = "" if one is None else f", {one.gpu}, {one.date}"
    return f"Times: medians in CUDA graphs, caches warm, one run{where}.\n"


def _section(ladder: Ladder, number: int, step: Step, before: Step | None) -> list[str]:
    parts = [
        f"## {number}. {step.title[0].upper()}{step.title[1:]}\n",
        f"{step.why}\n",
        f"`{step.kernel}`, {step.spec.label(step.params)}. Open in playground:\n",
        f"    fkjit playground --open {ladder.name}/{number}\n",
    ]
    for picture in step.pictures:
        said, file = pictures.caption(picture), _file(ladder, number, picture.kind)
        parts.append(f"![{said}]({file})\n")
        parts.append(f"*{said}.*\n")
    return parts if before is None else [*parts, *_changes(ladder, number, step, before)]


def _changes(ladder: Ladder, number: int, step: Step, before: Step) -> list[str]:
    rows = [f"| {' | '.join(row)} |" for row in launch_changes(ladder, step, before)]
    head = [f"| launch | step {number - 1} | step {number} |", "|---|---|---|"]
    parts = ["\n".join([*head, *rows]) + "\n"] if rows else []
    if not one_file(step, before):
        both = " after ".join(_source(one) for one in (step, before))
        return [*parts, f"Source: {both}; `fkjit gallery {ladder.name} --diff {number}`.\n"]
    diff = source_changes(step, before)
    if not diff:
        return [*parts, "Source: the same.\n"]
    body = "\n".join(diff)
    summary = f"Source, as it is rendered: {len(diff)} lines of differences"
    return [
        *parts,
        f"<details>\n<summary>{summary}</summary>\n\n```diff\n{body}\n```\n\n</details>\n",
    ]


def _source(step: Step) -> str:
    return f"[{step.spec.source}](../../kernels_cu/{step.spec.source})"


# ------------------------------------------------------------------ the index


def index() -> str:
    """docs/GALLERY.md."""
    lines = [
        "| ladder | what | steps | from | to | times as fast |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name in catalog.NAMES:
        ladder = catalog.find(name)
        first, best = _ends(ladder)
        ratio = "" if first is None or best is None else times_as_fast(first / best)
        what = ladder.about.partition(". ")[0].partition(": ")[0]
        cells = (
            f"[{ladder.title}](gallery/{name}.md)", what, len(ladder.steps),
            "" if first is None else duration(first), "" if best is None else duration(best), ratio,
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return _INDEX.format(made=_MADE, table="\n".join(lines))


def _ends(ladder: Ladder) -> tuple[float | None, float | None]:
    """The first measured time of the ladder's own work, and the best one of the same work."""
    every = [(step, measured(ladder, step)) for step in ladder.steps]
    timed = [(step, one.microseconds) for step, one in every if one is not None]
    alike = [[time for other, time in timed if ladder.alike(step, other)] for step, _ in timed]
    most = next((times for times in alike if len(times) > 1), None)
    return (None, None) if most is None else (most[0], min(most))


_INDEX = """{made}
# The gallery

Each family of kernels as a ladder: from the plain version to the fastest one, a step at a time. A
step is a variant that you can run, look at, and change; its page says what it does better than the
one before and why, what differs in launch and source, and what was measured.

{table}

"From" is the first step of the ladder, "to" the fastest one that does the same work; all of one run
on an NVIDIA H200, caches warm. Steps that have changed since say "{unmeasured}".

    fkjit gallery attention                              # go up a ladder here
    fkjit gallery attention --arch sm_80                 # as it is compiled for another target
    fkjit gallery gemm --shape "m=4096 n=4096 k=4096"    # other sizes, where a step has none
    fkjit gallery attention --diff 6                     # what differs from the step before
    fkjit gallery gemm --json                            # for programs
    fkjit playground --open attention/6                  # a step, to change it

- **On a GPU** every step is checked at small sizes and timed at the ladder's: the median of replays
  of a CUDA graph, between two events, with registers and how many times as fast it is as the first
  step and as the one before. Steps that are not for this GPU say why.
- **Without a GPU** every step is checked in the [interpreter](SANITIZER.md), compiled for `--arch`
  (registers, spills, shared memory, occupancy), and shown beside the stored time. The first run
  compiles; later ones take seconds.

Nothing on the pages is drawn by hand. Differences are computed from the rendered source of two
steps; `--diff` prints those of two files as well. Pictures of who touches what, of pipelines, of
banks and of fragments come from what the interpreter saw of the step at small sizes; those of tiles
and of shared memory from the launch. After a change to a ladder or a kernel,
`fkjit gallery --write docs` makes the pages anew; where a variant has changed,
`python -m bench.report.gallery` on a GPU first.
""".replace("{unmeasured}", NOT_MEASURED)


# ------------------------------------------------------------------ figures


def duration(microseconds: float) -> str:
    """Three figures or so: "7.42 us", "1.46 ms"."""
    if microseconds >= 1000:
        return f"{figure(microseconds / 1000)} ms"
    return f"{figure(microseconds)} us"


def figure(value: float) -> str:
    """ "0.123", "4.58", "64.5", "742"."""
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"


def times_as_fast(ratio: float | None) -> str:
    """ "1.84", "26.4"; "" for None."""
    return "" if ratio is None else f"{figure(ratio) if ratio >= 1 else f'{ratio:.2f}'}x"
