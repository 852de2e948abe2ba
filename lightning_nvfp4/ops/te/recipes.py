"""TE's recipe and quantizer objects from plans. Importing this module imports TE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe

from lightning_nvfp4.ops.te.gradient import Gradient
from lightning_nvfp4.ops.te.plan import ROWS, QuantizerPlan, builtin, quantizers
from lightning_nvfp4.ops.te.stochastic import StochasticMXFP8Quantizer
from lightning_nvfp4.recipe import GemmRecipe

Build = Callable[[QuantizerPlan, Gradient], Any]
"""Makes the quantizer of one plane, or of both."""


def recipe_of(gemm: GemmRecipe, gradient: Gradient, build: Build | None = None) -> Any:
    """Return TE's recipe for the numerics of one layer.

    Args:
        gemm: numerics that `plan.uncovered` has nothing to say against.
        gradient: where the quantizers of the output's gradient find their seed.
        build: makes the quantizers in the place of TE's and ours, in a custom recipe; for emulation.
    """
    name = builtin(gemm) if build is None else None
    if name is not None:
        return _BUILTIN[name]()
    return te_recipe.CustomRecipe(
        qfactory=qfactory(gemm, gradient, build or native),
        fp8_dpa=False,
        fp8_mha=False,
        backward_override=None,
        **_supported(te_recipe.CustomRecipe, quantization_alignment=ROWS),
    )


def qfactory(gemm: GemmRecipe, gradient: Gradient, build: Build | None = None) -> Callable[[Any], Any]:
    """Return the function of a role that TE's custom recipe asks for quantizers."""
    plans, make = quantizers(gemm), build or native

    def factory(role: Any) -> Any:
        # TE asks for the outputs too, whose quantizers are not used: they have no role, or that of their consumer.
        plan = plans.get(role.tensor_type if role is not None else "", plans["input"])
        return compose(plan, gradient, make)

    return factory


def compose(plan: QuantizerPlan, gradient: Gradient, build: Build) -> Any:
    """Make the quantizer of a plan."""
    if plan.parts is None:
        return build(plan, gradient)
    row, column = (build(part, gradient) for part in plan.parts)
    return te.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column, **plan.fields)


def native(plan: QuantizerPlan, gradient: Gradient) -> Any:
    """Make TE's own quantizer, or for stochastic MXFP8 ours."""
    fields = dict(plan.fields)
    for name in ("fp8_dtype", "fp4_dtype"):
        if name in fields:
            fields[name] = getattr(te.DType, fields[name])
    if plan.kind == "IdentityQuantizer":
        return te.IdentityQuantizer(**{**fields, "dtype": torch.bfloat16})
    if plan.kind == "StochasticMXFP8Quantizer":
        return StochasticMXFP8Quantizer(**fields, gradient=gradient)
    return getattr(te, plan.kind)(**fields)


def fused_grouped(recipe: Any) -> bool:
    """Return whether TE's grouped kernels, which read the counts on the device, take a recipe here."""
    try:
        from transformer_engine.pytorch.module.grouped_linear import is_module_grouped_tensor_path_supported
    except ImportError:  # TE before 2.20
        return False
    return is_module_grouped_tensor_path_supported(recipe, torch.bfloat16)


def _float8_block() -> Any:
    made = te_recipe.Float8BlockScaling(
        use_f32_scales=False,
        fp8_format=te_recipe.Format.E4M3,
        x_block_scaling_dim=1,
        w_block_scaling_dim=2,
        grad_block_scaling_dim=1,
        fp8_gemm_fprop=te_recipe.MMParams(use_split_accumulator=True),
        fp8_gemm_dgrad=te_recipe.MMParams(use_split_accumulator=True),
        fp8_gemm_wgrad=te_recipe.MMParams(use_split_accumulator=True),
        fp8_dpa=False,
        fp8_mha=False,
        backward_override=None,
    )
    # No arguments of the class: read from the environment when TE was imported.
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(made, name, te_recipe.QParams(power_2_scale=True, amax_epsilon=0.0))
    return made


def _mxfp8() -> Any:
    return te_recipe.MXFP8BlockScaling(
        margin=0,
        fp8_format=te_recipe.Format.E4M3,
        fp8_dpa=False,
        fp8_mha=False,
        backward_override=None,
        **_supported(te_recipe.MXFP8BlockScaling, enable_2d_quantization=False),
    )


def _nvfp4() -> Any:
    return te_recipe.NVFP4BlockScaling(
        disable_rht=False,
        disable_stochastic_rounding=False,
        disable_2d_quantization=False,
        fp4_format=te_recipe.Format.E2M1,
        fp8_format=te_recipe.Format.E4M3,
        fp8_dpa=False,
        fp8_mha=False,
        backward_override=None,
        **_supported(
            te_recipe.NVFP4BlockScaling,
            row_scaled_activation=False,
            nvfp4_4over6="none",
            nvfp4_4over6_e4m3_use_256="all",
            nvfp4_4over6_err_mode="MAE",
        ),
    )


_BUILTIN = {"Float8BlockScaling": _float8_block, "MXFP8BlockScaling": _mxfp8, "NVFP4BlockScaling": _nvfp4}


def _supported(recipe: Any, **fields: Any) -> dict[str, Any]:
    """Return the fields that this version's class has; those it lacks are what it does anyway."""
    return {name: value for name, value in fields.items() if name in recipe.__dataclass_fields__}
