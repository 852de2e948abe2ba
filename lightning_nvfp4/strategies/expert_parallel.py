"""`ExpertParallelStrategy`: FSDP2 for the dense part of a model, experts that live on their ranks, compressed exchange.

Built on Lightning's `ModelParallelStrategy` (processes, devices) and on transformers' plans for expert parallelism and
FSDP2 (which parameters go where); the exchange of tokens is `lightning_nvfp4.comm`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.distributed.utils import TransformersDeviceMesh

from lightning_nvfp4.comm.choice import Choice
from lightning_nvfp4.comm.codec import AUTO
from lightning_nvfp4.comm.expert_parallel import Communication, CompressedAllToAll
from lightning_nvfp4.comm.link import LEGS, reported
from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.selection import is_experts
from lightning_nvfp4.strategies import sharded_checkpoint
from lightning_nvfp4.strategies.averaging import refuse_averaging
from lightning_nvfp4.strategies.gradients import clip_grad_norm

_Base = ModelParallelStrategy if TYPE_CHECKING else object
_STATE = "expert_parallel"
"""Entry of a checkpoint."""
_numbers = itertools.count()


class ExpertParallelMixin(_Base):
    """What the strategies of both class trees have in common; the base is a ``ModelParallelStrategy`` of either.

    Args:
        expert_parallel_size: ranks that together hold all experts; it divides the number of processes and of experts.
            ``auto`` is the largest such number.
        codec: ``none``, ``mxfp8``, ``nvfp4``, ``s2f6``, a registered codec's name, ``package.module.name`` of one, or
            ``auto``: the fastest for each leg, measured on the first batch among `comm.choice.CANDIDATES`, said
            and saved with the run.
        legs: codecs that differ for some of ``dispatch_forward``, ``combine_forward``, ``dispatch_backward`` and
            ``combine_backward``.
        consistent: encode the rows that stay on their rank too, so that results do not depend on
            `expert_parallel_size`.
        overlap_degree: split each rank's tokens into that many parts, so that one travels while the experts work on
            another, in forward and backward (Tutel's ``a2a_ffn_overlap_degree``). Pays where the wire takes as long as
            the experts; 1 splits nothing. See docs/numerics.md for what it changes.
        save_distributed_checkpoint: write a folder with every rank's shards, which loads on any number of processes;
            else one file, which loads in every strategy.
        process_group_backend: ``nccl`` on CUDA and ``gloo`` on a CPU unless said.
        timeout: how long a rank waits for the others in a collective.

    Raises:
        UserError: an unknown codec or leg, a size that does not divide, or an `overlap_degree` that is no number of
            parts or comes with `consistent`.
    """

    strategy_name = "expert-parallel"

    def __init__(
        self,
        expert_parallel_size: int | Literal["auto"] = "auto",
        codec: str = "s2f6",
        legs: dict[str, str] | None = None,
        consistent: bool = False,
        overlap_degree: int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        if expert_parallel_size != "auto" and (not isinstance(expert_parallel_size, int) or expert_parallel_size < 1):
            raise UserError(f"expert_parallel_size = {expert_parallel_size!r} must be a number of ranks, or 'auto'.")
        names: dict[str, str] = dict.fromkeys(LEGS, codec)
        for leg, name in (legs or {}).items():
            if leg not in names:
                raise unknown("legs: leg", leg, LEGS)
            names[leg] = name
        self.expert_parallel_size = expert_parallel_size
        self.communication = Communication(names, consistent, overlap_degree, self._announce)
        self._implementation = f"compressed_all_to_all_{next(_numbers)}"

    def setup_environment(self) -> None:
        """Start the process group; every rank is a data-parallel one."""
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Shard what `configure_model` has built, then prepare the optimizers."""
        assert self.model is not None and self.accelerator is not None
        if self.world_size > 1:
            refuse_averaging(trainer)
        self.accelerator.setup(trainer)
        # FSDP2 changes the classes of modules: conversion comes first.
        self.model = self.precision_plugin.convert_module(self.model)
        for path, module in self.model.named_children():
            if isinstance(module, PreTrainedModel):
                setattr(self.model, path, self.shard_model(module))
        self.model_to_device()
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        self.barrier()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def shard_model(self, model: Any) -> Any:
        """Shard a `PreTrainedModel` in place, once; called for every child of the LightningModule that is one.

        Raises:
            UserError: `expert_parallel_size` does not divide the number of processes or of experts, the model has no
                experts that transformers can spread, or it has been sharded by another strategy.
        """
        sharded_by = getattr(model, "_sharded_by", self._implementation)
        if sharded_by != self._implementation:
            raise UserError(
                f"{type(model).__name__} has been sharded by the strategy of another Trainer, with its codecs: use "
                "that Trainer again, or build the model anew and load a checkpoint."
            )
        if hasattr(model, "_sharded_by"):
            return model
        world = self.world_size
        experts: dict[str, Any] = {path: module for path, module in model.named_modules() if is_experts(module)}
        size = self._expert_parallel_size(model, experts)
        rank_zero_info(
            f"expert-parallel: {len(experts)} experts modules over {size} of {world} ranks; "
            + ", ".join(f"{leg} {name}" for leg, name in self.codec_names.items())
            + (f"; overlap degree {self.communication.overlap_degree}" if self.communication.overlap_degree > 1 else "")
        )
        EPImplementationInterface.register(
            self._implementation, functools.partial(CompressedAllToAll, communication=self.communication)
        )
        if world > 1:
            kind = self.root_device.type
            # transformers would take the first accelerator that it finds.
            shapes = {("fsdp", "tp"): (world, 1), ("efsdp", "ep"): (world // size, size)}
            meshes = TransformersDeviceMesh(
                *(
                    init_device_mesh(kind, (1, 1, *shape), mesh_dim_names=("pp", "dp_replicate", *names))
                    for names, shape in shapes.items()
                )
            )
            _group_tied_weights(model)
            layout = DistributedConfig(fsdp_size=world, ep_size=size, ep_implementation=self._implementation)
            model = type(model).maybe_distribute_model(model, layout, meshes)
        if size == 1 and self.communication.consistent:
            for module in experts.values():
                module.forward = CompressedAllToAll(module, None, None, communication=self.communication)
        model._sharded_by = self._implementation
        return model

    @property
    def codec_names(self) -> dict[str, str]:
        """The codec of each leg."""
        return dict(self.communication.names)

    def _announce(self, choice: Choice) -> None:
        rank_zero_info(choice.summary())
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        for logger in trainer.loggers if trainer is not None else ():
            logger.log_hyperparams({f"codec/{leg}": name for leg, name in choice.names.items()})

    def _restore_choice(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on with the codecs that ``auto`` was when the checkpoint was written."""
        saved = checkpoint.get(_STATE, {}).get("codecs", {})
        chosen = {leg: saved.get(leg, AUTO) for leg, name in self.communication.names.items() if name == AUTO}
        self.communication.use({**self.communication.names, **chosen})

    def _expert_parallel_size(self, model: Any, experts: dict[str, Any]) -> int:
        world, wanted = self.world_size, self.expert_parallel_size
        counts = {path: int(module.num_experts) for path, module in experts.items()}
        common = math.gcd(world, *counts.values()) if counts else 1
        if not isinstance(wanted, int):
            return common
        if world % wanted:
            raise UserError(
                f"expert_parallel_size = {wanted} does not divide the {world} processes: choose one of "
                f"{[n for n in range(1, world + 1) if world % n == 0]}, or 'auto'."
            )
        if wanted > 1 and not counts:
            raise UserError(
                f"expert_parallel_size = {wanted}: {type(model).__name__} has no experts of transformers' experts "
                "interface. Use 'auto', or strategy='ddp'."
            )
        for path, count in counts.items():
            if count % wanted:
                raise UserError(
                    f"{path}: its {count} experts cannot be spread evenly over expert_parallel_size = {wanted} ranks; "
                    f"choose one of {[n for n in range(1, world + 1) if math.gcd(world, count) % n == 0]}, or 'auto'."
                )
        return wanted

    def _clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        clip_grad_norm(self.precision_plugin.main_params(optimizer), float(clip_val))

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step, then log what went over the wire since the last one."""
        with reported("optimizer step"):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        sent, bf16 = self.communication.traffic.take()
        module = self.lightning_module
        if self.world_size > 1 and module is not None and module._current_fx_name is not None:
            for name, value in (("comm/bytes_sent", sent), ("comm/bytes_saved", bf16 - sent)):
                number = torch.tensor(float(value), device=self.root_device)
                module.log(name, number, sync_dist=True, reduce_fx="sum")
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; a rank that is gone is reported."""
        with reported("training step"):
            return super().training_step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward; a rank that is gone is reported."""
        with reported("backward"):
            return super().backward(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Validate; what it sends is not part of a training step."""
        with reported("validation step"), self._not_counted():
            return super().validation_step(*args, **kwargs)

    @contextmanager
    def _not_counted(self) -> Iterator[None]:
        before = self.communication.traffic.copy()
        yield
        self.communication.traffic.restore(before)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return what a checkpoint keeps of the optimizer."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        assert self.model is not None
        return sharded_checkpoint.optimizer_state(self.model, optimizer, self._save_distributed_checkpoint)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a folder (or, without `save_distributed_checkpoint`, a file) that replaces what is there as a whole."""
        checkpoint[_STATE] = {"codecs": self.codec_names}
        if not self._save_distributed_checkpoint or storage_options is not None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        sharded_checkpoint.save_sharded(checkpoint, Path(self.broadcast(filepath)))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of this strategy on any number of processes, or a file of another strategy."""
        path = Path(self.broadcast(checkpoint_path))
        if self.global_rank == 0:
            sharded_checkpoint.recover(path)
        self.barrier()
        assert self.model is not None and self.lightning_module is not None
        strict = self.lightning_module.strict_loading
        if sharded_checkpoint.is_sharded(path):
            rest = sharded_checkpoint.load_sharded(path, self.model, self.optimizers, strict)
            self._restore_choice(rest)
            return rest
        if path.is_dir():
            raise UserError(
                f"ckpt_path = {str(path)!r} is a folder without {sharded_checkpoint.METADATA}: it was cut short, or is "
                "no checkpoint. Give an earlier one."
            )
        checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        sharded_checkpoint.load_full(checkpoint, self.model, self.optimizers, strict)
        self._restore_choice(checkpoint)
        return checkpoint

    def teardown(self) -> None:
        """Give the precision plugin its own clipping back."""
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        super().teardown()


def _group_tied_weights(model: PreTrainedModel) -> None:
    """Leave tied embeddings to the root's FSDP group: a shared parameter has to be in one."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(ends[0], "weight", None) is getattr(ends[1], "weight", ends):
        names = {name for name, module in model.named_modules() if module in ends}
        model.fsdp_plan = {name: style for name, style in model.fsdp_plan.items() if name not in names}


class ExpertParallelStrategy(ExpertParallelMixin, ModelParallelStrategy):
    """Train a mixture of experts with its experts spread over ranks: ``Trainer(strategy="expert-parallel")``.

    Every rank has its own batches. The Hugging Face models of the LightningModule are sharded once `configure_model`
    has run: the experts over `expert_parallel_size` ranks (and by FSDP2 among the ranks that hold the same ones), the
    rest by FSDP2 over all. Rows travel between a token's rank and its experts' through a codec, one for each of four
    legs. Logs `comm/bytes_sent` and `comm/bytes_saved` (against BF16) of each optimizer step, summed over the ranks.
    Arguments as `ExpertParallelMixin`.
    """
