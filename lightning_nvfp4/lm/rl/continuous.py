"""Sampling by transformers' continuous batching: a row that has ended makes room for the next prompt at once."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.hf_model import router_options
from lightning_nvfp4.lm.rl.rollout import (
    Rollout,
    Sampling,
    check_prompts,
    from_completions,
    is_sharded,
    without_padding,
)
from lightning_nvfp4.nn.inference import cached_weights

_PAGE = 64
_TOKENS_AT_ONCE = 2048


class ContinuousEngine:
    """`generate_batch` of transformers under the caller's autocast, with the log-probabilities of what it drew."""

    needs_weights = False

    def update_weights(self, model: PreTrainedModel, weights: Any, tokenizer: Any) -> None:
        """Nothing to do: the model itself generates."""

    @torch.no_grad()
    def sample(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        attention_mask: Tensor,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollout:
        """See `rollout.sample`. Seeded by the generator; which request draws which number is up to the scheduler."""
        check_prompts(model, input_ids, attention_mask, sampling.max_new_tokens)
        if is_sharded(model):
            raise UserError("rollout.engine is continuous, and the model is sharded: set it to transformers.")
        input_ids = input_ids.repeat_interleave(sampling.group_size, dim=0)
        attention_mask = attention_mask.repeat_interleave(sampling.group_size, dim=0)
        prompts = without_padding(input_ids, attention_mask)
        settings = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=sampling.temperature > 0,
            temperature=sampling.temperature or 1.0,
            top_k=0,
            eos_token_id=list(sampling.stop_ids) or None,
            pad_token_id=sampling.pad_id,
        )
        pages = -(-(input_ids.shape[1] + sampling.max_new_tokens) // _PAGE) + 1
        batching = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=pages * len(prompts),  # left to itself, the cache takes all the memory that is free
            max_batch_tokens=max(_TOKENS_AT_ONCE, len(prompts)),
            return_logprobs=True,
            use_cuda_graph=False,  # one would be captured anew in every step; grouped experts cannot be
            per_request_processors=False,
            auto_switch_to_flash=False,
        )
        devices = [input_ids.device] if input_ids.is_cuda else []
        with _generating(model), cached_weights(model), torch.random.fork_rng(devices=devices):
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
            generate: Any = model.generate_batch
            outputs = generate(
                prompts, generation_config=settings, continuous_batching_config=batching, warmup=False
            ).values()
        failed = next((output.error for output in outputs if output.error), None)
        if failed is not None or len(outputs) != len(prompts):
            raise RuntimeError(f"continuous batching gave {len(outputs)} of {len(prompts)} completions: {failed}")
        stops = set(sampling.stop_ids)
        rows = [
            (list(output.generated_tokens), list(output.logprobs), output.generated_tokens[-1] not in stops)
            for output in outputs
        ]
        return from_completions(input_ids, attention_mask, rows, sampling.pad_id)


@contextmanager
def _generating(model: PreTrainedModel) -> Any:
    """Evaluation mode, the caller's autocast in the scheduler's thread, and the attention as it was on exit."""
    device = model.device.type
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    autocast = torch.autocast(device, dtype, enabled, torch.is_autocast_cache_enabled())
    training, attention = model.training, str(model.config._attn_implementation)

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs["cache"]
        if "update" not in vars(cache):
            cache.update = partial(_update, cache.update, model.dtype)
        with autocast:
            return type(model).forward(model, *args, **kwargs, **router_options(model, load_balance=False))

    model.eval()
    model.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward
        model.set_attn_implementation(attention)
        model.train(training)
        torch.clear_autocast_cache()


def _update(update: Any, dtype: torch.dtype, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Write to a paged cache, which has the parameters' dtype, what autocast made; exact, as FP32 holds BF16."""
    return update(keys.to(dtype), values.to(dtype), *args, **kwargs)
