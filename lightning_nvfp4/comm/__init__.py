"""Expert-parallel communication: codecs for the wire, and the all-to-all around the experts."""

from lightning_nvfp4.comm.codec import CODECS, BlockCodec, Codec, register_codec

__all__ = ["CODECS", "BlockCodec", "Codec", "register_codec"]
