"""Whether two trees give the same machine code: digests of every variant for every target.

    python -m tests.core.machine_code digest --out before.jsonl [--ops attention,rope]
    python -m tests.core.machine_code compare before.jsonl .    # files, folders, or commits

Three answers, each dearer than the one before, and the first that says "same" is enough:

tokens  the rendered source with our headers expanded in place, without `#line`, comments and
        white space. What is the same here is the same to the compiler.
ptx     the PTX without debug information: what names, order and inlining leave of the source.
text    the cubin's code and constants: the machine code itself, without `-lineinfo`'s tables,
        which move with every line of a header.

A tree only renders its kernels, in a process that runs its own fkjit; all that is compiled is
compiled by one compiler, this checkout's NVRTC. Digests of PTX and code are kept under the user's
cache folder by what they were made of, so that comparing with the same tree again costs one side.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from struct import unpack_from
from typing import Any

from tests.core.render_tree import find_module
from tests.golden.compile import mend_cubin

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").is_file())

_INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"')
_LINE_MARK = re.compile(r"[ \t]*#[ \t]*line\b")
_ONCE = re.compile(r"[ \t]*#[ \t]*pragma[ \t]+once\b")
_STRING = r'"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])'"
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|/\*.*?\*/", re.DOTALL)
_TOKEN = re.compile(rf"{_STRING}|\w+(?:\.\w+)*|\S")
_CODE = (".text.", ".nv.constant2", ".nv.constant3")  # code and the constants it reads

Key = tuple[str, str, str]  # kernel id, label, target


@dataclass(frozen=True)
class Source:
    """What one tree compiles for one variant. `headers` by the name used in `#include`."""

    name: str
    text: str
    headers: Mapping[str, str] = field(repr=False)

    @cached_property
    def tokens(self) -> str:
        """The digest of what the compiler reads."""
        return _digest(" ".join(_expanded(self.text, self.headers, set())))


@dataclass(frozen=True)
class Digest:
    """One line of a file of digests."""

    kernel: str
    label: str
    target: str
    tokens: str
    text: str = ""  # "": not compiled

    @property
    def key(self) -> Key:
        return self.kernel, self.label, self.target


@dataclass(frozen=True)
class Tree:
    """All variants that a tree registers, rendered; `options` by target."""

    sources: dict[Key, Source]
    options: dict[str, tuple[str, ...]]


Side = Tree | dict[Key, Digest]


@dataclass(frozen=True)
class Choice:
    """Which variants are looked at."""

    ops: tuple[str, ...] = ()  # ops or kernel ids; none: all
    targets: tuple[str, ...] = ()
    sample: int = 0  # so many a kernel and target, spread over its variants; 0: all

    def of(self, keys: Iterable[Key]) -> list[Key]:
        groups: dict[tuple[str, str], list[Key]] = {}
        for key in keys:
            of_op = not self.ops or {key[0], key[0].split(".")[0]} & set(self.ops)
            if of_op and (not self.targets or key[2] in self.targets):
                groups.setdefault((key[0], key[2]), []).append(key)
        return [key for group in groups.values() for key in self._spread(group)]

    def _spread(self, group: list[Key]) -> list[Key]:
        if not 0 < self.sample < len(group):
            return group
        steps = max(self.sample - 1, 1)
        return [group[index * (len(group) - 1) // steps] for index in range(self.sample)]


# --- tokens -----------------------------------------------------------------------------------


def _digest(text: str | bytes) -> str:
    return sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def _expanded(text: str, headers: Mapping[str, str], seen: set[str]) -> Iterator[str]:
    """The tokens of a source, each header's where it is first included."""
    for piece in _pieces(text):
        if not isinstance(piece, tuple):
            yield piece
        elif piece[0] not in headers:
            yield f'#include "{piece[0]}"\n'
        elif piece[0] not in seen:
            seen.add(piece[0])
            yield from _expanded(headers[piece[0]], headers, seen)


@lru_cache(maxsize=4096)
def _pieces(text: str) -> tuple[str | tuple[str], ...]:
    """A file's tokens, joined line by line, and the names it includes as 1-tuples.

    The end of a line counts where a directive ends, and nowhere else.
    """
    bare = _COMMENT.sub(lambda found: found[1] or " ", text.replace("\\\n", " "))
    pieces: list[str | tuple[str]] = []
    for line in bare.split("\n"):
        include = _INCLUDE.match(line)
        if include:
            pieces.append((include[1],))
        elif line.strip() and not _LINE_MARK.match(line) and not _ONCE.match(line):
            end = "\n" if line.lstrip().startswith("#") else ""
            pieces.append(end + " ".join(_TOKEN.findall(line)) + end)
    return tuple(pieces)


# --- what NVRTC makes of it -------------------------------------------------------------------


def _nvrtc(source: Source, flags: Iterable[str], ptx: bool) -> bytes:
    """PTX or cubin. RuntimeError with the log when NVRTC refuses the source."""
    toolchain = find_module("jit.toolchain", "toolchain")
    nvrtc = toolchain.nvrtc_module()
    flags = [*flags, *(f"-I{folder}" for folder in toolchain.header_dirs())]
    texts = [text.encode() for text in source.headers.values()]
    names = [name.encode() for name in source.headers]
    program = nvrtc.createProgram(source.text, source.name, texts, names)
    try:
        nvrtc.compileProgram(program, flags)
        made = nvrtc.getPTX(program) if ptx else nvrtc.getCUBIN(program)
    except Exception as error:
        raise RuntimeError(f"{source.name}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    return made.encode() if isinstance(made, str) else made


def ptx_digest(source: Source, options: tuple[str, ...]) -> str:
    """The digest of the PTX that ptxas would be given, without lines of the source."""
    flags = [flag.replace("=sm_", "=compute_") for flag in options]
    flags = [f for f in flags if f != "-lineinfo" and not f.startswith("--ptxas-options")]
    return _digest(b"\n".join(re.sub(rb"//[^\n]*", b"", _nvrtc(source, flags, True)).split()))


def text_digest(source: Source, options: tuple[str, ...]) -> str:
    """The digest of the machine code."""
    return code_digest(mend_cubin(_nvrtc(source, options, False)))


def code_digest(cubin: bytes) -> str:
    """Of a 64-bit ELF: names, registers and contents of the sections with code and constants."""
    (table,), (size, count, names) = unpack_from("<Q", cubin, 40), unpack_from("<HHH", cubin, 58)
    headers = [unpack_from("<IIQQQQII", cubin, table + index * size) for index in range(count)]
    strings = cubin[headers[names][4] :]
    found = []
    for name, _, _, _, offset, length, _, info in headers:
        shown = strings[name : strings.index(b"\0", name)].decode()
        if shown.startswith(_CODE):
            registers = info >> 24  # of a section with code; the rest is an index
            found.append(f"{shown} {registers} {_digest(cubin[offset : offset + length])}")
    return _digest("\n".join(sorted(found)))


class Kept:
    """Digests of earlier runs, one a line, in a file that only grows."""

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            import platformdirs

            path = platformdirs.user_cache_path("fkjit") / "machine_code.txt"
        self.path = path
        lines = path.read_text().splitlines() if path.is_file() else []
        self.known = dict(line.split() for line in lines if line.count(" ") == 1)

    def add(self, key: str, value: str) -> None:
        self.known[key] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(f"{key} {value}\n")


Job = tuple[str, Source, tuple[str, ...]]  # "ptx" or "text", what to compile, options


def _name_of(job: Job) -> str:
    """What decides a job's result, as the name under which it is kept."""
    info = find_module("jit.toolchain", "toolchain").nvrtc_info()
    return _digest(f"2 {job[0]} {job[1].tokens} {job[2]} {info.version} {info.build}")


def _do(job: Job) -> str:
    return (ptx_digest if job[0] == "ptx" else text_digest)(job[1], job[2])


def compiled(
    jobs: Iterable[Job], processes: int, kept: Kept, say: Callable[[str], None]
) -> list[str]:
    """The digests of these jobs, in order. What is compiled twice, or was before, is looked up."""
    jobs = list(jobs)
    names = [_name_of(job) for job in jobs]
    new = {name: job for name, job in zip(names, jobs, strict=True) if name not in kept.known}
    if new:
        with ProcessPoolExecutor(processes) as pool:
            made = zip(new, pool.map(_do, new.values()), strict=True)
            for done, (name, digest) in enumerate(made, start=1):
                kept.add(name, digest)
                if done % 50 == 0 or done == len(new):
                    say(f"{done} of {len(new)} compiled")
    return [kept.known[name] for name in names]


# --- trees ------------------------------------------------------------------------------------


def read_tree(folder: Path, ops: tuple[str, ...] = ()) -> Tree:
    """The registered variants (of some ops or kernels) of the fkjit in `folder`, rendered by it."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    others = {name: value for name, value in os.environ.items() if not name.startswith("FKJIT_")}
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("render_tree.py").resolve()), *ops],
        env={**others, "PYTHONPATH": path},
        cwd=folder,
        stdout=subprocess.PIPE,
        check=True,
    )
    variants, options = pickle.loads(child.stdout)
    sources = {}
    for kernel, label, targets, *rest in variants:
        source = Source(*rest)
        sources.update({(kernel, label, target): source for target in targets})
    return Tree(sources, options)


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A commit's tree in a folder of its own, for as long as it is looked at."""
    with tempfile.TemporaryDirectory(prefix="fkjit-tree-") as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", folder, commit], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


def _read(what: str, ops: tuple[str, ...]) -> Side:
    """A file of digests, a folder with a tree, or a commit."""
    path = Path(what)
    if path.is_file():
        lines = [Digest(**json.loads(line)) for line in path.read_text().splitlines()]
        return {digest.key: digest for digest in lines}
    if path.is_dir():
        return read_tree(path.resolve(), ops)
    with checkout(what) as folder:
        return read_tree(folder, ops)


# --- commands ---------------------------------------------------------------------------------


def _keys(side: Side) -> list[Key]:
    return list(side.sources if isinstance(side, Tree) else side)


def _tokens(side: Side, key: Key) -> str:
    return side.sources[key].tokens if isinstance(side, Tree) else side[key].tokens


def _job(kind: str, tree: Tree, key: Key) -> Job:
    return kind, tree.sources[key], tree.options[key[2]]


def digests(
    tree: Tree, choice: Choice, jobs: int, kept: Kept, say: Callable[[str], None]
) -> list[Digest]:
    """Both digests of each chosen variant."""
    keys = choice.of(tree.sources)
    texts = compiled([_job("text", tree, key) for key in keys], jobs, kept, say)
    return [
        Digest(*key, tree.sources[key].tokens, text) for key, text in zip(keys, texts, strict=True)
    ]


def _texts(
    side: Side, keys: list[Key], kind: str, jobs: int, kept: Kept, say: Callable[[str], None]
) -> list[str]:
    if isinstance(side, Tree):
        return compiled([_job(kind, side, key) for key in keys], jobs, kept, say)
    return [side[key].text for key in keys]


def differences(
    before: Side, after: Side, choice: Choice, jobs: int, kept: Kept, say: Callable[[str], None]
) -> list[str]:
    """One line a variant whose machine code is not the same, or that one side lacks."""
    old, new = choice.of(_keys(before)), choice.of(_keys(after))
    both = [key for key in old if key in set(new)]
    found = [f"only before: {' '.join(key)}" for key in old if key not in set(new)]
    found += [f"only after: {' '.join(key)}" for key in new if key not in set(old)]
    left = [key for key in both if _differ(before, after, key)]
    say(f"{len(both)} variants, {len(both) - len(left)} with the same tokens")
    kinds = ("ptx", "text") if isinstance(before, Tree) and isinstance(after, Tree) else ("text",)
    for kind in kinds:
        one = _texts(before, left, kind, jobs, kept, say)
        other = _texts(after, left, kind, jobs, kept, say)
        left = [key for key, a, b in zip(left, one, other, strict=True) if a != b or not a]
        say(f"{len(left)} differ in {kind}")
    return found + [f"differs: {' '.join(key)}" for key in left]


def _differ(before: Side, after: Side, key: Key) -> bool:
    """Whether there is something to compile: other tokens, or other options of the compiler."""
    trees = [side for side in (before, after) if isinstance(side, Tree)]
    options = {tree.options[key[2]] for tree in trees}
    return len(options) > 1 or _tokens(before, key) != _tokens(after, key)


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.core.machine_code", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("digest", "compare"):
        command = commands.add_parser(name)
        command.add_argument("--ops", default="", help="ops or kernel ids; all if left out")
        command.add_argument("--targets", default="", help="sm_90a,…; all if left out")
        command.add_argument("--sample", type=int, default=0, help="variants a kernel and target")
        command.add_argument("--jobs", type=int, default=2, help="processes")
        if name == "digest":
            command.add_argument("--out", type=Path, required=True, help="the file to write")
            command.add_argument("tree", nargs="?", default=str(ROOT))
        else:
            command.add_argument("before", help="a file of digests, a folder, or a commit")
            command.add_argument("after", nargs="?", default=str(ROOT))
    return parser.parse_args(given)


def main(given: list[str] | None = None, kept: Kept | None = None) -> int:
    """The exit status: 1 when machine code differs."""
    arguments = _arguments(given)
    split = lambda text: tuple(part for part in text.split(",") if part)  # noqa: E731
    choice = Choice(split(arguments.ops), split(arguments.targets), arguments.sample)
    say: Callable[[str], Any] = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    rest = (choice, arguments.jobs, kept or Kept(), say)
    if arguments.command == "digest":
        tree = _read(arguments.tree, choice.ops)
        if not isinstance(tree, Tree):
            raise SystemExit(f"{arguments.tree} holds digests already")
        lines = [json.dumps(asdict(digest)) for digest in digests(tree, *rest)]
        arguments.out.write_text("\n".join(lines) + "\n")
        return 0
    sides = [_read(side, choice.ops) for side in (arguments.before, arguments.after)]
    found = differences(*sides, *rest)
    print("\n".join(found) or "the machine code is the same")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
