"""The parts of a step and their seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PARTS = {
    "gemm 4-bit": "GEMMs with NVFP4 operands",
    "gemm 8-bit": "GEMMs with MXFP8 or block-scaled FP8 operands",
    "gemm bf16": "GEMMs with BF16 operands, emulated formats among them",
    "quantize": "passes that quantize GEMM operands",
    "row scaling": "FP32 outputs scaled by rows in elementwise kernels, and launches where experts run one by one",
    "attention": "attention products and state-space scans",
    "elementwise": "norms, residuals, activations, rotary embedding, routing, permutation, loss",
    "optimizer": "AdamW on FP32 masters",
    "all-to-all": "dispatch and combine of tokens, and their codec, where not hidden",
    "parallel": "exposed traffic of sharded parameters and matrices, pipeline bubble",
    "kv cache": "reading the keys and values of generation",
    "latency": "shortest time of kernels that have too little to do, in generation",
}


@dataclass
class Times:
    """Seconds by part; zero where a part is absent."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, part: str, seconds: float) -> None:
        """Add time to a part."""
        self.seconds[part] += seconds

    def __add__(self, other: Times) -> Times:
        return Times({part: self.seconds[part] + other.seconds[part] for part in PARTS})

    def scaled(self, factor: float) -> Times:
        """Return every part times `factor`."""
        return Times({part: factor * seconds for part, seconds in self.seconds.items()})

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values())

    def shares(self) -> Mapping[str, float]:
        """Return each part's share of the total."""
        whole = self.total or 1.0
        return {part: seconds / whole for part, seconds in self.seconds.items()}
