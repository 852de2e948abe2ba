"""Every YAML under recipes/ parses, alone or over the stage it belongs to; and the recipes agree with one another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_nvfp4 import NumericsMonitor
from lightning_nvfp4.commands import fit
from lightning_nvfp4.commands.paths import find_config
from lightning_nvfp4.commands.pipeline_spec import load_arm, load_pipeline
from lightning_nvfp4.recipe import PRESETS

_RECIPES = Path(__file__).resolve().parents[2] / "recipes"
_STAGES = ("pretrain", "decay", "sft", "rl")
_OVERLAYS = {  # overlay folder or file -> the stages it is laid over
    "precision": _STAGES,
    "model": ("pretrain", "decay"),
    "comm": _STAGES,
    "data/embedded.yaml": ("pretrain", "decay"),
    "data/text.yaml": ("pretrain", "decay"),
    "data/hub.yaml": ("pretrain", "decay"),
    "data/chat.yaml": ("sft",),
    "data/prompts.yaml": ("rl",),
    "rl-gsm8k.yaml": ("rl",),
    "lora.yaml": ("sft",),
    "early-stop.yaml": ("sft",),
}


class _Parsed(Exception):
    """Stops the command line after parsing."""


def _parse(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """Return the configuration that `nvfp4 fit` would run."""
    found: list[Any] = []

    def stop(self: fit.RunCLI) -> None:
        found.append(self.config["fit"])
        raise _Parsed

    monkeypatch.setattr(fit.RunCLI, "before_instantiate_classes", stop)
    monkeypatch.setattr(fit.RunCLI, "_set_seed", lambda self: None)
    with pytest.raises(_Parsed):
        fit.run(["fit", *words])
    return found[0]


def _names(entry: str) -> list[str]:
    path = _RECIPES / entry
    files = [path] if path.suffix else sorted(path.glob("*.yaml"))
    return [file.relative_to(_RECIPES.parent).as_posix() for file in files]


_PAIRS = [(overlay, stage) for entry, stages in _OVERLAYS.items() for overlay in _names(entry) for stage in stages]


def test_every_file_is_covered() -> None:
    covered = {overlay for overlay, _ in _PAIRS} | {f"recipes/{name}.yaml" for name in (*_STAGES, "pipeline")}
    covered |= {*_names("hardware"), *_names("estimate")}  # read by `nvfp4 estimate`: tests/estimate
    assert {path.relative_to(_RECIPES.parent).as_posix() for path in _RECIPES.rglob("*.yaml")} == covered


@pytest.mark.parametrize("stage", _STAGES)
def test_a_stage_parses_alone(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _parse(monkeypatch, "--config", f"recipes/{stage}.yaml")
    assert config.trainer.precision == "nvfp4-hybrid"
    assert config.trainer.default_root_dir == f"runs/{stage}"


def test_the_overlay_in_the_readme_adds_the_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (_RECIPES.parent / "README.md").read_text(), re.DOTALL)
    (tmp_path / "monitor.yaml").write_text(block)
    words = ("--config", "recipes/pretrain.yaml", "--config", str(tmp_path / "monitor.yaml"))
    saved, monitor = _parse(monkeypatch, *words).trainer.callbacks
    assert saved.class_path.endswith("ModelCheckpoint")
    assert NumericsMonitor(**monitor.init_args).every_n_steps == 100 and monitor.class_path.endswith("NumericsMonitor")


# One stage per overlay keeps this quick; precision overlays set the same field whatever lies below.
@pytest.mark.parametrize(("overlay", "stage"), {overlay: (overlay, stage) for overlay, stage in _PAIRS}.values())
def test_an_overlay_parses_over_its_stage(overlay: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _parse(monkeypatch, "--config", f"recipes/{stage}.yaml", "--config", overlay)
    if overlay.endswith("late-bf16-forward.yaml"):
        names = [callback.class_path.rpartition(".")[2] for callback in config.trainer.callbacks]
        assert names == ["ModelCheckpoint", "PrecisionSchedule"]
        assert config.trainer.precision == "nvfp4-hybrid"
    elif "/precision/" in overlay:
        assert config.trainer.precision == Path(overlay).stem
    if "/model/" in overlay:
        wanted = yaml.safe_load((_RECIPES.parent / overlay).read_text(encoding="utf-8"))["model"]["init_args"]["model"]
        assert config.model.init_args.model["model_type"] == wanted["model_type"]
        assert set(config.model.init_args.model) == set(wanted)  # the overlay's model replaces the other one whole


def test_there_is_a_precision_overlay_for_every_preset() -> None:
    assert {path.stem for path in (_RECIPES / "precision").glob("*.yaml")} >= set(PRESETS)
    for name in PRESETS:
        assert load_arm(name).precision == name


def test_relative_references_follow_overlays_and_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _parse(monkeypatch, "--config", "recipes/pretrain.yaml", "--model.model.hidden_size", "64")
    assert config.model.init_args.model["hidden_size"] == 64
    assert config.model.init_args.model["moe_intermediate_size"] == 64
    config = _parse(monkeypatch, "--config", "recipes/sft.yaml", "--model.pretrained", "elsewhere")
    assert config.data.init_args.tokenizer == "elsewhere"


def test_a_precision_overlay_and_the_command_line_win_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--config", "recipes/pretrain.yaml", "--config", "recipes/precision/fp8.yaml"]
    assert _parse(monkeypatch, *words).trainer.precision == "fp8"
    assert _parse(monkeypatch, *words, "--trainer.precision", "bf16-mixed").trainer.precision == "bf16-mixed"


def _load(name: str) -> dict[str, Any]:
    return yaml.safe_load(find_config(f"recipes/{name}.yaml").read_text(encoding="utf-8"))


def test_pretrain_and_decay_train_one_model_on_one_schedule() -> None:
    pretrain, decay, tiny = _load("pretrain"), _load("decay"), _load("model/tiny-moe")
    models = [recipe["model"]["init_args"]["model"] for recipe in (pretrain, decay, tiny)]
    assert models[0] == models[1] == models[2]
    assert pretrain["model"]["init_args"]["optimizer"] == decay["model"]["init_args"]["optimizer"]
    before, after = (recipe["model"]["init_args"]["schedule"] for recipe in (pretrain, decay))
    assert before.items() <= after.items()
    assert after["decay_start"] == pretrain["trainer"]["max_steps"]
    assert after["decay_start"] + after["decay_steps"] == decay["trainer"]["max_steps"]


def test_each_stage_starts_where_the_former_one_ends() -> None:
    assert _load("decay")["ckpt_path"] == f"{_load('pretrain')['trainer']['default_root_dir']}/checkpoints/last.ckpt"
    assert _load("sft")["model"]["init_args"]["pretrained"] == _load("decay")["trainer"]["default_root_dir"]
    assert _load("rl")["model"]["init_args"]["pretrained"] == _load("sft")["trainer"]["default_root_dir"]


def test_the_last_step_of_every_stage_is_saved() -> None:
    for stage in _STAGES:
        trainer = _load(stage)["trainer"]
        assert trainer["max_steps"] % trainer["callbacks"][0]["init_args"]["every_n_train_steps"] == 0


def test_the_pipeline_runs_the_four_stages_and_the_control() -> None:
    pipeline = load_pipeline("recipes/pipeline.yaml", [])
    assert [stage.name for stage in pipeline.stages] == list(_STAGES)
    assert pipeline.baseline in pipeline.arms
    assert pipeline.eval is not None and pipeline.eval.stages == ["decay", "sft", "rl"]


def test_parts_of_the_tokens_can_be_laid_under_any_codec_and_set_by_word(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [f"--config=recipes/{name}.yaml" for name in ("pretrain", "comm/overlap", "comm/nvfp4-dispatch")]
    config = _parse(monkeypatch, *files)
    assert config.trainer.strategy.init_args.overlap_degree == 2
    assert config.trainer.strategy.init_args.legs == {"dispatch_forward": "nvfp4"}
    words = [files[0], files[2], "--trainer.strategy.init_args.overlap_degree=3"]
    assert _parse(monkeypatch, *words).trainer.strategy.init_args.overlap_degree == 3
