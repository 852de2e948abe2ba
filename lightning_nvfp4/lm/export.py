"""`HFExport`: leaves every finished stage behind as an ordinary Hugging Face folder."""

from __future__ import annotations

import copy
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.lm.lora import has_adapters, merged, save_adapter
from lightning_nvfp4.lm.stop_tokens import stop_token_ids

log = logging.getLogger(__name__)


class HFExport(Callback):
    """Writes `<default_root_dir>/hf/` when a fit has come to its end, not when it is stopped by an error.

    The folder holds FP32 safetensors in the layout of the published model, `config.json` and `generation_config.json`
    (stop and padding tokens of the tokenizer), and the datamodule's tokenizer with its chat template; `transformers`
    loads it without this package. It is written beside the target and swapped in whole. Low-rank adapters are merged
    into it, and left on their own in `<default_root_dir>/adapter/`, as peft loads them.

    Args:
        folder: name of the folder under the trainer's `default_root_dir`.
        weights: `last`, or `best`: those of the checkpoint that a `ModelCheckpoint` with a monitor found best.
    """

    def __init__(self, folder: str = "hf", weights: Literal["last", "best"] = "last") -> None:
        if weights not in ("last", "best"):
            raise unknown("weights", weights, ("last", "best"))
        self.weights = weights
        if folder in ("", "..") or Path(folder).name != folder:
            raise UserError(f"folder is {folder!r}: give the name of one folder under default_root_dir, such as hf.")
        self.folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse the best weights where nothing says which they are.

        Raises:
            UserError: no checkpoint is monitored.
        """
        if self.weights == "best" and not trainer.fast_dev_run and not _monitored(trainer):  # type: ignore[truthy-bool]
            raise UserError(
                "HFExport.weights is best, and no checkpoint is monitored: add a ModelCheckpoint with monitor: "
                "val/loss and save_top_k: 1, or set weights to last."
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export; every rank takes part in gathering shards, rank 0 writes."""
        if trainer.fast_dev_run or trainer.interrupted:  # type: ignore[truthy-bool]
            return
        model = getattr(pl_module, "network", None)
        if not isinstance(model, PreTrainedModel):
            raise UserError(f"HFExport exports a CausalLM; the fitted module is a {type(pl_module).__name__}.")
        if self.weights == "best":
            _load_best(trainer, pl_module)
        weights = gather_weights(model)
        lora = getattr(pl_module, "lora", None)
        if trainer.is_global_zero:
            target = Path(trainer.default_root_dir) / self.folder
            if lora is not None and has_adapters(weights):
                base = getattr(pl_module, "pretrained", None)
                save_adapter(model, weights, lora, base, target.with_name("adapter"))
                weights = merged(weights, lora)
            export(model, weights, target, getattr(getattr(trainer, "datamodule", None), "tokenizer", None))
            log.info("Exported the model to %s", target)
        trainer.strategy.barrier("HFExport")


def _monitored(trainer: Trainer) -> list[ModelCheckpoint]:
    return [call for call in trainer.checkpoint_callbacks if isinstance(call, ModelCheckpoint) and call.monitor]


def _load_best(trainer: Trainer, pl_module: LightningModule) -> None:
    """Give the module the weights of the best checkpoint."""
    found = _monitored(trainer)
    path = next((call.best_model_path for call in found if call.best_model_path), None)
    if path is None:
        raise UserError(
            f"HFExport.weights is best, and {found[0].monitor} was never measured, so no checkpoint is the best. "
            "Nothing was exported; checkpoints are kept. Give validation data (data.val_path), validate before the run "
            "ends (trainer.val_check_interval), or set weights to last."
        )
    checkpoint = trainer.strategy.load_checkpoint(path)
    trainer.strategy.load_model_state_dict(checkpoint)


def gather_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's logical weights in FP32 on the CPU; a collective where they are sharded (empty off rank 0)."""
    weights: Any = model.state_dict()
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {
        name: value.detach().to("cpu", torch.float32 if value.is_floating_point() else value.dtype)
        for name, value in weights.items()
    }


def export(model: PreTrainedModel, weights: dict[str, Tensor], target: Path, tokenizer: Any | None) -> None:
    """Write the Hugging Face folder `target`, replacing the one that is there as a whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    retired = target.with_name(f".{target.name}.{os.getpid()}.old")
    for leftover in (*target.parent.glob(f".{target.name}.*.tmp"), *target.parent.glob(f".{target.name}.*.old")):
        shutil.rmtree(leftover)
    try:
        with _unsharded(model.config):
            model.save_pretrained(temporary, state_dict=weights)
        public_config(model, tokenizer).save_pretrained(temporary)
        generation_config(model, tokenizer).save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        for file in temporary.iterdir():
            with open(file, "rb") as descriptor:
                os.fsync(descriptor.fileno())
        if target.exists():
            os.rename(target, retired)
        os.rename(temporary, target)
    except OSError as error:
        raise UserError(
            f"The model cannot be exported to {target}: {error}. What was there is unchanged; the checkpoint holds the "
            "same weights. Free space or choose another default_root_dir."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(retired, ignore_errors=True)


@contextmanager
def _unsharded(config: PretrainedConfig) -> Iterator[None]:
    """Hide how the model is sharded: transformers would gather the weights, which has been done, on all ranks."""
    layout = vars(config).pop("distributed_config", None)
    try:
        yield
    finally:
        if layout is not None:
            config.distributed_config = layout


def public_config(model: PreTrainedModel, tokenizer: Any | None) -> PretrainedConfig:
    """Return the model's configuration as another program should see it.

    FP32, the tokenizer's bos and eos, no experts implementation of ours, the load balance loss off since `generate`
    fails on padded batches with it. The padding token stays out:
    `transformers` would freeze its embedding, which is the eos embedding where the two are one token.
    """
    config = copy.deepcopy(model.config)
    config.dtype = "float32"
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config._experts_implementation = None
    vars(config).pop("distributed_config", None)
    text = config.get_text_config()
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = False
    if tokenizer is not None:
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
    return config


def generation_config(model: PreTrainedModel, tokenizer: Any | None) -> GenerationConfig:
    """Return the model's generation settings with every token that ends an answer, and the padding token."""
    config = copy.deepcopy(model.generation_config)
    if tokenizer is not None:
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = stop_token_ids(tokenizer) or None
        config.pad_token_id = tokenizer.pad_token_id
    return config
