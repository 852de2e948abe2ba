"""What can be evaluated: run folders, Lightning checkpoints, Hugging Face folders and hub names, GGUF files."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor
from transformers import PreTrainedModel

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data.tokenizer import load_tokenizer
from lightning_nvfp4.lm.hf_model import build_model, load_model, resolve_pretrained
from lightning_nvfp4.strategies.sharded_checkpoint import METADATA, is_sharded

_PREFIX = "model."  # CausalLM keeps the network there


@dataclass(frozen=True)
class Source:
    """A model to evaluate.

    Attributes:
        model: with FP32 parameters, on the CPU.
        tokenizer: of the model.
        fingerprint: of the files it came from: names, sizes, times of change.
    """

    model: PreTrainedModel
    tokenizer: Any
    fingerprint: list[Any]


def open_source(checkpoint: str | Path, tokenizer: str | None = None) -> Source:
    """Load what `checkpoint` means.

    Args:
        checkpoint: a stage's run folder or a Hugging Face folder; a Lightning checkpoint of a `CausalLM`, a file or a
            sharded folder; a GGUF file, whose weights are dequantized; or ``owner/name`` on the hub.
        tokenizer: where it is not the model's own: ``embedded``, a folder, or a hub name. That of a Lightning
            checkpoint is in its run folder: in ``hf/``, or named by ``config.yaml``.

    Raises:
        UserError: nothing there, damaged, not a causal language model, no tokenizer.
    """
    path = find_source(checkpoint)
    if path is not None and path.suffix == ".gguf":
        model, own = _gguf(path, tokenizer is None)
        return Source(model, load_tokenizer(tokenizer) if tokenizer else own, _fingerprint(path))
    if path is not None and (is_sharded(path) or path.is_file()):
        return Source(_lightning(path), _lightning_tokenizer(path, tokenizer), _fingerprint(path))
    name = resolve_pretrained(checkpoint)
    model = load_model(name)
    found = load_tokenizer(tokenizer) if tokenizer else _auto_tokenizer(name)
    folder = Path(name)
    return Source(model, found, _fingerprint(folder) if folder.is_dir() else [name, model.config._commit_hash])


def find_source(checkpoint: str | Path) -> Path | None:
    """Return the file or folder that `checkpoint` means, without opening it; None where it is a name on the hub.

    Raises:
        UserError: it is neither.
    """
    path = Path(checkpoint).expanduser()
    if path.suffix == ".gguf" or is_sharded(path) or (path.is_file() and path.suffix == ".ckpt"):
        if not path.exists():
            raise UserError(f"checkpoint {str(path)!r}: no such file.")
        return path
    resolved = resolve_pretrained(checkpoint)
    return path if Path(resolved).is_dir() else None


def _auto_tokenizer(name: str, **options: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # the libraries raise whatever a damaged file makes them raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"checkpoint {name!r} has no tokenizer that can be loaded: {reason}. Save one beside the model, or name "
            "one with --tokenizer."
        ) from error


def _gguf(path: Path, with_tokenizer: bool) -> tuple[PreTrainedModel, Any]:
    from transformers import AutoModelForCausalLM, GgufConfig

    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    except ImportError as error:
        raise UserError(f"checkpoint {str(path)!r} is a GGUF file: reading it takes the package gguf.") from error
    except Exception as error:  # the libraries raise whatever a damaged file makes them raise
        raise UserError(f"checkpoint {str(path)!r}: not a GGUF file that transformers reads: {error}") from error
    return model, _auto_tokenizer(str(path.parent), gguf_file=path.name) if with_tokenizer else None


def _lightning(path: Path) -> PreTrainedModel:
    sharded = is_sharded(path)
    try:
        content = torch.load(path / METADATA if sharded else path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:  # torch raises whatever a damaged file makes it raise
        raise UserError(f"checkpoint {str(path)!r}: not a whole Lightning checkpoint: {error}") from error
    settings = content.get("hyper_parameters", {})
    if settings.get("model") is not None:
        model = build_model(settings["model"], settings.get("seed", 0))
    elif settings.get("pretrained") is not None:
        model = load_model(settings["pretrained"])
    else:
        raise UserError(
            f"checkpoint {str(path)!r} is not one of a CausalLM: its hyper_parameters have neither model nor "
            "pretrained. Export the model as a Hugging Face folder."
        )
    weights = _sharded_weights(path, model) if sharded else content["state_dict"]
    weights = {name.removeprefix(_PREFIX): value for name, value in weights.items() if name.startswith(_PREFIX)}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"checkpoint {str(path)!r} does not fit its own hyper_parameters: {error}") from error
    return model


def _sharded_weights(path: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    state: dict[str, Any] = {"state_dict": {_PREFIX + name: value for name, value in model.state_dict().items()}}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each process reads for itself
            dcp.load(state, checkpoint_id=path, no_dist=True)
    except Exception as error:  # torch raises whatever a damaged file makes it raise
        reason = " ".join(str(error).split())[-400:]
        raise UserError(f"checkpoint {str(path)!r}: its shards cannot be read: {reason}") from error
    return state["state_dict"]


def _lightning_tokenizer(path: Path, name: str | None) -> Any:
    if name is not None:
        return load_tokenizer(name)
    for folder in path.parents[:3]:  # run folder/checkpoints/last.ckpt
        if (folder / "hf" / "tokenizer.json").is_file():
            return _auto_tokenizer(str(folder / "hf"))
        if (folder / "config.yaml").is_file():
            settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
            name = ((settings.get("data") or {}).get("init_args") or {}).get("tokenizer")
            if name is not None:
                return load_tokenizer(name)
    raise UserError(
        f"checkpoint {str(path)!r} holds no tokenizer, and its run folder names none: name one with --tokenizer "
        "(embedded, a folder, or a hub name)."
    )


def _fingerprint(path: Path) -> list[Any]:
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def tokenizer_identity(tokenizer: Any) -> list[Any]:
    """Return what of a tokenizer decides which tokens a text becomes, as plain data."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    return [type(tokenizer).__name__, tokenizer.chat_template, hashlib.sha256(str(rules).encode()).hexdigest()]
