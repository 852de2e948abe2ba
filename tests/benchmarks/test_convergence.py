"""`benchmarks/convergence.py`: pairs of arms, killed runs, and the report's arithmetic on runs that never were."""

import csv
import dataclasses
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from convergence import main
from convergence_report import collect, extra_tokens, extra_tokens_at_the_end, paired, write_report
from convergence_run import Options, read_json, run_folder, train
from convergence_settings import ROOT, read_plan
from convergence_tokens import TokenData, prepare, unpack

from lightning_nvfp4 import load_recipe
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.statistics import t_interval

CONFIG = ROOT / "benchmarks" / "convergence.yaml"
WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "12",
    "dogs",
    "that",
    "ran",
    "far",
    "away",
    "home",
    "again",
)


def documents(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=rng.integers(20, 80))) for _ in range(count)]


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """Token files of a few thousand tokens, as .xz."""
    folder = tmp_path_factory.mktemp("tokens")
    for name, texts in (("train", documents(120, 0)), ("validation", documents(30, 1))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    files = [[str(folder / f"{name}.jsonl")] for name in ("train", "validation")]
    prepare(folder / "tokens", *files, vocabulary_size=300, compress=True)
    unpack(folder / "tokens")
    return folder / "tokens"


@pytest.fixture(autouse=True)
def seeds_of_its_own(monkeypatch):
    """A run sets the process's seed; it is put back."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


@pytest.fixture(scope="session")
def plan():
    return read_plan(CONFIG, "tiny", tokens=1280)


def fit(plan, name, seed, tokens, out, **options):
    return train(plan, plan.arm(name), seed, tokens, out, Options(**options))


@pytest.fixture(scope="session")
def trained(plan, tokens, tmp_path_factory):
    """Two arms, seed 0, not interrupted."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", "0")
        patch.setenv("PL_SEED_WORKERS", "0")
        assert fit(plan, "bf16-gemm", 0, tokens, out) == "finished"
        assert fit(plan, "nvfp4-hybrid", 0, tokens, out, monitor=4) == "finished"
    return out


def test_token_files_hold_every_document_once_in_any_packing(tokens, tmp_path):
    tokenizer_folder = tokens / "tokenizer"
    from lightning_nvfp4.lm.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(tokenizer_folder))
    raw = np.fromfile(tokens / "train.u16", dtype="<u2")
    texts = tokenizer.decode(raw.tolist(), clean_up_tokenization_spaces=False).split(tokenizer.eos_token)
    assert sorted(texts[:-1]) == sorted(documents(120, 0)) and texts[-1] == ""
    assert texts[:-1] != documents(120, 0), "the order is drawn"


def test_order_of_data_is_a_function_of_the_seed_and_a_place_is_resumed(tokens):
    def first(seed: int, skip: int = 0) -> list:
        loader = TokenData(tokens, 32, 4, seed, 1).train_dataloader()
        loader._background = False
        if skip:
            state = {"version": 1, "fingerprint": loader._fingerprint, "position": {"taken": 4 * skip}}
            loader.load_state_dict(state)
        batches = iter(loader)
        return [next(batches)["input_ids"].tolist() for _ in range(3)]

    assert first(0) == first(0) != first(1)
    assert first(0, skip=2)[0] == first(0)[2]


def test_budget_beyond_the_text_is_refused(plan, tokens, tmp_path):
    with pytest.raises(UserError, match="not repeated"):
        fit(read_plan(CONFIG, "tiny", tokens=10**7), "bf16-gemm", 0, tokens, tmp_path)


def test_arms_of_the_file_are_different_recipes(plan):
    assert len({(repr(load_recipe(a.precision, a.overrides)), repr(a.schedule)) for a in plan.arms}) == len(plan.arms)
    assert len({a.folder for a in plan.arms}) == len(plan.arms)


def test_unknown_field_of_an_arm_is_named(tmp_path):
    path = tmp_path / "arms.yaml"
    path.write_text(CONFIG.read_text().replace("fp8: {precision: fp8,", "fp8: {precision: fp8, sedes: [0],"))
    with pytest.raises(UserError, match="seeds"):
        read_plan(path, "tiny")


def test_arms_start_alike_and_train_apart(plan, trained):
    folders = [run_folder(trained, plan, plan.arm(name), 0) for name in ("bf16-gemm", "nvfp4-hybrid")]
    starts = [read_json(folder / "start.json") for folder in folders]
    results = [read_json(folder / "result.json") for folder in folders]
    assert starts[0]["weights"] == starts[1]["weights"] and starts[0]["batches"] == starts[1]["batches"]
    assert results[0]["val_loss"] != results[1]["val_loss"]
    assert results[0]["val_loss"] == results[0]["val_loss_bf16"], "BF16 is the baseline's own forward"
    assert results[1]["val_loss"] != results[1]["val_loss_bf16"]
    assert not list(folders[0].rglob("*.ckpt"))


def test_another_start_is_refused(plan, trained, tokens, tmp_path):
    folder = run_folder(tmp_path, plan, plan.arm("mxfp8"), 0)
    folder.mkdir(parents=True)
    start = read_json(run_folder(trained, plan, plan.arm("bf16-gemm"), 0) / "start.json")
    (folder / "start.json").write_text(json.dumps({**start, "weights": "other"}))
    with pytest.raises(UserError, match="weights at the start"):
        fit(plan, "bf16-gemm", 0, tokens, tmp_path)


def test_a_result_of_other_settings_is_refused(plan, trained, tokens):
    size = dataclasses.replace(plan.size, warmup=0.5)
    with pytest.raises(UserError, match="other data or settings"):
        fit(dataclasses.replace(plan, size=size), "bf16-gemm", 0, tokens, trained)


def same_run(plan, a, b, name="nvfp4-hybrid"):
    folders = [run_folder(out, plan, plan.arm(name), 0) for out in (a, b)]
    results = [read_json(folder / "result.json") for folder in folders]
    logs = [list(csv.DictReader((folder / "metrics.csv").read_text().splitlines())) for folder in folders]
    assert (
        results[0]["val_loss"] == results[1]["val_loss"] and results[0]["val_loss_bf16"] == results[1]["val_loss_bf16"]
    )
    assert logs[0] == logs[1] and [row["step"] for row in logs[0]] == [str(i) for i in range(plan.size.steps)]


def test_stopped_at_its_limit_and_continued_is_the_same_run(plan, trained, tokens, tmp_path):
    processes = 0
    while fit(plan, "nvfp4-hybrid", 0, tokens, tmp_path, deadline=0.0 if processes < 2 else math.inf) == "stopped":
        processes += 1
    assert processes == 2
    assert read_json(run_folder(tmp_path, plan, plan.arm("nvfp4-hybrid"), 0) / "result.json")["processes"] == 3
    same_run(plan, trained, tmp_path)


def test_killed_and_continued_is_the_same_run(plan, trained, tokens, tmp_path):
    folder = run_folder(tmp_path, plan, plan.arm("nvfp4-hybrid"), 0)
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "convergence.py"),
        "one",
        "--arm",
        "nvfp4-hybrid",
        "--seed",
        "0",
    ]
    command += ["--model", "tiny", "--tokens", "1280", "--tokens-dir", str(tokens), "--out", str(tmp_path)]
    with (tmp_path / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)})
    checkpoint = folder / "checkpoints" / "last.ckpt"
    while process.poll() is None and not checkpoint.is_file():
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert checkpoint.is_file() and not (folder / "result.json").exists(), (tmp_path / "log.txt").read_text()
    assert fit(plan, "nvfp4-hybrid", 0, tokens, tmp_path) == "finished"
    same_run(plan, trained, tmp_path)


def test_driver_skips_what_is_finished_and_reports(plan, trained, tokens, capsys):
    arguments = ["run", "--tokens-dir", str(tokens), "--out", str(trained), "--model", "tiny", "--tokens", "1280"]
    assert main([*arguments, "--arms", "bf16-gemm,nvfp4-hybrid", "--seeds", "0"]) == 0
    assert "0 runs of 10 steps" in capsys.readouterr().out
    page = (trained / "1280-tokens" / "report.html").read_text()
    assert "Numerics by layer" in page and "flushed to zero" in page


def test_driver_does_not_skip_a_result_of_other_settings(plan, trained, tokens, tmp_path, capsys):
    folder = run_folder(tmp_path, plan, plan.arm("bf16-gemm"), 0)
    folder.mkdir(parents=True)
    result = read_json(run_folder(trained, plan, plan.arm("bf16-gemm"), 0) / "result.json")
    (folder / "result.json").write_text(json.dumps({**result, "identity": "other"}))
    arguments = ["run", "--tokens-dir", str(tokens), "--out", str(tmp_path), "--model", "tiny", "--tokens", "1280"]
    assert main([*arguments, "--arms", "bf16-gemm", "--seeds", "0"]) == 2
    assert "other data or settings" in capsys.readouterr().err


def test_a_token_file_of_the_right_size_with_other_tokens_is_refused(tokens, tmp_path):
    folder = tmp_path / "tokens"
    shutil.copytree(tokens, folder)
    path = folder / "train.u16"
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"train.u16: its hash is .*, and .* names .*prepare the folder again"):
        unpack(folder)


def test_a_run_that_diverges_is_a_result_and_in_no_mean(plan, tokens, tmp_path):
    size = dataclasses.replace(plan.size, optimizer={"lr": 1e30})
    wild = dataclasses.replace(plan, size=size)
    assert fit(wild, "bf16-gemm", 0, tokens, tmp_path) == "diverged"
    assert fit(wild, "bf16-gemm", 0, tokens, tmp_path) == "diverged", "and is not run again"
    assert paired(collect(tmp_path, wild), "bf16-gemm", "bf16-gemm").seeds == ()
    assert "diverged at step" in write_report(tmp_path, wild).with_suffix(".md").read_text()


def fake(plan, out, name, seed, loss, tokens=None, shift=0.0):
    """A finished run whose training loss is `loss` plus a curve, at every step."""
    plan = plan if tokens is None else dataclasses.replace(plan, size=dataclasses.replace(plan.size, tokens=tokens))
    folder = run_folder(out, plan, plan.arm(name), seed)
    folder.mkdir(parents=True)
    result = {"status": "finished", "seed": seed, "val_loss": loss, "val_loss_bf16": loss, "seconds": 1.0}
    steps = plan.size.steps
    result |= {"steps": steps, "tokens": plan.size.tokens, "hardware": "H", "date": "2026-01-01", "parameters": 1}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "start.json").write_text(json.dumps({"weights": f"w{seed}", "batches": f"b{seed}"}))
    rows = [f"{step},{loss + 10 / (step + 1)},{5 - math.log(step + 1) + shift}" for step in range(steps)]
    (folder / "metrics.csv").write_text("step,train/loss,val/loss\n" + "\n".join(rows) + "\n")


def test_gaps_are_paired_by_seed_and_the_interval_is_students(plan, tmp_path):
    base, arm = [4.0, 4.1, 4.2], [4.02, 4.11, 4.26]
    for seed in range(3):
        fake(plan, tmp_path, "bf16-gemm", seed, base[seed])
        fake(plan, tmp_path, "nvfp4-hybrid", seed, arm[seed])
    fake(plan, tmp_path, "nvfp4-hybrid", 3, 99.0)  # without a baseline
    gaps = paired(collect(tmp_path, plan), "nvfp4-hybrid", "bf16-gemm")
    expected = [a / b - 1 for a, b in zip(arm, base, strict=True)]
    assert gaps.seeds == (0, 1, 2) and gaps.validation == pytest.approx(expected, rel=1e-12)
    low, high = t_interval(gaps.validation)
    half = 4.302653 * statistics.stdev(expected) / math.sqrt(3)  # t table: 95 %, 2 degrees of freedom
    assert (low, high) == pytest.approx((np.mean(expected) - half, np.mean(expected) + half), rel=1e-6)
    text = write_report(tmp_path, plan).with_suffix(".md").read_text()
    assert f"{100 * np.mean(expected):+.2f} %" in text and "worse than the limit" in text


def test_runs_of_other_starts_are_not_reported(plan, tmp_path):
    fake(plan, tmp_path, "bf16-gemm", 0, 4.0)
    fake(plan, tmp_path, "mxfp8", 0, 4.0)
    (run_folder(tmp_path, plan, plan.arm("mxfp8"), 0) / "start.json").write_text('{"weights": "x", "batches": "b0"}')
    with pytest.raises(UserError, match="no pair"):
        collect(tmp_path, plan)


def test_extra_tokens_of_known_curves(plan, tmp_path):
    """The baseline falls as 5 - log(tokens): an arm that lies log(1.1) above it needs 10 % more."""
    plan = dataclasses.replace(plan, size=dataclasses.replace(plan.size, tokens=128 * 40))
    fake(plan, tmp_path, "bf16-gemm", 0, 4.0)
    fake(plan, tmp_path, "nvfp4-hybrid", 0, 4.0, shift=math.log(1.1))
    runs = collect(tmp_path, plan)
    base, arm = runs["bf16-gemm"][0], runs["nvfp4-hybrid"][0]
    assert extra_tokens(arm, base, plan) == pytest.approx(0.1, rel=1e-9)
    assert extra_tokens(base, base, plan) == 0
    shorter, longer = {"val_loss": 4.0 + math.log(2), "tokens": 500}, {"val_loss": 4.0, "tokens": 1000}
    assert extra_tokens_at_the_end(math.log(1.1) / 4.0, 4.0, shorter, longer) == pytest.approx(0.1, rel=1e-9)


def test_short_budget_gives_the_slope_at_the_end(plan, tmp_path):
    fake(plan, tmp_path, "bf16-gemm", 0, 4.4, tokens=1024)
    for name, loss in (("bf16-gemm", 4.0), ("nvfp4-hybrid", 4.01)):
        fake(plan, tmp_path, name, 0, loss)
    text = write_report(tmp_path, plan).with_suffix(".md").read_text()
    slope = -0.4 / math.log(1280 / 1024)
    assert f"{100 * (math.exp(0.01 / -slope) - 1):+.2f} %" in text and "the other: 1024 tokens" in text


def test_noise_is_two_seeds_of_the_baseline():
    plan = read_plan(CONFIG, "tiny", noise=True)
    assert [(arm.name, arm.seeds) for arm in plan.arms] == [("bf16-gemm", (0, 1))]
    assert plan.size.tokens == plan.size.noise_tokens


def test_files_of_the_driver_import_each_other_from_anywhere():
    assert Path(sys.modules["convergence"].__file__ or "").parent == ROOT / "benchmarks"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokens.json", b'{"train": {"tok', "damaged .* prepare the folder again"),
        ("tokens.json", b"{}", "damaged .*'train'"),
        ("train.u16.xz", b"\xfd7zXZ\x00\x00\x04\xe6\xd6", "not a whole .xz file"),
    ],
)
def test_a_damaged_token_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    about = {part: {"tokens": 8, "blake2b": ""} for part in ("train", "validation")}
    (tmp_path / "tokens.json").write_text(json.dumps(about))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: {message}"):
        unpack(tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("option", [["--workers", "0"], ["--seeds", "x"]], ids=str)
def test_a_driver_that_could_start_nothing_ends(option: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--tokens-dir", str(tmp_path), "--out", str(tmp_path), *option])
    assert ended.value.code == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "some words"}\n')
    arguments = ["prepare", "--tokens-dir", str(tmp_path / "file" / "x"), "--train", str(text), "--validation"]
    assert main([*arguments, str(text), "--vocab", "300"]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
