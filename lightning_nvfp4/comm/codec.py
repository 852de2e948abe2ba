"""Codecs: how rows travel between ranks. `register_codec` adds one of your own.

A codec turns each row of a matrix into a fixed number of bytes, by itself: decoding what arrived is then the same as
letting decoded rows travel, whatever the number of ranks.

Shapes: R rows, D columns, B bytes of a row.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.ops import QuantizedTensor, rows, wire
from lightning_nvfp4.recipe import QuantSpec


class Codec(ABC):
    """One codec; three methods are to be written, and every row must be encoded by itself.

    ::

        class Half(Codec):
            def row_bytes(self, num_columns, dtype):
                return 2 * num_columns

            def encode(self, x_RD, dtype):
                return x_RD.half().contiguous().view(torch.uint8)

            def decode(self, wire_RB, num_columns, dtype):
                return wire_RB.view(torch.float16).to(dtype)

        register_codec("half", Half())
    """

    @abstractmethod
    def row_bytes(self, num_columns: int, dtype: torch.dtype) -> int:
        """Return the bytes B of a row of `num_columns` elements that is going to be decoded to `dtype`."""

    @abstractmethod
    def encode(self, x_RD: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bytes uint8 (R, B) of rows of any floating-point dtype that are going to be decoded to `dtype`."""

    @abstractmethod
    def decode(self, wire_RB: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
        """Return the rows (R, D) of bytes; those bytes are contiguous."""

    def encode_rows(self, x_RD: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bytes of ``x[index]``; a codec that can do both at once overrides this."""
        return self.encode(x_RD[index], dtype)

    def decode_rows(self, wire_RB: Tensor, out: Tensor, index: Tensor) -> None:
        """Decode into ``out[index]``; a codec that can do both at once overrides this."""
        out.index_copy_(0, index, self.decode(wire_RB, out.shape[1], out.dtype))

    def sum_rows(self, wire_RB: Tensor, total: rows.TokenSum) -> Tensor | None:
        """Decode and sum by token at once, as `ops.rows.sum_rows`; ``None`` where a codec cannot."""
        return None


class PlainCodec(Codec):
    """``none``: the rows as they are, in the dtype in which they are wanted."""

    def row_bytes(self, num_columns: int, dtype: torch.dtype) -> int:
        """Return the size of the elements."""
        return num_columns * dtype.itemsize

    def encode(self, x_RD: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the memory of the rows."""
        return x_RD.to(dtype).contiguous().view(torch.uint8)

    def decode(self, wire_RB: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
        """Return the rows."""
        return wire_RB.view(dtype)

    def encode_rows(self, x_RD: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather and convert."""
        out = torch.empty(index.shape[0], x_RD.shape[1], dtype=dtype, device=x_RD.device)
        rows.move_rows(x_RD, index, out, None)
        return out.view(torch.uint8)

    def decode_rows(self, wire_RB: Tensor, out: Tensor, index: Tensor) -> None:
        """Scatter."""
        rows.move_rows(wire_RB.view(out.dtype), None, out, index)

    def sum_rows(self, wire_RB: Tensor, total: rows.TokenSum) -> Tensor | None:
        """Gather and sum by token."""
        return rows.sum_rows(wire_RB.view(total.kept.dtype), total)


class BlockCodec(Codec):
    """A block format whose scales travel with their row: MXFP8, S2F6, or NVFP4 with a tensor scale per row.

    Args:
        spec: the format; see `ops.wire.row_layout` for which can be sent.

    Raises:
        UserError: a format whose rows do not stand by themselves.
    """

    def __init__(self, spec: QuantSpec) -> None:
        self.spec = spec
        wire.row_layout(spec, 1)

    def row_bytes(self, num_columns: int, dtype: torch.dtype) -> int:
        """Return the bytes of codes and scales."""
        return wire.row_layout(self.spec, num_columns).size

    def encode(self, x_RD: Tensor, dtype: torch.dtype) -> Tensor:
        """Quantize the rows."""
        return wire.encode_rows(x_RD, self.spec)

    def decode(self, wire_RB: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
        """Return the decoded rows, the inverse transform included."""
        out = torch.empty(len(wire_RB), num_columns, dtype=dtype, device=wire_RB.device)
        wire.decode_rows(wire_RB, self.spec, out)
        return out

    def encode_rows(self, x_RD: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather and quantize."""
        return wire.encode_rows(x_RD, self.spec, index)

    def decode_rows(self, wire_RB: Tensor, out: Tensor, index: Tensor) -> None:
        """Decode and scatter."""
        wire.decode_rows(wire_RB, self.spec, out, index)

    def sum_rows(self, wire_RB: Tensor, total: rows.TokenSum) -> Tensor | None:
        """Decode and sum by token."""
        return wire.sum_rows(wire_RB, self.spec, total)

    def codes(self, wire_RB: Tensor, num_columns: int) -> QuantizedTensor:
        """Return the rows still quantized, for a GEMM that takes them so."""
        return wire.quantized_rows(wire_RB, self.spec, num_columns)


CODECS: dict[str, Codec] = {
    "none": PlainCodec(),
    "mxfp8": BlockCodec(QuantSpec("mxfp8")),
    "nvfp4": BlockCodec(QuantSpec("nvfp4", tensor_scale="row")),
    "s2f6": BlockCodec(QuantSpec("s2f6")),
}
"""Codecs by name. S2F6 is the random Hadamard transform over 32, then fixed point; see docs/numerics.md."""
AUTO = "auto"


def register_codec(name: str, codec: Codec) -> None:
    """Make `codec` known under `name`, for `ExpertParallelStrategy(codec=name)` and YAML.

    Raises:
        UserError: the name is taken, or `codec` is none.
    """
    if not isinstance(codec, Codec):
        raise UserError(f"register_codec({name!r}) got a {type(codec).__name__}: give an instance of a Codec subclass.")
    if name == AUTO or CODECS.get(name, codec) is not codec:
        raise UserError(f"The codec name {name!r} is taken: choose another.")
    CODECS[name] = codec


def find_codec(name: str) -> Codec:
    """Return the codec of that name, or, for ``package.module.name``, the `Codec` instance or class found there.

    Raises:
        UserError: there is none.
    """
    if name in CODECS:
        return CODECS[name]
    module, dot, attribute = name.rpartition(".")
    if not dot:
        raise unknown(
            "codec", name, [AUTO, *CODECS], "Your own: register_codec, or give package.module.name where it is defined."
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"codec {name!r} cannot be imported: {error}.") from error
    codec = found() if isinstance(found, type) and issubclass(found, Codec) else found
    if not isinstance(codec, Codec):
        raise UserError(f"codec {name!r} is a {type(found).__name__}: it must be a Codec, or a subclass of it.")
    return codec
