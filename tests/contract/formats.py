"""Every format that the laws are run over."""

from __future__ import annotations

import torch

from lightning_nvfp4.recipe import QuantSpec

SPECS = {
    "nvfp4": QuantSpec(),
    "nvfp4-row": QuantSpec(tensor_scale="row"),
    "nvfp4-2d": QuantSpec(block=(16, 16)),
    "nvfp4-rht": QuantSpec(hadamard=16),
    "nvfp4-4over6": QuantSpec(four_over_six="mae"),
    "mxfp8": QuantSpec("mxfp8"),
    "mxfp8-e5m2": QuantSpec("mxfp8", element="e5m2"),
    "mxfp8-floor": QuantSpec("mxfp8", scale_rule="floor"),
    "mxfp8-2d": QuantSpec("mxfp8", block=(32, 32)),
    "s2f6": QuantSpec("s2f6"),
    "s2f6-plain": QuantSpec("s2f6", hadamard=0),
    "fp8": QuantSpec("fp8_block"),
    "fp8-2d": QuantSpec("fp8_block", block=(128, 128)),
}
STOCHASTIC = {
    name: QuantSpec(**{**vars(spec), "rounding": "stochastic"}) for name, spec in SPECS.items() if "4over6" not in name
}
ALL = {**SPECS, **{f"{name}-sr": spec for name, spec in STOCHASTIC.items()}}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return seeded normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
