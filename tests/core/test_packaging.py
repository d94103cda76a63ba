"""A wheel and an editable install, each in an empty environment, used from another directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import fkjit

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = Path(sysconfig.get_path("purelib"))
SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in ("kernels_cu", "templates")
    for path in (ROOT / folder).rglob("*.cu*")
)
INFO = f"fkjit-{fkjit.__version__}.dist-info"
PAGE = ROOT / "fkjit/playground/static"
WHERE = "import fkjit, fkjit.paths; print(fkjit.__file__, fkjit.paths.source_root(), sep='\\n')"


def call(*command: object, cwd: Path, **env: str) -> str:
    """Standard output of a command that must succeed, without this checkout on the import path."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(python: Path | str, *arguments: object, cwd: Path) -> None:
    """pip of this environment, at work on another one. Nothing is downloaded."""
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "-q")
    command, *rest = arguments
    call(sys.executable, "-m", "pip", "--python", python, command, *offline, *rest, cwd=cwd)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "-w", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> tarfile.TarFile:
    folder = tmp_path_factory.mktemp("sdist")
    call(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (path,) = folder.glob("*.tar.gz")
    return tarfile.open(path)


@pytest.fixture
def environment(tmp_path) -> Path:
    """An environment with links to this one's libraries, but without fkjit and its `.pth`."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for path in LIBRARIES.iterdir():
        if "fkjit" not in path.name and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    return folder


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def test_the_wheel_holds_package_and_cuda_sources_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"fkjit/_cuda/{path.as_posix()}" for path in SOURCES} <= names and len(SOURCES) > 5
    tuned = {f"fkjit/tuned/{path.name}" for path in (ROOT / "fkjit" / "tuned").iterdir()}
    assert tuned <= names and len(tuned) > 0
    page = {f"fkjit/playground/static/{p.name}" for p in PAGE.iterdir()}
    assert page <= names and "fkjit/playground/static/LICENSES.txt" in page
    assert not [name for name in names if name.startswith("fkjit/playground/editor")]
    assert {"fkjit/py.typed", "fkjit/cli/app.py", "fkjit/interp/__init__.py"} <= names
    assert {name.split("/")[0] for name in names} == {"fkjit", INFO}
    assert not [name for name in names if name.startswith("fkjit/_cuda") and name.endswith(".py")]
    assert f"{INFO}/licenses/LICENSE" in names
    tests = [name for name in names if "__pycache__" in name or "test" in name.lower()]
    assert tests == ["fkjit/pytest_plugin.py"]
    entry_points = zipfile.ZipFile(wheel).read(f"{INFO}/entry_points.txt").decode()
    assert "[pytest11]\nfkjit = fkjit.pytest_plugin\n" in entry_points
    assert {"fkjit/_bench/command.py", "fkjit/_bench/attention/cases_attention.py"} <= names
    beside = {name for name in names if "_bench" in name and not name.endswith(".py")}
    assert beside == {
        f"fkjit/_bench/{name}"
        for name in (
            "models/curves.json", "models/steps.json", "report/chart.js", "report/choice.js",
            "report/page.css",
        )
    }  # fmt: skip


def test_its_metadata_ask_for_little(wheel):
    text = zipfile.ZipFile(wheel).read(f"{INFO}/METADATA").decode()
    found = Parser().parsestr(text)
    assert (found["Name"], found["License-Expression"]) == ("fkjit", "Apache-2.0")
    assert found["Requires-Python"] == ">=3.10"
    needs = found.get_all("Requires-Dist") or []
    plain = {re.split(r"[<>=;\s]", need)[0] for need in needs if "extra" not in need}
    assert {name.lower().replace("_", "-") for name in plain} == {
        "filelock", "jinja2", "ml-dtypes", "numpy", "platformdirs", "rich", "typer",
    }  # fmt: skip
    cuda = [need for need in needs if "cuda12" in need or "cuda13" in need]
    assert len(cuda) == 8
    runtime = [need.partition(">")[0] for need in cuda if "-runtime'" in need]
    assert runtime == ["cupy-cuda12x", "cupy-cuda13x"]
    assert not [need for need in cuda if "[" in need or re.search("cublas|cufft|cusolver", need)]
    assert [need for need in needs if need.startswith("torch") and "test" not in need] == []


def test_its_metadata_are_as_an_index_wants_them(wheel):
    text = zipfile.ZipFile(wheel).read(f"{INFO}/METADATA")
    found = Metadata.from_email(text, validate=True)  # raises for each field that breaks a rule
    assert found.description_content_type == "text/markdown" and not found.project_urls
    assert not [one for one in found.classifiers or () if one.startswith("License")]


def test_a_published_address_is_in_the_metadata_and_in_the_readme_s_links(tmp_path):
    url = "https://example.org/o/fkjit"
    code = "import hatchling.build as b, sys; b.prepare_metadata_for_build_wheel(sys.argv[1])"
    call(sys.executable, "-c", code, tmp_path, cwd=ROOT, FKJIT_URL=f"{url}/")
    found = Metadata.from_email((tmp_path / INFO / "METADATA").read_bytes(), validate=True)
    files = f"{url}/blob/v{fkjit.__version__}"
    assert found.project_urls == {
        "Source": url, "Documentation": f"{files}/docs", "Issues": f"{url}/issues",
        "Changelog": f"{files}/docs/CHANGELOG.md",
    }  # fmt: skip
    links = re.findall(r"\]\(([^)]*)\)", str(found.description))
    inner = [link.removeprefix(f"{files}/") for link in links if link.startswith(files)]
    assert f"{files}/docs/DESIGN.md" in links and all(link.startswith("https://") for link in links)
    assert not [name for name in inner if not (ROOT / name.partition("#")[0]).exists()]


def test_the_version_stands_in_one_place(wheel):
    assert re.fullmatch(r"\d+\.\d+\.\d+", fkjit.__version__)
    assert not re.search(r"(?m)^version *=", (ROOT / "pyproject.toml").read_text())
    assert wheel.name == f"fkjit-{fkjit.__version__}-py3-none-any.whl"


def test_the_sdist_holds_what_makes_the_wheel_and_what_tests_it(sdist):
    top = f"fkjit-{fkjit.__version__}"
    names = {name.removeprefix(f"{top}/") for name in sdist.getnames()}
    assert all(name.startswith(f"{top}/") for name in sdist.getnames())
    assert {path.as_posix() for path in SOURCES} <= names
    assert {"hatch_build.py", "Makefile", "LICENSE", "docs/container/Dockerfile"} <= names
    tests = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("test_*.py")}
    assert tests <= names
    assert not [n for n in names if re.search(r"__pycache__|node_modules|\.(pyc|cubin)$|\.venv", n)]


def test_the_sdist_makes_the_same_wheel(wheel, sdist, tmp_path, every_variant):
    if not every_variant:
        pytest.skip("with --every-variant: it builds another wheel")
    sdist.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=source)
    (made,) = tmp_path.glob("*.whl")
    one, other = zipfile.ZipFile(wheel), zipfile.ZipFile(made)
    assert sorted(one.namelist()) == sorted(other.namelist())
    assert not [n for n in one.namelist() if one.read(n) != other.read(n)]


def test_the_readme_of_a_package_index_has_no_links_into_a_checkout(wheel):
    text = zipfile.ZipFile(wheel).read(f"{INFO}/METADATA").decode()
    shown = Parser().parsestr(text).get_payload()
    assert shown.startswith("# fkjit\n") and "docs/ATTENTION.md" in shown
    assert re.findall(r"\]\((?!https?:)[^)]*\)", shown) == []
    assert len(shown) > 0.8 * len((ROOT / "README.md").read_text())


def test_the_wheel_works_from_another_directory(wheel, environment, elsewhere):
    python = environment / "bin" / "python"
    pip(python, "install", "--no-compile", wheel, cwd=elsewhere)
    package, sources = call(python, "-c", WHERE, cwd=elsewhere).split()
    assert Path(package).is_relative_to(environment)
    assert Path(sources) == Path(package).parent / "_cuda"
    command = environment / "bin" / "fkjit"
    assert call(command, "--version", cwd=elsewhere) == f"{fkjit.__version__}\n"
    shown = call(command, "show", "attention.flash", "--block", "32", "--source", cwd=elsewhere)
    assert shown.startswith('#line 1 "kernels_cu/attention/flash.cu"\n')
    ptx = call(command, "show", "attention.flash", "--block", "32", "--ptx", cwd=elsewhere)
    assert ".entry attention_flash" in ptx
    planned = call(
        command, "bench", "attention", "--only", "D128 S4096", "--dry-run", cwd=elsewhere
    )
    assert "bf16 D128 S4096 B4 H16 causal" in planned and "\n2 cases" in planned
    helped = " ".join(call(command, "bench", "--help", cwd=elsewhere, COLUMNS="500").split())
    assert "docs/BENCHMARKS.md of fkjit's sources says how" in helped
    assert f"default: {elsewhere}/fkjit-bench/DATE-GPU-COMMIT.jsonl" in helped
    done = subprocess.run([command, "report"], cwd=elsewhere, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and not list(elsewhere.iterdir())
    assert f"report: no results in {elsewhere}/fkjit-bench: `fkjit bench` measures" in done.stderr


def test_an_editable_install_uses_the_checkout(environment, elsewhere):
    python = environment / "bin" / "python"
    pip(python, "install", "--no-compile", "-e", ROOT, cwd=elsewhere)
    package, sources = call(python, "-c", WHERE, cwd=elsewhere).split()
    assert Path(package) == ROOT / "fkjit" / "__init__.py"
    assert Path(sources) == ROOT
    listed = call(environment / "bin" / "fkjit", "list", cwd=elsewhere)
    assert "attention " in listed and "flash" in listed
    assert "readme (16)" in call(environment / "bin" / "fkjit", "bench", "--list", cwd=elsewhere)


def test_make_names_its_targets_and_what_is_missing():
    targets = call("make", "help", cwd=ROOT)
    assert set(re.findall(r"(?m)^  make (\S+)", targets)) == {
        "help", "demo", "test", "test-gpu", "check", "format", "docs", "clean",
    }  # fmt: skip
    done = subprocess.run(
        ["make", "demo", "PYTHON=python9.9", "VENV=/nonexistent/venv"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "no python9.9 here: PYTHON=python3.x names another one" in done.stdout


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert 'exec make test "$@"' in script.read_text()
