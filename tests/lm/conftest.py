"""A tiny model, tokenizer and data that are functions of an index, for the tests of the language-model modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_nvfp4.plugins.checkpoint_io import AtomicCheckpointIO

VOCABULARY = ["<pad>", "<eos>", "<turn>", "<user>", "<assistant>", "<unk>"] + [f"w{i}" for i in range(6, 64)]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <turn> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class IndexedLoader:
    """Batch k is `make(k)`; continues after the batches that a checkpoint says were consumed."""

    def __init__(self, make: Any, length: int) -> None:
        self.make, self.length, self.position = make, length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.length:
            self.position += 1
            yield self.make(self.position - 1)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class IndexedData(LightningDataModule):
    def __init__(self, make: Any, tokenizer: Any, length: int = 1000) -> None:
        super().__init__()
        self.make, self.tokenizer, self.length = make, tokenizer, length

    def train_dataloader(self) -> IndexedLoader:
        return IndexedLoader(self.make, self.length)

    def val_dataloader(self) -> IndexedLoader:
        return IndexedLoader(self.make, 2)


def lm_batch(index: int, rows: int = 4, length: int = 12) -> dict[str, torch.Tensor]:
    """Ascending tokens from a random start: a rule that a tiny model learns."""
    generator = torch.Generator().manual_seed(index)
    start = torch.randint(6, 30, (rows, 1), generator=generator)
    tokens = start + torch.arange(length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def prompt_batch(index: int, prompts: int = 6) -> dict[str, Any]:
    """Prompts of two lengths, padded on the left."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(6, 64, (prompts, 5), generator=generator)
    mask = torch.ones_like(tokens)
    mask[::2, :2] = 0
    return {
        "input_ids": tokens * mask,
        "attention_mask": mask,
        "references": [{"kind": "exact", "answer": str(index)}] * prompts,
    }


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>", "<user>", "<assistant>"]})
    return tokenizer


@pytest.fixture
def moe_fields() -> dict[str, Any]:
    """Two MoE blocks, tied embeddings, load balance loss."""
    return {
        "model_type": "qwen3_moe",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.01,
        "initializer_range": 0.06,
        "norm_topk_prob": True,
    }


@pytest.fixture
def dense_fields() -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "initializer_range": 0.06,
    }


@pytest.fixture
def lm_data(tokenizer: PreTrainedTokenizerFast) -> Any:
    return lambda **options: IndexedData(lm_batch, tokenizer, **options)


@pytest.fixture
def prompt_data(tokenizer: PreTrainedTokenizerFast) -> Any:
    return lambda **options: IndexedData(prompt_batch, tokenizer, **options)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Any:
    """Trainer on one CPU thread's worth of work, nothing but what a test asks for."""

    def make(max_steps: int, **options: Any) -> Trainer:
        settings = {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": max_steps,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "default_root_dir": tmp_path,
            "plugins": [AtomicCheckpointIO()],
        }
        return Trainer(**(settings | options))

    return make
