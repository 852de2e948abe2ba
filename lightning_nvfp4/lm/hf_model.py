"""Hugging Face causal language models with FP32 parameters, from a configuration or from a checkpoint."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.lm.local_names import means_a_folder

# Names every configuration accepts besides its own fields.
_COMMON_FIELDS = (
    "attn_implementation",
    "experts_implementation",
    "partial_rotary_factor",
    "rope_scaling",
    "rope_theta",
)


def build_config(fields: Mapping[str, Any]) -> PretrainedConfig:
    """Return the HF configuration for `fields`, which name `model_type` and any fields of that model's configuration.

    Raises:
        UserError: `model_type` is missing, unknown, or no causal language model; a field is unknown or has a value
            that the configuration refuses.
    """
    values = dict(fields)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise UserError("model.model_type is missing: name an architecture of transformers, such as qwen3_moe.")
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise unknown("model.model_type", model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)}
    known.update(config_class.attribute_map, config_class.attribute_map.values(), _COMMON_FIELDS)
    if not known.issuperset(values):
        known |= _fields_read_by(_model_class(config_class))
    for name in values:
        if name not in known:
            raise unknown(f"model field ({model_type})", name, known)
    try:
        return config_class(**values)
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"model ({model_type}): {error}") from error


def _model_class(config_class: type) -> Any:
    """The causal language model of a configuration class; the first where there are variants."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return model_class[0] if isinstance(model_class, tuple) else model_class


def _fields_read_by(model_class: type) -> set[str]:
    """Names the model's own source reads from its configuration; some (Qwen3-MoE's head_dim) are declared nowhere."""
    source = inspect.getsource(inspect.getmodule(model_class) or model_class)
    optional = re.findall(r"""getattr\((?:self\.)?config, ['"](\w+)['"]""", source)
    return {*optional, *re.findall(r"\bconfig\.([a-z]\w*)\b(?!\()", source)}


def build_model(fields: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """Return a model with random FP32 weights: a function of `fields` and `seed` alone.

    The weights are drawn on the CPU from a forked generator, so they are the same on every machine and in every
    precision, and the caller's random state is left as it was. Attention is SDPA where the model has it, unless
    `fields` name another `attn_implementation`.
    """
    config = build_config(fields)
    attention = fields.get("attn_implementation") or ("sdpa" if _model_class(type(config))._supports_sdpa else "eager")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.random.default_generator.manual_seed(seed)
        try:
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        except (TypeError, ValueError, ZeroDivisionError, RuntimeError) as error:
            raise UserError(f"model ({fields['model_type']}) cannot be built from its fields: {error}") from error


def resolve_pretrained(pretrained: str | os.PathLike[str]) -> str:
    """Return the HF folder that `pretrained` means, or the name unchanged where it is one on the Hugging Face hub.

    A folder is an HF folder (it holds `config.json`) or a stage's run folder (its `hf/` is taken).
    """
    path = Path(pretrained).expanduser()
    for folder in (path / "hf", path):
        if (folder / "config.json").is_file():
            return str(folder)
    if path.is_file():
        raise UserError(
            f"pretrained is {str(pretrained)!r}, a file: give the run folder of a stage or a Hugging Face folder. "
            "A Lightning checkpoint is continued with --ckpt_path."
        )
    if path.exists():
        raise UserError(
            f"pretrained is {str(pretrained)!r}: neither it nor its hf/ holds a config.json. Give a Hugging Face "
            "folder, or the run folder of a stage that has finished."
        )
    name = str(pretrained)
    if means_a_folder(name):
        raise UserError(
            f"pretrained is {name!r}: no such folder. Run the stage that writes it first, check the path, or give "
            "owner/name of a hub model."
        )
    return name


def load_model(pretrained: str | os.PathLike[str]) -> PreTrainedModel:
    """Return the model of `pretrained` (see `resolve_pretrained`) with FP32 parameters.

    A checkpoint saved in fewer bits is upcast: BF16 parameters lose updates that are small against the weight.

    Raises:
        UserError: nothing there, no causal language model, or a checkpoint that is quantized.
    """
    source = resolve_pretrained(pretrained)
    try:
        config = AutoConfig.from_pretrained(source)
        if getattr(config, "quantization_config", None) is not None:
            raise UserError(
                f"pretrained is {source!r}, a quantized checkpoint: training starts from BF16 or FP32 weights. "
                "Give the unquantized version."
            )
        supports_sdpa = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", True)
        attention = "sdpa" if supports_sdpa else "eager"
        pair: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
        )
        model, loaded = pair
    except UserError:
        raise
    except Exception as error:  # the libraries raise whatever a damaged file makes them raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"pretrained is {source!r}: transformers cannot load it: {reason}. Check the folder, or export it again."
        ) from error
    if missing := sorted(loaded["missing_keys"]):
        raise UserError(
            f"pretrained is {source!r}: its weights lack {len(missing)} tensors of a {type(model).__name__} "
            f"({', '.join(missing[:3])}), which would be random. Give a whole checkpoint of this architecture."
        )
    return model


def router_options(model: PreTrainedModel, load_balance: bool) -> dict[str, bool]:
    """Return the forward argument that switches the load balance loss, for models that have one.

    It is always said: left to a configuration with `output_router_logits`, `generate` would compute the loss of cached
    steps against the mask of the whole sequence, and fail.
    """
    return {"output_router_logits": load_balance} if hasattr(text_config(model), "output_router_logits") else {}


def text_config(model: PreTrainedModel) -> PretrainedConfig:
    """The configuration of the language model, also where it is a part of a larger one."""
    return model.config.get_text_config()
