from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    from lightning_nvfp4.lm.data.tokenizer import embedded_tokenizer

    return embedded_tokenizer()


@pytest.fixture(scope="session")
def checkpoint(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a stage, with a tiny random mixture-of-experts model."""
    from lightning_nvfp4.lm.hf_model import build_model

    model = build_model(
        {
            "model_type": "qwen3_moe",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
        },
        seed=0,
    )
    folder = tmp_path_factory.mktemp("run") / "sft"
    model.save_pretrained(folder / "hf")
    tokenizer.save_pretrained(folder / "hf")
    return folder
