"""`fkjit check --format json` and `sarif`, and the lines around a fault."""

from __future__ import annotations

import json
import re

import pytest

from tests.cli.kit import run
from tests.core.user_kernel import registered_kernel, write_kernel

GUARD = "  if (i >= n) return;\n"


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """The kernel of CONTRIBUTING.md, without its look at n; the line of its fault."""
    monkeypatch.chdir(tmp_path)
    path = write_kernel(tmp_path / "kernels") / "scale.cu"
    text = path.read_text()
    path.write_text(text.replace(GUARD, "\n"))
    with registered_kernel(path.parent):
        yield text.split(GUARD)[0].count("\n") + 2


def test_json_has_every_kernel_and_nothing_else_on_stdout(broken):
    done = run("check", "scale", "vector_add", "--variants", "1", "--format", "json")
    scale, add = json.loads(done.out)
    assert done.status == 1
    assert (scale["kernel"], scale["ok"]) == ("scale.plain", False)
    assert scale["location"] == f"kernels/scale.cu:{broken}" and scale["params"]["dtype"]
    assert add["ok"] and add["verdict"] == "ok" and add["error_in_tolerances"] <= 1


def test_sarif_has_the_fault_at_its_file_and_line(broken):
    done = run("check", "scale", "--variants", "1", "--format", "sarif")
    found = json.loads(done.out)
    assert done.status == 1 and found["version"] == "2.1.0"
    (ran,) = found["runs"]
    (result,) = ran["results"]
    assert [rule["id"] for rule in ran["tool"]["driver"]["rules"]] == [result["ruleId"]]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "kernels/scale.cu"
    assert place["region"]["startLine"] == broken
    assert "out-of-bounds" in result["ruleId"]


def test_sarif_without_faults_has_no_results():
    done = run("check", "vector_add", "--variants", "1", "--format", "sarif")
    assert done.status == 0 and json.loads(done.out)["runs"][0]["results"] == []


def test_a_report_shows_five_lines_around_the_fault(broken):
    done = run("check", "scale", "--variants", "1")
    shown = [line for line in done.err.splitlines() if re.match(r"  [ >] +\d+ \|", line)]
    assert len(shown) == 5 and f"> {broken:4d} | " in shown[2]


def test_another_format_is_refused():
    done = run("check", "vector_add", "--format", "sarfi")
    assert done.status == 1 and "did you mean sarif" in done.err
