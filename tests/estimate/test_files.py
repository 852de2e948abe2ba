"""The YAML files: packaged ones load and are plausible; wrong ones are named by file, path, value, rule and cure."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import yaml

from lightning_nvfp4.commands.estimate import find_hardware
from lightning_nvfp4.commands.paths import find_config
from lightning_nvfp4.commands.plan import meta_model
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.estimate.hardware import load_hardware
from lightning_nvfp4.estimate.published import validate
from lightning_nvfp4.estimate.workload import load_workload

_GPUS = ("gb300", "gb200", "b200", "h200")


def _yaml(name: str) -> Any:
    return yaml.safe_load(find_config(f"recipes/{name}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", _GPUS)
def test_packaged_hardware_loads_and_every_efficiency_names_its_source(name: str) -> None:
    gpu = find_hardware(name)
    assert gpu.name.lower() == name
    assert gpu.native("nvfp4") == gpu.native("mxfp8") == (name != "h200")
    text = find_config(f"recipes/hardware/{name}.yaml").read_text(encoding="utf-8")
    assert "Datasheet:" in text
    comments: list[str] = []
    after_value = True
    for line in text.partition("efficiency:\n")[2].splitlines():
        if line.strip().startswith("#"):
            comments = [line] if after_value else [*comments, line]
        else:
            assert re.search(r"#\d+|\.md|docs|\.py|Assumed", " ".join(comments)), line
        after_value = not line.strip().startswith("#")


def test_newer_hardware_is_no_slower() -> None:
    order = [find_hardware(name) for name in reversed(_GPUS)]
    for older, newer in zip(order, order[1:], strict=False):
        for kind in ("bf16", "fp8_block", "nvfp4"):
            assert newer.flops(kind) >= older.flops(kind)
        assert newer.memory_tb_s >= older.memory_tb_s


_BAD: dict[str, tuple[list[str], Any, list[str]]] = {
    "above one": (["efficiency", "memory"], 1.3, ["efficiency.memory = 1.3", "at most 1", "give achieved over"]),
    "negative": (["memory_tb_s"], -8, ["memory_tb_s = -8", "above 0", "TB/s"]),
    "text": (["nvlink_gb_s"], "fast", ["nvlink_gb_s = 'fast'", "a number"]),
    "flag": (["nvlink_gpus"], True, ["nvlink_gpus = True", "a whole number"]),
    "fraction of a GPU": (["nvlink_gpus"], 7.5, ["nvlink_gpus = 7.5", "a whole number at least 1"]),
    "not a number": (["kernel_us"], math.nan, ["kernel_us = nan", "above 0"]),
    "unknown field": (["memory_tbs"], 8, ["'memory_tbs'", "Did you mean 'memory_tb_s'?"]),
    "unknown efficiency": (["efficiency", "memori"], 1, ["'efficiency.memori'", "'efficiency.memory'"]),
    "unknown format": (["dense_tflops", "nvfp5"], 1, ["dense_tflops: name 'nvfp5'", "'nvfp4'"]),
    "no rate of bf16": (["dense_tflops"], {"mxfp8": 1}, ["dense_tflops.bf16 is missing"]),
    "no efficiency of a rate": (["efficiency", "gemm"], {"bf16": 1}, ["efficiency.gemm.", "is missing", "Add"]),
    "no mapping": (["efficiency"], 0.8, ["efficiency = 0.8", "mapping"]),
    "no mapping of rates": (["dense_tflops"], 5000, ["dense_tflops = 5000", "bf16"]),
    "name": (["name"], 300, ["name = 300", "text"]),
}


@pytest.mark.parametrize("case", _BAD)
def test_a_wrong_hardware_file_says_what_and_where(case: str) -> None:
    path, value, parts = _BAD[case]
    content = copy.deepcopy(_yaml("hardware/gb300"))
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(UserError) as error:
        load_hardware(content, "mine.yaml")
    for part in ("mine.yaml", *parts):
        assert part in str(error.value)


@pytest.mark.parametrize("path", ["name", "memory_tb_s", "efficiency", "efficiency.gemm", "efficiency.network"])
def test_a_missing_value_is_named(path: str) -> None:
    content = copy.deepcopy(_yaml("hardware/gb300"))
    *above, last = path.split(".")
    place = content
    for key in above:
        place = place[key]
    del place[last]
    with pytest.raises(UserError, match=rf"mine\.yaml: {re.escape(path)} is missing"):
        load_hardware(content, "mine.yaml")


def test_a_workload_that_cannot_be() -> None:
    content = _yaml("estimate/workload")
    load_workload(content, "w.yaml")
    with pytest.raises(UserError, match=r"pretraining\.expert_parallel = 5 must divide pretraining\.gpus = 64"):
        load_workload({**content, "pretraining": {**content["pretraining"], "expert_parallel": 5}}, "w.yaml")
    with pytest.raises(UserError, match=r"rollout\.mean_response = 9000 must not exceed"):
        load_workload({**content, "rollout": {**content["rollout"], "mean_response": 9000}}, "w.yaml")
    with pytest.raises(UserError, match=r"pretraining\.recompute = 1 must be true or false"):
        load_workload({**content, "pretraining": {**content["pretraining"], "recompute": 1}}, "w.yaml")


def test_a_case_that_names_what_is_not_there() -> None:
    content = _yaml("estimate/published")
    build = lambda fields: meta_model(fields, None)  # noqa: E731
    for key, value in (("model", "llama3-7b"), ("candidate", "nvpf4"), ("stack", "fuse"), ("phase", "train")):
        case = {**content["cases"][0], key: value}
        with pytest.raises(UserError, match=rf"published: cases\[0\]: \w+ '{value}' is unknown"):
            validate({**content, "cases": [case]}, "published", build, find_hardware)
    with pytest.raises(UserError, match="cases is missing"):
        validate({**content, "cases": []}, "published", build, find_hardware)
