"""Codecs by themselves: the contract, the bytes, and one of a user's own."""

import pytest
import torch

from lightning_nvfp4.comm import CODECS, BlockCodec, Codec, register_codec
from lightning_nvfp4.comm.codec import find_codec
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.ops import quantize
from lightning_nvfp4.recipe import QuantSpec


@pytest.mark.parametrize("columns", [1, 32, 80, 4096])
@pytest.mark.parametrize("name", CODECS)
def test_rows_come_back_as_quantize_decodes_them_each_by_itself(name, columns):
    codec = CODECS[name]
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns)).bfloat16()
    wire = codec.encode(x, x.dtype)
    assert wire.dtype == torch.uint8 and wire.shape == (5, codec.row_bytes(columns, x.dtype))
    decoded = codec.decode(wire, columns, torch.bfloat16)
    expected = quantize(x, codec.spec).dequantize(torch.bfloat16) if isinstance(codec, BlockCodec) else x
    assert torch.equal(decoded, expected)
    index = torch.tensor([4, 0, 0])
    assert torch.equal(codec.encode_rows(x, index, x.dtype), wire[index])
    out = torch.full((6, columns), 7.0, dtype=torch.bfloat16)
    codec.decode_rows(wire[:3], out, torch.tensor([5, 1, 2]))
    assert torch.equal(out[[5, 1, 2]], expected[:3]) and (out[[0, 3, 4]] == 7).all()


@pytest.mark.parametrize(("name", "share"), [("s2f6", 0.52), ("mxfp8", 0.52), ("nvfp4", 0.30)])
@pytest.mark.parametrize("columns", [2048, 4096, 7168])
def test_share_of_bf16_bytes(name, share, columns):
    assert CODECS[name].row_bytes(columns, torch.bfloat16) <= share * CODECS["none"].row_bytes(columns, torch.bfloat16)


class Half(Codec):
    """What a user would write."""

    def row_bytes(self, num_columns, dtype):
        return 2 * num_columns

    def encode(self, x_RD, dtype):
        return x_RD.half().contiguous().view(torch.uint8)

    def decode(self, wire_RB, num_columns, dtype):
        return wire_RB.view(torch.float16).to(dtype)


def test_a_codec_of_ones_own_is_found_by_name(monkeypatch):
    monkeypatch.setattr("lightning_nvfp4.comm.codec.CODECS", dict(CODECS))
    half = Half()
    register_codec("half", half)
    assert find_codec("half") is half
    with pytest.raises(UserError, match="taken"):
        register_codec("s2f6", half)
    with pytest.raises(UserError, match="instance"):
        register_codec("other", Half)
    x = torch.randn(4, 6)
    out = torch.zeros(3, 6)
    half.decode_rows(half.encode_rows(x, torch.tensor([3, 1]), x.dtype), out, torch.tensor([2, 0]))
    assert torch.equal(out[[2, 0]], x[[3, 1]].half().float())


@pytest.mark.parametrize(
    ("name", "words"),
    [("s2f7", ["s2f7", "'s2f6'"]), ("no_such.module", ["no_such"]), ("lightning_nvfp4.comm.codec.AUTO", ["Codec"])],
)
def test_unknown_codecs_are_named_with_a_cure(name, words):
    with pytest.raises(UserError) as caught:
        find_codec(name)
    assert all(word in str(caught.value) for word in words)


def test_a_dotted_name_is_imported():
    assert find_codec("lightning_nvfp4.comm.codec.PlainCodec").row_bytes(3, torch.float32) == 12


@pytest.mark.parametrize(
    "spec", [QuantSpec("nvfp4"), QuantSpec("mxfp8", rounding="stochastic"), QuantSpec("mxfp8", block=(32, 32))]
)
def test_formats_whose_rows_do_not_stand_alone_are_refused(spec):
    with pytest.raises(UserError, match="each row by itself"):
        BlockCodec(spec)
