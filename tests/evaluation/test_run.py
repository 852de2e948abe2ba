"""An evaluation from a run folder to its files, on a tiny random model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_nvfp4.commands.eval import run
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.documents import load_documents
from lightning_nvfp4.evaluation.results import read_result, samples_path
from lightning_nvfp4.evaluation.run import NO_PERMISSION, evaluate, evaluate_many
from lightning_nvfp4.evaluation.suite import load_definition

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "eval" / "embedded.yaml"


@pytest.fixture(scope="module")
def results(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("eval")
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    done = evaluate_many(
        checkpoint, SUITE, ["bf16-gemm", "nvfp4-hybrid"], out, limit=6, allow_unsafe_code=True,
        allow_code_execution=True, progress=False,
    )  # fmt: skip
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    return out, done


def test_scores_every_task(results) -> None:
    _, done = results
    for precision, result in done.items():
        assert result.precision == precision
        assert [(s.task, s.metric, s.n) for s in result.scores] == [
            ("word", "exact_match", 6),
            ("choice_seen", "acc", 6),
            ("choice_heldout", "acc", 6),
            ("code", "pass_at_1", 6),
        ]
        assert result.skipped == {}
        for score in result.scores:
            values = [s.value for s in result.samples if s.task == score.task]
            assert score.value == pytest.approx(sum(values) / 6)
            assert score.version == "1.0"


def test_files_hold_what_was_returned(results, checkpoint: Path) -> None:
    out, done = results
    for precision, result in done.items():
        path = out / f"sft-{precision}.json"
        assert read_result(path) == result
        content = json.loads(path.read_text())
        assert content["checkpoint"] == str(checkpoint)
        assert {"torch", "transformers", "lm-eval", "python"} <= content["versions"].keys()
        assert content["seeds"] == {"documents": 0, "sampling": 0, "fewshot": 1234}
        assert content["hardware"] and content["date"]
        assert len(samples_path(path).read_text().splitlines()) == 24


def test_precisions_score_the_same_documents(results) -> None:
    a, b = results[1].values()
    assert [(s.task, s.id, s.prompt, s.target) for s in a.samples] == [
        (s.task, s.id, s.prompt, s.target) for s in b.samples
    ]
    likelihoods = [[s.response for s in r.samples if s.task == "choice_seen"] for r in (a, b)]
    assert likelihoods[0] != likelihoods[1], "the second run computed in another precision"


def test_emulated_runs_report_no_speed(results) -> None:
    for result in results[1].values():
        if not result.native:
            assert result.seconds is None
            assert any("emulated" in note for note in result.notes)


def test_prompts_are_in_the_chat_template(results, tokenizer) -> None:
    for sample in results[1]["bf16-gemm"].samples:
        assert sample.prompt.startswith("<|user|>") and sample.prompt.endswith("<|end|><|assistant|>")


def test_a_score_of_zero_is_pointed_at(results) -> None:
    result = results[1]["bf16-gemm"]
    zeros = [s for s in result.scores if s.value == 0.0]
    assert zeros, "a random model writes no correct program"
    for score in zeros:
        assert any(note.startswith(f"{score.task} {score.metric} is exactly 0") for note in result.notes)


def test_code_needs_permission(checkpoint: Path, tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(f"tasks:\n  code: {{definition: {ROOT}/eval/tasks/code.yaml}}\n")
    result = evaluate(checkpoint, suite, "bf16-gemm", tmp_path / "r.json", progress=False)
    assert result.skipped == {"code": NO_PERMISSION} and result.scores == ()


def test_the_plain_form_and_another_seed(checkpoint: Path, tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(f"tasks:\n  word: {{definition: {ROOT}/eval/tasks/word.yaml}}\n")
    a, b = (evaluate(checkpoint, suite, "bf16-gemm", tmp_path, 3, seed=s, progress=False) for s in (0, 1))
    assert all(s.prompt.startswith("Question: ") and s.prompt.endswith("\nAnswer:") for s in a.samples)
    assert {s.id for s in a.samples}.isdisjoint(s.id for s in b.samples)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: {}", "at least one task"),
        ("task: {}", "Did you mean 'tasks'"),
        ("tasks: {a: {stok: gsm8k}}", "Did you mean 'stock'"),
        ("tasks: {a: {}}", "exactly one of"),
        ("tasks: {a: {stock: humaneval, code: true}}", "judge: code"),
        ("tasks: {a: {definition: nowhere.yaml}}", "nowhere.yaml: cannot be read"),
        ("tasks: [", "not YAML"),
        ("batch_size: 0\ntasks: {a: {stock: b}}", "batch_size is 0: need at least 1"),
        ("batch_size: x\ntasks: {a: {stock: b}}", "batch_size is 'x': need a whole number"),
        ("chat_template: perhaps\ntasks: {a: {stock: b}}", "chat_template is 'perhaps': need true or false"),
        ("tasks: {a: {definition: 5}}", "tasks.a: definition is 5: need text or null"),
        ("tasks: {a: {stock: b, limit: -1}}", "tasks.a: limit is -1: need at least 1"),
        ("tasks: {a: {stock: b, count: many}}", "tasks.a: count is 'many'"),
        ("tasks: {a: {definition: b, samples: 5, temperature: .inf}}", "tasks.a: temperature is inf"),
        ("tasks: {a: {definition: b, samples: 5}}", "tasks.a: 5 samples without a temperature"),
        ("tasks: {a: {definition: b, temperature: warm}}", "tasks.a: temperature is 'warm': need a number above 0"),
        ("tasks: {a: {stock: b, temperature: 1}}", "tasks.a: samples and temperature are for definitions"),
    ],
)
def test_a_bad_suite_names_the_field(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path, path, "bf16-gemm", tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("5", "limits is 5: need a mapping"),
        ("{second: 5}", "Did you mean 'seconds'"),
        ("{seconds: 0}", "limits: seconds is 0: need at least 1"),
        ("{slow: {599: long}}", "limits.slow is {599: 'long'}: need task_id: seconds"),
        ("{slow: 5}", "limits: slow is 5"),
    ],
)
def test_bad_limits_name_the_field(limits: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(f"documents: {{test: a.jsonl}}\nharness: {{}}\njudge: code\nlimits: {limits}\n")
    with pytest.raises(UserError, match=re.escape(message)):
        load_definition(path)


def test_bad_documents_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n{"id": 2}\n{"id": 3}\n')

    def load(**source):
        return load_documents(source, "task", seed=0, count=None, data_dir=tmp_path)

    assert load(test="a.jsonl", fewshot="a.jsonl", fewshot_where={"id": [1, 3]}) == {
        "test": [{"id": 1}, {"id": 2}, {"id": 3}],
        "fewshot": [{"id": 1}, {"id": 3}],
    }
    assert load(test="a.jsonl", fewshot="a.jsonl", where={"id": 2}) == {"test": [{"id": 2}], "fewshot": [{"id": 2}]}
    with pytest.raises(UserError, match="fewshot documents: the source holds none with {'id': 4}"):
        load(test="a.jsonl", fewshot="a.jsonl", fewshot_where={"id": 4})
    with pytest.raises(UserError, match="no file '.*b.jsonl'.*--data-dir"):
        load(test="b.jsonl")
    with pytest.raises(UserError, match="Did you mean 'fewshot'"):
        load(test="a.jsonl", fewshots="a.jsonl")
    with pytest.raises(UserError, match="need hub: OWNER/NAME"):
        load(hub=5)


def test_an_answer_longer_than_the_context_is_refused_before_anything_runs(checkpoint: Path, tmp_path: Path) -> None:
    """The tiny model's context has 256 tokens; the first task would fit."""
    (tmp_path / "long.yaml").write_text(
        (SUITE.parent / "tasks" / "word.yaml").read_text().replace("max_gen_toks: 32", "max_gen_toks: 256")
    )
    word = SUITE.parent / "tasks" / "word.yaml"
    suite = tmp_path / "suite.yaml"
    suite.write_text(f"tasks: {{word: {{definition: {word}, limit: 1}}, long: {{definition: long.yaml, limit: 1}}}}\n")
    message = "task 'long': generation_kwargs.max_gen_toks is 256, and the model's context has 256 tokens"
    with pytest.raises(UserError, match=message):
        evaluate(checkpoint, suite, "bf16-gemm", tmp_path / "out", progress=False)


def test_the_printed_table_names_each_metric(checkpoint: Path, tmp_path: Path, capsys) -> None:
    out = ["--limit", "1", "--out", str(tmp_path)]
    assert run(["--config", str(SUITE), "--checkpoint", str(checkpoint), *out]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"precision +task +metric +score", printed)
    assert re.search(r"bf16-gemm +word +exact_match +\d\.\d{3}", printed)
    assert re.search(r"bf16-gemm +code +skipped", printed)


def test_bad_arguments(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        evaluate("./nowhere", SUITE, "bf16-gemm", tmp_path)
    with pytest.raises(UserError, match="limit is 0"):
        evaluate(checkpoint, SUITE, "bf16-gemm", tmp_path, 0)
    with pytest.raises(UserError, match="Did you mean 'nvfp4-hybrid'"):
        evaluate(checkpoint, SUITE, "nvfp4-hybird", tmp_path)
    with pytest.raises(UserError, match="--data-dir 'nowhere' is no folder"):
        run(["--checkpoint", str(checkpoint), "--data-dir", "nowhere"])
    with pytest.raises(UserError, match="name a folder"):
        evaluate_many(checkpoint, SUITE, ["nvfp4", "mxfp8"], tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


_CHOICE = """documents: {test: t.jsonl}
parts: PARTS
harness:
  output_type: multiple_choice
  doc_to_text: "{{question}}"
  doc_to_choice: "{{choices}}"
  doc_to_target: answer
  metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
_DOCUMENT = {"question": "q", "choices": ["a", "b"], "answer": 0}


@pytest.mark.parametrize(
    ("rows", "parts", "fewshot", "message"),
    [
        ([_DOCUMENT, {"choices": ["a"], "answer": 0}], "null", 0, "test document 2 has no field 'question'"),
        ([{"choices": ["a"], "answer": 0}], "null", 0, "'question' is undefined"),
        ([_DOCUMENT, _DOCUMENT | {"question": 5}], "null", 0, "refuses its documents"),
        ([_DOCUMENT, _DOCUMENT | {"answer": 7}], "null", 0, "answer of document 2 is 7, none of its 2 choices"),
        ([_DOCUMENT | {"choices": []}], "null", 0, "refuses its documents"),
        ([_DOCUMENT, _DOCUMENT | {"choices": []}], "null", 0, "answer of document 2 is 0, none of its 0 choices"),
        ([_DOCUMENT] * 3, "null", 5, "fewshot is 5, and there are 2 examples: lower it"),
        ([_DOCUMENT | {"topic": ["a"]}], "topic", 0, "a test document has ..a.. there: need text"),
    ],
)
def test_a_document_that_cannot_be_asked_is_refused_before_the_first_is(
    tmp_path: Path, rows: list, parts: str, fewshot: int, message: str
) -> None:
    from lightning_nvfp4.evaluation.harness import own_tasks
    from lightning_nvfp4.evaluation.suite import TaskSpec

    path = tmp_path / "task.yaml"
    path.write_text(_CHOICE.replace("PARTS", parts))
    spec = TaskSpec(definition=str(path), fewshot=fewshot)
    with pytest.raises(UserError, match=message):
        own_tasks("a", spec, load_definition(path), {"test": rows}, chat=False, judge=None)
