"""The hybrid inside Transformer Engine: objects, wiring and stochastic rounding, on any GPU that it loads on."""

from __future__ import annotations

import pytest
import torch
from one_layer import CASES, run
from tiny_models import tiny_model

from lightning_nvfp4 import PRESETS, QuantSpec, convert, quantize
from lightning_nvfp4.ops.te.gradient import Gradient
from lightning_nvfp4.ops.te.layers import Layers
from lightning_nvfp4.ops.te.plan import TENSORS, planned, quantizers
from lightning_nvfp4.testing import assert_codes_equal, sqnr_db

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("te")]
HYBRID = PRESETS["nvfp4-hybrid"]
GEMMS = {role: HYBRID.gemms[role] for role in ("experts", "linear")}
SR = QuantSpec("mxfp8", rounding="stochastic")


def assert_is(quantizer, plan):
    """The object is of the planned class and has the planned fields."""
    assert type(quantizer).__name__ == plan.kind
    if plan.parts:
        assert quantizer.columnwise_source == plan.fields["columnwise_source"]
        assert_is(quantizer.rowwise_quantizer, plan.parts[0])
        assert_is(quantizer.columnwise_quantizer, plan.parts[1])
        return
    for name, value in plan.fields.items():
        if name in ("fp8_dtype", "fp4_dtype"):
            assert quantizer.dtype.name == value
        elif name == "with_random_sign_mask":
            assert (quantizer.rht_matrix_random_sign_mask_t != 0) == value
        elif name in ("rowwise", "columnwise"):
            assert getattr(quantizer, f"{name}_usage") == value
        elif name == "dtype":
            assert str(quantizer.dtype) == f"torch.{value}"
        else:
            assert getattr(quantizer, name) == value, name


@pytest.mark.parametrize("role", GEMMS)
@pytest.mark.parametrize("module_type", ["linear", "grouped_linear"])
@pytest.mark.parametrize("tensor", TENSORS)
def test_the_qfactory_makes_what_is_planned(te, role, module_type, tensor):
    from lightning_nvfp4.ops.te import recipes

    factory = recipes.qfactory(GEMMS[role], Gradient())
    asked = te.QuantizerRole(module_type=module_type, tensor_type=tensor, name="layer0")
    assert_is(factory(asked), quantizers(GEMMS[role])[tensor])
    assert factory(None) is not None, "output slots have no role"


@pytest.mark.parametrize("preset", ["fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("experts", [1, 2])
def test_te_makes_the_planned_quantizers_from_its_own_recipes(te, preset, experts):
    """What `RecipeState` builds for a module's slots is what the table in the documentation says."""
    from transformer_engine.pytorch.quantization import RecipeState

    gemm = PRESETS[preset].gemms["linear"]
    layer = Layers().of(0, gemm, (experts, 128, 128), False)
    for mode, tensors in (("forward", ("input", "weight", None)), ("backward", ("grad_output", None))):
        count = len(tensors) * experts
        roles = layer.module.get_quantizer_roles(fwd=mode == "forward", num_quantizers=count)
        made = RecipeState.create(layer.recipe, mode=mode, num_quantizers=count, roles=roles).make_quantizers()
        for quantizer, tensor in zip(made, tensors * experts, strict=True):
            if tensor is not None:
                assert_is(quantizer, planned(gemm)[tensor])


def test_kept_layers_never_meet_te():
    model = tiny_model(hidden_size=128, intermediate_size=128, moe_intermediate_size=128, head_dim=32).cuda()
    report = convert(model, "fp8", backend="te")
    kept = [d.path for d in report.decisions if d.gemm is None]
    assert kept
    for path in kept:
        numerics = getattr(model.get_submodule(path), "block_scaled_numerics", None)
        for layer in numerics if isinstance(numerics, tuple) else (numerics,) if numerics else ():
            assert not layer.native


@pytest.mark.parametrize("role", GEMMS)
@pytest.mark.parametrize(("counts", "n", "k", "bias"), CASES, ids=str)
def test_emulated_quantizers_in_te_equal_our_emulation(role, counts, n, k, bias):
    """The wiring that Blackwell uses; TE multiplies operands whose tensor scale is folded into BF16."""
    from lightning_nvfp4.ops.te import emulated

    ours = run(GEMMS[role], "triton", counts, n, k, bias)
    theirs = run(GEMMS[role], "te", counts, n, k, bias, emulated.build)
    for a, b in zip(ours, theirs, strict=True):
        assert sqnr_db(a.float(), b.float()) > 45


@pytest.mark.parametrize("role", GEMMS)
@pytest.mark.parametrize("counts", [(256,), (128, 0, 256)], ids=str)
def test_codes_in_te_are_those_of_the_reference(monkeypatch, role, counts):
    """Every plane that TE asks for, of every expert, has the reference's bytes."""
    from lightning_nvfp4.ops.te import emulated

    seen = []
    quantize_ = emulated.EmulatedQuantizer.quantize

    def recording(self, tensor, **options):
        made = quantize_(self, tensor, **options)
        seen.append((self.spec, tensor.detach().clone(), dict(made.planes)))
        return made

    monkeypatch.setattr(emulated.EmulatedQuantizer, "quantize", recording)
    run(GEMMS[role], "te", counts, 128, 256, False, emulated.build)
    gradient, compared = [], 0
    for spec, tensor, planes in seen:
        for name, dim in (("rowwise", 1), ("columnwise", 0)):
            plane = planes[name]
            if plane is None:
                continue
            if spec.rounding == "stochastic":
                gradient.append((dim, tensor.cpu(), plane))
                continue
            expected = quantize(tensor.cpu(), spec, dim=dim, backend="reference")
            assert_codes_equal(plane.codes.cpu(), expected.codes)
            assert_codes_equal(plane.block_scale.cpu(), expected.block_scale)
            compared += 1
    assert compared >= 4 * len(counts)
    for dim in (1, 0):
        parts = [(t, p) for d, t, p in gradient if d == dim]
        assert len(parts) == len(counts)
        whole = torch.cat([t for t, _ in parts])
        from lightning_nvfp4.nn.context import LayerNumerics, NumericsContext

        seed = LayerNumerics(GEMMS[role], NumericsContext(step_seed=3), 1).seed("dgrad_grad_output")
        expected = quantize(whole, SR, dim=dim, seed=seed, backend="reference")
        assert_codes_equal(torch.cat([p.codes.cpu() for _, p in parts], dim=1 - dim), expected.codes)


@pytest.mark.parametrize("shape", [(128, 256), (384, 96), (96, 64), (2, 64, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("internal", [False, True])
def test_stochastic_mxfp8_fills_tes_tensor(te, shape, dtype, internal):
    """Bytes are the reference's; fields are those of the tensor that TE's own quantizer makes."""
    from lightning_nvfp4.ops.te.stochastic import StochasticMXFP8Quantizer

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    gradient = Gradient()
    gradient.seed = 13
    ours = StochasticMXFP8Quantizer(te.DType.kFloat8E4M3, gradient=gradient)
    theirs = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    ours.internal = theirs.internal = internal
    made, empty = ours(x), theirs.make_empty(shape, dtype=dtype, device="cuda")
    assert type(made) is type(empty)
    flat = x.reshape(-1, shape[-1]).cpu()
    rows, columns = (quantize(flat, SR, dim=dim, seed=13, backend="reference") for dim in (1, 0))
    m, n = flat.shape
    assert_codes_equal(made._rowwise_data.cpu().reshape(m, n), rows.codes)
    assert_codes_equal(made._rowwise_scale_inv.cpu()[:m, : n // 32], rows.block_scale)
    assert_codes_equal(made._columnwise_data.cpu().reshape(m, n), columns.codes.t())
    assert_codes_equal(made._columnwise_scale_inv.cpu()[: m // 32, :n], columns.block_scale.t())
    for name in ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"):
        a, b = getattr(made, name), getattr(empty, name)
        assert (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride()), name
    for scale, inside in ((made._rowwise_scale_inv, (m, n // 32)), (made._columnwise_scale_inv, (m // 32, n))):
        outside = scale.clone()
        outside[: inside[0], : inside[1]] = 0
        assert not outside.any(), "padding is zero"
    assert made._fp8_dtype == empty._fp8_dtype and made._dtype == empty._dtype
    assert made._with_gemm_swizzled_scales is False and empty._with_gemm_swizzled_scales is False
    assert tuple(made.size()) == tuple(empty.size())


def test_stochastic_mxfp8_survives_what_te_does_to_quantizers(te):
    from lightning_nvfp4.ops.te.stochastic import StochasticMXFP8Quantizer

    gradient = Gradient()
    ours = StochasticMXFP8Quantizer(te.DType.kFloat8E4M3, gradient=gradient, rowwise=True, columnwise=False)
    copy = ours.copy()
    assert type(copy) is StochasticMXFP8Quantizer and copy.gradient is gradient
    assert (copy.rowwise_usage, copy.columnwise_usage) == (True, False)
    assert not ours.is_requantization_safe() and te.MXFP8Quantizer(te.DType.kFloat8E4M3).is_requantization_safe()
    hybrid = te.HybridQuantizer(rowwise_quantizer=ours, columnwise_quantizer=ours.copy()).copy()
    assert type(hybrid.rowwise_quantizer) is StochasticMXFP8Quantizer and not hybrid.is_requantization_safe()
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    both = StochasticMXFP8Quantizer(te.DType.kFloat8E4M3, gradient=gradient)
    dst = both.make_empty((64, 64), dtype=torch.bfloat16, device="cuda")
    both.update_quantized(x, dst)
    assert torch.equal(dst._rowwise_data, both(x)._rowwise_data)
    with pytest.raises(ValueError, match="noop"):
        both.update_quantized(x, dst, noop_flag=torch.zeros(1, device="cuda"))


@pytest.mark.parametrize(("counts", "n", "k", "bias"), CASES, ids=str)
def test_a_counting_quantizer_runs_in_tes_backward(te, monkeypatch, counts, n, k, bias):
    """Our class, not a copy of TE's, makes the planes of every expert; decoded, because MXFP8 GEMMs need Blackwell."""
    from lightning_nvfp4.ops.te import emulated, recipes
    from lightning_nvfp4.ops.te.stochastic import StochasticMXFP8Quantizer

    made = []

    def quantize_impl(self, tensor):
        planes = self._planes(tensor)
        name = "rowwise" if self.rowwise_usage else "columnwise"
        made.append((type(self), name))
        codes, scale = planes[f"{name}_data"], planes[f"{name}_scale_inv"]
        values = codes.view(torch.float8_e4m3fn).float()
        rows, columns = values.shape
        if name == "rowwise":
            scale = scale[:rows, : columns // 32].repeat_interleave(32, dim=1)
        else:
            scale = scale[: rows // 32, :columns].repeat_interleave(32, dim=0)
        decoded = values * torch.exp2(scale.float() - 127)
        return te.IdentityTensorStorage(
            hp_data=decoded.bfloat16(), fake_dtype=torch.bfloat16, quantizer=te.IdentityQuantizer()
        )

    def build(plan, gradient):
        native = plan.kind == "StochasticMXFP8Quantizer"
        return (recipes.native if native else emulated.build)(plan, gradient)

    monkeypatch.setattr(StochasticMXFP8Quantizer, "quantize_impl", quantize_impl)
    ours = run(GEMMS["experts"], "triton", counts, n, k, bias)
    theirs = run(GEMMS["experts"], "te", counts, n, k, bias, build)
    per_plane = [sum(name == wanted for _, name in made) for wanted in ("rowwise", "columnwise")]
    assert per_plane == [len(counts)] * 2
    assert {kind for kind, _ in made} == {StochasticMXFP8Quantizer}
    for a, b in zip(ours, theirs, strict=True):
        assert sqnr_db(a.float(), b.float()) > 45


def test_mxfp8_and_nvfp4_are_refused_where_they_cannot_run():
    """Asked for by name on a GPU before Blackwell."""
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU runs them")
    for preset in ("mxfp8", "nvfp4", "nvfp4-hybrid"):
        with pytest.raises(ValueError, match="cannot run.*compute capability"):
            convert(tiny_model("llama"), preset, backend="te")
