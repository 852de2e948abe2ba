"""torch.compile in the Trainer changes no bit, with recompute, accumulation and averaged weights together."""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import run_ranks
from tiny_models import quiet_trainer, same_state
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_nvfp4 import BlockScaledPrecision
from lightning_nvfp4.nn.function import COMPILES

pytestmark = [
    pytest.mark.skipif(not COMPILES, reason="before torch 2.13 these layers run outside of compiled graphs"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::RuntimeWarning"),
]
EVERYTHING = {"keep_first_blocks": 0, "keep_last_blocks": 0}
STEPS = 3


class Net(nn.Module):
    """One layer, for it takes seconds to trace."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList([nn.Linear(32, 32)])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return x


class Module(lightning.LightningModule):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net(recompute)
        self.losses: list[float] = []
        self.validation: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validation.append(self.net(batch).square().mean().item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    compiled: str,
    recompute: bool = False,
    accumulate: int = 1,
    average: bool = False,
    module: Any = None,
    **trainer: Any,
) -> Module:
    torch._dynamo.reset()
    counters.clear()
    module = module or Module(recompute)
    for part in {"": [], "whole": [module.net], "blocks": module.net.blocks}[compiled]:
        part.compile(backend="aot_eager")
    data = torch.randn(16 * STEPS * accumulate, 32, generator=torch.Generator().manual_seed(1))
    fitted = quiet_trainer(
        STEPS,
        **trainer,
        plugins=[BlockScaledPrecision("nvfp4-hybrid", overrides=EVERYTHING)],
        accumulate_grad_batches=accumulate,
        callbacks=[EMAWeightAveraging(decay=0.75, use_buffers=False)] if average else [],
        val_check_interval=accumulate,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    fitted.fit(module, DataLoader(data, batch_size=16), DataLoader(data[:16], batch_size=16))
    assert bool(compiled) == bool(counters["stats"]["unique_graphs"]) and not counters["graph_break"]
    torch._dynamo.reset()
    return module


@pytest.mark.parametrize("compiled", ["whole", "blocks"])
def test_a_compiled_run_has_the_bits_of_eager(compiled: str) -> None:
    """The recomputed part is inside of the graph, or around it."""
    eager = fit("", accumulate=2, average=True)
    traced = fit(compiled, recompute=True, accumulate=2, average=True)
    assert traced.losses == eager.losses and traced.validation == eager.validation
    assert same_state(traced, eager) and len(set(eager.losses)) == 2 * STEPS


class Sharded(Module):
    """Shards its layers by FSDP2."""

    def configure_model(self) -> None:
        self.trainer.precision_plugin.convert_module(self)
        for part in (*self.net.blocks, self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


def sharded(rank: int, size: int) -> dict[str, tuple[list[float], list[Tensor]]]:
    found = {}
    for compiled in ("", "blocks"):
        strategy = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
        module = fit(compiled, recompute=True, accumulate=2, module=Sharded(True), strategy=strategy, devices=size)
        assert all(isinstance(p, DTensor) for p in module.parameters())
        found[compiled] = module.losses, [p.full_tensor().detach() for p in module.parameters()]
    return found


def test_under_fsdp2_too() -> None:
    for found in run_ranks(sharded, 2, 2, group=None):
        (losses, weights), (again, others) = found[""], found["blocks"]
        assert losses == again and all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
