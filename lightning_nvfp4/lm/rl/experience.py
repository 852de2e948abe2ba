"""`SamplingLM`: a language model that samples completions of prompts and has them scored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_nvfp4.lm.export import gather_weights
from lightning_nvfp4.lm.model import CausalLM
from lightning_nvfp4.lm.rl.engines import RolloutConfig, RolloutEngine, prompt_batches
from lightning_nvfp4.lm.rl.objective import zero_variance
from lightning_nvfp4.lm.rl.reward_workers import Components, RewardWorkers
from lightning_nvfp4.lm.rl.rewards import RewardOptions, checked, score_components
from lightning_nvfp4.lm.rl.rollout import Rollout, Sampling, join
from lightning_nvfp4.lm.stop_tokens import stop_token_ids

Reward = Callable[[list[str], list[dict[str, Any]]], list[float]]


class SamplingLM(CausalLM):
    """What GRPO learns from: rollouts, their texts and rewards; and the clock of a step. `GRPO` sets the attributes."""

    group_size: int
    max_new_tokens: int
    temperature: float
    reward: Reward | None
    reward_weights: dict[str, float]
    reward_options: RewardOptions
    resample_limit: int
    rollout: RolloutConfig
    _engine: RolloutEngine
    _workers: RewardWorkers
    _seconds: dict[str, float]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._seconds = {"step": time.perf_counter(), "rollout": 0.0, "reward_wait": 0.0}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log how the wall time of this step was spent."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        step = time.perf_counter() - self._seconds["step"]
        shares = {f"time/{name}_share": self._seconds[name] / step for name in ("rollout", "reward_wait")}
        self.log_dict({"time/step": step} | shares, batch_size=1)

    def on_fit_end(self) -> None:
        """Let go of the threads."""
        self._workers.close()

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def _hand_over_weights(self) -> None:
        """Bring an engine outside of this process up to date; every rank takes part in gathering shards."""
        if self._engine.needs_weights:
            weights = gather_weights(self.network)
            if self.trainer.is_global_zero:
                self._engine.update_weights(self.network, weights, self._tokenizer)
            self.trainer.strategy.barrier("rollout weights")

    def _experience(
        self, batch: dict[str, Any], generator: torch.Generator, temperature: float | None = None, group_size: int = 0
    ) -> tuple[Rollout, list[str], dict[str, Tensor]]:
        """Sample every prompt of `batch`, and score batch after batch of completions beside the sampling.

        Returns the rollout, its texts, and the values (B,) of each reward.
        """
        group_size = group_size or self.group_size
        temperature = self.temperature if temperature is None else temperature
        size = self.rollout.batch_size
        parts, texts, scores, places = [], [], [], []
        for rows, columns in prompt_batches(batch["attention_mask"], size and max(1, size // group_size)):
            with self._clock("rollout"):
                prompts = {name: batch[name][rows][:, columns] for name in ("input_ids", "attention_mask")}
                part = self._sample(prompts, generator, temperature, group_size)
            parts.append(part)
            texts += self._decode(part)
            references = [batch["references"][row] for row in rows.tolist() for _ in range(group_size)]
            scores.append(self._workers.submit(texts[-len(references) :], references))
            places.append(rows)
        with self._clock("reward_wait"):
            components = [self._workers.result(score) for score in scores]
        group = torch.arange(group_size, device=self.device)
        order = torch.cat([(rows.unsqueeze(1) * group_size + group).flatten() for rows in places]).argsort()
        joined = {name: [value for part in components for value in part[name]] for name in self.reward_weights}
        values = {
            name: torch.tensor(column, dtype=torch.float32, device=self.device)[order]
            for name, column in joined.items()
        }
        return join(parts, self._pad_id).rows(order), [texts[place] for place in order.tolist()], values

    def _resample(
        self, batch: dict[str, Any], generator: torch.Generator, rollout: Rollout, texts: list[str], rewards: Tensor
    ) -> tuple[Rollout, list[str], Tensor, Tensor]:
        """Draw groups of equal rewards again, up to the limit; the last entry counts them."""
        count = torch.zeros((), device=self.device)
        group = torch.arange(self.group_size, device=self.device)
        for _ in range(self.resample_limit):
            flat = zero_variance(rewards.view(-1, self.group_size)).nonzero().flatten()
            # All ranks go on together: sampling a sharded model is a collective.
            if not self.trainer.strategy.reduce(torch.tensor(float(len(flat)), device=self.device), reduce_op="sum"):
                break
            count += len(flat)
            prompts = flat if len(flat) else torch.zeros(1, dtype=torch.int64, device=self.device)
            chosen = {name: batch[name][prompts] for name in ("input_ids", "attention_mask")}
            references = [batch["references"][row] for row in prompts.tolist()]
            again, new_texts, components = self._experience(chosen | {"references": references}, generator)
            if not len(flat):
                continue
            order = torch.arange(len(rewards), device=self.device)
            rows = (flat.unsqueeze(1) * self.group_size + group).flatten()
            order[rows] = len(rewards) + torch.arange(len(rows), device=self.device)
            rollout = join([rollout, again], self._pad_id).rows(order)
            rewards = torch.cat([rewards, self._total(components)])[order]
            texts = [[*texts, *new_texts][place] for place in order.tolist()]
        return rollout, texts, rewards, count

    def on_validation_start(self) -> None:
        """Validate the weights that are there now."""
        self._hand_over_weights()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log `val/reward` of the most likely completion of every prompt."""
        generator = torch.Generator(device=self.device)  # greedy: nothing is drawn from it
        rewards = self._total(self._experience(batch, generator, temperature=0.0, group_size=1)[2])
        self.log("val/reward", rewards.mean(), prog_bar=True, batch_size=len(rewards), sync_dist=True)

    @property
    def _tokenizer(self) -> Any:
        return getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)

    def _sample(
        self, batch: dict[str, Any], generator: torch.Generator, temperature: float, group_size: int
    ) -> Rollout:
        return self._engine.sample(
            self.network,
            batch["input_ids"],
            batch["attention_mask"],
            Sampling(self.max_new_tokens, temperature, stop_token_ids(self._tokenizer), self._pad_id, group_size),
            generator,
        )

    @property
    def _pad_id(self) -> int:
        pad_id = self._tokenizer.pad_token_id
        return next(iter(stop_token_ids(self._tokenizer)), 0) if pad_id is None else pad_id

    def _decode(self, rollout: Rollout) -> list[str]:
        rows = zip(rollout.completions.tolist(), rollout.completion_mask.sum(dim=1).tolist(), strict=True)
        return self._tokenizer.batch_decode([tokens[:length] for tokens, length in rows], skip_special_tokens=True)

    def _components(self, texts: list[str], references: list[dict[str, Any]]) -> Components:
        """The values of every reward; runs in a worker."""
        if self.reward is None:
            return score_components(texts, references, list(self.reward_weights), self.reward_options)
        return {"reward": checked(self._reward_name, self.reward(texts, references), len(texts))}

    @property
    def _reward_name(self) -> str:
        return f"reward, {self.reward!r}," if self.reward else f"rewards ({', '.join(self.reward_weights)})"

    def _total(self, components: dict[str, Tensor]) -> Tensor:
        """The weighted sum of the rewards, (B,) FP32."""
        return torch.stack([weight * components[name].float() for name, weight in self.reward_weights.items()]).sum(0)
