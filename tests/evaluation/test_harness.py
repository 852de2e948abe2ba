"""The harness scores what a model answers: a model that knows the answers gets every point."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation import harness
from lightning_nvfp4.evaluation.run import evaluate
from lightning_nvfp4.lm.data.embedded import eval_documents

ROOT = Path(__file__).parents[2]


def suite(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "suite.yaml"
    path.write_text(text.replace("tasks/", f"{ROOT}/eval/tasks/"))
    return path


def test_right_answers_score_one(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {d["question"]: d["answer"] for d in eval_documents("word", 0, 8)}
    answers |= {d["prompt"]: d["canonical_solution"] for d in eval_documents("code", 0, 8)}

    def generate(self, requests, disable_tqdm=False):
        return [next(a for q, a in answers.items() if q in request.args[0]) for request in requests]

    monkeypatch.setattr(harness.InMemoryLM, "generate_until", generate)
    path = suite(
        tmp_path,
        "chat_template: true\ntasks:\n  word: {definition: tasks/word.yaml, count: 8}\n"
        "  code: {definition: tasks/code.yaml, count: 8}\n",
    )
    result = evaluate(
        checkpoint, path, "bf16-gemm", tmp_path, allow_code_execution=True, allow_unsafe_code=True, progress=False
    )
    assert [(s.task, s.value, s.stderr, s.n) for s in result.scores] == [("word", 1.0, 0.0, 8), ("code", 1.0, 0.0, 8)]


def test_pass_at_k_of_sampled_answers(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mbpp").mkdir()
    for split in ("test", "prompt"):
        rows = [
            {
                "task_id": i,
                "text": f"{split} {i}",
                "code": f"def f():\n    return {i}",
                "test_list": [f"assert f() == {i}"] * 3,
            }
            for i in range(2, 5)
        ]
        (tmp_path / "mbpp" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = []

    def generate(self, requests, disable_tqdm=False):
        drawn.extend(request.args[1] for request in requests)
        seen = Counter()
        answers = []
        for request in requests:
            number = int(re.findall(r"test (\d)", request.args[0])[-1])
            seen[number] += 1
            answers.append(f"def f():\n    return {number if seen[number] < number else 0}")
        return answers

    monkeypatch.setattr(harness.InMemoryLM, "generate_until", generate)
    tasks = "max_length: 512\ntasks: {mbpp: {definition: tasks/mbpp_files.yaml, samples: 10, temperature: 0.8}}"
    path = suite(tmp_path, tasks)
    options = {"allow_unsafe_code": True, "data_dir": tmp_path, "progress": False}
    result = evaluate(checkpoint, path, "bf16-gemm", tmp_path / "r.json", allow_code_execution=True, **options)
    assert {s.metric: s.value for s in result.scores} == pytest.approx({"pass_at_1": 0.2, "pass_at_10": 1.0})
    assert [s.value for s in result.samples if s.metric == "pass_at_1"] == pytest.approx([0.1, 0.2, 0.3])
    assert len(drawn) == 30 and all(d["do_sample"] and d["temperature"] == 0.8 for d in drawn)
    assert all(len(s.response) == 10 and s.prompt.count("[DONE]") == 3 for s in result.samples)
    refused = evaluate(checkpoint, path, "bf16-gemm", tmp_path / "r.json", **options)
    assert refused.scores == () and "--allow-code-execution" in refused.skipped["mbpp"]


def test_batches_do_not_change_scores(checkpoint: Path, tmp_path: Path) -> None:
    texts = {}
    for size in (1, 5):
        path = suite(
            tmp_path,
            f"batch_size: {size}\nchat_template: true\ntasks:\n  word: {{definition: tasks/word.yaml, count: 5}}\n"
            "  choice: {definition: tasks/choice_seen.yaml, count: 5}\n",
        )
        result = evaluate(checkpoint, path, "bf16-gemm", tmp_path, progress=False)
        texts[size] = result.samples
    for one, five in zip(texts[1], texts[5], strict=True):
        assert (one.id, one.prompt, one.target) == (five.id, five.prompt, five.target)
        if one.task == "choice":
            # BF16 sums in another order: likelihoods agree to its 8 bits, over a few tokens.
            assert one.response == pytest.approx(five.response, rel=0.02)


def test_the_model_runs_under_bf16_autocast_as_inference_says(checkpoint: Path, tmp_path: Path) -> None:
    from lightning_nvfp4.evaluation.journal import Journal
    from lightning_nvfp4.evaluation.sources import open_source
    from lightning_nvfp4.evaluation.wrapped_model import wrap
    from lightning_nvfp4.nn.inference import inference

    source = open_source(checkpoint)
    ids = torch.arange(8).reshape(1, 8)
    with torch.no_grad(), inference(source.model, "nvfp4-hybrid"):
        expected = source.model(ids).logits
        seen = []
        source.model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits.dtype))
        lm = wrap(source.model, source.tokenizer, journal=Journal(None))
        assert torch.equal(lm._model_call(ids), expected)
        lm._model_generate(ids, attention_mask=torch.ones_like(ids), max_length=10, stop=[])
    assert set(seen) == {torch.bfloat16} and len(seen) > 1


def test_files_with_few_shot_examples(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for split, count in (("test", 3), ("train", 4)):
        path = tmp_path / "data" / "gsm8k" / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f'{{"question": "{split} {i}?", "answer": "#### {i}"}}\n' for i in range(count)))
    path = suite(tmp_path, "tasks: {gsm8k: {definition: tasks/gsm8k_files.yaml, fewshot: 2}}")
    path.write_text(f"max_length: 512\ndata_dir: data\n{path.read_text()}")
    result = evaluate(checkpoint, path, "bf16-gemm", tmp_path / "r.json", progress=False)
    assert [s.metric for s in result.scores] == ["exact_match@flexible-extract", "exact_match@strict-match"]
    assert result.scores[0].n == 3
    for sample in result.samples:
        assert sample.prompt.count("Question: train") == 2 and sample.prompt.count("Question: test") == 1
    (tmp_path / "data" / "gsm8k" / "test.jsonl").write_text('{"question": "a"}\n{"question"\n')
    with pytest.raises(UserError, match="test.jsonl, line 2: not valid JSON"):
        evaluate(checkpoint, path, "bf16-gemm", tmp_path / "r.json", progress=False)
    (tmp_path / "data" / "gsm8k" / "test.jsonl").unlink()
    with pytest.raises(UserError, match="no file 'data/gsm8k/test.jsonl'"):
        evaluate(checkpoint, path, "bf16-gemm", tmp_path / "r.json", progress=False)
