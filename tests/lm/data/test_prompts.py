"""Prompts: padded on the left, each with the reference that its verifier needs."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data import PromptData, embedded
from lightning_nvfp4.lm.data.prompts import prompt_of_row

USER = [{"role": "user", "content": "q"}]
EXACT = {"kind": "exact", "answer": "42"}
CODE = {"kind": "code", "entry_point": "f", "tests": "def check(f): ..."}


@pytest.mark.parametrize(
    ("row", "reference"),
    [
        ({"messages": USER, "reference": EXACT}, EXACT),
        ({"prompt": "q", "reference": {**CODE, "prompt": "def f():", "answer": None}}, {**CODE, "prompt": "def f():"}),
        ({"question": "q", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}, {**EXACT, "difficulty": 1}),
        ({"question": "q", "answer": "so\n#### 1,234"}, {"kind": "exact", "answer": "1234", "difficulty": 1}),
        ({"prompt": "q", "answer": " 42 "}, EXACT),
        ({"prompt": "q", "entry_point": "f", "test": "def check(f): ..."}, {**CODE, "prompt": "q"}),
    ],
)
def test_shapes_of_rows(row: dict[str, Any], reference: dict[str, Any]) -> None:
    assert prompt_of_row(row, "") == (USER, reference)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "no prompt with a reference; the row has 'text'"),
        ({"prompt": "x"}, "no prompt with a reference"),
        ({"messages": USER, "reference": "42"}, "'reference' must be an object, found a str"),
        ({"messages": USER, "reference": {"kind": "exakt"}}, "Did you mean 'exact'"),
        ({"messages": USER, "reference": {"kind": "exact", "answer": 42}}, "needs the string 'answer', found 42"),
        ({"messages": USER, "reference": {"kind": "code", "entry_point": "f"}}, "needs the string 'tests', found None"),
        ({"question": "q", "answer": "no idea ####"}, "needs the string 'answer'"),
        ({"messages": [*USER, {"role": "assistant", "content": "a"}], "reference": EXACT}, "the last turn"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, tokenizer_folder: str, row: dict[str, Any], message: str) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    data = PromptData(path=str(tmp_path / "p.jsonl"), tokenizer=tokenizer_folder)
    with pytest.raises(UserError, match=f"p.jsonl, line 1: .*{message}"):
        next(iter(data.train_dataloader()))


def write(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "p.jsonl")


def prompts(tmp_path: Path, count: int = 10) -> str:
    return write(tmp_path, [{"question": "q" * (i + 1), "answer": f"#### {i}"} for i in range(count)])


def test_a_batch(tmp_path: Path, tokenizer_folder: str) -> None:
    data = PromptData(path=prompts(tmp_path), tokenizer=tokenizer_folder, prompts_per_step=4)
    batch = next(iter(data.train_dataloader()))
    lengths = [int(reference["answer"]) + 4 for reference in batch["references"]]
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert tuple(batch["input_ids"].shape) == (4, max(lengths))
    for ids, mask, length in zip(batch["input_ids"], batch["attention_mask"], lengths, strict=True):
        assert mask.tolist() == [0] * (max(lengths) - length) + [1] * length
        text = f"<|user|>{'q' * (length - 3)}<|end|><|assistant|>"
        assert data.tokenizer.decode(ids) == "<|pad|>" * (max(lengths) - length) + text
    assert list(data.val_dataloader()) == []


def test_passes_are_shuffled_anew_and_resume(tmp_path: Path, tokenizer_folder: str) -> None:
    def make() -> PromptData:
        return PromptData(path=prompts(tmp_path), tokenizer=tokenizer_folder, prompts_per_step=4, seed=3)

    def answers(loader: Any, count: int) -> list[str]:
        return [r["answer"] for batch in itertools.islice(loader, count) for r in batch["references"]]

    whole = answers(make().train_dataloader(), 10)
    passes = [whole[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(one) == sorted(map(str, range(10))) for one in passes)
    assert len({tuple(one) for one in passes}) == 4
    loader, resumed = make().train_dataloader(), make().train_dataloader()
    answers(loader, 3)
    resumed.load_state_dict(loader.state_dict())
    assert answers(resumed, 7) == whole[12:]


def test_long_prompts_are_left_out_counted_and_named(
    tmp_path: Path, tokenizer_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = PromptData(path=prompts(tmp_path), tokenizer=tokenizer_folder, prompts_per_step=7, max_prompt_length=10)
    batch = next(iter(data.train_dataloader()))
    assert sorted(int(reference["answer"]) for reference in batch["references"]) == list(range(7))
    assert data._dropped.affected == data._dropped.seen - 7
    told = (
        r"1 of the first \d+ prompts left out, longer than .*=10 tokens; the last is .*p.jsonl, line \d+, with 1\d tok"
    )
    assert re.search(told, caplog.text)
    short = PromptData(path=prompts(tmp_path), tokenizer=tokenizer_folder, max_prompt_length=2)
    with pytest.raises(UserError, match="no prompt is left.*max_prompt_length=2"):
        next(iter(short.train_dataloader()))


def test_references_of_a_batch_are_copies(tmp_path: Path, tokenizer_folder: str) -> None:
    data = PromptData(path=prompts(tmp_path, 1), tokenizer=tokenizer_folder, prompts_per_step=1)
    loader = iter(data.train_dataloader())
    next(loader)["references"][0]["answer"] = "changed"
    assert next(loader)["references"] == [{"kind": "exact", "answer": "0"}]


def test_embedded_prompts(monkeypatch: pytest.MonkeyPatch, tokenizer_folder: str) -> None:
    def stand_in(seed: int, count: int) -> list[dict[str, Any]]:
        return [{"messages": USER, "reference": {"kind": "exact", "answer": f"{seed} {i}"}} for i in range(count)]

    monkeypatch.setattr(embedded, "rl_prompts", stand_in)
    data = PromptData(tokenizer=tokenizer_folder, num_prompts=6, prompts_per_step=6, seed=4)
    batch = next(iter(data.train_dataloader()))
    assert sorted(reference["answer"] for reference in batch["references"]) == [f"4 {i}" for i in range(6)]
    assert batch["input_ids"].dtype == torch.int64


@pytest.mark.skipif(
    not (Path(__file__).resolve().parents[3].parent / "shared" / "data" / "gsm8k").is_dir(),
    reason="GSM8K is not beside this repository",
)
def test_gsm8k(tokenizer_folder: str) -> None:
    file = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "gsm8k" / "test.jsonl"
    data = PromptData(path=str(file), tokenizer=tokenizer_folder, max_prompt_length=4_000)
    batch = next(iter(data.train_dataloader()))
    assert all(reference["answer"].lstrip("-").replace(".", "").isdigit() for reference in batch["references"])


@pytest.mark.parametrize("curriculum", [0.0, 0.5, 1.0])
def test_a_curriculum_goes_from_easy_to_hard(tmp_path: Path, tokenizer_folder: str, curriculum: float) -> None:
    rows = [{"question": "q", "answer": "step\n" * (i % 40 + 1) + f"#### {i}"} for i in range(80)]
    path = write(tmp_path, rows)
    data = PromptData(path=path, tokenizer=tokenizer_folder, prompts_per_step=80, curriculum=curriculum)
    loader = iter(data.train_dataloader())
    passes = [[r["difficulty"] for r in next(loader)["references"]] for _ in range(2)]
    for order in passes:
        assert sorted(order) == sorted(2 * list(range(1, 41)))
        rises = sum(order[40:]) / 40 - sum(order[:40]) / 40
        assert (rises == 20) if curriculum == 1 else (5 < rises < 20) if curriculum else abs(rises) < 8
    assert curriculum == 1 or passes[0] != passes[1]


def test_a_rows_own_difficulty_wins_and_must_be_a_number(tmp_path: Path, tokenizer_folder: str) -> None:
    rows = [{"question": "q", "answer": "a\nb\n#### 1", "difficulty": d} for d in (3, 1.5, 2)]
    options = {"tokenizer": tokenizer_folder, "prompts_per_step": 3, "curriculum": 1.0}
    loader = iter(PromptData(path=write(tmp_path, rows), **options).train_dataloader())
    assert [r["difficulty"] for r in next(loader)["references"]] == [1.5, 2, 3]
    for value in ("hard", float("nan")):
        path = write(tmp_path, [{"question": "q", "answer": "#### 1", "difficulty": value}])
        with pytest.raises(UserError, match=f"p.jsonl, line 1: the difficulty {value!r} must be a number"):
            next(iter(PromptData(path=path, **options).train_dataloader()))
    with pytest.raises(UserError, match="data.curriculum=2 must be from 0"):
        PromptData(path=path, curriculum=2)


def test_a_system_message_goes_before_prompts_that_have_none(tmp_path: Path, tokenizer_folder: str) -> None:
    own = [{"role": "system", "content": "own"}, *USER]
    path = write(tmp_path, [{"question": "q", "answer": "#### 1"}, {"messages": own, "reference": EXACT}])
    data = PromptData(path=path, tokenizer=tokenizer_folder, prompts_per_step=2, system="be short")
    texts = [data.tokenizer.decode(row) for row in next(iter(data.train_dataloader()))["input_ids"]]
    assert {text.split("<|end|>")[0].rpartition("<|system|>")[2] for text in texts} == {"be short", "own"}
