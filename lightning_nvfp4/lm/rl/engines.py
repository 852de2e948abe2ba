"""Where completions are sampled: the engines behind one interface, and the batches that a step's prompts go in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.lm.rl.rollout import Rollout, Sampling, sample

EngineName = Literal["transformers", "continuous", "vllm"]


@dataclass(frozen=True)
class RolloutConfig:
    """How a step's completions are sampled.

    Attributes:
        engine: `transformers` generates with the KV cache; a resumed run draws the same completions. `continuous` is
            transformers' continuous batching (CUDA, dense or mixture models without sharding), which refills a row as
            soon as one has ended, for long completions of very different lengths; it reads random numbers in an order
            that the scheduler chooses, so that a resumed run is not the same bit for bit. `vllm` asks a vLLM server.
        batch_size: completions generated at a time, whole groups, prompts of similar length together; the rewards of
            one batch are computed while the next is generated. None takes all prompts of a step at once.
        url: of the vLLM server, such as http://localhost:8000.
        weights_folder: where the weights of each step are left for the vLLM server to load; both must see it.
        timeout: seconds that one request to the server may take.
    """

    engine: EngineName = "transformers"
    batch_size: int | None = None
    url: str | None = None
    weights_folder: str | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.engine not in get_args(EngineName):
            raise unknown("rollout.engine", self.engine, get_args(EngineName))
        if self.batch_size is not None and self.batch_size < 1:
            raise UserError(f"rollout.batch_size is {self.batch_size}: it must be at least 1, or null for all at once.")
        if not 0 < self.timeout < math.inf:
            raise UserError(f"rollout.timeout is {self.timeout}: it must be a number of seconds above 0.")
        if self.engine == "vllm" and not (self.url and self.weights_folder):
            raise UserError(
                "rollout.engine is vllm: set rollout.url to the address of the server, and rollout.weights_folder to a "
                "folder that this process and the server share."
            )


class RolloutEngine(Protocol):
    """Samples completions with the weights of `model`."""

    def update_weights(self, model: PreTrainedModel, weights: Any, tokenizer: Any) -> None:
        """Take over the weights (`export.gather_weights`) that `model` has now; called where `needs_weights`."""
        ...

    needs_weights: bool

    def sample(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        attention_mask: Tensor,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollout:
        """Draw completions; arguments and result are those of `rollout.sample`."""
        ...


class TransformersEngine:
    """`rollout.sample`, in the numerics of training."""

    needs_weights = False
    sample = staticmethod(sample)

    def update_weights(self, model: PreTrainedModel, weights: Any, tokenizer: Any) -> None:
        """Nothing to do: the model itself generates."""


def make_engine(config: RolloutConfig) -> RolloutEngine:
    """Return the engine of `config`."""
    if config.engine == "vllm":
        from lightning_nvfp4.lm.rl.vllm_engine import VLLMEngine

        assert config.url is not None and config.weights_folder is not None
        return VLLMEngine(config.url, config.weights_folder, config.timeout)
    if config.engine == "continuous":
        from lightning_nvfp4.lm.rl.continuous import ContinuousEngine

        return ContinuousEngine()
    return TransformersEngine()


def prompt_batches(attention_mask: Tensor, num_prompts: int | None) -> Iterator[tuple[Tensor, slice]]:
    """Yield the rows of each batch of prompts and the columns that their longest needs.

    Args:
        attention_mask: (N, P), left-padded.
        num_prompts: prompts of a batch, which are then sorted by length; None leaves all in one batch as they are.
    """
    rows = torch.arange(len(attention_mask), device=attention_mask.device)
    if num_prompts is None or num_prompts >= len(rows):
        yield rows, slice(None)
        return
    lengths = attention_mask.sum(dim=1)
    for chosen in lengths.argsort(stable=True).split(num_prompts):
        yield chosen, slice(attention_mask.shape[1] - int(lengths[chosen].max()), None)
