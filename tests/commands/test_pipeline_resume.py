"""An arm killed with SIGKILL in pretraining and again in RL ends with the weights of one that was never killed."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

# Runs a job as the pipeline does, and kills itself after a given step of a given stage.
_DRIVER = """
import os, signal, sys
from lightning.pytorch import Callback
from lightning_nvfp4.commands import fit, pipeline_worker

job, stage, step = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Kill(Callback):
    def on_train_batch_end(self, trainer, *_):
        if os.path.basename(trainer.default_root_dir) == stage and trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)

original = fit.run
fit.run = lambda arguments, extra=None: original(arguments, [*(extra or []), Kill()])
sys.exit(pipeline_worker.main(job))
"""
_MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
    "output_router_logits": True,
}


def _stage(name: str, config: str, steps: int, cadence: int, **settings: Any) -> dict[str, Any]:
    origin = {key: settings.pop(key, None) for key in ("continues", "starts_from")}
    values = {"trainer.max_steps": steps, "trainer.callbacks.init_args.every_n_train_steps": cadence, **settings}
    seeded = ["model", "data"]
    return {"name": name, "config": config, **origin, "set": values, "seeded": seeded, "evaluate": False}


@pytest.fixture
def job(tmp_path: Path, root: Path) -> dict[str, Any]:
    recipe = yaml.safe_load((root / "recipes" / "pretrain.yaml").read_text(encoding="utf-8"))
    recipe["model"]["init_args"]["model"] = _MODEL
    recipe["data"]["init_args"] |= {"sequence_length": 32, "batch_size": 2}
    (tmp_path / "pretrain.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    small_rl = {
        "data.init_args.prompts_per_step": 2,
        "model.init_args.group_size": 2,
        "model.init_args.max_new_tokens": 4,
        "model.init_args.reward": "letters.reward",
    }
    # An untrained model earns nothing from the real reward, and would learn nothing.
    (tmp_path / "letters.py").write_text(
        "def reward(texts, references):\n    return [float(sum(map(ord, text)) % 2) for text in texts]\n",
        encoding="utf-8",
    )
    return {
        "precision": "nvfp4-hybrid",
        "overrides": None,
        "overlay": str(root / "recipes" / "precision" / "nvfp4-hybrid.yaml"),
        "overlays": [],
        "seed": 3,
        "threads": 1,
        "eval": None,
        "allow_code_execution": False,
        "stages": [
            _stage("pretrain", str(tmp_path / "pretrain.yaml"), 5, 2),
            _stage("rl", str(root / "recipes" / "rl.yaml"), 4, 2, starts_from="pretrain", **small_rl),
        ],
    }


def _run(folder: Path, job: dict[str, Any], stage: str = "-", step: int = -1) -> int:
    folder.mkdir(exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    command = [sys.executable, "-c", _DRIVER, str(folder / "job.json"), stage, str(step)]
    environment = {**os.environ, "PYTHONPATH": str(folder.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode in (0, -9), done.stdout + done.stderr
    return done.returncode


def test_a_killed_arm_ends_as_one_never_killed(tmp_path: Path, job: dict[str, Any]) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert _run(whole, job) == 0
    assert _run(killed, job, "pretrain", 3) == -9
    assert not (killed / "pretrain" / "done.json").exists()
    assert _run(killed, job, "rl", 3) == -9
    assert (killed / "pretrain" / "done.json").exists()
    assert not (killed / "rl" / "done.json").exists()
    assert _run(killed, job) == 0
    for stage in ("pretrain", "rl"):
        for name in ("hf/model.safetensors", "metrics.csv"):
            assert (killed / stage / name).read_bytes() == (whole / stage / name).read_bytes(), (stage, name)
    with (whole / "rl" / "metrics.csv").open(newline="", encoding="utf-8") as file:
        assert any(float(row["train/grad_norm"]) > 0 for row in csv.DictReader(file))  # RL did train
    assert json.loads((killed / "progress.json").read_text(encoding="utf-8"))["state"] == "done"
