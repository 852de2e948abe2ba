"""How a software stack runs the same numerics: which passes over memory it makes, and which loops."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_nvfp4.estimate.hardware import BF16, GEMM_FORMATS, Hardware
from lightning_nvfp4.formats import BLOCK_FORMATS
from lightning_nvfp4.recipe import QuantSpec

BF16_BYTES, FP32_BYTES = 2.0, 4.0


@dataclass(frozen=True)
class Stack:
    """What a stack does besides the GEMMs themselves.

    Attributes:
        name: as printed.
        shares_inputs: linears that read one tensor (Q, K and V; gate and up) quantize it once.
        separate_amax: the amax behind a tensor scale or a row's scale of NVFP4 takes a pass of its own.
        separate_directions: a tensor that is NVFP4 along rows and another format along columns takes one pass each,
            and one more that decodes it where the columns are quantized from the decoded rows.
        loops_row_scaled: NVFP4 GEMMs with a scale for each row leave FP32 and are scaled, rounded and copied by
            elementwise kernels; those of experts run one expert after the other, launched from Python.
    """

    name: str
    shares_inputs: bool
    separate_amax: bool
    separate_directions: bool
    loops_row_scaled: bool


TE_TODAY = Stack("te-today", False, True, True, True)
"""Transformer Engine 2.20 under modules converted one by one. Source: pytorch/cpp_extensions/gemm.py
(general_grouped_gemm, row-scaled branch), pytorch/module/grouped_linear.py (custom recipes leave the fused path)."""

TE_BUILT_IN = Stack("te-built-in", True, True, False, False)
"""Transformer Engine's built-in recipes under Megatron's fused modules."""

FUSED = Stack("fused", True, False, False, False)
"""What a fused path could do: one pass for each tensor, row scales in the GEMM's epilogue. No such kernels exist."""

STACKS = {stack.name: stack for stack in (TE_TODAY, TE_BUILT_IN, FUSED)}

# Row-scaled NVFP4 in TE 2.20: FP32 output instead of BF16, then mul_, to(bfloat16), copy_.
LOOP_BYTES = (FP32_BYTES - BF16_BYTES) + 2 * FP32_BYTES + (FP32_BYTES + BF16_BYTES) + 2 * BF16_BYTES
LOOP_OPERATIONS = 5  # GEMM, product of the scales, mul_, to, copy_


@dataclass(frozen=True)
class Pass:
    """One quantize kernel over a tensor: bytes moved for each number, and whether it rounds stochastically."""

    bytes: float
    stochastic: bool = False


def pair_format(a: QuantSpec | None, b: QuantSpec | None) -> str:
    """Return the format a GEMM of two operands runs in: that of the wider one."""
    kinds = [BF16 if spec is None else spec.format for spec in (a, b)]
    widths = {BF16: 16.0, **{name: BLOCK_FORMATS[name].bits_per_element for name in GEMM_FORMATS[1:]}}
    return max(kinds, key=widths.__getitem__)


def operand_bytes(kind: str, hardware: Hardware) -> float:
    """Return the bytes of one operand number; an emulated format travels as BF16 values."""
    if kind == BF16 or not hardware.native(kind):
        return BF16_BYTES
    return BLOCK_FORMATS[kind].bits_per_element / 8


def quantize_passes(
    rows: QuantSpec | None, columns: QuantSpec | None, hardware: Hardware, stack: Stack, dequantized: bool = False
) -> list[Pass]:
    """Return the kernels that quantize one BF16 tensor along its rows, its columns, or both.

    Args:
        rows: how along its rows; ``None`` = not quantized there.
        columns: the same along its columns.
        hardware: decides the width of what is written.
        stack: decides what is one kernel.
        dequantized: the columns are quantized from the decoded rows.
    """
    specs = [spec for spec in (rows, columns) if spec is not None]
    if not specs:
        return []
    written = {id(spec): operand_bytes(spec.format, hardware) for spec in specs}
    passes = []
    if stack.separate_amax and any(spec.tensor_scale != "none" for spec in specs):
        passes.append(Pass(BF16_BYTES))
    if stack.separate_directions and rows and columns and rows.format != columns.format:
        passes.append(Pass(BF16_BYTES + written[id(rows)], rows.rounding == "stochastic"))
        if dequantized:
            passes.append(Pass(written[id(rows)] + BF16_BYTES))
        passes.append(Pass(BF16_BYTES + written[id(columns)], columns.rounding == "stochastic"))
    else:
        total = BF16_BYTES + sum(operand_bytes(spec.format, hardware) for spec in specs)
        passes.append(Pass(total, any(spec.rounding == "stochastic" for spec in specs)))
    return passes
