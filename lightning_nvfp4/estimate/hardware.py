"""What a GPU can do: datasheet rates, and the share of them that kernels reach; read from ``recipes/hardware``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.estimate.settings import load, number
from lightning_nvfp4.formats import BLOCK_FORMATS

BF16 = "bf16"
GEMM_FORMATS = (BF16, *(name for name in BLOCK_FORMATS if name != "s2f6"))
"""Operand formats a GEMM can have; a rate that is missing means that the hardware emulates the format in BF16."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of the datasheet rates that are reached."""

    gemm: Mapping[str, float] = number("achieved over dense TFLOP/s of a large GEMM", most=1, names=GEMM_FORMATS)
    attention_forward: float = number("achieved over dense BF16 TFLOP/s, causal attention", most=1)
    attention_backward: float = number("achieved over dense BF16 TFLOP/s, causal attention", most=1)
    memory: float = number("achieved over datasheet memory bandwidth of elementwise kernels", most=1)
    quantize: float = number("achieved over datasheet memory bandwidth of a quantize kernel, nearest", most=1)
    quantize_stochastic: float = number("the same with stochastic rounding", most=1)
    nvlink: float = number("achieved over datasheet NVLink bandwidth of collectives", most=1)
    network: float = number("achieved over datasheet network bandwidth of collectives", most=1)


@dataclass(frozen=True)
class Hardware:
    """One GPU and its links.

    Attributes:
        name: as printed.
        efficiency: shares of the rates below that are reached.
        dense_tflops: format -> datasheet TFLOP/s without sparsity; ``bf16`` is required.
        memory_tb_s: memory bandwidth, TB/s.
        nvlink_gb_s, nvlink_gpus: NVLink bandwidth of one GPU in one direction, GB/s; GPUs that it joins.
        network_gb_s: bandwidth of one GPU's network adapter in one direction, GB/s.
        kernel_us: time below which no kernel goes: start, drain and the gap to the next, in microseconds.
        host_us: time the CPU takes for one operation of eager PyTorch, microseconds.
    """

    name: str
    efficiency: Efficiency
    dense_tflops: Mapping[str, float] = number("datasheet TFLOP/s without sparsity", names=GEMM_FORMATS)
    memory_tb_s: float = number("datasheet memory bandwidth in TB/s")
    nvlink_gb_s: float = number("NVLink bandwidth of one GPU in one direction, GB/s")
    nvlink_gpus: int = number("the number of GPUs that NVLink joins", least=1)
    network_gb_s: float = number("network bandwidth of one GPU in one direction, GB/s")
    kernel_us: float = number("the shortest time of one kernel in microseconds")
    host_us: float = number("the CPU's time for one eager operation in microseconds")

    def native(self, kind: str) -> bool:
        """Return whether tensor cores multiply this format."""
        return kind in self.dense_tflops

    def flops(self, kind: str) -> float:
        """Return the FLOP/s of a large GEMM of this format; of BF16 where the format is emulated."""
        name = kind if self.native(kind) else BF16
        return self.dense_tflops[name] * 1e12 * self.efficiency.gemm[name]

    def attention_flops(self, backward: bool) -> float:
        """Return the FLOP/s of causal attention in BF16."""
        share = self.efficiency.attention_backward if backward else self.efficiency.attention_forward
        return self.dense_tflops[BF16] * 1e12 * share

    def bandwidth(self, share: float) -> float:
        """Return the bytes/s of kernels that reach `share` of the memory bandwidth."""
        return self.memory_tb_s * 1e12 * share

    def gather_rate(self, gpus: int) -> float:
        """Return the bytes/s at which each of `gpus` gathers or reduces: rings use all adapters of an NVLink group."""
        nvlink = self.nvlink_gb_s * 1e9 * self.efficiency.nvlink
        if gpus <= self.nvlink_gpus:
            return nvlink
        return min(nvlink, self.nvlink_gpus * self._network)

    def exchange_seconds(self, count: float, gpus: int) -> float:
        """Return the seconds of an all-to-all: `count` bytes of each of `gpus`, spread evenly over all of them.

        What stays inside an NVLink group and what leaves it through the GPU's own adapter travel at the same time.
        """
        near = min(gpus, self.nvlink_gpus)
        inside = count * (near - 1) / gpus / (self.nvlink_gb_s * 1e9 * self.efficiency.nvlink)
        return max(inside, count * (gpus - near) / gpus / self._network)

    @property
    def _network(self) -> float:
        return self.network_gb_s * 1e9 * self.efficiency.network


def load_hardware(content: Any, where: str) -> Hardware:
    """Return the hardware a YAML mapping describes; `where` names its file in messages.

    Raises:
        UserError: see `lightning_nvfp4.estimate.settings.load`; or a rate without its efficiency.
    """
    hardware = load(Hardware, content, where)
    if BF16 not in hardware.dense_tflops:
        raise UserError(f"{where}: dense_tflops.{BF16} is missing: every GPU needs it, emulated formats run in it.")
    for kind in hardware.dense_tflops:
        if kind not in hardware.efficiency.gemm:
            raise UserError(
                f"{where}: efficiency.gemm.{kind} is missing: dense_tflops has {kind}. Add the share that its GEMMs "
                "reach, or take the rate away (the format is then emulated in BF16)."
            )
    return hardware
