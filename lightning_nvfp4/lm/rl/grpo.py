"""`GRPO`: reinforcement learning with verifiable rewards, sampling and training with one quantizer."""

from __future__ import annotations

import copy
import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.hf_model import router_options
from lightning_nvfp4.lm.model import DEFAULT_OPTIMIZER, DEFAULT_SCHEDULE
from lightning_nvfp4.lm.optim import OptimizerConfig, ScheduleConfig, as_config
from lightning_nvfp4.lm.rl.abort import AbortThresholds
from lightning_nvfp4.lm.rl.engines import RolloutConfig, make_engine
from lightning_nvfp4.lm.rl.experience import Reward, SamplingLM
from lightning_nvfp4.lm.rl.objective import (
    group_advantages,
    grpo_objective,
    token_entropy,
    token_logps,
)
from lightning_nvfp4.lm.rl.reward_workers import RewardWorkers
from lightning_nvfp4.lm.rl.rewards import BY_REFERENCE, RewardOptions, check_names
from lightning_nvfp4.lm.rl.rollout import Rollout, check_length, rollout_generator
from lightning_nvfp4.lm.rl.rollout_log import RolloutLog
from lightning_nvfp4.lm.rl.routing import recorded_routing, routing_agreement

# Completions logged of each prompt that is logged; a group has at least as many.
_LOGGED_PER_PROMPT = 2
# Stands in the place of a micro-batch in the seed of the minibatches' order.
_SHUFFLE = 2**32 - 1


DEFAULT_ABORT = AbortThresholds()
DEFAULT_REWARD_OPTIONS = RewardOptions()
DEFAULT_ROLLOUT = RolloutConfig()


class GRPO(SamplingLM):
    """Group-relative policy optimisation of `self.model` on prompts with verifiable answers.

    Batches are `{"input_ids" (N, P), "attention_mask" (N, P), "references": list of N dicts}`, prompts padded on the
    left; the datamodule's tokenizer decodes. A step samples `group_size` completions of every prompt with the weights
    and numerics of training, scores them, and updates the policy on them. Logged, averaged over tokens where nothing
    else is said: `rl/reward` and `rl/reward_std` (over completions, before any resampling; with several rewards
    `rl/reward_<name>` too), `rl/zero_variance_share` (groups that teach nothing), `rl/resampled_groups` (drawn again, a
    step), `rl/kl` (k3 estimate of KL(rollout || trainer), the cost of differing numerics), `rl/logp_diff` (mean
    absolute difference of the same log-probabilities), `rl/routing_agreement` (mixtures: share of tokens x layers whose
    experts are the same in rollout and trainer), `rl/entropy` (nats), `rl/clip_share`, `rl/tis_capped_share`,
    `rl/nonfinite_share`, `rl/length` (tokens) and `rl/truncated_share` (completions without a stop token). Wall times
    are `time/step` (s) and the shares of it `time/rollout_share` and `time/reward_wait_share`.

    The router's load balance loss is off in RL (`aux_loss_coef = 0`): it would pull the policy on its own samples,
    rewarded or not, and routers hardly move at RL's learning rates. Training does with several updates a rollout
    what it does with one, by manual optimisation, so that `trainer.max_steps` counts updates, not rollouts.

    Args:
        model: as in `CausalLM`.
        pretrained: as in `CausalLM`.
        optimizer: as in `CausalLM`.
        schedule: as in `CausalLM`; counts optimizer updates.
        seed: of the weights, and with the step and rank of the sampling.
        group_size: completions a prompt, at least 2.
        max_new_tokens: longest completion.
        temperature: of sampling; the policy that is trained is softmax(logits / temperature).
        clip_low: see `grpo_objective`.
        clip_high: see `grpo_objective`.
        tis_cap: bound of the truncated importance weight between rollout and trainer; None switches it off.
        beta: weight of the divergence from the initial model. Above 0, a frozen copy of that model is kept, which runs
            in high precision.
        scale_rewards: divide advantages by the group's standard deviation.
        mask_truncated: leave completions without a stop token out of the loss.
        updates_per_rollout: passes over each batch of rollouts.
        minibatches: optimizer steps a pass, each on as many of the completions, in an order drawn anew for each pass.
        gradient_clip_val: norm bound for several updates a rollout, where the Trainer's own is not available.
        aux_loss_coef: weight of the router's load balance loss.
        abort: values at which training stops.
        reward: function of completions and references, in place of `rewards`.
        rewards: names of rewards and the weights with which they are added up; `reference` is the one that a prompt's
            reference names by its `kind`, and the default.
        reward_options: limits of the named rewards.
        reward_workers: threads that compute the rewards of one batch of completions (see `rollout.batch_size`) while
            the next is generated; 0 computes them in between.
        reward_timeout: wall seconds that the rewards of a batch may take; a run whose reward hangs ends after that.
        resample_limit: how often groups whose rewards are all equal are drawn again, for lack of anything to learn.
        rollout: how completions are sampled.
        log_prompts: prompts a step whose first completions go to `<default_root_dir>/rollouts.jsonl` (at most 16 MiB).
    """

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        pretrained: str | None = None,
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
        schedule: ScheduleConfig = DEFAULT_SCHEDULE,
        seed: int = 0,
        group_size: int = 8,
        max_new_tokens: int = 24,
        temperature: float = 1.0,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        tis_cap: float | None = 2.0,
        beta: float = 0.0,
        scale_rewards: bool = True,
        mask_truncated: bool = False,
        updates_per_rollout: int = 1,
        minibatches: int = 1,
        gradient_clip_val: float | None = None,
        aux_loss_coef: float = 0.0,
        abort: AbortThresholds = DEFAULT_ABORT,
        reward: Reward | None = None,
        rewards: dict[str, float] | None = None,
        reward_options: RewardOptions = DEFAULT_REWARD_OPTIONS,
        reward_workers: int = 0,
        reward_timeout: float = 600.0,
        resample_limit: int = 0,
        rollout: RolloutConfig = DEFAULT_ROLLOUT,
        log_prompts: int = 2,
    ) -> None:
        super().__init__(model, pretrained, optimizer, schedule, seed, aux_loss_coef)
        self.group_size = _at_least("group_size", group_size, 2)
        self.max_new_tokens = int(_at_least("max_new_tokens", max_new_tokens, 1))
        if not 0 < temperature < math.inf:
            raise UserError(f"temperature is {temperature}: it must be a positive number, for samples to differ.")
        self.temperature = temperature
        self.clip_low = _at_least("clip_low", clip_low, 0)
        self.clip_high = _at_least("clip_high", clip_high, 0)
        self.tis_cap = None if tis_cap is None else _at_least("tis_cap", tis_cap, 1)
        self.beta = _at_least("beta", beta, 0)
        self.scale_rewards = scale_rewards
        self.mask_truncated = mask_truncated
        self.updates_per_rollout = int(_at_least("updates_per_rollout", updates_per_rollout, 1))
        self.minibatches = int(_at_least("minibatches", minibatches, 1))
        self.automatic_optimization = self.updates_per_rollout * self.minibatches == 1
        if gradient_clip_val is not None and self.automatic_optimization:
            raise UserError(
                "gradient_clip_val is for updates_per_rollout or minibatches above 1; with one update set "
                "trainer.gradient_clip_val."
            )
        self.gradient_clip_val = (
            None if gradient_clip_val is None else _at_least("gradient_clip_val", gradient_clip_val, 0)
        )
        self.abort = as_config(AbortThresholds, abort, "abort")
        self.reward = reward
        if reward is not None and rewards is not None:
            raise UserError("reward and rewards are both set: give a function, or names with weights.")
        self.reward_weights = {"reward": 1.0} if reward else dict(rewards or {BY_REFERENCE: 1.0})
        if reward is None:
            check_names(self.reward_weights)
        for name, weight in self.reward_weights.items():
            if not math.isfinite(weight):
                raise UserError(f"rewards.{name} is {weight}: a weight must be a number.")
        self.rewards = rewards
        self.reward_options = as_config(RewardOptions, reward_options, "reward_options")
        self.reward_workers = int(_at_least("reward_workers", reward_workers, 0))
        self.resample_limit = int(_at_least("resample_limit", resample_limit, 0))
        self.rollout = as_config(RolloutConfig, rollout, "rollout")
        self._engine = make_engine(self.rollout)
        self.reward_timeout = reward_timeout
        self._workers = RewardWorkers(self._components, self.reward_workers, reward_timeout, self._reward_name)
        self._seconds: dict[str, float] = {}
        self.log_prompts = int(_at_least("log_prompts", log_prompts, 0))
        self._reference: list[PreTrainedModel] = []  # in a list: no submodule, so no part of checkpoints or optimizers
        self._rollout_log: RolloutLog | None = None
        self._store_hyperparameters(
            **{name: self.hparams[name] for name in ("model", "pretrained", "seed", "aux_loss_coef")},
            **{
                name: getattr(self, name)
                for name in (
                    "group_size max_new_tokens temperature clip_low clip_high tis_cap beta scale_rewards "
                    "mask_truncated updates_per_rollout minibatches gradient_clip_val rewards reward_workers "
                    "reward_timeout resample_limit log_prompts"
                ).split()
            },
            abort=dataclasses.asdict(self.abort),
            reward_options=dataclasses.asdict(self.reward_options),
            rollout=dataclasses.asdict(self.rollout),
        )

    def configure_model(self) -> None:
        """Build the model, and with `beta` above 0 copy it before a checkpoint is loaded into it."""
        built = self.model is not None
        super().configure_model()
        if self.beta > 0 and not built:
            if self._trainer is not None and self.device_mesh is not None:
                raise UserError(
                    f"beta is {self.beta}, which keeps a whole reference model on every device: with a sharding "
                    "strategy set beta to 0."
                )
            self._reference = [copy.deepcopy(self.network).eval().requires_grad_(False)]

    def on_fit_start(self) -> None:
        """Check what the datamodule must offer, and put the reference model on the device."""
        super().on_fit_start()
        if self._tokenizer is None:
            raise UserError("GRPO decodes with the datamodule's tokenizer: fit with a datamodule that has one.")
        longest = getattr(self.trainer.datamodule, "max_prompt_length", None)  # type: ignore[attr-defined]
        if longest is not None:
            check_length(self.network, longest, self.max_new_tokens)
        for reference in self._reference:
            torch.nn.Module.to(reference, self.device)

    def on_train_start(self) -> None:
        """Open the log of completions where this run starts or resumes."""
        super().on_train_start()
        if self.log_prompts and self.trainer.is_global_zero:
            self._rollout_log = RolloutLog(Path(self.trainer.default_root_dir) / "rollouts.jsonl")
            self._rollout_log.rewind(self.trainer.global_step)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        """Sample, score and update on one batch of prompts."""
        micro_batch = batch_idx % self.trainer.accumulate_grad_batches
        generator = rollout_generator(self.seed, self.trainer.global_step, micro_batch, self.global_rank, self.device)
        self._hand_over_weights()
        rollout, texts, components = self._experience(batch, generator)
        rewards = first_rewards = self._total(components)
        metrics = {"reward": rewards.mean(), "reward_std": rewards.std()}
        if len(components) > 1:
            metrics |= {f"reward_{name}": values.mean() for name, values in components.items()}
        if self.resample_limit:
            rollout, texts, rewards, metrics["resampled_groups"] = self._resample(
                batch, generator, rollout, texts, first_rewards
            )
        advantages = group_advantages(rewards.view(-1, self.group_size), self.scale_rewards)
        mask = rollout.completion_mask
        if self.mask_truncated:
            mask = mask & ~rollout.truncated.unsqueeze(1)
        self._log_rollout(batch, rollout, texts, rewards)
        metrics |= {
            "zero_variance_share": advantages.zero_variance_share,
            "length": rollout.completion_mask.sum(dim=1).float().mean(),
            "truncated_share": rollout.truncated.float().mean(),
        }
        if self.automatic_optimization:
            loss, _, step_metrics = self._loss(rollout, mask, advantages.values.flatten(), old_logps=None)
            self._report(metrics | step_metrics)
            return loss
        self._update_repeatedly(rollout, mask, advantages.values.flatten(), metrics)
        return None

    def _update_repeatedly(
        self, rollout: Rollout, mask: Tensor, advantages: Tensor, metrics: dict[str, Tensor]
    ) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        parts = [torch.arange(len(advantages), device=self.device)]
        shuffle = rollout_generator(self.seed, self.trainer.global_step, _SHUFFLE, self.global_rank, self.device)
        old_logps, as_sampled = None, {}
        if self.minibatches > 1:
            if len(advantages) < self.minibatches:
                raise UserError(
                    f"minibatches is {self.minibatches}, and a step has {len(advantages)} completions: lower it."
                )
            with torch.no_grad():
                chunks = parts[0].tensor_split(self.minibatches)
                views = [self._policy(rollout.rows(rows)) for rows in chunks]
            old_logps, as_sampled = torch.cat([logps for logps, _, _ in views]), _mean([seen for _, seen, _ in views])
        clipped, described = [], []
        for number in range(self.updates_per_rollout):
            if self.minibatches > 1:
                order = torch.randperm(len(advantages), generator=shuffle, device=self.device)
                parts = list(order.tensor_split(self.minibatches))
            for rows in parts:
                part = rollout if self.minibatches == 1 else rollout.rows(rows)
                old = None if old_logps is None else old_logps[rows]
                loss, logps, step_metrics = self._loss(part, mask[rows], advantages[rows], old)
                if old_logps is None:
                    old_logps = logps.detach()
                if number == 0:
                    described.append(step_metrics)
                clipped.append(step_metrics["clip_share"])
                optimizer.zero_grad()  # type: ignore[union-attr]
                self.manual_backward(loss)
                optimizer.step()  # type: ignore[union-attr]
                schedule.step()  # type: ignore[union-attr]
        self._report(metrics | _mean(described) | as_sampled | {"clip_share": torch.stack(clipped).mean()})

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the norm, then clip where the Trainer cannot."""
        super().on_before_optimizer_step(optimizer)
        if self.gradient_clip_val is not None:
            self.clip_gradients(optimizer, self.gradient_clip_val, "norm")

    def _loss(
        self, rollout: Rollout, mask: Tensor, advantages: Tensor, old_logps: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss, the log-probabilities (B, T) with gradient, and metrics."""
        logps, described, aux_loss = self._policy(rollout)
        reference_logps = None
        if self._reference:
            with torch.no_grad():
                reference = self._reference[0]
                output = reference(**_inputs(rollout), use_cache=False, **router_options(reference, False))
                logits = _completion_logits(output.logits, rollout)
                reference_logps = token_logps(logits, rollout.completions, self.temperature)
        objective = grpo_objective(
            logps,
            logps.detach() if old_logps is None else old_logps,
            rollout.logps,
            advantages,
            mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            tis_cap=self.tis_cap,
            reference_logps_BT=reference_logps,
            beta=self.beta,
            # Data-parallel ranks average their gradients: dividing by their mean count weighs all tokens alike.
            denominator=self.trainer.strategy.reduce(mask.sum().float(), reduce_op="mean"),  # type: ignore[arg-type]
        )
        metrics = objective.metrics | described | {"loss": objective.loss.detach()}
        if aux_loss is None:
            return objective.loss, logps, metrics
        return objective.loss + self.load_balance_coef * aux_loss, logps, metrics | {"aux_loss": aux_loss.detach()}

    def _policy(self, rollout: Rollout) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """Return log-probabilities (B, T) with gradient, metrics, and the load balance loss where it is on."""
        mask = rollout.completion_mask
        length = mask.shape[1]
        compares = rollout.routing is not None
        recording = recorded_routing(self.network, len(mask), length + 1) if compares else nullcontext()
        with recording as record:
            output = self(**_inputs(rollout), **router_options(self.network, self.load_balance_coef > 0))
        logits = _completion_logits(output.logits, rollout)
        entropy = token_entropy(logits.detach(), self.temperature)
        metrics = {"entropy": entropy.masked_fill(~mask, 0.0).sum() / mask.sum()}
        routing = None if record is None else record.chosen(length)
        if routing is not None and rollout.routing is not None:
            metrics["routing_agreement"] = routing_agreement(rollout.routing, routing, mask)
        return token_logps(logits, rollout.completions, self.temperature), metrics, output.get("aux_loss")

    def _report(self, metrics: dict[str, Tensor]) -> None:
        """Log the step's metrics, averaged over ranks, and stop at the thresholds."""
        means = {name: self.trainer.strategy.reduce(value, reduce_op="mean") for name, value in metrics.items()}
        self.log_dict({f"rl/{name}": value for name, value in means.items()}, batch_size=1)
        self.log("reward", means["reward"], prog_bar=True, logger=False, batch_size=1)
        self.abort.check({name: float(value) for name, value in means.items()}, self.trainer.global_step)

    def _log_rollout(self, batch: dict[str, Any], rollout: Rollout, texts: list[str], rewards: Tensor) -> None:
        if self._rollout_log is None:
            return
        prompts = self._tokenizer.batch_decode(batch["input_ids"][: self.log_prompts], skip_special_tokens=True)
        rows = [
            index * self.group_size + offset for index in range(len(prompts)) for offset in range(_LOGGED_PER_PROMPT)
        ]
        self._rollout_log.append(
            [
                {
                    "step": self.trainer.global_step,
                    "prompt": prompts[row // self.group_size],
                    "completion": texts[row],
                    "reward": float(rewards[row]),
                    "truncated": bool(rollout.truncated[row]),
                }
                for row in rows
            ]
        )


def _mean(metrics: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([step[name] for step in metrics]).mean() for name in metrics[0]}


def _inputs(rollout: Rollout) -> dict[str, Tensor]:
    return {
        "input_ids": rollout.sequences,
        "attention_mask": rollout.attention_mask,
        "position_ids": rollout.position_ids,
        "logits_to_keep": rollout.completion_mask.shape[1] + 1,  # type: ignore[dict-item]
    }


def _completion_logits(logits: Tensor, rollout: Rollout) -> Tensor:
    """The logits that predict the completion: those one position to its left. (B, >= T + 1, V) -> (B, T, V)."""
    return logits[:, -rollout.completion_mask.shape[1] - 1 : -1]


def _at_least(name: str, value: float, low: float) -> Any:
    if not low <= value < math.inf:
        raise UserError(f"{name} is {value}: it must be a number of at least {low}.")
    return value
