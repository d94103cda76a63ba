"""The playground's server: who may call it, what it answers, what it stops."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from fkjit.errors import ParameterError, ToolchainError
from fkjit.playground import server
from fkjit.playground.jobs import Jobs, _descendants
from tests.playground.kit import NEW, template_of

pytest.importorskip("starlette", reason="needs the extra [playground]")
pytest.importorskip("httpx", reason="starlette's test client needs httpx")

from starlette.testclient import TestClient

from fkjit.playground.app import STATIC, make

TOKEN, PORT = "a-token", 4711
ADDRESS = f"http://127.0.0.1:{PORT}"
LIMIT = 2.0  # seconds of a job that does not end
ENDLESS = "//% for i in range(90000)\n//% for j in range(90000)\n//% endfor\n//% endfor\n"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A client of a server whose workers are real."""
    jobs = Jobs(tmp_path_factory.mktemp("saved") / "kernels")
    with TestClient(make(TOKEN, PORT, jobs), base_url=ADDRESS) as made:
        made.jobs = jobs
        yield made
    assert not [worker for worker in (*jobs._pages.values(), jobs._spare) if worker]


def run(client, asked, page="one"):
    """The events of a run."""
    answer = client.post(f"/{TOKEN}/api/run", json={"page": page, "a": asked})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n") if part]


def is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "path", ["/", "/api/kernels", "/a-toke/", "/a-token", "/static/main.js", "//"]
)
def test_without_the_token_there_is_nothing(client, path):
    answer = client.get(path, follow_redirects=False)
    assert answer.status_code == 401 and "token" in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": f"127.0.0.1.evil.example:{PORT}"},
        {"host": "127.0.0.1:80"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": f"https://127.0.0.1:{PORT}"},
        {"origin": f"http://localhost:{PORT}"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_no_other_host_origin_or_site(client, headers):
    for answer in (
        client.get(f"/{TOKEN}/", headers=headers),
        client.post(f"/{TOKEN}/api/save", headers=headers, json={}),
    ):
        assert answer.status_code == 403


def test_the_page_loads_nothing_from_elsewhere(client):
    answer = client.get(f"/{TOKEN}/", headers={"origin": ADDRESS, "sec-fetch-site": "same-origin"})
    policy = answer.headers["content-security-policy"]
    assert answer.status_code == 200 and "default-src 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy
    nonce = policy.partition("nonce-")[2].partition("'")[0]
    assert len(nonce) > 16 and f'content="{nonce}"' in answer.text
    assert "<script>" not in answer.text and "style=" not in answer.text
    for path in STATIC.iterdir():
        if path.suffix in (".js", ".css", ".html") and path.name != "editor.js":
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert "http" not in text and "innerHTML" not in text, path


def test_what_is_no_json_of_this_page_is_refused(client):
    path = f"/{TOKEN}/api/run"
    plain = client.post(path, content="{}", headers={"content-type": "text/plain"})
    assert plain.status_code == 400 and "application/json" in plain.json()["error"]
    for body in (b"[", b"[]", b"[" * 100_000, b"{}"):
        answer = client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and "playground: " in answer.json()["error"]


def test_a_template_of_a_megabyte_is_refused(client):
    asked = {"page": "one", "a": {**NEW, "text": "/" * (1 << 20)}}
    answer = client.post(f"/{TOKEN}/api/run", json=asked)
    assert answer.status_code == 400 and "allowed" in answer.json()["error"]


def test_kernels_templates_and_files_of_the_page(client):
    found = client.get(f"/{TOKEN}/api/kernels").json()
    assert {"attention.flash", "new_kernel.plain"} <= {one["kernel"] for one in found["kernels"]}
    answer = client.get(f"/{TOKEN}/api/template", params={"kernel": "reduce.blocks"}).json()
    assert answer["name"] == "kernels_cu/reduce/blocks.cu" and "__global__" in answer["text"]
    wrong = client.get(f"/{TOKEN}/api/template", params={"kernel": "../x"})
    assert wrong.status_code == 400 and "not registered" in wrong.json()["error"]
    assert client.get(f"/{TOKEN}/static/editor.js").status_code == 200
    assert "MIT" in client.get(f"/{TOKEN}/static/LICENSES.txt").text
    for path in ("../app.py", "%2e%2e/app.py", "..%2fapp.py"):
        assert client.get(f"/{TOKEN}/static/{path}").status_code in (401, 404)


def test_a_run_in_a_worker(client):
    events = run(client, NEW)
    names = [event["event"] for event in events]
    assert names[-1] == "end" and {"source", "resources", "code", "ptx", "check"} <= set(names)
    assert not [event for event in events if event["event"] == "error"]
    worker = client.jobs._pages['"one"']
    run(client, NEW)
    assert client.jobs._pages['"one"'] is worker  # which stays for the next edit


def test_an_edit_ends_what_is_under_way_and_time_ends_what_is_endless(client, monkeypatch):
    text = template_of(NEW).replace("using elem_t", ENDLESS + "using elem_t")
    first: list[dict] = []
    thread = threading.Thread(target=lambda: first.extend(run(client, {**NEW, "text": text})))
    thread.start()
    while not (worker := client.jobs._pages.get('"one"')) or not worker.busy:
        time.sleep(0.01)
    children = _descendants(worker._process.pid)
    assert run(client, NEW)[-1]["event"] == "end"
    thread.join()
    assert not worker.alive
    assert first[-1]["event"] == "stopped"
    assert children and not [pid for pid in children if is_running(pid)]
    monkeypatch.setattr(client.jobs, "seconds", LIMIT)
    *_, last = run(client, {**NEW, "text": text}, page="two")
    assert last["stage"] == "time limit" and "2 s is over" in last["text"]


def test_memory_is_limited(client):
    text = template_of(NEW).replace("using elem_t", "// ${'x' * 20000000000}\nusing elem_t")
    events = run(client, {**NEW, "text": text})
    assert any(event["event"] == "error" for event in events)
    assert not any(event["event"] == "resources" for event in events)


def test_saving_writes_two_files_that_are_a_kernel(client):
    text = template_of(NEW).replace("factor * static", "factor * 1.f * static")
    asked = {"kernel": "new_kernel.plain", "name": "mine_too", "text": text}
    saved = client.post(f"/{TOKEN}/api/save", json=asked).json()
    assert [Path(file).name for file in saved["files"]] == ["mine_too.cu", "mine_too.py"]
    again = client.post(f"/{TOKEN}/api/save", json=asked)
    assert again.status_code == 400 and "already" in again.json()["error"]
    ours = {**asked, "kernel": "vector_add.rows", "name": "my_add"}
    ours["text"] = template_of({"kernel": "vector_add.rows"})
    assert client.post(f"/{TOKEN}/api/save", json=ours).json()["kernel"] == "my_add.plain"
    first = next(
        one["first"]["sm_90a"]
        for one in client.get(f"/{TOKEN}/api/kernels").json()["kernels"]
        if one["kernel"] == "my_add.plain"
    )
    events = run(client, {"kernel": "my_add.plain", "arch": "sm_90a", "params": first})
    check = [event for event in events if event["event"] == "check"][-1]
    assert check["findings"] == [] and check["error"]["ratio"] <= 1


@pytest.mark.parametrize("name", ["Two", "../x", "a b", "attention", "lambda", "", "x" * 99])
def test_names_that_cannot_be_saved(client, name):
    asked = {"kernel": "new_kernel.plain", "name": name, "text": "x"}
    answer = client.post(f"/{TOKEN}/api/save", json=asked)
    assert answer.status_code == 400 and "save: " in answer.json()["error"]


def test_a_port_that_is_taken_and_an_extra_that_is_missing(monkeypatch, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ParameterError, match=f"--port {port} cannot be used"):
            server.run(port, False, tmp_path)
    with pytest.raises(ParameterError, match="--port 70000"):
        server.run(70_000, False, tmp_path)
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match=r"pip install 'fkjit\[playground\]'"):
        server.run(0, False, tmp_path)


def test_the_editor_is_the_bundle_of_the_packages_that_the_lock_file_names():
    text = (STATIC.parent / "editor" / "package-lock.json").read_text()
    assert '"resolved"' not in text  # no registry's address
    locked = json.loads(text)["packages"]
    bundled = re.findall(r"(?m)^(\S+) (\d\S+) \(MIT\)$", (STATIC / "LICENSES.txt").read_text())
    assert {"@codemirror/lang-cpp", "@codemirror/view"} <= {name for name, _ in bundled}
    assert [locked[f"node_modules/{name}"]["version"] for name, _ in bundled] == [
        version for _, version in bundled
    ]


def test_what_the_page_begins_with():
    assert server.beginning(None, None) == ""
    assert server.beginning("attention.flash", None) == "#kernel=attention.flash"
    assert server.beginning("reduce_sum", "9.0") == "#kernel=reduce.blocks&arch=sm_90"
    assert server.beginning(None, "sm_90a") == "#kernel=attention.flash&arch=sm_90a"
    with pytest.raises(ParameterError, match="playground: 'atention' is no call"):
        server.beginning("atention", None)
