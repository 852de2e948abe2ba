"""Tiny random models of the architectures under test, and the smallest training loop around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_HEAD = {"head_dim": 16}


def _configs() -> dict[str, PreTrainedConfig]:
    return {
        "qwen3_moe": Qwen3MoeConfig(
            **_BASE, **_HEAD, intermediate_size=64, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2
        ),
        "mixtral": MixtralConfig(**_BASE, **_HEAD, intermediate_size=48, num_local_experts=4),
        "olmoe": OlmoeConfig(**_BASE, intermediate_size=48, num_experts=8, num_experts_per_tok=2),
        "gpt_oss": GptOssConfig(
            **_BASE,
            **_HEAD,
            intermediate_size=48,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            layer_types=["full_attention", "full_attention"],
        ),
        "deepseek_v3": DeepseekV3Config(
            **{**_BASE, "num_hidden_layers": 3, "num_key_value_heads": 4},
            intermediate_size=64,
            moe_intermediate_size=48,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            n_shared_experts=1,
        ),
        "nemotron_h": NemotronHConfig(
            **{**_BASE, "num_hidden_layers": 3},
            **_HEAD,
            intermediate_size=64,
            layers_block_type=["mamba", "moe", "attention"],
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            moe_shared_expert_intermediate_size=48,
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=2,
            use_mamba_kernels=False,
        ),
        "llama": LlamaConfig(**_BASE, **_HEAD, intermediate_size=96, tie_word_embeddings=True),
    }


ARCHITECTURES = tuple(_configs())


def tiny_model(name: str = "qwen3_moe", seed: int = 0, experts: str = "eager", **changes: Any) -> PreTrainedModel:
    """Return a random FP32 model of two or three layers; the same seed gives the same weights."""
    config = _configs()[name]
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation=experts)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "bias" in parameter_name and parameter.dim():
                    parameter.normal_(0, 0.1)
    return model


def tokens(batch: int = 2, length: int = 9, seed: int = 0, vocab: int = 128) -> Tensor:
    """Return (batch, length) random token ids."""
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


class UserModule(lightning.LightningModule):
    """What a user would write around a Hugging Face model."""

    def __init__(self, model: torch.nn.Module, lr: float = 1e-3) -> None:
        super().__init__()
        self.model, self.lr = model, lr
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def quiet_trainer(max_steps: int = 2, **arguments: Any) -> lightning.Trainer:
    """Return a CPU Trainer that writes nothing."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_steps": max_steps,
    }
    return lightning.Trainer(**{**defaults, **arguments})


class _Batches(torch.utils.data.Dataset[Tensor]):
    """Batch i is a pure function of i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        return tokens(2, self.length, seed=index)


class _Positions(torch.utils.data.Sampler[int]):
    """Indices in order, from where the last pass was left."""

    position = 0

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[int]:
        while self.position < len(self):
            self.position += 1
            yield self.position - 1


class ResumableLoader(torch.utils.data.DataLoader[Tensor]):
    """A loader that Lightning can resume in the middle of an epoch."""

    def __init__(self, length: int = 9) -> None:
        self.positions = _Positions()
        super().__init__(_Batches(length), batch_size=None, sampler=self.positions)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.positions.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.positions.position = state["position"]


def loader(length: int = 9) -> ResumableLoader:
    """Return a resumable stream of batches of two rows."""
    return ResumableLoader(length=length)


def same_state(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Return whether two modules hold bitwise equal states."""
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
