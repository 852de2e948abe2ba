"""What a pipeline YAML becomes, and when an existing folder refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_nvfp4.commands.pipeline import _check_folder, _save_record, _write_job
from lightning_nvfp4.commands.pipeline_spec import differences, load_arm, load_pipeline, record
from lightning_nvfp4.commands.pipeline_worker import fit_arguments
from lightning_nvfp4.errors import UserError

_RECIPE = "recipes/pipeline.yaml"


def _record(*overrides: str) -> dict[str, object]:
    pipeline = load_pipeline(_RECIPE, list(overrides))
    return record(pipeline, [load_arm(name) for name in pipeline.arms])


def test_words_reach_the_pipeline_its_stages_and_its_evaluation() -> None:
    pipeline = load_pipeline(
        _RECIPE, ["seed=7", "lanes=1", "eval.limit=3", "rl.trainer.max_steps=9", "arms=[mxfp8,fp8]"]
    )
    assert (pipeline.seed, pipeline.lanes, pipeline.arms) == (7, 1, ["mxfp8", "fp8"])
    assert pipeline.eval is not None and pipeline.eval.limit == 3
    assert next(stage.set for stage in pipeline.stages if stage.name == "rl") == {"trainer.max_steps": 9}


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["seed=1"], "seed"),
        (["pretrain.trainer.max_steps=3"], "stages.pretrain.set"),
        (["eval.limit=2"], "eval.limit"),
        (["threads=2"], "threads"),
    ],
)
def test_what_changes_results_is_a_difference(words: list[str], changed: str) -> None:
    assert any(line.startswith(changed) for line in differences(_record(), _record(*words)))


@pytest.mark.parametrize("words", [["lanes=1"], ["arms=[bf16-gemm,fp8]"], ["baseline=mxfp8"]])
def test_what_does_not_is_none(words: list[str]) -> None:
    assert differences(_record(), _record(*words)) == []


def test_the_contents_of_an_overlay_count(tmp_path: Path) -> None:
    overlay = tmp_path / "mine.yaml"
    records = []
    for sr_bits in (32, 8):
        gemms = {"experts": {"dgrad_grad_output": {"sr_bits": sr_bits}}}
        init = {"preset": "nvfp4-hybrid", "overrides": {"gemms": gemms}}
        plugin = {"class_path": "lightning_nvfp4.BlockScaledPrecision", "init_args": init}
        overlay.write_text(yaml.safe_dump({"trainer": {"precision": None, "plugins": [plugin]}}), encoding="utf-8")
        pipeline = load_pipeline(_RECIPE, [f"arms=[{overlay}]"])
        arm = load_arm(str(overlay))
        assert (arm.name, arm.precision, arm.overrides) == ("mine", "nvfp4-hybrid", {"gemms": gemms})
        records.append(record(pipeline, [arm]))
    assert differences(*records)


def test_an_overlay_with_a_wrong_field_is_refused(tmp_path: Path) -> None:
    overlay = tmp_path / "mine.yaml"
    plugin = {"class_path": "lightning_nvfp4.BlockScaledPrecision", "init_args": {"overrides": {"gemmz": {}}}}
    overlay.write_text(yaml.safe_dump({"trainer": {"plugins": [plugin]}}), encoding="utf-8")
    with pytest.raises(UserError, match="'gemmz'.*'gemms'"):
        load_arm(str(overlay))


def test_a_folder_of_another_configuration_is_refused_and_names_the_key(tmp_path: Path) -> None:
    pipeline = load_pipeline(_RECIPE, [])
    _save_record(tmp_path, pipeline, ["mxfp8"], _record())
    _check_folder(tmp_path, _record())
    with pytest.raises(UserError, match=r"seed: 0 -> 5(.|\n)*--restart"):
        _check_folder(tmp_path, _record("seed=5"))


def test_each_stage_starts_from_the_former_ones_checkpoint(tmp_path: Path) -> None:
    import json

    pipeline = load_pipeline(_RECIPE, ["seed=4"])
    job = json.loads(_write_job(pipeline, load_arm("mxfp8"), tmp_path, True).read_text(encoding="utf-8"))
    folder = tmp_path / "mxfp8"
    words = {stage["name"]: fit_arguments(job, stage, folder) for stage in job["stages"]}
    assert "--ckpt_path=null" in words["pretrain"]
    assert f"--ckpt_path={folder}/pretrain/checkpoints/last.ckpt" in words["decay"]
    assert f"--model.init_args.pretrained={folder}/decay" in words["sft"]
    assert f"--model.init_args.pretrained={folder}/sft" in words["rl"]
    for stage in words.values():
        assert {"--seed_everything=4", "--model.init_args.seed=4", "--data.init_args.seed=4"} <= set(stage)
        assert stage[2].endswith("precision/mxfp8.yaml")  # the arm's overlay comes last
    own = folder / "decay" / "checkpoints" / "last.ckpt"
    own.parent.mkdir(parents=True)
    own.touch()
    assert f"--ckpt_path={own}" in fit_arguments(job, job["stages"][1], folder)
