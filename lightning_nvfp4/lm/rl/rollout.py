"""Sampling completions with the model that is being trained.

Tokens are drawn by the Gumbel maximum: argmax(logits / temperature + g) with independent standard Gumbel g has exactly
the distribution softmax(logits / temperature). The noise comes from the rollout's own generator inside a logits
processor and Hugging Face's `generate` decodes greedily, because its own sampling reads the global random state, which
must stay as it is for a run to be resumable and for one rank's sampling not to depend on what ran before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator as Generates
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.hf_model import router_options, text_config
from lightning_nvfp4.lm.rl.objective import token_logps
from lightning_nvfp4.lm.rl.routing import recorded_routing


@dataclass(frozen=True)
class Rollout:
    """B = prompts x group_size completions; row i * group_size + j is completion j of prompt i.

    `sequences` (B, P + T) int64: the left-padded prompt and the right-padded completion. `attention_mask` (B, P + T)
    int64. `completion_mask` (B, T) bool: the sampled tokens, the stop token included. `logps` (B, T) FP32: of the
    sampled tokens under softmax(logits / temperature) over the whole vocabulary, the distribution they were drawn from
    (at temperature 1, the model's own); 0 outside the mask. `truncated` (B,) bool: no stop token within the limit.
    `routing` (B, T, L, K) int16, or None where it is not known: the experts that L mixture layers chose for the token
    that each completion token was predicted from, in ascending order.
    """

    sequences: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    logps: Tensor
    truncated: Tensor
    routing: Tensor | None = None

    def rows(self, index: Tensor) -> Rollout:
        """The rows of `index`, an int64 vector."""
        taken: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            taken[field.name] = None if value is None else value[index]
        return Rollout(**taken)

    @property
    def completions(self) -> Tensor:
        """(B, T) int64, padding included."""
        return self.sequences[:, -self.completion_mask.shape[1] :]

    @property
    def position_ids(self) -> Tensor:
        """(B, P + T) int64: 0 at each row's first real token, as `generate` counts."""
        return position_ids(self.attention_mask)


def join(parts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Put the rows of several rollouts under one another, prompts and completions padded to the longest."""
    if len(parts) == 1:
        return parts[0]
    longest = max(part.completion_mask.shape[1] for part in parts)
    prompt = max(part.sequences.shape[1] - part.completion_mask.shape[1] for part in parts)
    padded = []
    for part in parts:
        right = longest - part.completion_mask.shape[1]
        left = prompt - (part.sequences.shape[1] - part.completion_mask.shape[1])
        padded.append(
            Rollout(
                sequences=pad(part.sequences, (left, right), value=pad_id),
                attention_mask=pad(part.attention_mask, (left, right)),
                completion_mask=pad(part.completion_mask, (0, right)),
                logps=pad(part.logps, (0, right)),
                truncated=part.truncated,
                routing=None if part.routing is None else pad(part.routing, (0, 0, 0, 0, 0, right)),
            )
        )
    routing = [part.routing for part in padded if part.routing is not None]
    return Rollout(
        *(torch.cat([getattr(part, field.name) for part in padded]) for field in fields(Rollout)[:-1]),
        routing=torch.cat(routing) if len(routing) == len(parts) else None,
    )


def from_completions(
    input_ids: Tensor, attention_mask: Tensor, completions: Sequence[tuple[list[int], list[float], bool]], pad_id: int
) -> Rollout:
    """Make a rollout of what another engine generated: (tokens, their log-probabilities, truncated) for each row.

    input_ids, attention_mask: (B, P), left-padded, one row a completion.
    """
    device = input_ids.device
    longest = max(len(tokens) for tokens, _, _ in completions)
    tokens_BT = torch.full((len(completions), longest), pad_id, dtype=torch.int64)
    logps_BT, mask_BT = torch.zeros(len(completions), longest), torch.zeros(len(completions), longest, dtype=torch.bool)
    for row, (tokens, logps, _) in enumerate(completions):
        tokens_BT[row, : len(tokens)] = torch.tensor(tokens)
        logps_BT[row, : len(tokens)] = torch.tensor(logps)
        mask_BT[row, : len(tokens)] = True
    mask = mask_BT.to(device)
    return Rollout(
        sequences=torch.cat([input_ids, tokens_BT.to(device)], dim=1),
        attention_mask=torch.cat([attention_mask, mask.to(attention_mask.dtype)], dim=1),
        completion_mask=mask,
        logps=logps_BT.to(device),
        truncated=torch.tensor([truncated for _, _, truncated in completions], device=device),
    )


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions of a padded batch: the number of real tokens before each token."""
    return (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)


def without_padding(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Return the real tokens of each row of a padded batch."""
    return [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]


def rollout_generator(seed: int, step: int, micro_batch: int, rank: int, device: torch.device) -> torch.Generator:
    """A generator that is a function of its arguments; distinct arguments give independent streams."""
    state = np.random.SeedSequence((seed, step, micro_batch, rank)).generate_state(1, np.uint64)[0]
    return torch.Generator(device=device).manual_seed(int(state) >> 1)


class GumbelSampler(LogitsProcessor):
    """Perturbs logits so that their argmax is a sample, and keeps the log-probabilities of what was drawn.

    Args:
        temperature: 0 takes the most likely token, and its log-probability at temperature 1.
        generator: source of the noise, on the logits' device.
    """

    def __init__(self, temperature: float, generator: torch.Generator) -> None:
        self.temperature = temperature
        self.generator = generator
        self.logps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores: (B, V) raw FP32 logits of the next token -> perturbed logits, (B, V)."""
        perturbed = scores
        if self.temperature > 0:
            # -log of a standard exponential is a standard Gumbel; the floor keeps an exact zero from winning always.
            noise = torch.empty_like(scores).exponential_(generator=self.generator)
            noise.clamp_(min=torch.finfo(noise.dtype).tiny)
            perturbed = scores / self.temperature - noise.log_()
        drawn = perturbed.argmax(dim=-1, keepdim=True)
        self.logps.append(token_logps(scores.unsqueeze(1), drawn, self.temperature or 1.0).squeeze(1))
        return perturbed


@dataclass(frozen=True)
class Sampling:
    """What is drawn for each prompt.

    Attributes:
        max_new_tokens: longest completion, stop token included.
        temperature: of the sampling distribution; 0 is greedy.
        stop_ids: tokens that end a completion.
        pad_id: fills rows that have ended.
        group_size: completions a prompt.
    """

    max_new_tokens: int
    temperature: float
    stop_ids: Sequence[int]
    pad_id: int
    group_size: int = 1


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    sampling: Sampling,
    generator: torch.Generator,
) -> Rollout:
    """Draw the completions of every prompt, all in one batch, with the KV cache.

    The model runs in the caller's autocast context with every weight quantized once for the whole rollout; dropout is
    off. Global random state, the model's mode and its generation settings are left as they were.

    Args:
        model: the Hugging Face model in training.
        input_ids: (N, P) int64 prompts, left-padded.
        attention_mask: (N, P), 0 at padding.
        sampling: what is drawn.
        generator: source of randomness, on the model's device.

    Raises:
        UserError: prompt and completion exceed the model's positions, or a prompt is padded on the right.
    """
    from lightning_nvfp4.nn.inference import cached_weights

    check_prompts(model, input_ids, attention_mask, sampling.max_new_tokens)
    input_ids = input_ids.repeat_interleave(sampling.group_size, dim=0)
    attention_mask = attention_mask.repeat_interleave(sampling.group_size, dim=0)
    sampler = GumbelSampler(sampling.temperature, generator)
    settings = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,
        use_cache=True,
        eos_token_id=list(sampling.stop_ids) or None,
        pad_token_id=sampling.pad_id,
    )
    with (
        _generating(model, settings),
        cached_weights(model),
        recorded_routing(model, len(input_ids), keep=1) as routing,
    ):
        generate: Any = model.generate
        sequences = generate(
            input_ids,
            attention_mask=attention_mask,
            generation_config=settings,
            logits_processor=LogitsProcessorList([sampler]),
            synced_gpus=is_sharded(model),
            **router_options(model, load_balance=False),
        )
    completions = sequences[:, input_ids.shape[1] :]
    stops = torch.isin(completions, torch.tensor(list(sampling.stop_ids), device=completions.device))
    ended_before = stops.long().cumsum(dim=1) - stops.long() > 0
    mask = ~ended_before
    logps = torch.stack(sampler.logps[: completions.shape[1]], dim=1)
    return Rollout(
        sequences=sequences,
        attention_mask=torch.cat([attention_mask, mask.to(attention_mask.dtype)], dim=1),
        completion_mask=mask,
        logps=logps.masked_fill(~mask, 0.0),
        truncated=~stops.any(dim=1),
        routing=routing.chosen(completions.shape[1]),
    )


@contextlib.contextmanager
def _generating(model: PreTrainedModel, settings: GenerationConfig) -> Generates[None]:
    """Evaluation mode, exactly `settings`, and the experts implementation that training uses."""
    training, own_settings = model.training, model.generation_config
    model.eval()
    # `generate` fills gaps of its settings from here: a checkpoint's top_k or penalties would leak in.
    model.generation_config = settings
    # On a GPU `generate` swaps grouped experts for batched ones while decoding: other numerics than the trainer's.
    model.__dict__["_optimize_model_for_decode"] = contextlib.nullcontext
    try:
        yield
    finally:
        del model.__dict__["_optimize_model_for_decode"]
        model.generation_config = own_settings
        model.train(training)
        # Older releases of torch cache weight casts made without a graph and reuse them in the training forward that
        # follows in the same autocast region, which then has no gradient.
        torch.clear_autocast_cache()


def is_sharded(model: PreTrainedModel) -> bool:
    """Whether ranks run collectives in the forward pass, and so must decode the same number of steps."""
    return dist.is_initialized() and any(isinstance(parameter, DTensor) for parameter in model.parameters())


def check_prompts(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int) -> None:
    """Raise a `UserError` for prompts padded on the right, or too long for the model's positions."""
    if not bool(attention_mask[:, -1].all()):
        raise UserError("A prompt ends in padding: pad prompts on the left, so that completions follow them directly.")
    check_length(model, input_ids.shape[1], max_new_tokens)


def check_length(model: PreTrainedModel, prompt_length: int, max_new_tokens: int) -> None:
    """Raise a `UserError` where a prompt and its completion may exceed the model's positions."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    if limit is not None and prompt_length + max_new_tokens > limit:
        raise UserError(
            f"Prompts of {prompt_length} tokens and max_new_tokens = {max_new_tokens} exceed the model's "
            f"max_position_embeddings = {limit}: lower data.max_prompt_length, beyond which prompts are left out, or "
            "model.max_new_tokens."
        )
