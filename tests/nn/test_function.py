"""The three GEMMs against their definition in float64, written with `quantize` alone."""

import itertools

import pytest
import torch

from lightning_nvfp4 import PRESETS, GemmRecipe, QuantSpec, quantize
from lightning_nvfp4.nn.context import LayerNumerics, NumericsContext
from lightning_nvfp4.nn.function import grouped_linear
from lightning_nvfp4.recipe import OPERANDS
from lightning_nvfp4.testing import sqnr_db

GEMMS = {name: recipe.gemms["experts"] for name, recipe in PRESETS.items()}
GEMMS["original"] = GemmRecipe(*[QuantSpec("nvfp4")] * 2, *[QuantSpec("mxfp8")] * 4)
GEMMS["bf16 backward of nvfp4"] = GemmRecipe(*[QuantSpec("nvfp4", tensor_scale="row")] * 2, source="dequantized")


def decode(x, spec, dim, seed=0):
    return x.bfloat16().double() if spec is None else quantize(x, spec, dim=dim, seed=seed).dequantize().double()


def by_definition(x_RK, w_NK, dy_RN, gemm, numerics):
    """One expert, in float64: each operand quantized along the contracted dim."""
    x, dy = x_RK.bfloat16(), dy_RN.bfloat16()
    x_forward, w_forward = decode(x, gemm.fprop_input, -1), decode(w_NK, gemm.fprop_weight, -1)
    y = x_forward @ w_forward.T
    x_source, w_source = x, w_NK
    if gemm.source == "dequantized":
        x_source = x_forward.bfloat16() if gemm.fprop_input else x
        w_source = w_forward.float() if gemm.fprop_weight else w_NK
    seed = numerics.seed
    dx = decode(dy, gemm.dgrad_grad_output, -1, seed("dgrad_grad_output")) @ decode(w_source, gemm.dgrad_weight, 0)
    if gemm.wgrad_input and gemm.wgrad_input.hadamard:
        # The product is taken between transformed operands, whole transforms long.
        dy_q = quantize(dy, gemm.wgrad_grad_output, dim=0, seed=seed("wgrad_grad_output"))
        x_q = quantize(x_source, gemm.wgrad_input, dim=0)
        scale = dy_q.tensor_scale.double() * x_q.tensor_scale.double()
        return y, dx, dy_q.unscaled_values().double() @ x_q.unscaled_values().double().T * scale
    dy_t = decode(dy, gemm.wgrad_grad_output, 0, seed("wgrad_grad_output"))
    return y, dx, dy_t.T @ decode(x_source, gemm.wgrad_input, 0)


def test_transforms_on_both_operands_cancel():
    """The RHT leaves the weight gradient near the plain one: what remains is quantization noise."""
    x, w, dy = data(64, 48, 96)
    _, (_, dw), _ = run(x, w, dy, GEMMS["nvfp4"], (64,))
    assert sqnr_db(dy.T @ x, dw[0]) > 10


def run(x, w, dy, gemm, counts, bias=None, out_dtype=torch.float32):
    numerics = LayerNumerics(gemm, NumericsContext(step_seed=5), 3)
    leaves = [t.clone().requires_grad_() for t in (x, w, *([bias] if bias is not None else []))]
    y = grouped_linear(leaves[0], leaves[1], leaves[2] if bias is not None else None, counts, numerics, out_dtype)
    y.backward(dy)
    return y.detach(), [leaf.grad for leaf in leaves], numerics


def data(rows, n, k, experts=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, k, generator=g),
        torch.randn(experts, n, k, generator=g),
        torch.randn(rows, n, generator=g).bfloat16().float(),
    )


@pytest.mark.parametrize(("rows", "n", "k"), [(64, 48, 96), (1, 1, 1), (7, 5, 3), (33, 130, 17), (31, 16, 160)])
@pytest.mark.parametrize("name", GEMMS)
def test_one_weight_equals_the_definition(name, rows, n, k):
    """FP32 sums of exact products differ from float64 by rounding only."""
    x, w, dy = data(rows, n, k)
    y, (dx, dw), numerics = run(x, w, dy, GEMMS[name], (rows,))
    expected = by_definition(x, w[0], dy, GEMMS[name], numerics)
    for got, want in zip((y, dx, dw[0]), expected, strict=True):
        assert sqnr_db(want.float(), got) > 110


@pytest.mark.parametrize("name", GEMMS)
def test_experts_are_independent(name):
    """Each expert's result is what a linear of its own gives, whatever the other experts hold; no tokens is fine."""
    gemm = GEMMS[name]
    step = gemm.tokens_alignment
    counts = (step, 0, 2 * step)
    x, w, dy = data(3 * step, 24, 40, experts=3)
    plain = GEMMS[name]
    y, (dx, dw), _ = run(x, w, dy, plain, counts)
    assert torch.equal(dw[1], torch.zeros_like(dw[1]))
    if any(s and s.rounding == "stochastic" for s in (gemm.dgrad_grad_output, gemm.wgrad_grad_output)):
        plain = GemmRecipe(gemm.fprop_input, gemm.fprop_weight, source=gemm.source)
        y, (dx, dw), _ = run(x, w, dy, plain, counts)
    for e, rows in ((0, slice(0, step)), (2, slice(step, 3 * step))):
        y_e, (dx_e, dw_e), _ = run(x[rows], w[e : e + 1], dy[rows], plain, (counts[e],))
        assert torch.equal(y[rows], y_e)
        assert torch.equal(dx[rows], dx_e)
        torch.testing.assert_close(dw[e : e + 1], dw_e, rtol=1e-6, atol=1e-6)


def test_padding_rows_change_nothing():
    """Zero rows after an expert's tokens leave the others' results and the weight gradient as they were."""
    gemm = GEMMS["mxfp8"]
    x, w, dy = data(20, 24, 40)
    pad = torch.zeros(12, 40), torch.zeros(12, 24)
    y, (dx, dw), _ = run(x, w, dy, gemm, (20,))
    y_p, (dx_p, dw_p), _ = run(torch.cat((x, pad[0])), w, torch.cat((dy, pad[1])), gemm, (32,))
    assert torch.equal(y, y_p[:20])
    assert torch.equal(dx, dx_p[:20])
    torch.testing.assert_close(dw, dw_p, rtol=1e-6, atol=1e-6)


def test_bias_is_added_in_fp32_and_gets_the_sum_of_the_gradient():
    x, w, dy = data(64, 24, 40, experts=2)
    bias = torch.randn(2, 24, generator=torch.Generator().manual_seed(1))
    y, (_, _, dbias), _ = run(x, w, dy, GEMMS["mxfp8"], (32, 32), bias)
    without, _, _ = run(x, w, dy, GEMMS["mxfp8"], (32, 32))
    assert torch.equal(y, without + bias.repeat_interleave(32, 0))
    torch.testing.assert_close(dbias, torch.stack((dy[:32].sum(0), dy[32:].sum(0))))


def test_without_gradients_the_result_is_the_same_and_the_weight_is_quantized_once():
    x, w, _ = data(32, 24, 40)
    numerics = LayerNumerics(GEMMS["nvfp4-hybrid"], NumericsContext(), 0)
    with torch.no_grad():
        plain = grouped_linear(x, w, None, (32,), numerics, torch.bfloat16)
        with numerics.context.cached_weights():
            first = grouped_linear(x, w, None, (32,), numerics, torch.bfloat16)
            w.zero_()
            second = grouped_linear(x, w, None, (32,), numerics, torch.bfloat16)
        after = grouped_linear(x, w, None, (32,), numerics, torch.bfloat16)
    assert torch.equal(plain, first) and torch.equal(first, second)
    assert not after.any()


def test_stochastic_rounding_replays_within_a_step_and_differs_between_steps_layers_and_operands():
    context = NumericsContext()
    seeds = set()
    for step, micro, index in itertools.product(range(3), range(2), range(4)):
        context.begin(7, 0, step, micro)
        layer = LayerNumerics(GEMMS["nvfp4-hybrid"], context, index)
        seeds |= {layer.seed("dgrad_grad_output"), layer.seed("wgrad_input")}
        # One pass over the gradient draws for both of its GEMMs.
        assert layer.seed("dgrad_grad_output") == layer.seed("wgrad_grad_output")
    assert len(seeds) == 3 * 2 * 4 * 2
    context.begin(7, 0, 1, 1)
    first = LayerNumerics(GEMMS["nvfp4-hybrid"], context, 2).seed("wgrad_grad_output")
    context.begin(7, 0, 1, 1)
    assert LayerNumerics(GEMMS["nvfp4-hybrid"], context, 2).seed("wgrad_grad_output") == first


def test_backward_saves_packed_codes_and_no_activation():
    """NVFP4 is 4 bits and a byte per 16; BF16 would be 16 bits."""
    x, w, _ = data(128, 64, 256)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        numerics = LayerNumerics(GEMMS["nvfp4-hybrid"], NumericsContext(), 0)
        grouped_linear(x.requires_grad_(), w.requires_grad_(), None, (128,), numerics, torch.bfloat16)
    total = sum(t.numel() * t.element_size() for t in saved)
    assert total < 0.36 * 2 * (x.numel() + w.numel())


@pytest.mark.parametrize("wgrad", [QuantSpec("mxfp8"), QuantSpec("nvfp4"), QuantSpec("nvfp4", tensor_scale="row")])
def test_a_bf16_forward_leaves_the_backward_as_it_is(wgrad):
    """With the forward switched off, `dequantized` operands are the BF16 ones."""
    forward = QuantSpec("nvfp4", tensor_scale="row")
    gemm = GemmRecipe(forward, forward, wgrad_grad_output=wgrad, wgrad_input=wgrad, source="dequantized")
    same = GemmRecipe(wgrad_grad_output=wgrad, wgrad_input=wgrad)
    x, w, dy = data(64, 24, 40, experts=2)
    leaf = w.clone().requires_grad_()
    numerics = LayerNumerics(gemm, NumericsContext(step_seed=5, forward_high_precision=True), 3)
    grouped_linear(x, leaf, None, (32, 32), numerics, torch.float32).backward(dy)
    _, (_, dw), _ = run(x, w, dy, same, (32, 32))
    assert torch.equal(leaf.grad, dw)


def test_switches_run_a_gemm_in_bf16():
    x, w, dy = data(32, 24, 40)
    for switch, same in (("forward_high_precision", 0), ("backward_high_precision", 1)):
        context = NumericsContext(**{switch: True})
        leaf = w.clone().requires_grad_()
        numerics = LayerNumerics(GEMMS["mxfp8"], context, 0)
        y = grouped_linear(x, leaf, None, (32,), numerics, torch.float32)
        y.backward(dy)
        y_bf16, (_, dw_bf16), _ = run(x, w, dy, GEMMS["bf16-gemm"], (32,))
        equal = torch.equal(y, y_bf16), torch.equal(leaf.grad, dw_bf16)
        assert equal == (same == 0, same == 1)


@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.parametrize("kind", ["zeros", "one outlier", "1e-38", "3e38"])
def test_extreme_but_finite_operands_stay_finite(name, kind):
    """All-zero experts, blocks with one huge element and values at both ends of FP32 are normal cases."""
    x, w, dy = data(64, 24, 40, experts=2)
    for t in (x, w, dy):
        if kind == "zeros":
            t[: len(t) // 2] = 0
        elif kind == "one outlier":
            t.view(len(t), -1)[:, 3] = 1e30
    if kind in ("1e-38", "3e38"):
        # The gradient alone: a product of two such values is outside of FP32 by itself.
        dy = torch.full_like(dy, float(kind)) * dy.sign() * (1 if kind == "1e-38" else 1e-3)
    if kind == "one outlier":
        x, w = x.clamp(max=1e4), w.clamp(max=1e4)
    step = max(32, GEMMS[name].tokens_alignment)
    x, dy = (t.repeat(step // 32, 1) for t in (x, dy))
    y, gradients, _ = run(x, w, dy, GEMMS[name], (step, step))
    assert all(t.isfinite().all() for t in (y, *gradients))


@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_a_nonfinite_element_of_any_operand_reaches_a_result(name, bad, operand):
    tensors = [t.clone() for t in data(64, 24, 40)]
    tensors[operand].view(-1)[7] = bad
    y, (dx, dw), _ = run(*tensors, GEMMS[name], (64,))
    reached = [not t.isfinite().all() for t in (y, dx, dw)]
    assert reached == [operand != 2, operand != 0, operand != 1]


def test_a_second_derivative_is_an_error():
    x, w, _ = data(4, 8, 8)
    x.requires_grad_()
    y = grouped_linear(
        x, w.requires_grad_(), None, (4,), LayerNumerics(GEMMS["mxfp8"], NumericsContext(), 0), torch.float32
    )
    (gradient,) = torch.autograd.grad((y.sum(1) * x.sum(1)).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_seeds_on_a_device_are_those_of_the_host(monkeypatch):
    """On a CPU a graph that is traced reads them there, and nothing else does."""
    host, table = NumericsContext(num_layers=5), NumericsContext(num_layers=5)
    host.begin(3, 1, 7, 2, 0)
    table.begin(3, 1, 7, 2, 0, torch.device("cpu"))
    for index, operand, part in itertools.product(range(5), OPERANDS, range(4)):
        layer = LayerNumerics(GEMMS["nvfp4-hybrid"], table, index).of_part(part)
        expected = LayerNumerics(GEMMS["nvfp4-hybrid"], host, index).of_part(part).seed(operand)
        assert layer.seed(operand) == expected and isinstance(expected, int)
        with monkeypatch.context() as traced:
            traced.setattr(torch.compiler, "is_compiling", lambda: True)
            seed = layer.seed(operand)
        assert isinstance(seed, torch.Tensor) and int(seed) & (2**64 - 1) == expected


def test_parts_of_the_tokens_have_seeds_of_their_own_and_the_same_weights():
    layer = LayerNumerics(GEMMS["nvfp4-hybrid"], NumericsContext(step_seed=5), 1)
    for operand in OPERANDS:
        seeds = {layer.of_part(part).seed(operand) for part in range(4)}
        assert len(seeds) == (1 if operand.endswith("weight") else 4)
