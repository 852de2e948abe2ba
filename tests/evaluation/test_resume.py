"""A killed evaluation continues after its last whole batch, and ends with the result of one that never stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation import run
from lightning_nvfp4.evaluation.journal import Journal
from lightning_nvfp4.evaluation.results import EvalResult, read_result
from lightning_nvfp4.evaluation.run import evaluate

ROOT = Path(__file__).parents[2]
TASKS = (
    "batch_size: 2\nchat_template: true\ntasks:\n"
    f"  word: {{definition: {ROOT}/eval/tasks/word.yaml, count: 6, samples: 2, temperature: 0.7}}\n"
    f"  choice: {{definition: {ROOT}/eval/tasks/choice_seen.yaml, count: 8}}\n"
)
# Batches one after the other until told to die: a batch that has begun is lost, those before it are on the disk.
KILLED = """
import os, signal, sys
from lightning_nvfp4.evaluation import wrapped_model
from lightning_nvfp4.evaluation.run import evaluate
left = [3]
def counted(call):
    def counting(self, *args, **kwargs):
        if left[0] == 0:
            self._journal.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return call(self, *args, **kwargs)
    return counting
for name in ("_model_call", "_model_generate"):
    setattr(wrapped_model.InMemoryLM, name, counted(getattr(wrapped_model.InMemoryLM, name)))
evaluate(sys.argv[1], sys.argv[2], "bf16-gemm", __import__("pathlib").Path(sys.argv[3]), progress=False)
"""


def content(result: EvalResult) -> EvalResult:
    return replace(result, date="", seconds=None)


def test_after_sigkill(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(TASKS)
    whole = evaluate(checkpoint, suite, "bf16-gemm", tmp_path / "whole.json", progress=False)
    out = tmp_path / "killed.json"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(checkpoint), str(suite), str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    (journal,) = tmp_path.glob(".killed.*")
    assert not out.exists() and len(journal.read_text().splitlines()) == 1 + 3
    from lightning_nvfp4.evaluation.wrapped_model import InMemoryLM

    calls = []
    generate = InMemoryLM._model_generate
    monkeypatch.setattr(InMemoryLM, "_model_generate", lambda self, *a, **k: calls.append(1) or generate(self, *a, **k))
    resumed = evaluate(checkpoint, suite, "bf16-gemm", out, progress=False)
    assert content(resumed) == content(whole)
    assert len(calls) == 6 - 3, "six batches of two answers, three of them known"
    assert not list(tmp_path.glob(".*journal*")) and content(read_result(out)) == content(whole)


def test_journal_keeps_whole_batches_of_the_same_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, ["model", "nvfp4"])
    for key, answer in (("a", [-1.5, True]), ("b", "text"), ("a", [-2.5, False])):
        journal.add(key, answer)
    journal.flush()
    journal.add("lost", 1)
    journal.close()
    with path.open("a") as stream:
        stream.write('[["torn", ')
    again = Journal(path, ["model", "nvfp4"])
    assert again.answers(["b", "a", "a", "a"]) == ["text", [-1.5, True], [-2.5, False], None]
    assert again.answers(["lost", "torn"]) == [None, None]
    again.add("c", 3)
    again.flush()
    again.close()
    with closing(Journal(path, ["model", "nvfp4"])) as third:
        assert third.answers(["a", "c"]) == [[-1.5, True], 3]
    kept = path.read_bytes()
    with closing(Journal(path, ["model", "mxfp8"])) as other:
        assert other.answers(["a", "b", "c"]) == [None] * 3
    assert path.with_name(f"{path.name}.old").read_bytes() == kept


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with closing(Journal(path, 0)) as first, pytest.raises(UserError, match="another evaluation is writing it"):
        first.add("a", 1)
        first.flush()
        before = path.read_bytes()
        Journal(path, 1)
    assert path.read_bytes() == before
    Journal(path, 0).delete()
    assert not path.exists()


@pytest.mark.parametrize("line", ["5", "{", '[["a"]]', "[1]", "\xff"])
def test_a_damaged_line_of_a_journal_is_named_and_nothing_is_lost(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal.jsonl"
    with closing(Journal(path, 0)) as journal:
        for key in "ab":
            journal.add(key, key)
            journal.flush()
    head, first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([head, first, line.encode("latin-1"), second, b""]))
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"journal\.jsonl, line 3: no batch .* Delete that line"):
        Journal(path, 0)
    assert path.read_bytes() == before


@pytest.mark.parametrize("changes", [{"limit": 2}, {"tokenizer": "other"}, {"seed": 1}], ids=str)
def test_answers_of_another_evaluation_are_neither_taken_nor_lost(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(TASKS)
    if "tokenizer" in changes:
        other = AutoTokenizer.from_pretrained(checkpoint / "hf")
        other.add_tokens("colour")
        changes = {"tokenizer": str(tmp_path / "other")}
        other.save_pretrained(changes["tokenizer"])
    monkeypatch.setattr(run, "_score", lambda *_: 1 / 0)
    for options in ({}, changes):
        with pytest.raises(ZeroDivisionError):
            evaluate(checkpoint, suite, "bf16-gemm", tmp_path / "out.json", progress=False, **options)
    journal, old = (path.read_text() for path in sorted(tmp_path.glob(".out.*")))
    assert journal != old


RANKS = """
import sys
from pathlib import Path
from lightning_nvfp4.evaluation.run import evaluate
evaluate(sys.argv[1], sys.argv[2], "nvfp4", Path(sys.argv[3]), 3, progress=False, device="cpu")
"""


def test_two_processes_share_the_documents(checkpoint: Path, tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(TASKS.replace("batch_size: 2", "batch_size: 1").replace(", samples: 2, temperature: 0.7", ""))
    one = evaluate(checkpoint, suite, "nvfp4", tmp_path / "one.json", 3, progress=False)
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    out = tmp_path / "two.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*command, str(checkpoint), str(suite), str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    two = read_result(out)
    assert two.config["ranks"] == 2 and one.config["ranks"] == 1
    assert two.samples == one.samples and two.scores == one.scores
    assert not list(tmp_path.glob(".*journal*"))
