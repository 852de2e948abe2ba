"""The seam to lm-evaluation-harness: a model in memory, tasks from our definitions, results as ours.

Importing this module imports lm_eval, which takes seconds; `run.py` does it when an evaluation starts.
"""

from __future__ import annotations

import copy
import functools
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import datasets
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate as harness_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.code import pass_at
from lightning_nvfp4.evaluation.documents import Rows
from lightning_nvfp4.evaluation.results import Sample, Score
from lightning_nvfp4.evaluation.statistics import standard_error
from lightning_nvfp4.evaluation.suite import Definition, Suite, TaskSpec
from lightning_nvfp4.lm.stop_tokens import stop_token_ids

Judge = Callable[..., list[list[str]]]
"""`(responses, documents, limits=CodeLimits) -> verdicts`."""

PASS_AT = (1, 10, 100)


_HFLM: Any = HFLM  # its decorator hides the class from type checkers


class InMemoryLM(_HFLM):
    """HFLM on a model object, with a progress bar that can be turned off and no graph kept while generating."""

    def __init__(self, *args: Any, progress: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._quiet = not progress

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-likelihood, is greedy) of each request's continuation."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self._quiet)

    @torch.no_grad()
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text generated for each request, up to its stop strings or the end of the answer."""
        return super().generate_until(requests, disable_tqdm=disable_tqdm or self._quiet)


def make_lm(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, suite: Suite, *, progress: bool = True
) -> InMemoryLM:
    """Wrap a model; its generation ends at the tokens that end an answer in the tokenizer's chat template."""
    generation = model.generation_config
    if generation is not None:
        generation.eos_token_id = stop_token_ids(tokenizer)
    return InMemoryLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=suite.batch_size,
        max_length=suite.max_length,
        progress=progress,
    )


def own_task(
    name: str, spec: TaskSpec, definition: Definition, splits: dict[str, Rows], *, chat: bool, judge: Judge | None
) -> ConfigurableTask:
    """Build the task of a definition over documents in memory."""
    config = copy.deepcopy(definition.harness)
    if not chat:
        config.update(copy.deepcopy(definition.plain))
    if judge is not None:
        limited = functools.partial(judge, limits=definition.code_limits())
        config["filter_list"] = [{"name": "sandbox", "filter": [{"function": "custom", "filter_fn": limited}]}]
        config["metric_list"] = [
            {"metric": pass_at(k), "aggregation": "mean", "higher_is_better": True}
            for k in PASS_AT
            if k <= spec.samples
        ]
    if spec.temperature is not None:
        config.setdefault("generation_kwargs", {}).update(do_sample=True, temperature=float(spec.temperature))
    config["repeats"] = spec.samples
    loaded = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in splits.items()})
    config |= {"task": name, "custom_dataset": lambda **_: loaded, "test_split": "test"}
    if "fewshot" in splits:
        config["fewshot_split"] = "fewshot"
    if spec.fewshot is not None:
        config["num_fewshot"] = spec.fewshot
    try:
        return ConfigurableTask(config=config)
    except (TypeError, KeyError, ValueError, AssertionError) as error:
        raise UserError(f"task {name!r}: lm-evaluation-harness refuses its definition: {error}") from error


def stock_tasks(name: str, spec: TaskSpec) -> dict[str, Any]:
    """Load a task or group of lm-evaluation-harness; its parts are named `name` or `name/part`."""
    try:
        loaded: dict[str, Any] = dict(TaskManager().load([str(spec.stock)])["tasks"])
    except Exception as error:  # the harness raises whatever a data set's loader raises
        raise UserError(f"task {name!r}: lm-evaluation-harness cannot load {spec.stock!r}: {error}") from error
    for task in loaded.values():
        if spec.fewshot is not None:
            task.set_config("num_fewshot", spec.fewshot)
    return {name if len(loaded) == 1 else f"{name}/{part}": task for part, task in loaded.items()}


def score_tasks(
    lm: InMemoryLM, tasks: dict[str, Any], *, chat: bool, limit: int | None, seed: int
) -> tuple[list[Score], list[Sample]]:
    """Score `tasks`, which share the form of their prompts, and return scores and documents."""
    for task in tasks.values():
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(seed)
    loaded: Any = {"tasks": tasks, "groups": {}, "group_map": {}}
    raw: Any = harness_evaluate(
        lm=lm,
        task_dict=loaded,
        limit=limit,
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        confirm_run_unsafe_code=True,  # only tasks that the caller has permitted get here
    )
    assert raw is not None, "the first rank returns results"
    scores, samples = [], []
    for name, task in tasks.items():
        filters = {str(s["filter"]) for s in raw["samples"][name]}
        for metric, direction in task.higher_is_better().items():
            for filter_name in sorted(filters):
                label = metric if len(filters) == 1 else f"{metric}@{filter_name}"
                chosen = [s for s in raw["samples"][name] if s["filter"] == filter_name and metric in s]
                part = _samples(name, metric, label, chosen)
                value = raw["results"][name].get(f"{metric},{filter_name}")
                if value is None or not part:
                    continue
                samples += part
                scores.append(_score(name, label, float(value), part, bool(direction), str(task.VERSION)))
    return scores, samples


def _score(name: str, label: str, value: float, samples: list[Sample], direction: bool, version: str) -> Score:
    error = standard_error([sample.value for sample in samples])
    return Score(name, label, value, error if error == error else None, len(samples), direction, version)


def _samples(task: str, metric: str, label: str, raw: list[dict[str, Any]]) -> list[Sample]:
    seen: Counter[str] = Counter()
    samples = []
    for entry in raw:
        identity = entry["doc_hash"][:16]
        seen[identity] += 1
        if seen[identity] > 1:
            identity = f"{identity}#{seen[identity]}"  # the same document twice in a data set
        texts = entry["resps"][0]
        if not isinstance(texts[0], str):
            response = entry["filtered_resps"]
        else:
            response = texts[0] if len(texts) == 1 else texts
        samples.append(
            Sample(
                task=task,
                metric=label,
                id=identity,
                value=float(entry[metric]),
                response=json.loads(json.dumps(response)),
                target=json.loads(json.dumps(entry["target"])),
                prompt=str(entry["arguments"][0][0]),
            )
        )
    return samples
