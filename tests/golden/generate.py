"""Makes the goldens: python -m tests.golden.generate [--out DIR] [GROUP or GROUP/CASE-PREFIX …]

Needs a GPU of compute capability 9.0 and CuPy; --compile-only needs neither GPU nor driver, and
--self takes the interpreter's results for goldens, to try everything around them.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import date
from pathlib import Path

from tests.golden.case import Case
from tests.golden.compile import GPU, compile_kernel, nvrtc_version
from tests.golden.groups import GROUPS, cases_of
from tests.golden.produce import failure, produce
from tests.golden.store import DATA, Golden, load, save


def select(wanted: list[str]) -> dict[str, dict[str, Case]]:
    """The cases to run, by group: all, or those that "group" or "group/prefix" names."""
    chosen: dict[str, dict[str, Case]] = {}
    for word in wanted or GROUPS:
        group, _, prefix = word.partition("/")
        if group not in GROUPS:
            raise SystemExit(f"generate: no group {group!r}; there are {', '.join(GROUPS)}")
        fitting = {n: c for n, c in cases_of(group).items() if n.startswith(prefix)}
        chosen.setdefault(group, {}).update(fitting)
    return chosen


def compile_all(chosen: dict[str, dict[str, Case]]) -> int:
    """Compile every case for the GPU and for the interpreter; returns how many do not."""
    failed = 0
    for group, cases in chosen.items():
        begin = time.perf_counter()
        for name, case in cases.items():
            for target in (GPU, case.arch):
                try:
                    compile_kernel(case.source, target)
                except RuntimeError as error:
                    failed += 1
                    print(f"{group}/{name}: {target}: {error}", file=sys.stderr)
        print(f"{group}: {len(cases)} cases compiled, {time.perf_counter() - begin:.1f} s")
    return failed


def made_by(engine: str) -> dict[str, str]:
    """What is stored about the machine and the tools; in a process without a CUDA context."""
    about = {"engine": engine, "nvrtc": nvrtc_version(), "date": date.today().isoformat()}
    if engine == "gpu":
        from tests.golden.device import describe_gpu

        about.update(describe_gpu())
    return about


def generate(chosen: dict[str, dict[str, Case]], engine: str, folder: Path) -> int:
    """Run the cases and write the groups' files; returns how many cases failed."""
    failed = 0
    about = made_by(engine)
    for group, cases in chosen.items():
        begin = time.perf_counter()
        golden = _kept(folder, group, about)
        results = produce(engine, group, list(cases))
        for name, result in results.items():
            reason = failure(cases[name], result)
            if reason:
                failed += 1
                print(f"{group}/{name}: {reason}", file=sys.stderr)
            else:
                outputs = {} if isinstance(result, str) else result
                golden.add(name, cases[name].digest(), outputs)
        path = save(folder, group, golden)
        seconds, size = time.perf_counter() - begin, path.stat().st_size / 1000
        done = sum(not failure(cases[name], result) for name, result in results.items())
        print(f"{group}: {done} of {len(cases)} cases, {size:.0f} kB, {seconds:.1f} s", flush=True)
    return failed


def _kept(folder: Path, group: str, about: dict[str, str]) -> Golden:
    """What the group's file has of cases that still exist and have not changed."""
    try:
        old = load(folder, group)
    except FileNotFoundError:
        return Golden(about)
    golden = Golden(about)
    for name, case in cases_of(group).items():
        if old.made_by.get("gpu") == about.get("gpu") and old.digests.get(name) == case.digest():
            golden.add(name, old.digests[name], old.outputs[name])
    return golden


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.generate")
    parser.add_argument("names", nargs="*", help="groups, or group/prefix; all when none is named")
    parser.add_argument("--out", type=Path, default=DATA, help="folder for the files")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--self", action="store_true", help="by the interpreter, without a GPU")
    options = parser.parse_args()
    chosen = select(options.names)
    if options.compile_only:
        return min(1, compile_all(chosen))
    if options.self and options.out == DATA:
        parser.error("--self needs --out: its results are no goldens")
    return min(1, generate(chosen, "interpreter" if options.self else "gpu", options.out))


if __name__ == "__main__":
    sys.exit(main())
