"""fkjit.attention in PyTorch's autograd: eager, compiled, under torch.func, as operators."""

from __future__ import annotations

import pytest

from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.errors import ArgumentTypeError  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from fkjit.ops.attention import autograd as attention_gradients  # noqa: E402
from fkjit.ops.op.op import Op  # noqa: E402
from fkjit.ops.op.plan import geometry  # noqa: E402
from tests.attention.backward.test_attention_backward import gradients, tensors  # noqa: E402


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with quiet():
        yield


def leaves(*given):
    return [x.detach().clone().requires_grad_() for x in given]


def assert_close(found, expected, tolerance=2e-5):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other).abs().max() <= tolerance * other.abs().max() + 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_both_results(causal):
    q, k, v, dout = tensors(4, 2, 20, 13, 24, 16, "fp32")
    dlse = torch.randn(q.shape[:3])
    exact = gradients(*(x.double() for x in (q, k, v, dout)), causal, 24**-0.5, dlse)[2:]
    given = leaves(q, k, v)
    o, lse = fkjit.attention(*given, causal=causal, return_lse=True)
    seen = torch.isfinite(lse)
    ((o * dout).sum() + (lse[seen] * dlse[seen]).sum()).backward()
    assert_close([x.grad for x in given], exact)


def test_gradcheck_in_fp32():
    """Differences in fp32 err by rounding over eps: that is what the tolerances are for."""
    q, k, v, _ = tensors(1, 1, 2, 3, 4, 4, "fp32")

    def call(q, k, v):
        return fkjit.attention(q, k, v, causal=True, return_lse=True)

    assert torch.autograd.gradcheck(
        call, leaves(q, k, v), eps=1e-2, atol=2e-3, rtol=2e-2, nondet_tol=0.0
    )


def test_either_result_alone():
    q, k, v, dout = tensors(2, 2, 9, 11, 16, 16, "fp32")
    for used, of in ((0, dout), (1, torch.randn(q.shape[:3]))):
        given, wide = leaves(q, k, v), leaves(*(x.double() for x in (q, k, v)))
        (fkjit.attention(*given, return_lse=True)[used] * of).sum().backward()
        scores = wide[0] @ wide[1].transpose(-1, -2) / 4
        result = scores.softmax(-1) @ wide[2] if used == 0 else torch.logsumexp(scores, -1)
        (result * of.double()).sum().backward()
        assert_close([x.grad for x in given[: 3 - used]], [x.grad for x in wide[: 3 - used]])


def test_a_gradient_of_any_strides():
    q, k, v, _ = tensors(2, 1, 9, 11, 16, 16, "fp32")
    given = leaves(q, k, v)
    fkjit.attention(*given).sum().backward()
    exact = gradients(*(x.double() for x in (q, k, v)), torch.ones_like(q).double(), False, 0.25)
    assert_close([x.grad for x in given], exact[2:])


def test_what_requires_no_grad_gets_none():
    q, k, v, dout = tensors(2, 1, 9, 11, 16, 16, "fp32")
    v.requires_grad_()
    fkjit.attention(q, k, v).backward(dout)
    assert q.grad is None and k.grad is None and v.grad is not None
    with torch.no_grad():
        assert not fkjit.attention(q, k, v).requires_grad


@one_in(2)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_compiled_whole_it_has_the_same_gradients(return_lse, layout):
    q, k, v, dout = tensors(2, 2, 20, 24, 32, 32)
    if layout == "bshd":
        q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))

    def model(q, k, v):
        made = fkjit.attention(q * 2, k, v, causal=True, return_lse=return_lse, layout=layout)
        return made[0] + made[1].mean().half() if return_lse else made

    found = []
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        given = leaves(q, k, v)
        call(*given).backward(dout)
        found.append([x.grad for x in given])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["attention", "attention_lse"])
def test_operators_are_what_their_schemas_say(name):
    q, k, v, _ = tensors(2, 1, 20, 24, 32, 32)
    torch.library.opcheck(getattr(torch.ops.fkjit, name).default, leaves(q, k, v), {"causal": True})


def test_the_backward_operator_is_what_its_schema_says():
    q, k, v, dout = tensors(2, 1, 20, 24, 32, 32)
    o, lse = fkjit.attention(q, k, v, return_lse=True)
    options = (False, None, True, "auto", "bhsd")
    operator = torch.ops.fkjit.attention_backward.default
    torch.library.opcheck(operator, (dout, q, k, v, o, lse, None, *options))


@pytest.mark.parametrize("deterministic", [True, False, None])
def test_whether_the_same_bits_are_asked_for(deterministic, monkeypatch):
    """The flag of PyTorch's overrules what is not."""
    asked = []
    real = attention_gradients.gradients
    monkeypatch.setattr(
        attention_gradients, "gradients",
        lambda given, options: asked.append(options.deterministic) or real(given, options),
    )  # fmt: skip
    given = leaves(*tensors(2, 1, 9, 11, 16, 16)[:3])
    fkjit.attention(*given, deterministic=deterministic).sum().backward()
    assert asked == [deterministic is True]
    with pytest.raises(ArgumentTypeError, match="attention: deterministic=2 is not True or False"):
        fkjit.attention(*given, deterministic=2)


def test_torch_func_grad():
    q, k, v, dout = tensors(2, 1, 9, 11, 16, 16, "fp32")

    def loss(q, k, v):
        return (fkjit.attention(q, k, v) * dout).sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    exact = gradients(*(x.double() for x in (q, k, v, dout)), False, 0.25)[2:]
    assert_close(found, exact)


def test_a_mapped_call_has_gradients():
    """Under torch.func.vmap the batch is one call."""
    many = [torch.stack([x, x + 1]) for x in tensors(2, 1, 9, 11, 16, 16, "fp32")]
    found = []
    for mapped in (True, False):
        given = leaves(*many[:3])
        if mapped:
            o = torch.func.vmap(fkjit.attention)(*given)
        else:
            o = torch.stack([fkjit.attention(*one) for one in zip(*given, strict=True)])
        o.backward(many[3])
        found.append([x.grad for x in given])
    assert_close(*([x.double() for x in one] for one in found))


def test_there_is_no_second_derivative():
    given = leaves(*tensors(1, 1, 5, 6, 16, 16, "fp32")[:3])
    (found,) = torch.autograd.grad(fkjit.attention(*given).sin().sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


# ------------------------------------------------------------------ prepared ahead

ENDS = torch.tensor((0, 4, 9), dtype=torch.int32)
PREPARED = (
    (fkjit.attention, (), {"causal": True}, ()),
    (fkjit.attention, (), {"window": (3, 0), "layout": "bshd", "return_lse": True}, ("sinks",)),
    (fkjit.attention, (), {"score_mod": "score * 2", "score_mod_grad": "2.f"}, ("bias",)),
    (fkjit.attention_varlen, (ENDS, ENDS, 5, 5), {"deterministic": False}, ("alibi_slopes",)),
)  # fmt: skip


@one_in(4)
@pytest.mark.parametrize("case", PREPARED, ids=lambda case: " ".join(case[2]))
def test_what_is_prepared_is_what_forward_and_backward_ask_for(case, monkeypatch):
    """As plans tell calls apart: by geometry and options, of both ops."""
    call, more, options, learned = case
    asked: list = []
    prepared: list = []
    usual = Op.__call__

    def note(to, op, arrays, options):
        arrays = [*arrays, *(None,) * (len(op.names) - len(arrays))]
        to.append((op.name, geometry("torch", len(arrays))(*arrays)[1], tuple(options)))

    def run(op, inputs, outputs=(), options=(), **rest):
        if not torch.is_grad_enabled():
            note(asked, op, (*inputs, *(None,) * (len(op.inputs) - len(inputs)), *outputs), options)
        return usual(op, inputs, outputs, options, **rest)

    monkeypatch.setattr(Op, "__call__", run)
    monkeypatch.setattr(
        Op, "prepare", lambda op, arrays, options: note(prepared, op, arrays, options)
    )
    shape = (9, 2, 16) if more else (1, 2, 9, 16)
    rows = leaves(*(torch.randn(shape) for _ in range(3)))
    shapes = {"sinks": (2 if "layout" not in options else 9,), "bias": (1, 2, 9, 9)}
    given = {n: leaves(torch.rand(shapes.get(n, 2)))[0] for n in learned}
    call.prepare(*rows, *more, **options, **given)
    made = call(*rows, *more, **options, **given)
    (made[0] if isinstance(made, tuple) else made).backward(torch.randn(shape))
    assert len(asked) == 2 and prepared == asked
