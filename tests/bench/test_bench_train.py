"""Training steps of tiny models on the CPU: what `bench.models.train` compares makes the same
losses and weights."""

from __future__ import annotations

import itertools
import json
from xml.etree import ElementTree

import pytest

from fkjit.jit.build import quiet

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers, fkjit[models]")

from bench.models import curves  # noqa: E402
from bench.models.train import Row, line, main  # noqa: E402
from bench.models.training import Training, apart, batches, curve  # noqa: E402
from tests.core.sampling import one_in  # noqa: E402
from tests.models.reference_model import CONFIGS  # noqa: E402

BATCH, LENGTH, STEPS = 1, 8, 2


@one_in(2)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steps_of_fkjit_are_those_of_transformers(name):
    """Losses before and after AdamW has changed every weight of two layers, and gradients then."""
    curves, gradients = {}, {}
    for candidate in ("sdpa", "fkjit"):
        training = Training(candidate, CONFIGS[name], torch.float32, "cpu")
        with quiet():
            given = batches(48, BATCH, LENGTH, "cpu")
            curves[candidate] = curve(training, given, STEPS)
        found = training.model.named_parameters()
        gradients[candidate] = {key: parameter.grad for key, parameter in found}
    assert apart(curves, "sdpa")["fkjit"].most < 1e-5
    assert curves["sdpa"][1] != pytest.approx(curves["sdpa"][0], rel=1e-3)
    torch.testing.assert_close(gradients["fkjit"], gradients["sdpa"], rtol=1e-3, atol=1e-5)


def test_batches_are_the_same_for_a_seed_and_can_be_learned():
    one, two = (list(itertools.islice(batches(48, 3, 64, "cpu"), 2)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    pairs = torch.cat([x.unfold(1, 2, 1).flatten(0, 1) for x in one]).tolist()
    follows = {a: [d for c, d in pairs if c == a] for a, _ in pairs}
    usual = sum(max(map(found.count, found)) for found in follows.values())
    assert 0.8 < usual / len(pairs) < 1


def test_a_row_and_the_distance_of_curves():
    row = Row("fkjit", 8192, 61.24, 5.06)
    assert line("gpt2", 1024, row) == "| gpt2 | 8 x 1024 | fkjit | 61.2 | 133,769 | 5.1 |"
    found = apart({"a": [1.0, 2.0], "b": [1.1, 2.0]}, "a")
    assert found["a"] == (0, 0)
    assert found["b"] == pytest.approx((0.1, 0.05))


def test_curves_are_stored_and_drawn(tmp_path, monkeypatch):
    said = {"config": "gpt2", "batch": 8, "length": 1024, "rate": 3e-4, "device": "NVIDIA H200"}
    lines = [
        json.dumps({**said, "candidate": name, "curve": [10.98, *[loss] * 19]})
        for name, loss in (("sdpa", 2.0), ("fkjit", 2.01), ("eager", 1.99), ("fkjit", 2.02))
    ]
    found = curves.read([*lines, json.dumps({**said, "candidate": "sdpa", "milliseconds": 1.0})])
    monkeypatch.setattr(curves, "STORED", tmp_path / "curves.json")
    curves.store(found)
    assert curves.stored() == found
    assert curves.table(found).splitlines()[1] == (
        "| gpt2 | 8 x 1024 | fkjit | 10.9800 | 2.0200 | 1.00 % | 0.950 % |"
    )
    text = "".join(ElementTree.fromstring(curves.picture(found)).itertext())
    assert "gpt2: Hugging Face, eager" in text


def test_the_picture_of_the_docs_is_made_of_what_is_stored():
    assert curves.PICTURE.read_text() == curves.picture(curves.stored())
    found = {(one.config, name): apart.mean for one in curves.stored()
             for name, apart in curves.distances(one).items()}  # fmt: skip
    assert found["gpt2", "adamw-graph"] < 2 * found["gpt2", "eager"]  # what docs/MODELS.md asks for


def test_commands_that_time_a_gpu_end_with_a_line_where_there_is_none(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["train"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "error: torch sees no CUDA device here" in capsys.readouterr().err
