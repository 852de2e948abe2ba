"""What an evaluation leaves behind: a JSON file of scores and JSON Lines of documents, which pair between runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.recipe import PRESETS

SCHEMA = 1
PLAIN = "bf16"
"""The model as it is under BF16 autocast, as lm-evaluation-harness runs it; `bf16-gemm` converts, and sums in FP32."""
PRECISIONS = (PLAIN, *PRESETS)
"""What a checkpoint can be evaluated in."""


@dataclass(frozen=True)
class Score:
    """The mean of one metric of one task, weighted by `Sample.weight`; perplexities, without samples, are no means.

    Attributes:
        task: name in the evaluation's configuration.
        metric: name of the metric, `metric@filter` where a task has several ways to read an answer.
        value: mean over documents, 0 to 1 for accuracies.
        stderr: standard error of the mean.
        n: documents.
        higher_is_better: direction of the metric.
        version: of the task's definition.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    n: int
    higher_is_better: bool = True
    version: str = ""


@dataclass(frozen=True)
class Sample:
    """One scored document.

    Attributes:
        task: name in the evaluation's configuration.
        metric: as in `Score`.
        id: depends on the document's content alone, so that it pairs across runs and machines.
        value: of the metric.
        response: what the model said: the text; of a multiple choice the log-likelihood of each choice, in nats; of a
            running text its log-likelihood and sizes.
        target: the reference answer.
        prompt: what the model was shown.
        choice: the answer taken: the number of the likeliest choice, or what was read out of the text. Runs agree on a
            document where it is equal. None where there is nothing to choose.
        logprob: log-likelihood of the reference answer, in nats; None where the task does not ask for it.
        part: the part of the task it belongs to: a subject, a cell of a grid.
        weight: how much it counts in the mean, such as its bytes where the metric is bits per byte.
    """

    task: str
    metric: str
    id: str
    value: float
    response: Any = None
    target: Any = None
    prompt: str = ""
    choice: int | str | None = None
    logprob: float | None = None
    part: str = ""
    weight: float = 1.0


@dataclass(frozen=True)
class EvalResult:
    """An evaluation of one checkpoint in one precision.

    Attributes:
        suite: name of the configuration.
        precision: one of `PRECISIONS`.
        backend: where the GEMMs ran.
        native: whether the hardware computes in that precision; False means emulated numerics.
        checkpoint: as given.
        scores: one for each task and metric.
        skipped: task -> why it did not run.
        notes: what a reader should know before trusting a score.
        seeds: by name.
        versions: of the packages that matter.
        hardware: device name.
        date: UTC, ISO 8601.
        config: the resolved configuration.
        seconds: wall time; None for emulated runs, whose speed says nothing about hardware that has the format.
        samples: documents; kept in a file of their own.
    """

    suite: str
    precision: str
    backend: str
    native: bool
    checkpoint: str
    scores: tuple[Score, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seeds: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    hardware: str = ""
    date: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    samples: tuple[Sample, ...] = ()

    def score(self, task: str, metric: str | None = None) -> Score:
        """Return the score of `task`; the first metric where none is named."""
        for score in self.scores:
            if score.task == task and metric in (None, score.metric):
                return score
        raise KeyError((task, metric))

    def write(self, path: Path) -> Path:
        """Write `path` (JSON) and, beside it, `*.samples.jsonl`; each is whole or absent."""
        content = {"schema": SCHEMA, **asdict(self)}
        del content["samples"]
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(asdict(sample), ensure_ascii=False) for sample in self.samples)
        _write_whole(samples_path(path), lines)
        _write_whole(path, [json.dumps(content, indent=2, ensure_ascii=False)])
        return path


def samples_path(path: Path) -> Path:
    """Return where the documents of the result `path` are."""
    return path.with_suffix(".samples.jsonl")


def read_result(path: str | os.PathLike[str], *, samples: bool = True) -> EvalResult:
    """Read what `EvalResult.write` wrote.

    Raises:
        UserError: no such file, not a result, or (with `samples`) its documents are missing or cut short.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: no readable evaluation result ({error}). Give a file that nvfp4 eval wrote."
        ) from error
    if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
        raise UserError(f"{path}: not an evaluation result of schema {SCHEMA}. Give a file that nvfp4 eval wrote.")
    try:
        content["scores"] = tuple(Score(**{**score, "value": float(score["value"])}) for score in content["scores"])
        content["notes"] = tuple(content["notes"])
        result = EvalResult(**content)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged, or written by another version ({error!r}). Evaluate again.") from error
    if not samples:
        return result
    result = replace(result, samples=tuple(_read_samples(samples_path(path))))
    strangers = {(s.task, s.metric) for s in result.samples} - {(s.task, s.metric) for s in result.scores}
    if strangers:
        raise UserError(
            f"{samples_path(path)}: has documents of {min(strangers)}, of which {path.name} has no score: the files "
            "are of different evaluations. Evaluate again."
        )
    return result


def _read_samples(path: Path) -> Iterable[Sample]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} is missing: runs pair by it. Keep it beside its .json, or evaluate again.") from error
    # Bytes, because text has line ends of its own, such as U+2028.
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n") if content else (), start=1):
        try:
            sample = Sample(**json.loads(line))
            yield replace(sample, value=float(sample.value))
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not a sample ({error}). Evaluate again.") from error


def _write_whole(path: Path, lines: Iterable[str]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        for line in lines:
            stream.write(line + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
