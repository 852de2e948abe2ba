"""`CausalLM`: any Hugging Face causal language model as a LightningModule, for pretraining, decay and SFT."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torchmetrics.text import Perplexity
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.hf_model import build_config, build_model, load_model, router_options, text_config
from lightning_nvfp4.lm.lora import LoraSettings, inject, settings_dict
from lightning_nvfp4.lm.monitors import check_monitors
from lightning_nvfp4.lm.optim import (
    OptimizerConfig,
    ScheduleConfig,
    StepSchedule,
    as_config,
    build_adamw,
    schedule_ratio,
)
from lightning_nvfp4.lm.resumed import remember_saved
from lightning_nvfp4.strategies.averaging import refuse_averaging
from lightning_nvfp4.strategies.gradients import total_grad_norm

IGNORED_LABEL = -100
# Vocabularies are often rounded up; a larger share of spare rows means that the model is another tokenizer's.
_MAX_SPARE_VOCABULARY = 0.1
DEFAULT_OPTIMIZER = OptimizerConfig()
DEFAULT_SCHEDULE = ScheduleConfig()


class CausalLM(LightningModule):
    """Trains `self.model`, a Hugging Face causal language model with FP32 parameters.

    Batches are dicts of (B, S) tensors: `input_ids`, `labels` (not shifted; -100 is ignored) and, where they matter,
    `attention_mask` and `position_ids`; further entries are passed to the model as they are. Logs `train/loss` (cross
    entropy alone, nats per token), `train/aux_loss` (the router's load balance loss, before its coefficient),
    `train/grad_norm` (before clipping), `train/lr`, `val/loss` and `val/perplexity`. SFT is this module with chat data.

    Args:
        model: fields of the HF configuration, `model_type` among them; weights are drawn from `seed`.
        pretrained: a Hugging Face folder, the run folder of an earlier stage, or a name on the hub. Exactly one of
            `model` and `pretrained` is given.
        optimizer: AdamW's settings.
        schedule: the learning rate over the optimizer steps.
        seed: of the weight initialisation.
        aux_loss_coef: weight of the router's load balance loss; default, the configuration's `router_aux_loss_coef`
            where its `output_router_logits` is set, else 0. An exported configuration does not set it (it is of no use
            outside training), so a later stage that wants the loss says so here.
        lora: low-rank adapters to train in place of the weights, which are frozen; the export has them merged.
    """

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        pretrained: str | None = None,
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
        schedule: ScheduleConfig = DEFAULT_SCHEDULE,
        seed: int = 0,
        aux_loss_coef: float | None = None,
        lora: LoraSettings | None = None,
    ) -> None:
        super().__init__()
        if (model is None) == (pretrained is None):
            raise UserError(
                "Give exactly one of model (a configuration, weights drawn from the seed) and pretrained (weights that "
                f"exist); {'neither' if model is None else 'both'} is set."
            )
        if model is not None:
            build_config(model)  # a misspelled field stops here, before data are prepared
        self.model_fields = model
        self.pretrained = pretrained
        self.optimizer_config = as_config(OptimizerConfig, optimizer, "optimizer")
        self.schedule_config = as_config(ScheduleConfig, schedule, "schedule")
        self.seed = seed
        if not 0 <= seed < 2**63:
            raise UserError(f"seed is {seed}: it must be a whole number from 0 to 2**63 - 1.")
        if aux_loss_coef is not None and not 0 <= aux_loss_coef < math.inf:
            raise UserError(f"aux_loss_coef is {aux_loss_coef}: it must be a number, not negative.")
        self.aux_loss_coef = aux_loss_coef
        self.lora = None if lora is None else as_config(LoraSettings, lora, "lora")
        self.model: PreTrainedModel | None = None
        self.perplexity = Perplexity(ignore_index=IGNORED_LABEL)
        self._store_hyperparameters(
            model=model, pretrained=pretrained, seed=seed, aux_loss_coef=aux_loss_coef, lora=settings_dict(self.lora)
        )

    def _store_hyperparameters(self, **settings: Any) -> None:
        """Keep the constructor's arguments as plain containers: a checkpoint is loaded with weights_only=True."""
        hyperparameters = {
            **settings,
            "optimizer": {**dataclasses.asdict(self.optimizer_config), "betas": list(self.optimizer_config.betas)},
            "schedule": dataclasses.asdict(self.schedule_config),
        }
        self.save_hyperparameters(hyperparameters)

    @property
    def network(self) -> PreTrainedModel:
        """The HF model; an error before `configure_model` has built it."""
        if self.model is None:
            raise RuntimeError("The model is built by configure_model(), which the Trainer calls; call it first.")
        return self.model

    def configure_model(self) -> None:
        """Build the model once; later calls (validation after a fit, resume) leave it alone."""
        if self.model is not None:
            return
        if self.model_fields is not None:
            self.model = build_model(self.model_fields, self.seed)
        else:
            assert self.pretrained is not None
            self.model = load_model(self.pretrained)
        if self.lora is not None:
            inject(self.network, self.lora, self.seed)
        self.network.train()
        self._shard()

    def _shard(self) -> None:
        """Under a strategy with a device mesh, hand the model to the strategy's `shard_model` or shard it by FSDP2."""
        if self._fabric is not None or self._trainer is None or self.device_mesh is None:
            return
        strategy: Any = self.trainer.strategy
        if strategy.world_size > 1:
            refuse_averaging(self.trainer)
        self.trainer.precision_plugin.convert_module(self)  # FSDP2 swaps classes: conversion has to come first
        if hasattr(strategy, "shard_model"):
            self.model = strategy.shard_model(self.network)
            return
        mesh = self.device_mesh["data_parallel"]
        blocks = set(self.network._no_split_modules or ())
        for module in self.network.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh)
        fully_shard(self.network, mesh=mesh)

    def forward(self, input_ids: Tensor, **inputs: Any) -> ModelOutput:
        """Run the HF model without its cache. input_ids: (B, S) -> output with `logits` (B, S, V)."""
        return self.network(input_ids=input_ids, use_cache=False, **inputs)

    @property
    def load_balance_coef(self) -> float:
        """Weight of the load balance loss in training; 0 for a model without routers."""
        config = text_config(self.network)
        if self.aux_loss_coef is None:
            return config.router_aux_loss_coef if getattr(config, "output_router_logits", False) else 0.0
        if self.aux_loss_coef > 0 and not hasattr(config, "output_router_logits"):
            raise UserError(
                f"aux_loss_coef is {self.aux_loss_coef}: {config.model_type} has no load balance loss. Set 0."
            )
        return self.aux_loss_coef

    def losses(self, batch: Mapping[str, Tensor], load_balance: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the cross entropy (scalar FP32), the load balance loss (scalar or None), and the logits (B, S, V)."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        output = self(**inputs, **router_options(self.network, load_balance))
        vocab_size = text_config(self.network).vocab_size
        loss = self.network.loss_function(logits=output.logits, labels=batch["labels"], vocab_size=vocab_size)
        return loss, output.get("aux_loss"), output.logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss to minimise: cross entropy, plus the weighted load balance loss where it is on."""
        coef = self.load_balance_coef
        loss, aux_loss, _ = self.losses(batch, load_balance=coef > 0)
        batch_size = batch["input_ids"].shape[0]
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=batch_size, sync_dist=True)
        if aux_loss is None:
            return loss
        self.log("train/aux_loss", aux_loss.detach(), batch_size=batch_size, sync_dist=True)
        return loss + coef * aux_loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add the batch to the loss and the perplexity of the validation set."""
        loss, _, logits = self.losses(batch, load_balance=False)
        self.perplexity.update(logits[:, :-1].float(), batch["labels"][:, 1:])
        batch_size = batch["input_ids"].shape[0]
        self.log("val/loss", loss, prog_bar=True, batch_size=batch_size, sync_dist=True)
        self.log("val/perplexity", self.perplexity, batch_size=batch_size)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, and a schedule that advances with every optimizer step."""
        optimizer = build_adamw(self.network, self.optimizer_config)
        schedule = StepSchedule(optimizer, schedule_ratio(self.schedule_config, self.trainer.max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "lr"}}

    def on_fit_start(self) -> None:
        """Check what can only be checked when model and data are both there."""
        self.check_vocabulary()

    def on_train_start(self) -> None:
        """Check that what callbacks monitor will be measured."""
        check_monitors(self.trainer)
        remember_saved(self.trainer)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Stop when the checkpoint of another run leaves nothing to train: its weights would be exported as trained."""
        trainer, step = self._trainer, checkpoint.get("global_step", 0)
        if trainer is None or not trainer.training or trainer.max_steps is None or not 0 < trainer.max_steps <= step:
            return
        source = Path(str(trainer.ckpt_path))
        if not source.resolve().is_relative_to(Path(trainer.default_root_dir).resolve()):
            raise UserError(
                f"ckpt_path = {str(source)!r} is at step {step}, and trainer.max_steps = {trainer.max_steps} counts "
                "from the beginning of that run: set max_steps (and the schedule's decay_start) to what comes after."
            )

    def check_vocabulary(self) -> None:
        """Stop when the datamodule's tokenizer is not the one the model's vocabulary was made for."""
        datamodule = getattr(self.trainer, "datamodule", None)
        tokenizer = getattr(datamodule, "tokenizer", None)
        if tokenizer is None:
            return
        model_size, tokenizer_size = text_config(self.network).vocab_size, len(tokenizer)
        if tokenizer_size <= model_size <= tokenizer_size * (1 + _MAX_SPARE_VOCABULARY):
            return
        cure = (
            f"set model.vocab_size to {tokenizer_size}"
            if self.pretrained is None
            else f"set data.tokenizer to {self.pretrained}, the tokenizer this model was trained with"
        )
        raise UserError(
            f"The model has {model_size} token embeddings and the tokenizer of "
            f"{type(datamodule).__name__} has {tokenizer_size} tokens: the model must have at least as "
            f"many, and at most a tenth more. Cure: {cure}."
        )

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the gradient norm before the Trainer clips it, and the rate of this step."""
        self.log("train/grad_norm", total_grad_norm(self.parameters()))
        self.log("train/lr", optimizer.param_groups[0]["lr"])
