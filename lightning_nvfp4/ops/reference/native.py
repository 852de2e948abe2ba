"""Loads `kernels.c`, the reference's hot loops for the CPU, and calls it on tensors.

The file is compiled once per machine with the C compiler at hand (`CC`, cc, gcc or clang; about a second) into the
user's cache folder, checked against the torch definition when it is loaded, and not used where anything is
missing: then the torch definition runs, and one log line says so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from lightning_nvfp4.capability import c_compiler, cache_folder
from lightning_nvfp4.formats.block import BLOCK_FORMATS, NVFP4, NVFP4_RANGE
from lightning_nvfp4.formats.element import E2M1, ELEMENTS, ElementFormat
from lightning_nvfp4.formats.rounding import (
    FP32_BIAS,
    FP32_FRACTION,
    FP32_MANTISSA_BITS,
    FP32_MAX,
    PHILOX_KEY_INCREMENTS,
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    PHILOX_WORDS,
)
from lightning_nvfp4.ops.layout import block_of, num_elements
from lightning_nvfp4.ops.reference.elements import code_offset
from lightning_nvfp4.ops.reference.hadamard import factors, sign_vector
from lightning_nvfp4.ops.reference.philox import num_draws
from lightning_nvfp4.recipe import QuantSpec

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("kernels.c")
# No contraction and no fast math: the bits must be the torch definition's.
_FLAGS = (
    *(
        "-O3",
        "-march=native",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-std=c11",
        "-fopenmp-simd",
    ),
    *("-shared", "-fPIC", f"-DPHILOX_ROUNDS={PHILOX_ROUNDS}"),
    *(f"-DPHILOX_MULTIPLIER_{i}={value:#x}u" for i, value in enumerate(PHILOX_MULTIPLIERS)),
    *(f"-DPHILOX_INCREMENT_{i}={value:#x}u" for i, value in enumerate(PHILOX_KEY_INCREMENTS)),
)
_PARALLEL_FROM = 1 << 17
_RULES = {"e4m3": 0, "floor": 1, "rounded": 2, "ceil": 3}


class View(ctypes.Structure):
    """`struct view`: a tensor in its moved layout."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("lead_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("col_stride", ctypes.c_int64),
    ]


class Format(ctypes.Structure):
    """`struct format`: the constants of a format."""

    _fields_ = [
        ("fixed", ctypes.c_int64),
        ("mantissa_bits", ctypes.c_int64),
        ("min_exponent_bits", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("sr_bits", ctypes.c_int64),
        ("code_offset", ctypes.c_int64),
        ("max", ctypes.c_float),
        ("per_step", ctypes.c_float),
        ("scale_rule", ctypes.c_int64),
        ("scale_offset", ctypes.c_int64),
        ("scale_threshold", ctypes.c_int64),
        ("zero_code", ctypes.c_int64),
        ("scale_ratio", ctypes.c_float),
        ("scale_max", ctypes.c_float),
        ("scale_per_step", ctypes.c_float),
        ("fp32_max", ctypes.c_float),
        ("scale_mantissa_bits", ctypes.c_int64),
        ("scale_min_exponent_bits", ctypes.c_int64),
        ("scale_code_offset", ctypes.c_int64),
        ("scale_nan", ctypes.c_int64),
    ]


def _lowest(element: ElementFormat) -> int:
    return (element.min_exponent + FP32_BIAS) << FP32_MANTISSA_BITS


@functools.cache
def _format(spec: QuantSpec) -> Format:
    element, block = ELEMENTS[spec.element or ""], BLOCK_FORMATS[spec.format]
    scale = block.scale
    largest = int(torch.tensor(element.max).view(torch.int32))
    if block is NVFP4:
        rule, ratio = "e4m3", 1.0 / E2M1.max
    else:
        rule = "floor" if spec.scale_rule == "floor" else "rounded" if spec.format == "mxfp8" else "ceil"
        ratio = 1.0 / element.max
    return Format(
        fixed=element.kind == "fixed",
        mantissa_bits=element.mantissa_bits,
        min_exponent_bits=_lowest(element),
        bits=element.bits,
        sr_bits=spec.sr_bits,
        code_offset=code_offset(element),
        max=element.max,
        per_step=2.0 ** (element.mantissa_bits - element.min_exponent),
        scale_rule=_RULES[rule],
        scale_offset=element.max_exponent,
        scale_threshold=largest & FP32_FRACTION,
        zero_code=block.zero_block_scale,
        scale_ratio=ratio,
        scale_max=scale.max if scale.kind == "float" else 0.0,
        scale_per_step=2.0 ** (scale.mantissa_bits - scale.min_exponent) if scale.kind == "float" else 0.0,
        fp32_max=FP32_MAX,
        scale_mantissa_bits=scale.mantissa_bits,
        scale_min_exponent_bits=_lowest(scale) if scale.kind == "float" else 0,
        scale_code_offset=code_offset(scale),
        scale_nan=scale.nan_code,
    )


@functools.cache
def _table(element: ElementFormat) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * len(element.values))(*element.values)


def _cpu() -> str:
    """Describe the processor that -march=native compiles for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def kernel_folder() -> Path:
    """Return the folder of compiled kernels, made for this user alone.

    Raises:
        OSError: it cannot be made, or somebody else could write into it.
    """
    folder = cache_folder() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise OSError(f"{folder} belongs to another user or is open to others")
    return folder


def _compile(compiler: str) -> Path:
    """Compile the kernels unless the cache has them; return the library."""
    source = _SOURCE.read_bytes()
    key = hashlib.sha256("\0".join((compiler, *_FLAGS, platform.machine(), _cpu())).encode() + source).hexdigest()[:24]
    folder = kernel_folder()
    target = folder / f"kernels-{key}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as work:
        built = os.path.join(work, "kernels.so")
        openmp = ("-fopenmp",) if sys.platform != "darwin" else ()
        command = [compiler, *_FLAGS, *openmp, "-o", built, str(_SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        os.replace(built, target)
    return target


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or ``None`` where they cannot be had."""
    compiler = c_compiler()
    if compiler is None:
        _log.info("No C compiler found: CPU quantization runs in plain torch (same bits, slower).")
        return None
    try:
        lib = ctypes.CDLL(str(_compile(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("kernels.c did not compile with %s (%s): CPU quantization runs in plain torch.", compiler, error)
        return None
    for name in ("block_tops", "quantize", "decode", "philox", "hadamard"):
        getattr(lib, name).restype = None
    lib.tensor_scales.restype = ctypes.c_int64
    return lib


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _threads(count: int) -> ctypes.c_int64:
    return ctypes.c_int64(torch.get_num_threads() if count >= _PARALLEL_FROM else 1)


def _int(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


class Kernels:
    """The kernels on tensors: moved layout (lead, rows, length), any strides, float32 or bfloat16."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._lib = lib

    @staticmethod
    def _view(x: Tensor) -> View:
        return View(x.data_ptr(), int(x.dtype == torch.bfloat16), *x.stride())

    def random(self, seed: int, total: int) -> Tensor:
        """Return int32 random words 0 to `total` - 1 of a seed."""
        draws = num_draws(total)
        out = torch.empty(draws * PHILOX_WORDS, dtype=torch.int32)
        self._lib.philox(ctypes.c_uint64(seed & (2**64 - 1)), _int(draws), _pointer(out), _threads(total))
        return out[:total]

    def block_tops(self, x: Tensor, length: int) -> Tensor:
        """Return int32 magnitude bits of the amax of each block, (lead, rows, blocks)."""
        lead, rows, row_length = x.shape
        out = torch.empty(lead, rows, -(-row_length // length), dtype=torch.int32)
        self._lib.block_tops(
            ctypes.byref(self._view(x)),
            *map(_int, (lead, rows, row_length, length)),
            _pointer(out),
            _threads(x.numel()),
        )
        return out

    def tensor_scales(self, tops: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return amax, encode and decode tensor scale of `shape`, each of an equal run of contiguous block maxima.

        ``None`` if a block is not finite.
        """
        out = torch.empty(3, *shape, dtype=torch.float32)
        amax, encode, decode = out.unbind()
        groups = amax.numel()
        finite = self._lib.tensor_scales(
            _pointer(tops),
            _int(groups),
            _int(tops.numel() // groups),
            ctypes.c_float(NVFP4_RANGE),
            ctypes.c_float(FP32_MAX),
            *map(_pointer, (amax, encode, decode)),
        )
        return (amax, encode, decode) if finite else None

    def decode(self, codes: Tensor, block_scale: Tensor, spec: QuantSpec, length: int) -> Tensor:
        """Return float32 (..., length) codes times block scales; both contiguous, blocks along the last dim."""
        element = ELEMENTS[spec.element or ""]
        lead_shape = block_scale.shape[:-1]
        out = torch.empty(*lead_shape, length, dtype=torch.float32)
        self._lib.decode(
            _pointer(codes),
            _pointer(block_scale),
            *map(_int, (element.bits, num_elements(tuple(lead_shape)), length, block_of(spec)[1])),
            _table(element),
            _table(BLOCK_FORMATS[spec.format].scale),
            _pointer(out),
            _threads(out.numel()),
        )
        return out

    def hadamard(self, x: Tensor, spec: QuantSpec) -> Tensor:
        """Return the transform of x, padded to whole groups: contiguous float32 holding BF16 values."""
        lead, rows, row_length = x.shape
        n = spec.hadamard or 1
        before, after = factors(n)
        signs = (ctypes.c_float * n)(*(sign * before for sign in sign_vector(spec)))
        out = torch.empty(lead, rows, -(-row_length // n) * n, dtype=torch.float32)
        self._lib.hadamard(
            ctypes.byref(self._view(x)),
            *map(_int, (lead, rows, row_length, n)),
            signs,
            ctypes.c_float(after),
            _pointer(out),
            _threads(x.numel()),
        )
        return out

    def quantize(
        self,
        x: Tensor,
        spec: QuantSpec,
        tops: Tensor | None,
        encode: Tensor | None,
        random: Tensor | None,
        packed: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Round blocks.

        Args:
            x: (lead, rows, length).
            spec: the format.
            tops: contiguous `block_tops` (reduced over tiles for 2D blocks), or ``None`` to compute them.
            encode: float32 encode tensor scale expanded to (lead, rows, blocks), or ``None``.
            random: int32 random bits in x's shape, or ``None`` for nearest.
            packed: give codes and scale codes, else values.

        Returns:
            (codes, scale codes uint8), or (values float32, None).
        """
        lead, rows, row_length = x.shape
        length = block_of(spec)[1]
        element = ELEMENTS[spec.element or ""]
        values = codes = scale_codes = None
        stored = -(-row_length // 2) if element.bits == 4 else row_length
        if packed:
            codes = torch.empty(lead, rows, stored, dtype=torch.int8 if element.kind == "fixed" else torch.uint8)
            scale_codes = torch.empty(lead, rows, -(-row_length // length), dtype=torch.uint8)
        else:
            values = torch.empty(lead, rows, row_length, dtype=torch.float32)
        strides = (0, 0, 0) if encode is None else encode.stride()
        self._lib.quantize(
            ctypes.byref(_format(spec)),
            ctypes.byref(self._view(x)),
            *map(_int, (lead, rows, row_length, length)),
            _pointer(tops),
            _pointer(encode),
            *map(_int, strides),
            ctypes.byref(self._view(random)) if random is not None else None,
            _pointer(values),
            _pointer(codes),
            _int(stored),
            _pointer(scale_codes),
            _threads(x.numel()),
        )
        if codes is not None:
            return codes, scale_codes
        assert values is not None
        return values, None
