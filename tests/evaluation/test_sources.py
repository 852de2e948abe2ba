"""Every form of checkpoint gives the weights that were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.sources import open_source
from lightning_nvfp4.lm.hf_model import build_model
from lightning_nvfp4.strategies.sharded_checkpoint import METADATA

FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {f"model.{name}": value for name, value in build_model(FIELDS, seed=7).state_dict().items()}


def same(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, weights[f"model.{name}"]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("sharded", [False, True])
def test_lightning_checkpoints(sharded: bool, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    rest = {"hyper_parameters": {"model": FIELDS, "pretrained": None, "seed": 0}}
    if sharded:
        dcp.save({"state_dict": weights}, checkpoint_id=path, no_dist=True)
        torch.save(rest, path / METADATA)
    else:
        torch.save({**rest, "state_dict": weights}, path)
    with pytest.raises(UserError, match="holds no tokenizer.*--tokenizer"):
        open_source(path)
    (tmp_path / "run" / "config.yaml").write_text("data: {init_args: {tokenizer: embedded}}\n")
    source = open_source(path)
    assert same(source.model, weights)
    assert source.tokenizer.chat_template
    before = source.fingerprint
    (path / METADATA if sharded else path).touch()
    assert open_source(path, "embedded").fingerprint != before, "another file may hold other weights"


def test_what_is_no_checkpoint_is_named(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.gguf': no such file"):
        open_source(tmp_path / "none.gguf")
    (tmp_path / "cut.ckpt").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match="cut.ckpt': not a whole Lightning checkpoint"):
        open_source(tmp_path / "cut.ckpt", "embedded")
    torch.save({"state_dict": weights}, tmp_path / "bare.ckpt")
    with pytest.raises(UserError, match="bare.ckpt' is not one of a CausalLM"):
        open_source(tmp_path / "bare.ckpt", "embedded")
    other = {"hyper_parameters": {"model": {**FIELDS, "hidden_size": 64}}, "state_dict": weights}
    torch.save(other, tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="does not fit its own hyper_parameters"):
        open_source(tmp_path / "other.ckpt", "embedded")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="GGUF"):
        open_source(tmp_path / "cut.gguf")
