"""`fkjit.attention.prepare`: it has ready what the call launches, and where an input requires grad
what its gradients launch, by what the same call runs in the interpreter."""

from __future__ import annotations

import pytest

import fkjit
from fkjit.arch import target
from fkjit.errors import ParameterError
from fkjit.jit.build import quiet
from fkjit.ops.op import op as front_end
from fkjit.ops.op.plan import Plans
from fkjit.runtime import interop, workspace
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
fkjit.attention, fkjit.attention_decode, fkjit.attention_backward  # noqa: B018  import the modules


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels that calls run."""
    seen, run = [], front_end.interpret
    note = lambda spec, *rest: (seen.append(spec.id), run(spec, *rest))  # noqa: E731
    monkeypatch.setattr(front_end, "interpret", note)
    with quiet():
        yield seen


@pytest.fixture
def on_gpu(monkeypatch):
    """Makes CPU tensors be on an A100; the kernels that are loaded for it, and the options that
    have plans then."""
    view, kernels, options = interop.view, [], []

    def enter():
        monkeypatch.setattr(interop, "view", lambda *given: view(*given)._replace(device=0))
        monkeypatch.setattr(interop, "current_stream", lambda view: 0)
        monkeypatch.setattr(workspace, "reserve", lambda *_: None)
        monkeypatch.setattr(
            front_end, "load_all", lambda launches, *_: kernels.extend(x.spec.id for x in launches)
        )
        monkeypatch.setattr(Plans, "store", lambda self, arrays, said, *_: options.append(said))
        monkeypatch.setattr("fkjit.ops.op.request.device_target", lambda device: target("sm_80"))
        for room in ("checks", "backward.checks", "decode.checks"):
            monkeypatch.setattr(f"fkjit.ops.attention.{room}.multiprocessors", lambda device: 108)
        return kernels, options

    return enter


def tensors(grad, keys=40):
    made = [torch.randn(1, h, n, 32).half() for h, n in ((2, 24), (1, keys), (1, keys))]
    return [x.requires_grad_(grad) for x in made]


FEATURES = ({}, {"window": [9, 0]}, {"alibi_slopes": torch.rand(2), "softcap": 3.0})


@one_in(2)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("features", FEATURES, ids=" ".join)
def test_what_a_call_launches_is_ready(features, grad, interpreted, on_gpu):
    rows = tensors(grad)
    o = fkjit.attention(*rows, causal=True, **features)
    if grad:
        o.sum().backward()
    kernels, options = on_gpu()
    fkjit.attention.prepare(*rows, causal=True, **features)
    assert set(kernels) == set(interpreted) and len(options) == 1 + grad
    assert len(set(kernels)) >= 3 if grad else len(kernels) == 1


@pytest.mark.parametrize("grad", [False, True])
def test_of_packed_sequences_too(grad, interpreted, on_gpu):
    rows = [x[0].transpose(0, 1).contiguous().detach().requires_grad_(grad) for x in tensors(False)]
    ends = (torch.tensor([0, 9, 24]).int(), torch.tensor([0, 30, 40]).int(), 15, 30)
    o = fkjit.attention_varlen(*rows, *ends)
    if grad:
        o.sum().backward()
    kernels, _ = on_gpu()
    fkjit.attention_varlen.prepare(*rows, *ends)
    assert set(kernels) == set(interpreted)


@pytest.mark.parametrize("features", [{}, {"softcap": 3.0}], ids=str)
def test_of_few_queries_it_is_decodings_kernel(features, on_gpu):
    kernels, _ = on_gpu()
    q, k, v = tensors(False, keys=600)
    fkjit.attention.prepare(q[:, :, :2], k, v, **features)
    (kernel,) = kernels
    assert kernel in ("attention_decode.split", "decode_form.split")


def test_the_plan_is_the_calls(on_gpu, monkeypatch):
    """Options as the call itself gives them to its op."""
    _, options = on_gpu()
    op = fkjit.attention.__globals__["_ATTENTION"]
    for features in ({"causal": True}, {"window": [3, 0]}, {"score_mod": "score * 2"}):
        fkjit.attention.prepare(*tensors(False), **features)
        asked = []
        with monkeypatch.context() as patch:
            patch.setattr(op.plans, "lookup", lambda arrays, said, *_, a=asked: a.append(said) or 1)
            with pytest.raises(AttributeError):  # 1 is no plan
                fkjit.attention(*tensors(False), **features)
        assert options[-1:] == asked


def test_a_score_mod_without_a_derivative_is_refused(on_gpu):
    on_gpu()
    with pytest.raises(ParameterError, match=r"attention: .* has no derivative"):
        fkjit.attention.prepare(*tensors(True), score_mod="score * 2")


def test_there_is_nothing_to_do_for_arrays_on_the_cpu(interpreted):
    fkjit.attention.prepare(*tensors(True))
    fkjit.attention.prepare(*tensors(False), window=(3, 0))
    assert not interpreted
