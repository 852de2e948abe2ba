"""What changes no bit of pretraining changes none of low-rank adapters and of GRPO either."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from ranks import run_ranks
from tiny_models import quiet_trainer
from tiny_policies import Trace, policy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_nvfp4.lm.lora import LoraSettings
from lightning_nvfp4.lm.model import CausalLM
from lightning_nvfp4.lm.optim import OptimizerConfig

STEPS = 2
KINDS = ("lora", "grpo")


class Data(LightningDataModule):
    """Batches of tokens, or of prompts, for one of several ranks."""

    def __init__(self, tokenizer: Any, kind: str, rank: int, size: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        every = [torch.randint(6, 64, (2, 6), generator=torch.Generator().manual_seed(i)) for i in range(8 * size)]
        self.batches = [batch_of(kind, tokens) for tokens in every[rank::size]]

    def train_dataloader(self) -> Any:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def batch_of(kind: str, tokens: torch.Tensor) -> dict[str, Any]:
    if kind == "lora":
        return {"input_ids": tokens, "labels": tokens}
    references = [{"kind": "exact", "answer": "0"}] * len(tokens)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "references": references}


def module_of(kind: str, fields: dict[str, Any]) -> CausalLM:
    if kind == "grpo":
        return policy(fields, group_size=4)
    lora = LoraSettings(rank=4, alpha=8.0, targets=["q_proj", "v_proj"])
    return CausalLM(fields, optimizer=OptimizerConfig(lr=1e-2), lora=lora)


def fit(
    kind: str,
    fields: dict[str, Any],
    tokenizer: Any,
    recompute: bool,
    accumulate: int,
    strategy: Any = "auto",
    rank: int = 0,
    size: int = 1,
    callbacks: Any = (),
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the weights at the end, whole, and how often the first block was called."""
    module = module_of(kind, fields)
    configure, calls = module.configure_model, []

    def configured() -> None:
        first = module.model is None
        configure()
        if first:
            module.network.get_submodule("model.layers.0.self_attn").register_forward_hook(lambda *_: calls.append(1))
        if recompute:
            module.network.activation_checkpointing_enable()
        module.network.train()

    module.configure_model = configured
    trainer = quiet_trainer(
        STEPS,
        devices=size,
        strategy=strategy,
        precision="nvfp4-hybrid",
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=list(callbacks),
    )
    trainer.fit(module, Data(tokenizer, kind, rank, size))
    parameters = module.named_parameters()
    whole = {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in parameters}
    return whole, len(calls)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
def test_recompute_and_averaging_change_no_bit(kind: str, moe_fields, tokenizer) -> None:
    plain, averaged = Trace(), Trace()
    end, calls = fit(kind, moe_fields, tokenizer, False, 2, callbacks=[plain])
    ema = EMAWeightAveraging(decay=0.75, update_every_n_steps=1, use_buffers=False)
    average, more = fit(kind, moe_fields, tokenizer, True, 2, callbacks=[averaged, ema])
    assert more == calls + 2 * STEPS, "each forward with a backward ran once more"
    assert len(plain.weights) == STEPS and not torch.equal(plain.weights[0], plain.weights[1])
    assert all(torch.equal(a, b) for a, b in zip(plain.weights, averaged.weights, strict=True))
    assert not same(end, average)


def on_ranks(rank: int, size: int, fields: dict[str, Any], tokenizer: Any) -> dict[tuple[str, str, bool], Any]:
    found = {}
    for kind in KINDS:
        for name, recompute in (("ddp", False), ("ddp", True), ("fsdp2", True)):
            mesh = {"data_parallel_size": size, "tensor_parallel_size": 1}
            strategy = DDPStrategy() if name == "ddp" else ModelParallelStrategy(**mesh)
            found[kind, name, recompute] = fit(kind, fields, tokenizer, recompute, 1, strategy, rank, size)[0]
    return found


def test_two_ranks_have_the_bits_of_each_other_under_ddp_and_fsdp2(moe_fields, tokenizer) -> None:
    """Completions too are drawn alike where weights are sharded."""
    one, other = run_ranks(on_ranks, 2, 2, moe_fields, tokenizer, group=None, limit=60)
    for key, weights in one.items():
        assert same(weights, other[key]), key
        assert same(weights, one[key[0], "ddp", False]), key
