"""Laws of the atomic checkpoint plugin: the target is always the old file or the new one, whole."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.plugins import checkpoint_io
from lightning_nvfp4.plugins.checkpoint_io import AtomicCheckpointIO, AtomicFileMixin


def checkpoint(value: float, size: int = 1000) -> dict:
    return {"state_dict": {"weight": torch.full((size,), value)}, "global_step": int(value), "none": None}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint(1.0), path)
    return path


def test_saving_then_loading_gives_equal_content_and_leaves_one_file(saved: Path) -> None:
    loaded = AtomicCheckpointIO().load_checkpoint(saved)
    assert torch.equal(loaded["state_dict"]["weight"], torch.full((1000,), 1.0)) and loaded["global_step"] == 1
    AtomicCheckpointIO().save_checkpoint(checkpoint(2.0), str(saved))
    assert AtomicCheckpointIO().load_checkpoint(str(saved))["global_step"] == 2
    assert names(saved.parent) == ["last.ckpt"]


def test_files_are_what_the_stock_plugin_reads_and_writes(saved: Path, tmp_path: Path) -> None:
    assert TorchCheckpointIO().load_checkpoint(saved, weights_only=True)["global_step"] == 1
    TorchCheckpointIO().save_checkpoint(checkpoint(3.0), tmp_path / "stock.ckpt")
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / "stock.ckpt")["global_step"] == 3


def test_the_new_file_is_on_the_disk_before_it_takes_the_name(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        events.append("fsync folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "fsync file")
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        assert Path(source).parent == saved.parent and str(os.getpid()) in Path(source).name
        assert AtomicCheckpointIO().load_checkpoint(saved)["global_step"] == 1
        assert AtomicCheckpointIO().load_checkpoint(source)["global_step"] == 2
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    AtomicCheckpointIO().save_checkpoint(checkpoint(2.0), saved)
    assert events == ["fsync file", "replace", "fsync folder"]


def test_a_full_disk_leaves_the_previous_checkpoint_and_no_temporary(saved: Path) -> None:
    """RLIMIT_FSIZE makes the kernel itself refuse the write part of the way, as a full disk does."""
    before = saved.read_bytes()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"last\.ckpt cannot be written.*MiB free.*unchanged.*default_root_dir"):
            AtomicCheckpointIO().save_checkpoint(checkpoint(2.0, size=1_000_000), saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert saved.read_bytes() == before and names(saved.parent) == ["last.ckpt"]


def test_no_space_at_fsync_is_the_same_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device.*No file was left behind"):
        AtomicCheckpointIO().save_checkpoint(checkpoint(1.0), tmp_path / "last.ckpt")
    assert names(tmp_path) == []


def test_an_interrupt_while_writing_leaves_the_previous_checkpoint(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(content: object, file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_io.torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint(checkpoint(2.0), saved)
    assert AtomicCheckpointIO().load_checkpoint(saved)["global_step"] == 1
    assert names(saved.parent) == ["last.ckpt"]


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99, -1])
def test_a_cut_file_is_refused_with_its_path_and_the_cure(saved: Path, keep: float) -> None:
    content = saved.read_bytes()
    length = int(len(content) * keep) if isinstance(keep, float) else keep
    saved.write_bytes(content[:length])
    for verify in (True, False):
        with pytest.raises(UserError, match=r"last\.ckpt \(\d+ bytes\) is not a whole checkpoint.*earlier checkpoint"):
            AtomicCheckpointIO(verify=verify).load_checkpoint(saved)


def test_a_flipped_bit_in_a_weight_is_refused(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    position = content.find(torch.full((8,), 1.0).numpy().tobytes())
    content[position + 2] ^= 1
    saved.write_bytes(content)
    assert not torch.equal(TorchCheckpointIO().load_checkpoint(saved)["state_dict"]["weight"], torch.full((1000,), 1.0))
    with pytest.raises(UserError, match="does not match its checksum"):
        AtomicCheckpointIO().load_checkpoint(saved)


def test_objects_are_not_unpickled_unless_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "objects.ckpt"
    AtomicCheckpointIO().save_checkpoint({"path": Path("x")}, path)
    with pytest.raises(UserError, match=r"objects\.ckpt holds objects other than tensors.*weights_only=False"):
        AtomicCheckpointIO().load_checkpoint(path)
    assert AtomicCheckpointIO().load_checkpoint(path, weights_only=False) == {"path": Path("x")}


def test_a_missing_file_and_a_bare_tensor_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "absent.ckpt")
    torch.save(torch.zeros(2), tmp_path / "tensor.ckpt")
    with pytest.raises(UserError, match="holds a Tensor"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "tensor.ckpt")


def test_leftovers_of_dead_processes_are_removed_and_those_of_the_living_kept(saved: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    prefix = checkpoint_io._prefix(saved)
    dead, living = f"{prefix}{process.pid}.tmp", f"{prefix}{os.getppid()}.tmp"
    for name in (dead, living, ".other.ckpt.tmp"):
        (saved.parent / name).write_bytes(b"half")
    AtomicCheckpointIO().save_checkpoint(checkpoint(2.0), saved)
    assert names(saved.parent) == sorted(["last.ckpt", living, ".other.ckpt.tmp"])


def test_a_symlink_is_replaced_and_what_it_named_is_kept(saved: Path) -> None:
    link = saved.parent / "link.ckpt"
    link.symlink_to(saved.name)
    AtomicCheckpointIO().save_checkpoint(checkpoint(2.0), link)
    assert AtomicCheckpointIO().load_checkpoint(saved)["global_step"] == 1
    assert AtomicCheckpointIO().load_checkpoint(link)["global_step"] == 2 and not link.is_symlink()


def test_remote_urls_go_to_the_stock_implementation() -> None:
    url = "memory://folder/last.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint(5.0), url)
    assert TorchCheckpointIO().load_checkpoint(url)["global_step"] == 5
    assert AtomicCheckpointIO().load_checkpoint(url)["global_step"] == 5


def test_trainer_and_the_other_class_tree_accept_it() -> None:
    plugin = AtomicCheckpointIO()
    assert Trainer(accelerator="cpu", logger=False, plugins=[plugin]).strategy.checkpoint_io is plugin
    lightning_fabric = pytest.importorskip("lightning_fabric")
    pytorch_lightning = pytest.importorskip("pytorch_lightning")
    other = type("OtherTree", (AtomicFileMixin, lightning_fabric.plugins.TorchCheckpointIO), {})()
    trainer = pytorch_lightning.Trainer(accelerator="cpu", logger=False, plugins=[other])
    assert trainer.strategy.checkpoint_io is other
