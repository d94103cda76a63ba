"""fkjit.grouped_linear and fkjit.moe_layer on a CUDA GPU: at most twice PyTorch's own error, the
same bits, graphs that serve any counts."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("cupy", reason="needs CuPy")

import fkjit  # noqa: E402
from fkjit.errors import CaptureError  # noqa: E402
from fkjit.ops.grouped import select  # noqa: E402
from fkjit.runtime import device  # noqa: E402
from tests.gemm.kit import FLOOR, normal  # noqa: E402
from tests.grouped.kit import arrays, by_choice, choices, grouped, layer, layer_arrays  # noqa: E402


def near(found, wide, peer, dtype):
    """At most twice the error of PyTorch in the same dtype; a rounding of the largest element."""
    floor = FLOOR[dtype] * max(1.0, wide.abs().max().item())
    theirs = (peer.double() - wide).abs().max().item()
    assert (found.double() - wide).abs().max().item() <= max(2 * theirs, floor)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "how", "n", "k"),
    [
        (1, 128, 8, "even", 768, 4096), (64, 256, 8, "even", 256, 512),
        (1000, 8, 2, "zipf", 1024, 768), (3000, 40, 2, "even", 136, 264),
        (700, 5, 1, "first", 77, 99),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("activation", "gate"), [("silu", True), (None, False)])
def test_numbers(tokens, experts, top_k, how, n, k, activation, gate, dtype):
    ids = choices(tokens, experts, top_k, how).cuda()
    groups = grouped(ids, experts)
    x, weight, bias = arrays(tokens, experts, n, k, dtype, gate, "cuda")
    said = {"activation": activation, "gate": gate}
    y, again = (
        fkjit.grouped_linear(x, weight, groups, bias, gather=True, **said) for _ in range(2)
    )
    found = y[groups.inverse.long()]
    assert torch.equal(found, again[groups.inverse.long()])
    for rows in torch.arange(tokens).split(50):  # the reference has a weight for each choice
        part = [a.double() for a in (x[rows], weight, bias)]
        near(found[rows], by_choice(*part, ids[rows], **said),
             by_choice(x[rows], weight, bias, ids[rows], **said), dtype)  # fmt: skip


@pytest.mark.parametrize("tile", [None, (32, 8, 2), (16, 4, 4), (8, 16, 4)])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "how", "n", "k"),
    [
        (1, 128, 8, "even", 768, 4096), (8, 256, 8, "even", 2048, 7168),
        (64, 128, 8, "even", 4096, 768), (50, 3, 2, "zipf", 104, 264),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_few_rows_of_each_expert(tokens, experts, top_k, how, n, k, tile, dtype):
    ids = choices(tokens, experts, top_k, how).cuda()
    groups = grouped(ids, experts)
    x, weight, bias = arrays(tokens, experts, n, k, dtype, True, "cuda")
    said = {"activation": "silu", "gate": True}
    place, rows = groups.inverse.long(), fkjit.moe_permute(x, groups)
    given = {"impl": "stream", "block": tile, **said}
    found = fkjit.grouped_linear(x, weight, groups, bias, gather=True, **given)[place]
    by_places = fkjit.grouped_linear(rows, weight, groups, bias, **given)[place]
    assert torch.equal(found, by_places)
    for token in range(tokens):
        own, some = ids[token].long(), slice(token, token + 1)
        part, places = (x[some], weight[own], bias[own]), torch.arange(top_k, device="cuda")[None]
        near(found[some], by_choice(*(a.double() for a in part), places, **said),
             by_choice(*part, places, **said), dtype)  # fmt: skip


@pytest.mark.parametrize("tile", [(64, 128), (64, 256), (128, 64), (128, 128), (128, 256)])
@pytest.mark.parametrize(("tokens", "how"), [(70, "even"), (3000, "zipf"), (500, "first")])
def test_rows_are_gathered_as_they_are_multiplied(tokens, how, tile):
    """The same bits as of permuted rows."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's")
    groups = grouped(choices(tokens, 16, 2, how).cuda(), 16)
    x, weight, bias = arrays(tokens, 16, 520, 264, "bf16", True, "cuda")
    said = {"activation": "silu", "gate": True, "gather": True, "block": tile}
    place = groups.inverse.long()
    permuted = fkjit.grouped_linear(x, weight, groups, bias, impl="wgmma", **said)[place]
    for _ in range(20):
        found = fkjit.grouped_linear(x, weight, groups, bias, impl="gather", **said)[place]
        assert torch.equal(found, permuted)


@pytest.mark.parametrize("tile", [(160, 128), (304, 128)])
@pytest.mark.parametrize(
    ("tokens", "how", "block", "n", "k"),
    [
        (7, "even", 16, 72, 72), (3000, "zipf", 16, 520, 264), (500, "first", 64, 136, 1032),
        (4100, "first", 16, 1024, 520), (2600, "even", 16, 768, 4096),
    ],
)  # fmt: skip
@pytest.mark.parametrize("gate", [True, False])
def test_tiles_of_as_many_rows_as_experts_have(tokens, how, block, n, k, gate, tile):
    """NaN in the rows that nobody has: none of it comes to others' results."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's")
    ids = choices(tokens, 16, 2, how).cuda()
    groups = grouped(ids, 16, block)
    x, weight, bias = arrays(tokens, 16, n, k, "bf16", gate, "cuda")
    rows, place = fkjit.moe_permute(x, groups), groups.inverse.long()
    nobody = torch.ones(rows.shape[0], dtype=torch.bool, device="cuda")
    nobody[place.view(-1)] = False
    rows[nobody] = float("nan")
    said = {"activation": "silu" if gate else None, "gate": gate}
    given = {"impl": "ragged", "block": tile, **said}
    found, again = (
        fkjit.grouped_linear(rows, weight, groups, bias, **given)[place] for _ in range(2)
    )
    assert torch.equal(found, again)
    for some in torch.arange(tokens).split(50):
        part = [a.double() for a in (x[some], weight, bias)]
        near(found[some], by_choice(*part, ids[some], **said),
             by_choice(x[some], weight, bias, ids[some], **said), "bf16")  # fmt: skip


@pytest.mark.parametrize("precision", ["short", "ieee"])
@pytest.mark.parametrize(("tokens", "how"), [(7, "even"), (3000, "zipf"), (500, "first")])
def test_weights_of_fp8_by_rows(tokens, how, precision):
    """What codes stand for, in float64; short sums are cut off behind 13 bits at each step."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's")
    ids, k = choices(tokens, 16, 2, how).cuda(), 272
    groups = grouped(ids, 16, 16 if precision == "short" else 64)
    x, weight, bias = arrays(tokens, 16, 512, k, "bf16", True, "cuda")
    said = {"activation": "silu", "gate": True}
    quantized = fkjit.quantize(weight, "fp8_row")
    place = groups.inverse.long()
    y, again = (
        fkjit.grouped_linear(x, quantized, groups, bias, gather=True, precision=precision, **said)[
            place
        ]
        for _ in range(2)
    )
    assert torch.equal(y, again)
    wide = [fkjit.dequantize(q, "fp32").double()
            for q in (fkjit.quantize(x, "fp8_row"), quantized)]  # fmt: skip
    for rows in torch.arange(tokens).split(50):
        expected = by_choice(wide[0][rows], wide[1], bias.double(), ids[rows], **said)
        most = max(1.0, expected.abs().max().item())
        bound = FLOOR["bf16"] * most + (k / 32 * 2**-13 * most if precision == "short" else 0)
        assert (y[rows].double() - expected).abs().max().item() <= bound


@pytest.mark.parametrize("tile", [(128, 128), (192, 128), (256, 128)])
@pytest.mark.parametrize(("tokens", "how"), [(7, "even"), (3000, "zipf"), (500, "first")])
def test_weights_of_fp8(tokens, how, tile):
    """What codes stand for, multiplied in float64."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's")
    ids = choices(tokens, 16, 2, how).cuda()
    groups = grouped(ids, 16)
    x, weight, bias = arrays(tokens, 16, 512, 272, "bf16", True, "cuda")
    said = {"activation": "silu", "gate": True}
    quantized = fkjit.quantize(weight, "fp8_block", weight=True)
    y, again = (
        fkjit.grouped_linear(x, quantized, groups, bias, gather=True, block=tile, **said)
        for _ in range(2)
    )
    place = groups.inverse.long()
    assert torch.equal(y[place], again[place])
    wide = [fkjit.dequantize(q, "fp32").double()
            for q in (fkjit.quantize(x, "fp8_block"), quantized)]  # fmt: skip
    for rows in torch.arange(tokens).split(50):
        expected = by_choice(wide[0][rows], wide[1], bias.double(), ids[rows], **said)
        bound = FLOOR["bf16"] * max(1.0, expected.abs().max().item())
        assert (y[place][rows].double() - expected).abs().max().item() <= bound


def test_results_that_are_quantized_in_the_kernel():
    """As quantize has them, of a result that was not rounded before; the same in each call."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's")
    ids = choices(900, 16, 2, "zipf").cuda()
    groups = grouped(ids, 16)
    x, weight, bias = arrays(900, 16, 512, 272, "bf16", True, "cuda")
    quantized = fkjit.quantize(weight, "fp8_block", weight=True)
    said, place = {"activation": "silu", "gate": True, "gather": True}, groups.inverse.long()
    made, again = (
        fkjit.grouped_linear(x, quantized, groups, bias, out_scheme="fp8_block", **said)
        for _ in range(2)
    )
    found, same = (fkjit.dequantize(q, "fp32").double()[place] for q in (made, again))
    assert torch.equal(found, same)
    y = fkjit.grouped_linear(x, quantized, groups, bias, **said)[place].double()
    least = made.scales.double()[place].repeat_interleave(128, -1) * 2**-9
    assert ((found - y).abs() <= torch.maximum(y.abs() / 14, least)).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_so_many_rows_of_each_expert(dtype):
    counts = torch.tensor([5, 0, 256, 64, 191], dtype=torch.int32, device="cuda")
    x, weight, bias = arrays(5 * 256, 5, 520, 264, dtype, True, "cuda")
    x, said = x.view(5, 256, 264), {"activation": "silu", "gate": True}
    y = fkjit.grouped_linear(x, weight, counts, bias, **said)
    for expert, count in enumerate(counts.tolist()):
        ids = torch.full((count, 1), expert, device="cuda")
        if count:
            rows = x[expert, :count]
            exact = by_choice(rows.double(), weight.double(), bias.double(), ids, **said)
            near(y[expert, :count], exact[:, 0], by_choice(rows, weight, bias, ids, **said)[:, 0],
                 dtype)  # fmt: skip


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_tile(layout, dtype):
    """Each that a call may ask for, of rows by experts and of the weights' gradients."""
    ids = choices(300, 6, 2, "zipf").cuda()
    groups = grouped(ids, 6, 128)
    x, weight, _ = arrays(300, 6, 512, 320, dtype, True, "cuda", layout)
    tiles = [b for b in select.kernels.TILES] if dtype == "bf16" else [(64, 64, 16), (128, 128, 16)]
    expected = by_choice(x.double(), weight.double(), None, ids, activation="silu", gate=True,
                         layout=layout)  # fmt: skip
    for tile in tiles:
        if layout == "kn" and tile[1] == 64:
            continue  # has no whole panels of gate and up
        y = fkjit.grouped_linear(x, weight, groups, activation="silu", gate=True, gather=True,
                                 weight_layout=layout, block=tile)  # fmt: skip
        error = (y[groups.inverse.long()].double() - expected).abs().max().item()
        assert error <= 2 * FLOOR[dtype] * max(1.0, expected.abs().max().item()), tile


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    [(1, 16, 4, 256, 128), (333, 64, 6, 512, 192), (2000, 8, 2, 512, 768)],
)
def test_a_layer_and_its_gradients(tokens, experts, top_k, hidden, inner, dtype):
    given = layer_arrays(tokens, experts, hidden, inner, dtype, "cuda")
    ours, peer = ([a.clone().requires_grad_() for a in given] for _ in range(2))
    wide = [a.double().requires_grad_() for a in given]
    ids = fkjit.moe_route(given[1], top_k)[1]
    found = fkjit.moe_layer(*ours, top_k)
    dy = normal(tokens, hidden, dtype=dtype, seed=9, device="cuda")
    theirs, exact = layer(*peer, top_k, ids=ids), layer(*wide, top_k, ids=ids)
    near(found, exact, theirs, dtype)
    found.backward(dy), theirs.backward(dy), exact.backward(dy.double())
    for one, other, reference in zip(ours, peer, wide, strict=True):
        near(one.grad, reference.grad, other.grad, dtype)
    again = [a.clone().requires_grad_() for a in given]
    fkjit.moe_layer(*again, top_k).backward(dy)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, again, strict=True))


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 64])
def test_a_layer_of_few_tokens(tokens):
    given = layer_arrays(tokens, 40, 512, 192, "bf16", "cuda")
    ids = fkjit.moe_route(given[1], 6)[1]
    theirs, exact = layer(*given, 6, ids=ids), layer(*[a.double() for a in given], 6, ids=ids)
    for _ in range(3):  # a plan serves the third call
        near(fkjit.moe_layer(*given, 6), exact, theirs, "bf16")


def test_the_same_bits_in_a_thousand_calls():
    given = layer_arrays(257, 16, 512, 256, "bf16", "cuda")
    first = fkjit.moe_layer(*given, 4)
    assert all(torch.equal(fkjit.moe_layer(*given, 4), first) for _ in range(1000))


@pytest.mark.parametrize("impl", ["auto", "stream", "gather", "ragged"])
def test_a_graph_serves_any_counts(impl):
    """Captured with even choices, replayed with all tokens on the first experts, and on few."""
    if impl in ("gather", "ragged") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's")
    given = layer_arrays(200, 32, 256, 128, "bf16", "cuda")
    fkjit.prepare("moe_layer", *given, 4, impl=impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fkjit.moe_layer(*given, 4, impl=impl)
    for shift in (0.0, 20.0, 3.0):
        given[1].copy_(torch.randn(200, 32, device="cuda") - shift * torch.arange(32).cuda() / 32)
        graph.replay()
        assert torch.equal(y, fkjit.moe_layer(*given, 4, impl=impl))


def test_a_kernel_cannot_be_loaded_under_capture():
    given = layer_arrays(211, 12, 128, 64, "bf16", "cuda")
    device.forget()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        with pytest.raises(CaptureError, match="prepare"):
            fkjit.moe_layer(*given, 3)
        graph.capture_end()
