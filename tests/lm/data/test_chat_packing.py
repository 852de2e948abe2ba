"""Packed conversations: none is cut, none sees another, and the loss is that of the conversations on their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_nvfp4.lm.data import ChatData
from lightning_nvfp4.lm.data.packing import IGNORED
from lightning_nvfp4.lm.hf_model import build_model
from lightning_nvfp4.nn.inference import inference

FIELDS: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
MODELS = {
    "qwen3": FIELDS | {"model_type": "qwen3", "intermediate_size": 64},
    "qwen3_moe": FIELDS
    | {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture
def data(tmp_path: Path, tokenizer_folder: str) -> Any:
    path = tmp_path / "chat.jsonl"
    rows = [{"prompt": "q" * (1 + i % 7), "completion": "abc"[: 1 + i % 3] * (1 + i % 5)} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**options: Any) -> ChatData:
        settings = {"max_length": 48, "batch_size": 3, "shuffle_rows": 40}
        return ChatData(path=str(path), val_path=str(path), tokenizer=tokenizer_folder, **(settings | options))

    return make


def documents(batch: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    found = []
    for tokens, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        for start, end in zip(starts, starts[1:], strict=False):
            assert positions[start:end].tolist() == list(range(end - start)) and labels[start] == IGNORED
            if (labels[start:end] != IGNORED).any():
                found.append((tokens[start:end].tolist(), labels[start:end].tolist()))
    return found


def test_every_conversation_is_in_one_row_whole(data: Any) -> None:
    alone = [
        (row[mask.bool()].tolist(), labels[mask.bool()].tolist())
        for batch in data(val_batches=None).val_dataloader()
        for row, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
    ]
    packed = list(data(packing=True, val_batches=None).val_dataloader())
    assert [document for batch in packed for document in documents(batch)] == alone and len(alone) == 40
    assert sum(len(batch["input_ids"]) for batch in packed) < 20
    assert {batch["input_ids"].shape[1] for batch in packed} == {48}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", [None, "nvfp4-hybrid"])
def test_a_packed_conversation_has_the_logits_that_it_has_alone(data: Any, name: str, precision: str | None) -> None:
    """FP32: to the rounding of a longer sum. In 4 bits too: a token's scales are its own."""
    model = build_model(MODELS[name], seed=0).eval()
    batch = next(iter(data(packing=True).train_dataloader()))

    def run(**inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if precision is None:
                return model(**inputs, use_cache=False).logits
            with inference(model, precision):
                return model(**inputs, use_cache=False).logits.float()

    packed = run(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    compared = 0
    for row in range(len(packed)):
        starts = [*(batch["position_ids"][row] == 0).nonzero().flatten().tolist(), packed.shape[1]]
        for start, end in zip(starts, starts[1:], strict=False):
            alone = run(input_ids=batch["input_ids"][row : row + 1, start:end])[0]
            # BF16 attention over another layout may round a last bit the other way, which 4 bits can magnify.
            bound = 2e-5 if precision is None else 0.1 * float(alone.abs().max())
            assert (packed[row, start:end] - alone).abs().max() < bound
            compared += start > 0
    assert compared >= 6
    blind = run(input_ids=batch["input_ids"])  # without the positions documents see one another
    assert (blind - packed).abs().max() > 0.05


def test_a_resumed_run_gets_the_packs_of_one_that_was_not_stopped(data: Any) -> None:
    loader = data(packing=True).train_dataloader()
    straight = iter(loader)
    for _ in range(3):
        next(straight)
    state = loader.state_dict()
    rest = [next(straight) for _ in range(4)]
    again = data(packing=True).train_dataloader()
    again.load_state_dict(json.loads(json.dumps(state)))
    for expected, batch in zip(rest, again, strict=False):
        assert all(torch.equal(expected[name], batch[name]) for name in expected)
