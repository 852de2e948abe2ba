"""`nvfp4 fit` with a comm overlay on two processes: checkpoint folder, Hugging Face export, and continuing on one."""

import pytest
import torch
from ranks import run_ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_nvfp4.commands import fit
from lightning_nvfp4.lm.hf_model import load_model

# The command line's libraries call one another by older names.
pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {
    "--data.sequence_length": 16,
    "--data.batch_size": 2,
    "--data.val_batches": 1,
    "--trainer.val_check_interval": 2,
}


def command(rank, folder, devices, steps, *words):
    files = ["recipes/pretrain.yaml", "recipes/comm/overlap.yaml", "recipes/comm/nvfp4-dispatch.yaml"]
    own = {"--trainer.default_root_dir": folder, "--trainer.devices": devices, "--trainer.max_steps": steps, **SMALL}
    arguments = [word for name in files for word in ("--config", name)]
    arguments += [str(word) for option in own.items() for word in option]
    quiet = ["--trainer.enable_progress_bar", "false"]
    trainer = fit.run(["fit", *arguments, *quiet, *words])
    return {name: float(value) for name, value in trainer.logged_metrics.items()}


def test_pretrain_on_two_processes_exports_and_continues_on_one(tmp_path):
    folder = str(tmp_path / "run")
    (metrics, _) = run_ranks(command, 2, folder, 2, 2, group=None, limit=120)
    assert metrics["comm/bytes_sent"] > 0 and metrics["comm/bytes_saved"] > 0
    dcp_to_torch_save(tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path / "whole.pt")
    saved = torch.load(tmp_path / "whole.pt", weights_only=False)["state_dict"]
    exported = load_model(folder).state_dict()
    assert all(torch.equal(exported[name.removeprefix("model.")], value) for name, value in saved.items())
    (resumed,) = run_ranks(command, 1, folder, 1, 3, "--ckpt_path", "last", group=None, limit=120)
    assert resumed["train/loss"] > 0
