"""Bad input: one message with the place, the value, the rule and the cure; a status that is not 0; no file touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401  (its log handler keeps the stderr of its first import)
import pytest
import torch

from lightning_nvfp4 import cli

_FIT = ["fit", "--config", "recipes/pretrain.yaml", "--trainer.default_root_dir", "run"]
# name -> (files by name, words of the command line, what the message has to say)
_CASES: dict[str, tuple[dict[str, str], list[str], list[str]]] = {
    "subcommand": ({}, ["fti"], ["'fti'", "'fit'", "nvfp4 --help"]),
    "config missing": ({}, ["fit", "--config", "recipes/pretrian.yaml"], ["pretrian", "'recipes/pretrain.yaml'"]),
    "config syntax": (
        {"a.yaml": "trainer: {max_steps: [1\n"},
        [*_FIT, "--config", "a.yaml"],
        ["a.yaml, line 2", "YAML"],
    ),
    "config is a list": ({"a.yaml": "- 1\n"}, [*_FIT, "--config", "a.yaml"], ["a.yaml", "list", "mapping"]),
    "key twice": (
        {"a.yaml": "trainer:\n  max_steps: 1\n  max_steps: 2\n"},
        [*_FIT, "--config=a.yaml"],
        ["a.yaml, line 3", "'trainer.max_steps'", "twice"],
    ),
    "trainer key": (
        {"a.yaml": "trainer:\n  max_stepz: 1\n"},
        [*_FIT, "--config", "a.yaml"],
        ["a.yaml, line 2", "max_stepz", "'max_steps'"],
    ),
    "model key": (
        {"a.yaml": "model:\n  init_args:\n    sedd: 1\n"},
        [*_FIT, "--config", "a.yaml"],
        ["a.yaml, line 3", "'sedd'", "'seed'"],
    ),
    "optimizer key": (
        {"a.yaml": "model:\n  init_args:\n    optimizer:\n      weigth_decay: 1\n"},
        [*_FIT, "--config", "a.yaml"],
        ["a.yaml, line 4", "'weigth_decay'", "'weight_decay'"],
    ),
    "alias in itself": (
        {"a.yaml": "trainer: &a\n  callbacks: [*a]\n"},
        [*_FIT, "--config", "a.yaml"],
        ["a.yaml", "alias"],
    ),
    "interpolation": (
        {"a.yaml": "model: {init_args: {seed: '${nowhere.at}'}}\n"},
        [*_FIT, "--config", "a.yaml"],
        ["nowhere"],
    ),
    "plugin override": (
        {
            "a.yaml": "trainer: {precision: null, plugins: [{class_path: lightning_nvfp4.BlockScaledPrecision, "
            "init_args: {overrides: {keep_frist_blocks: 1}}}]}\n"
        },
        [*_FIT, "--config", "a.yaml"],
        ["keep_frist_blocks", "'keep_first_blocks'"],
    ),
    "trainer value": ({}, [*_FIT, "--trainer.limit_train_batches", "2.5"], ["limit_train_batches", "2.5"]),
    "trainer zero": ({}, [*_FIT, "--trainer.accumulate_grad_batches", "0"], ["accumulate_grad_batches", "0"]),
    "eps": ({}, [*_FIT, "--model.optimizer.eps", "-1"], ["optimizer.eps", "-1", "positive"]),
    "run folder": ({"f": "x"}, [*_FIT, "--trainer.default_root_dir", "f/run"], ["'f/run'", "another folder"]),
    "data surrogate": (
        {"d.jsonl": '{"text": "\\ud800 a"}\n'},
        [*_FIT, "--data.path", "d.jsonl"],
        ["d.jsonl, line 1", "\\ud800", "surrogate"],
    ),
    "data nested": ({"d.jsonl": "[" * 200_000}, [*_FIT, "--data.path", "d.jsonl"], ["d.jsonl, line 1", "JSON"]),
    "plan trainer": ({"a.yaml": "trainer: 5\n"}, ["plan", "--config", "a.yaml"], ["trainer = 5", "mapping"]),
    "pipeline type": (
        {"p.yaml": "arms: [mxfp8]\nstages: [{name: a, config: 5}]\n"},
        ["pipeline", "--config", "p.yaml", "--out", "o"],
        ["p.yaml: stages[0]", "config is 5", "text"],
    ),
    "pipeline record": (
        {"o/pipeline.json": "{"},
        ["pipeline", "--out", "o"],
        ["o/pipeline.json", "--restart"],
    ),
    "eval out": (
        {"m/config.json": "{}", "f": "x"},
        ["eval", "--checkpoint", "m", "--out", "f/o"],
        ["--out", "'f' is a file"],
    ),
    "option": ({}, [*_FIT, "--trainer.max_stepz", "3"], ["command line", "max_stepz", "'max_steps'"]),
    "precision": ({}, [*_FIT, "--trainer.precision", "nvfp5"], ["trainer.precision", "'nvfp5'", "'nvfp4'", "mxfp8"]),
    "type": ({}, [*_FIT, "--trainer.max_steps", "many"], ["trainer.max_steps", "'many'", "int"]),
    "data type": ({}, [*_FIT, "--data.batch_size", "many"], ["batch_size", "'many'", "int"]),
    "class path": (
        {"a.yaml": "data: {class_path: lightning_nvfp4.lm.data.text.TextDat}\n"},
        [*_FIT, "--config", "a.yaml"],
        ["a.yaml", "TextDat", "class path"],
    ),
    "model type": ({}, [*_FIT, "--model.model.model_type", "qwen3_mo"], ["model_type", "'qwen3_mo'", "'qwen3_moe'"]),
    "model field": ({}, [*_FIT, "--model.model.hidden_sise", "64"], ["'hidden_sise'", "'hidden_size'"]),
    "model and pretrained": (
        {},
        [*_FIT, "--model.pretrained", "runs/x"],
        ["model", "pretrained", "exactly one", "both"],
    ),
    "pretrained missing": (
        {},
        ["fit", "--config", "recipes/sft.yaml", "--model.pretrained", "./nowhere", "--trainer.default_root_dir", "run"],
        ["'./nowhere'", "no such folder", "Give"],
    ),
    "stage before it missing": (
        {},
        ["fit", "--config", "recipes/sft.yaml", "--trainer.default_root_dir", "run"],
        ["'runs/decay'", "no such folder", "Run the stage that writes it first"],
    ),
    "nothing to continue": ({}, [*_FIT, "--ckpt_path", "last"], ["ckpt_path = 'last'", "no checkpoint", "Leave"]),
    "checkpoint missing": ({}, [*_FIT, "--ckpt_path", "no.ckpt"], ["ckpt_path", "'no.ckpt'", "no such checkpoint"]),
    "data missing": ({}, [*_FIT, "--data.path", "no.jsonl"], ["data.path", "no.jsonl"]),
    "data empty": ({"d.jsonl": ""}, [*_FIT, "--data.path", "d.jsonl"], ["data.path", "d.jsonl", "empty"]),
    "data malformed": (
        {"d.jsonl": '{"text": "a"}\n{"text": \n'},
        [*_FIT, "--data.path", "d.jsonl"],
        ["d.jsonl, line 2", "JSON", "mend"],
    ),
    "data field": ({"d.jsonl": '{"txt": "a"}\n'}, [*_FIT, "--data.path", "d.jsonl"], ["d.jsonl", "'text'", "txt"]),
    "data suffix": ({"d.xml": "<a/>"}, [*_FIT, "--data.path", "d.xml"], ["d.xml", ".jsonl"]),
    "data truncated": (
        {"d.jsonl.gz": "\x1f"},
        [*_FIT, "--data.path", "d.jsonl.gz"],
        ["d.jsonl.gz"],
    ),
    "batch size": ({}, [*_FIT, "--data.batch_size", "0"], ["data.batch_size", "0", "at least 1"]),
    "schedule": ({}, [*_FIT, "--model.schedule.kind", "wds"], ["schedule.kind", "'wds'", "wsd"]),
    "learning rate": ({}, [*_FIT, "--model.optimizer.lr", "-1"], ["optimizer.lr", "-1", "positive"]),
    "vocabulary": ({}, [*_FIT, "--model.model.vocab_size", "100"], ["100", "1024", "vocab_size"]),
    "strategy": ({}, [*_FIT, "--trainer.strategy", "fsdp"], ["nvfp4-hybrid", "fsdp", "ModelParallelStrategy"]),
    "pipeline to fit": ({}, ["fit", "--config", "recipes/pipeline.yaml"], ["pipeline.yaml", "nvfp4 pipeline"]),
    "arm": ({}, ["pipeline", "--arms", "nvfp4-hybird,bf16-gemm", "--out", "o"], ["'nvfp4-hybird'", "'nvfp4-hybrid'"]),
    "baseline": ({}, ["pipeline", "--arms", "mxfp8", "--out", "o"], ["'bf16-gemm'", "mxfp8", "baseline="]),
    "pipeline key": ({}, ["pipeline", "--out", "o", "lane=1"], ["'lane'", "'lanes'"]),
    "pipeline value": ({}, ["pipeline", "--out", "o", "--lanes", "0"], ["lanes", "0", "at least 1"]),
    "pipeline stage": (
        {"p.yaml": "arms: [mxfp8]\nstages: [{name: a, config: recipes/sft.yaml, starts_from: b}]\n"},
        ["pipeline", "--config", "p.yaml", "--out", "o"],
        ["p.yaml", "'a'", "'b'"],
    ),
    "pipeline folder": ({"o/x.txt": "mine"}, ["pipeline", "--out", "o"], ["--out o", "not empty", "new folder"]),
    "eval checkpoint": ({}, ["eval", "--checkpoint", "./nowhere"], ["'./nowhere'", "no such folder"]),
    "eval precision": (
        {"m/config.json": "{}"},
        ["eval", "--checkpoint", "m", "--precision", "fp4"],
        ["--precision", "'fp4'", "'nvfp4'"],
    ),
    "eval limit": (
        {"m/config.json": "{}"},
        ["eval", "--checkpoint", "m", "--limit", "0"],
        ["--limit", "0", "at least 1"],
    ),
    "compare path": ({}, ["compare", "nowhere", "a"], ["'nowhere'", "nvfp4 eval"]),
    "compare format": ({}, ["compare", "a", "--out", "t.txt"], ["--out", "'t.txt'", ".md"]),
    "plan without model": (
        {"a.yaml": "trainer: {}\n"},
        ["plan", "--config", "a.yaml"],
        ["a.yaml", "model", "tiny-moe"],
    ),
    "plan option": ({}, ["plan", "--configs", "a.yaml"], ["--config", "nvfp4 plan --help"]),
}


def _snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_there_are_at_least_twenty() -> None:
    assert len(_CASES) >= 20


@pytest.mark.parametrize("name", _CASES)
def test_bad_input(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, words, expected = _CASES[name]
    monkeypatch.chdir(tmp_path)
    for file, text in files.items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_bytes(text.encode("latin-1"))
    before = _snapshot(tmp_path)
    status = cli.main(words)
    said = capsys.readouterr().err
    errors = [line for line in said.splitlines() if line.startswith("nvfp4: error: ")]
    assert status == 2, said
    assert len(errors) == 1, said
    assert "Traceback" not in said
    message = said[said.index("nvfp4: error: ") :]
    for part in expected:
        assert part in message
    assert _snapshot(tmp_path) == before


def test_a_truncated_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"w": torch.zeros(1000)}}, "whole.ckpt")
    Path("cut.ckpt").write_bytes(Path("whole.ckpt").read_bytes()[:500])
    Path("whole.ckpt").unlink()
    before = _snapshot(tmp_path)
    assert cli.main([*_FIT, "--ckpt_path", "cut.ckpt"]) == 2
    assert "cut.ckpt" in capsys.readouterr().err
    assert _snapshot(tmp_path) == before


def test_as_a_process_and_with_debug(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_nvfp4.cli", "plan", "--config", "recipes/model/tiny.yaml"]
    plain = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert plain.returncode == 2
    assert plain.stderr.startswith("nvfp4: error: ") and "recipes/model/tiny-moe.yaml" in plain.stderr
    environment = {**os.environ, "NVFP4_DEBUG": "1"}
    debug = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert debug.returncode == 2
    assert "Traceback" in debug.stderr
