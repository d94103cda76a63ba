"""The Dockerfile's steps without Docker: every RUN line as it stands, in an empty root.

    python docs/container/image.py --list                   the steps, stage by stage
    sudo python docs/container/image.py --arg ARCH=sm_90a   run them, check and measure the result

A stage's root has this machine's /usr, read-only, and an empty Python environment in /usr/local;
all else is what the steps make. They run in a mount namespace with chroot, so Linux and root are
needed. Then the health check and the command run as the image's user, and a call is prepared out
of the bundle alone. Sizes are of files that the steps of the last stage wrote; the base image is
not in them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOCKERFILE = HERE / "Dockerfile"
_USR = ("bin", "sbin", "lib", "lib64", "libexec", "share")
_ETC = ("login.defs", "nsswitch.conf", "resolv.conf", "hosts", "ssl",
        "pip.conf", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives")  # fmt: skip
_PREPARED = """
import fkjit
q = "bf16[2, 16, 4096, 128]"
fkjit.prepare("attention", q, q, q, causal=True, arch="{arch}")
"""


class Step(NamedTuple):
    """One instruction, `${…}` of its ARGs and ENVs replaced but in RUN, and what was set then."""

    word: str
    text: str
    values: Mapping[str, str]


@dataclass
class Stage:
    """From one FROM to the next."""

    name: str
    base: str
    steps: list[Step] = field(default_factory=list)

    def last(self, word: str) -> str | None:
        """The text of its last such instruction."""
        return next((s.text for s in reversed(self.steps) if s.word == word), None)

    def environment(self) -> dict[str, str]:
        """What its ENVs set."""
        found = [pairs(step.text) for step in self.steps if step.word == "ENV"]
        return {name: value for one in found for name, value in one.items()}


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """(word, rest) of each instruction, continued lines in one; comments are dropped."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word.upper(), rest.strip()


def pairs(text: str) -> dict[str, str]:
    """ "A=1 B=2" as a dictionary."""
    return {n: v.strip('"') for n, v in re.findall(r'(\w+)=("[^"]*"|\S*)', text)}


def stages(text: str, given: Mapping[str, str] | None = None) -> list[Stage]:
    """All stages; `given`: build args."""
    shared: dict[str, str] = {}  # ARGs before the first FROM
    values: dict[str, str] = {}
    found: list[Stage] = []
    for word, rest in instructions(text):
        known = values if found else shared
        if word == "FROM":
            base, _, name = _filled(rest, shared).partition(" AS ")
            values = {}
            found.append(Stage(name or "image", base))
            continue
        rest = rest if word == "RUN" else _filled(rest, known)
        if word == "ARG":
            name, _, default = rest.partition("=")
            known[name] = (given or {}).get(name, default.strip('"') or shared.get(name, ""))
            rest = f"{name}={known[name]}"
        if word == "ENV":
            known.update(pairs(rest))
        if found:
            found[-1].steps.append(Step(word, rest, dict(values)))
    return found


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)


# ------------------------------------------------------------------ running


def empty_root(root: Path) -> None:
    """What a base image has: folders, accounts, Python without packages."""
    for name in ("dev", "proc", "tmp", "etc", "root", "home", "opt", "usr/local", "var/mail"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    for name in _ETC:
        source = Path("/etc", name)
        if source.is_dir():
            shutil.copytree(source, root / "etc" / name, symlinks=True)
        elif source.exists():
            shutil.copy(source, root / "etc" / name)
    for name in ("passwd", "group"):  # of the system alone
        lines = Path("/etc", name).read_text().splitlines()
        kept = [line for line in lines if int(line.split(":")[2]) not in range(1000, 60_000)]
        (root / "etc" / name).write_text("\n".join(kept) + "\n")
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(os.readlink(f"/{name}"))
    inside(root, [_python(), "-m", "venv", "/usr/local"], {})


def _python() -> str:
    """The interpreter that environments are made of."""
    return os.path.realpath(sys.executable)


def inside(root: Path, command: list[str], environment: Mapping[str, str], user: str = "0:0",
           mounts: Mapping[Path, str] | None = None, folder: str = "/") -> None:  # fmt: skip
    """Run a command in a root; SystemExit if it fails. `mounts`: folder -> place."""
    bound = {Path("/usr", n): f"/usr/{n}" for n in _USR if Path("/usr", n).exists()}
    bound |= {Path("/", n): f"/{n}" for n in ("bin", "sbin", "lib", "lib64", "dev", "proc")
              if not Path("/", n).is_symlink() and Path("/", n).exists()}  # fmt: skip
    bound[Path(sys.base_prefix)] = sys.base_prefix
    script = ["set -e"]
    for source, place in {**bound, **(mounts or {})}.items():
        mode = "rw" if place in ("/dev", "/proc") else "ro"
        script += [f"mkdir -p '{root}{place}'", f"mount --rbind '{source}' '{root}{place}'",
                   f"mount -o remount,bind,{mode} '{root}{place}' 2>/dev/null || true"]  # fmt: skip
    script.append(f"exec chroot --userspec={user} '{root}' /usr/bin/env -i -C '{folder}' \"$@\"")
    kept = {n: v for n, v in os.environ.items() if n.startswith("PIP_") or n.endswith("_proxy")}
    home = "/root" if user == "0:0" else "/home/fkjit"
    every = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": home, **kept,
             **environment}  # fmt: skip
    settings = [f"{name}={value}" for name, value in every.items()]
    entered = ["unshare", "--mount", "sh", "-c", "\n".join(script), "sh", *settings, *command]
    status = subprocess.run(entered).returncode
    if status:
        raise SystemExit(f"image: status {status} of {' '.join(command)}")


def build(stage: Stage, root: Path, others: Mapping[str, Path]) -> None:
    """All steps of a stage in its root."""
    empty_root(root)
    folder, user = "/", "0:0"
    for step in stage.steps:
        print(f"[{stage.name}] {step.word} {step.text}", flush=True)
        if step.word == "WORKDIR":
            folder = step.text
            (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif step.word == "USER":
            user = step.text
        elif step.word == "COPY":
            _copy(step.text, root, folder, others)
        elif step.word == "RUN":
            mounted, command = _mounts(step.text, others)
            inside(root, ["sh", "-c", command], step.values, user, mounted, folder)


def _mounts(text: str, others: Mapping[str, Path]) -> tuple[dict[Path, str], str]:
    """The folders of `--mount=type=bind,from=…` options, and the command behind them."""
    mounted = {}
    while text.startswith("--mount="):
        option, _, text = text.partition(" ")
        said = dict(part.split("=", 1) for part in option.removeprefix("--mount=").split(","))
        mounted[others[said["from"]] / said["source"].lstrip("/")] = said["target"]
        text = text.strip()
    return mounted, text


def _copy(text: str, root: Path, folder: str, others: Mapping[str, Path]) -> None:
    *options, source, place = text.split()
    to = root / (place if place.startswith("/") else f"{folder}/{place}").lstrip("/")
    if options:
        (stage,) = (option.removeprefix("--from=") for option in options)
        shutil.copytree(others[stage] / source.lstrip("/"), to, dirs_exist_ok=True)
        return
    for path in context():
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, to / path)


def context() -> list[Path]:
    """The files that Docker would send, by Dockerfile.dockerignore."""
    lines = (HERE / "Dockerfile.dockerignore").read_text().splitlines()
    wanted = [line[1:] for line in lines if line.startswith("!")]
    left_out = [line for line in lines if line and line[0] not in "#!*"]
    names = {line.removeprefix("**/") for line in lines if line.startswith("**/")}
    found = []
    for top in wanted:
        for path in [ROOT / top] if (ROOT / top).is_file() else (ROOT / top).rglob("*"):
            inner = path.relative_to(ROOT)
            under = any(inner.is_relative_to(folder) for folder in left_out)
            if path.is_file() and not under and not names & set(inner.parts):
                found.append(inner)
    return sorted(found)


# ------------------------------------------------------------------ what came of it


def sizes(root: Path) -> dict[str, int]:
    """Bytes of each installed distribution by its RECORD, and of the bundle."""
    found, base = {}, ("pip", "setuptools")  # which a base image has
    for record in root.glob("usr/local/lib/python*/site-packages/*.dist-info/RECORD"):
        name = record.parent.name.split("-")[0]
        files = (record.parents[1] / line.split(",")[0] for line in record.read_text().splitlines())
        if name not in base:
            found[name] = sum(path.stat().st_size for path in files if path.is_file())
    bundle = sum(path.stat().st_size for path in (root / "opt" / "fkjit").iterdir())
    every = {**found, "(the bundle)": bundle}
    return dict(sorted(every.items(), key=lambda row: -row[1]))


def checked(stage: Stage, root: Path, arch: str) -> None:
    """The health check, the command, and a call out of the bundle alone, as the image's user."""
    environment, user = stage.environment(), stage.last("USER") or "0:0"
    folder = stage.last("WORKDIR") or "/"
    for word in ("HEALTHCHECK", "CMD"):
        text = stage.last(word) or "[]"
        inside(root, json.loads(text[text.index("[") :]), environment, user, folder=folder)
    only = {**environment, "FKJIT_REQUIRE_CACHED": "1", "FKJIT_CACHE_DIR": "/tmp/none"}
    code = _PREPARED.format(arch=arch)
    inside(root, ["python", "-c", code], only, user, folder=folder)
    print(f"attention for {arch} is in the bundle")


def main() -> None:
    """List the steps, or run them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--list", action="store_true", help="the steps, without running them")
    chosen = parser.parse_args()
    found = stages(DOCKERFILE.read_text(), dict(one.split("=", 1) for one in chosen.arg))
    if chosen.list:
        for stage in found:
            print(f"{stage.name}: FROM {stage.base}")
            print(*(f"    {step.word} {step.text}" for step in stage.steps), sep="\n")
        return
    with tempfile.TemporaryDirectory(prefix="fkjit-image-") as kept:
        roots: dict[str, Path] = {}
        for stage in found:
            Path(kept).chmod(0o755)
            roots[stage.name] = Path(kept, stage.name)
            build(stage, roots[stage.name], roots)
        final = found[-1]
        arch = next(s.values["ARCH"] for s in found[0].steps if "ARCH" in s.values).split(",")[0]
        checked(final, roots[final.name], arch)
        for name, size in (rows := sizes(roots[final.name])).items():
            print(f"{size / 1e6:8.1f} MB  {name}")
        print(f"{sum(rows.values()) / 1e6:8.1f} MB  beside the base image")


if __name__ == "__main__":
    main()
