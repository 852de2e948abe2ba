"""Checkpoints of a sharded model and its optimizers: saved by torch.distributed.checkpoint, loaded on any world size.

Optimizer states go by the names of parameters, not by groups: how many groups there are depends on the device meshes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_nvfp4.errors import UserError

METADATA = "meta.pt"
"""Holds everything of a checkpoint but tensors; Lightning's name for it."""


def is_sharded(path: Path) -> bool:
    """Return whether `path` is a folder that `save_sharded` wrote."""
    return path.is_dir() and (path / METADATA).is_file()


def save_sharded(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint folder; a collective. The folder that is there stays whole until the new one is.

    Args:
        checkpoint: Lightning's, with `state_dict` and flat `optimizer_states`.
        path: the same on all ranks.

    Raises:
        UserError: it cannot be written; what was there is unchanged.
    """
    rank = dist.get_rank()
    temporary = path.with_name(f".{path.name}.tmp")
    if rank == 0:
        recover(path)
        shutil.rmtree(temporary, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    tensors = {"state_dict": checkpoint["state_dict"]}
    tensors |= {f"optimizer_{i}": state for i, state in enumerate(checkpoint.get("optimizer_states", []))}
    rest = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
    error: list[str | None] = [None]
    try:
        dcp.save(tensors, checkpoint_id=temporary)
        if rank == 0:
            torch.save(rest, temporary / METADATA)
            _swap(temporary, path)
    except Exception as failure:  # of any rank: torch reports them to all
        error = [" ".join(str(failure).split())[-400:]]
    if rank == 0 and error[0]:
        shutil.rmtree(temporary, ignore_errors=True)
    dist.broadcast_object_list(error, src=0)
    if error[0]:
        kept = "The checkpoint that was there is unchanged" if path.exists() else "Nothing was left behind"
        raise UserError(
            f"The checkpoint {path} cannot be written: {error[0]}. {kept}. Free space or choose another "
            "default_root_dir, then continue with --ckpt_path."
        )


def _swap(temporary: Path, path: Path) -> None:
    """Flush the new folder to the disk and put it in the place of what is there."""
    for file in temporary.iterdir():
        with open(file, "rb") as descriptor:
            os.fsync(descriptor.fileno())
    retired = _retired(path)
    if path.exists():
        os.rename(path, retired)
    os.rename(temporary, path)
    shutil.rmtree(retired, ignore_errors=True) if retired.is_dir() else retired.unlink(missing_ok=True)


def recover(path: Path) -> None:
    """Give a checkpoint back its name that was retired when the process died before the new one had it."""
    retired = _retired(path)
    if retired.exists() and not path.exists():
        os.rename(retired, path)


def _retired(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def optimizer_state(model: nn.Module, optimizer: Optimizer, sharded: bool) -> dict[str, Any]:
    """Return what a checkpoint keeps of an optimizer; a collective.

    Args:
        model: the module whose parameters the optimizer has.
        optimizer: any.
        sharded: each rank's part, by names of parameters; else all of it on rank 0, as ``optimizer.state_dict()`` of an
            unsharded model is.
    """
    if sharded:
        options = StateDictOptions(cpu_offload=True, flatten_optimizer_state_dict=True)
        return get_optimizer_state_dict(model, optimizer, options=options)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=options))
    if dist.get_rank() != 0:
        return {}
    groups = _logical_groups(state["param_groups"], model)
    numbers = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
    return {
        "state": {numbers[name]: value for name, value in state["state"].items()},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }


def load_sharded(path: Path, model: nn.Module, optimizers: Sequence[Optimizer], strict: bool) -> dict[str, Any]:
    """Load a folder into the model and optimizers, however they are sharded, and return the rest; a collective."""
    weights = {"state_dict": get_model_state_dict(model)}
    _read(weights, path)
    model.load_state_dict(weights["state_dict"], strict=strict)
    options = StateDictOptions(cpu_offload=True, flatten_optimizer_state_dict=True)
    for i, optimizer in enumerate(optimizers):
        state = {f"optimizer_{i}": get_optimizer_state_dict(model, optimizer, options=options)}
        _read(state, path)
        set_optimizer_state_dict(model, optimizer, state[f"optimizer_{i}"], options=options)
    return torch.load(path / METADATA, weights_only=True, map_location="cpu")


def _read(state: dict[str, Any], path: Path) -> None:
    try:
        dcp.load(state, checkpoint_id=path)
    except Exception as error:
        reason = " ".join(str(error).split())[-400:]
        raise UserError(
            f"ckpt_path = {str(path)!r}: cannot be loaded into this model: {reason}. Give the model and optimizer that "
            "wrote it, or an earlier checkpoint if it is damaged."
        ) from error


def load_full(checkpoint: dict[str, Any], model: nn.Module, optimizers: Sequence[Optimizer], strict: bool) -> None:
    """Load a checkpoint that holds everything, of any strategy, into the model and optimizers; a collective."""
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sharded, strict=strict)
    set_model_state_dict(model, checkpoint["state_dict"], options=options)
    for saved, optimizer in zip(checkpoint.get("optimizer_states", []), optimizers, strict=False):
        set_optimizer_state_dict(model, optimizer, _by_name(saved, model, optimizer), options=options)


def _by_name(saved: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's saved state with names in the place of numbers, in the groups that the optimizer has."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    groups = own
    if sizes != [len(group["params"]) for group in groups]:
        groups = _logical_groups(own, model)
    if sizes != [len(group["params"]) for group in groups]:
        raise UserError(
            f"The checkpoint's optimizer has groups of {sizes} parameters and this one of "
            f"{[len(group['params']) for group in groups]}: build the optimizer as the run did that wrote it."
        )
    state, fields = {}, {}
    for group, saved_group in zip(groups, saved["param_groups"], strict=True):
        for name, number in zip(group["params"], saved_group["params"], strict=True):
            fields[name] = {key: value for key, value in saved_group.items() if key != "params"}
            if number in saved["state"]:
                state[name] = saved["state"][number]
    return {
        "state": state,
        "param_groups": [{**fields[group["params"][0]], "params": group["params"]} for group in own],
    }


def _logical_groups(groups: Sequence[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Join groups that differ in nothing but their parameters: an unsharded model has one in their place."""
    order = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    joined: list[dict[str, Any]] = []
    for group in groups:
        fields = {key: value for key, value in group.items() if key != "params"}
        for other in joined:
            if fields == {key: value for key, value in other.items() if key != "params"}:
                other["params"] = sorted([*other["params"], *group["params"]], key=order.__getitem__)
                break
        else:
            joined.append({**fields, "params": list(group["params"])})
    return joined
