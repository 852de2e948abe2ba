"""Low-rank adapters by peft: injected in place, saved in peft's format, merged for the export.

The weights that a run starts from are frozen and run in the preset's numerics; the adapters stay in high precision,
with FP32 masters as everything that is trained.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from lightning_nvfp4.errors import UserError

_ADAPTER = "default"
_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class LoraSettings:
    """Adapters of linear layers (arXiv:2106.09685).

    Attributes:
        rank: of the update.
        alpha: the update is multiplied by alpha / rank.
        dropout: of the adapters' inputs.
        targets: names of the linear layers, such as [q_proj, v_proj], or `all-linear` for all but the output head;
            routers and the stacked experts of a mixture are no linear layers.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: list[str] | str = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < math.inf or not 0 <= self.dropout < 1:
            raise UserError(
                f"lora: rank {self.rank} must be at least 1, alpha {self.alpha} a number above 0, dropout "
                f"{self.dropout} in [0, 1)."
            )


def inject(model: PreTrainedModel, settings: LoraSettings, seed: int) -> None:
    """Freeze `model` and put adapters into it, whose start is a function of the seed; its outputs stay as they are.

    Raises:
        UserError: peft is not installed, or no layer has one of the names.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError("model.lora needs peft, which is not installed: pip install 'lightning-nvfp4[lora]'.")
    from peft import inject_adapter_in_model

    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        try:
            inject_adapter_in_model(_peft_config(model, settings), model, _ADAPTER)
        except ValueError as error:
            raise UserError(
                f"lora.targets is {settings.targets!r}: {' '.join(str(error).split())} Name linear layers of the model."
            ) from error


def _peft_config(model: PreTrainedModel, settings: LoraSettings) -> Any:
    from peft import LoraConfig

    targets = settings.targets
    if targets == "all-linear":
        head = model.get_output_embeddings()
        targets = sorted(
            {
                path.rpartition(".")[2]
                for path, module in model.named_modules()
                if isinstance(module, torch.nn.Linear) and module is not head
            }
        )
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def has_adapters(weights: Mapping[str, Tensor]) -> bool:
    """Whether a state dict is of a model with adapters."""
    return any(".lora_A." in name for name in weights)


def merged(weights: Mapping[str, Tensor], settings: LoraSettings) -> dict[str, Tensor]:
    """Return the weights of the plain model: W + alpha / rank * B A where there is an adapter, under W's own name."""
    plain = {}
    for name, value in weights.items():
        if ".lora_" in name:
            continue
        down = weights.get(name.replace(".base_layer.weight", f".lora_A.{_ADAPTER}.weight"))
        up = weights.get(name.replace(".base_layer.weight", f".lora_B.{_ADAPTER}.weight"))
        if ".base_layer.weight" in name and down is not None and up is not None:
            value = (value.double() + settings.alpha / settings.rank * (up.double() @ down.double())).to(value.dtype)
        plain[name.replace(".base_layer.", ".")] = value
    return plain


def save_adapter(
    model: PreTrainedModel, weights: Mapping[str, Tensor], settings: LoraSettings, base: str | None, target: Path
) -> None:
    """Write the adapters alone, as `PeftModel.from_pretrained(base, target)` loads them."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    config = _peft_config(model, settings)
    if settings.targets == "all-linear":  # of the plain model: the adapters' own layers are linear too
        config.target_modules = {n.rpartition(".lora_A")[0].rpartition(".")[2] for n in weights if ".lora_A." in n}
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(temporary)
    adapters = {
        f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": value.contiguous()
        for name, value in weights.items()
        if ".lora_" in name
    }
    save_file(adapters, temporary / _WEIGHTS, metadata={"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def settings_dict(settings: LoraSettings | None) -> dict[str, Any] | None:
    """The settings as plain containers."""
    return None if settings is None else asdict(settings)
