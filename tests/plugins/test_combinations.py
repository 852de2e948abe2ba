"""What changes memory, bookkeeping or where a weight lies changes no bit of training, also all together."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from ranks import run_ranks
from tiny_models import UserModule, loader, quiet_trainer, tiny_model, tokens
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader

from lightning_nvfp4 import NumericsMonitor, PrecisionSchedule
from lightning_nvfp4.callbacks import NonfiniteGuard

STEPS, DECAY = 3, 0.75


class Module(UserModule):
    """Recomputes, and validates."""

    def __init__(self, recompute: bool) -> None:
        super().__init__(tiny_model())
        self.validation: list[float] = []
        if recompute:
            self.model.activation_checkpointing_enable()
        self.model.train()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validation.append(self.model(input_ids=batch, labels=batch).loss.item())


class Sharded(Module):
    """Shards itself by FSDP2."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        self.trainer.precision_plugin.convert_module(self)
        for block in self.model.model.layers:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


class Weights(Callback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.steps.append(whole(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == len(self.steps):
            self.steps.append(whole(pl_module))


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = module.named_parameters()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in parameters}


def fit(
    rank: int,
    size: int,
    strategy: Any = "auto",
    recompute: bool = False,
    accumulate: int = 1,
    average: bool = False,
    preset: str = "nvfp4-hybrid",
    extra: Any = (),
    logger: Any = False,
) -> tuple[Module, Weights, EMAWeightAveraging | None]:
    module = (Sharded if isinstance(strategy, ModelParallelStrategy) else Module)(recompute)
    weights = Weights()
    ema = EMAWeightAveraging(decay=DECAY, update_every_n_steps=1, use_buffers=False) if average else None
    data = [tokens(1, 12, seed=index)[0] for index in range(4 * STEPS * accumulate)]
    trainer = quiet_trainer(
        STEPS,
        devices=size,
        strategy=strategy,
        precision=preset,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        callbacks=[weights, *extra, *([ema] if ema else [])],
        logger=logger,
        val_check_interval=accumulate,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    batches = DataLoader(data, batch_size=4 // size, sampler=range(rank, len(data), size))
    trainer.fit(module, batches, DataLoader(data[:4], batch_size=4))
    return module, weights, ema


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("preset", ["nvfp4-hybrid", "nvfp4"])
def test_recompute_and_averaging_change_no_bit_of_training(preset: str, accumulate: int) -> None:
    plain, expected, _ = fit(0, 1, accumulate=accumulate, preset=preset)
    assert not same(expected.steps[0], expected.steps[-1])
    for recompute, average in [(True, False), (False, True), (True, True)]:
        module, weights, ema = fit(0, 1, "auto", recompute, accumulate, average, preset)
        assert module.losses == plain.losses
        assert all(same(a, b) for a, b in zip(expected.steps, weights.steps, strict=True))
        if ema is None:
            assert module.validation == plain.validation
            continue
        # Lightning's first update copies; the averages go into the module at the end.
        averages, fold = expected.steps[1], get_ema_avg_fn(DECAY)
        for count, step in enumerate(expected.steps[2:], start=1):
            averages = {name: fold(averages[name], step[name], torch.tensor(count)) for name in averages}
        assert same(averages, whole(module))
        # Validation quantized the averages, not what training had packed: only after one step are they the same.
        assert module.validation[0] == plain.validation[0] and module.validation[1:] != plain.validation[1:]


def sharded_and_not(rank: int, size: int) -> dict[tuple[str, bool, int], list[dict[str, torch.Tensor]]]:
    found = {}
    for recompute, accumulate in itertools.product([False, True], [1, 2]):
        _, found["ddp", recompute, accumulate], _ = fit(rank, size, DDPStrategy(), recompute, accumulate)
        mesh = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
        module, found["fsdp2", recompute, accumulate], _ = fit(rank, size, mesh, recompute, accumulate)
        assert any(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in module.parameters())
        _, found["ddp, averaged", recompute, accumulate], _ = fit(
            rank, size, DDPStrategy(), recompute, accumulate, True
        )
    return {key: weights.steps for key, weights in found.items()}


def test_fsdp2_has_the_bits_of_ddp_and_recompute_changes_none() -> None:
    """On two ranks, where a mean over ranks has one order of sums."""
    for found in run_ranks(sharded_and_not, 2, 2, group=None, limit=150):
        plain = {accumulate: found["ddp", False, accumulate] for accumulate in (1, 2)}
        assert not same(plain[1][0], plain[1][-1]) and not same(plain[1][-1], plain[2][-1])
        for (strategy, _, accumulate), steps in found.items():
            # FSDP2 reduces each micro-batch, DDP their sum: other roundings.
            expected = found["fsdp2", False, 2] if (strategy, accumulate) == ("fsdp2", 2) else plain[accumulate]
            assert all(same(a, b) for a, b in zip(expected, steps, strict=True))


def stopped_and_not(rank: int, size: int, kind: str, folder: str) -> tuple[dict[str, torch.Tensor], ...]:
    """The weights at the start of a run of four steps, at its end, and at the end of one from its checkpoint."""
    mesh = {"data_parallel_size": size, "tensor_parallel_size": 1}

    def run(resume: str | None) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        module = (Sharded if kind == "fsdp2" else Module)(recompute=True)
        weights = Weights()
        saved = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        callbacks = [weights, PrecisionSchedule(forward_at=1, backward_at=3), saved]
        if kind != "fsdp2":
            callbacks.append(EMAWeightAveraging(decay=DECAY, update_every_n_steps=1, use_buffers=False))
        trainer = quiet_trainer(
            4,
            devices=size,
            strategy={"auto": "auto", "ddp": DDPStrategy(), "fsdp2": ModelParallelStrategy(**mesh)}[kind],
            precision="nvfp4-hybrid",
            accumulate_grad_batches=2,
            use_distributed_sampler=False,
            enable_checkpointing=True,
            callbacks=callbacks,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, loader(), loader(), ckpt_path=resume)
        return weights.steps[0], whole(module)

    start, end = run(None)
    return start, end, run(f"{folder}/step=2.ckpt")[1]


@pytest.mark.filterwarnings("ignore:.*exists and is not empty.*:UserWarning", "ignore:Detected an existing:UserWarning")
@pytest.mark.parametrize("kind", ["auto", "ddp", "fsdp2"])
def test_a_stopped_run_goes_on_bitwise_with_all_of_them(kind: str, tmp_path: Path) -> None:
    """Recompute, accumulation and a schedule of precisions; averages, where weights are whole."""
    size = 1 if kind == "auto" else 2
    for start, end, again in run_ranks(stopped_and_not, size, size, kind, str(tmp_path), group=None):
        assert same(end, again) and not same(start, end)


def by_fabric(rank: int, size: int) -> dict[tuple[str, bool], dict[str, torch.Tensor]]:
    found = {}
    for kind, recompute in (("ddp", False), ("fsdp2", False), ("fsdp2", True)):
        mesh = FabricModelParallelStrategy(shard, data_parallel_size=size, tensor_parallel_size=1)
        strategy = FabricDDPStrategy() if kind == "ddp" else mesh
        fabric = lightning.Fabric(precision="nvfp4-hybrid", strategy=strategy, accelerator="cpu", devices=size)
        fabric.launch()
        model = tiny_model()
        if recompute:
            model.activation_checkpointing_enable()
        module = fabric.setup_module(model.train())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=1e-3))
        for batch in range(4):
            ids = tokens(2, 12, seed=size * batch + rank)
            with fabric.no_backward_sync(module, enabled=batch % 2 == 0):
                fabric.backward(module(input_ids=ids, labels=ids).loss / 2)
            if batch % 2:
                optimizer.step()
                optimizer.zero_grad()
        found[kind, recompute] = whole(module.module)
    return found


def shard(model: Any, mesh: Any) -> Any:
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh["data_parallel"])
    return model


def test_fabric_shards_without_a_change_of_bits() -> None:
    """Accumulated before it is reduced, as DDP does."""
    for found in run_ranks(by_fabric, 2, 2, group=None):
        plain = found["ddp", False]
        assert all(same(plain, weights) for weights in found.values())
        assert not same(plain, dict(tiny_model().named_parameters()))


class Poison(Callback):
    """Makes one element of what the last rank holds of the second step's gradients NaN."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 1 and trainer.global_rank == trainer.world_size - 1:
            grad = pl_module.model.model.layers[0].self_attn.q_proj.weight.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad).flatten()[0] = torch.nan


def watched(rank: int, size: int, folder: str) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Weights after every step, with callbacks that look at parts of them."""
    found = {}
    for name, strategy, recompute, accumulate, extra in (
        ("plain", "fsdp2", False, 2, []),
        ("monitor", "fsdp2", True, 2, [NumericsMonitor(1)]),
        ("ddp, guard", "ddp", False, 1, [Poison(), NonfiniteGuard("skip")]),
        ("fsdp2, guard", "fsdp2", True, 1, [Poison(), NonfiniteGuard("skip")]),
    ):
        mesh = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
        kind = DDPStrategy() if strategy == "ddp" else mesh
        logger = CSVLogger(folder, name="", version="") if name == "monitor" else False
        _, weights, _ = fit(rank, size, kind, recompute, accumulate, extra=extra, logger=logger)
        found[name] = weights.steps
    return found


@pytest.mark.filterwarnings("ignore:step 1 left out:UserWarning", "ignore:.*log_every_n_steps:UserWarning")
def test_callbacks_that_look_at_shards_act_alike_on_all_ranks(tmp_path: Path) -> None:
    """The monitor changes no bit; a step is left out on every rank where one has a NaN in its share."""
    for found in run_ranks(watched, 2, 2, str(tmp_path), group=None):
        assert all(same(a, b) for a, b in zip(found["plain"], found["monitor"], strict=True))
        _, first, second, third = found["ddp, guard"]
        assert same(first, second) and not same(second, third)
        assert all(same(a, b) for a, b in zip(found["ddp, guard"], found["fsdp2, guard"], strict=True))
    assert "layers.0.self_attn.q_proj/fprop_weight/sqnr" in (tmp_path / "metrics.csv").read_text()
