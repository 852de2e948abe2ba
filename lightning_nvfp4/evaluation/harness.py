"""The seam to lm-evaluation-harness: a model in memory, tasks from our definitions, results as ours.

Importing this module imports lm_eval, which takes seconds; `run.py` does it when an evaluation starts.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import datasets
import jinja2
from jinja2 import meta
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate as harness_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.articles import bits, perplexities
from lightning_nvfp4.evaluation.code import pass_at
from lightning_nvfp4.evaluation.documents import Rows
from lightning_nvfp4.evaluation.results import Sample, Score
from lightning_nvfp4.evaluation.statistics import standard_error
from lightning_nvfp4.evaluation.suite import Definition, TaskSpec
from lightning_nvfp4.evaluation.wrapped_model import InMemoryLM

Judge = Callable[..., list[list[str]]]
"""`(responses, documents, limits=CodeLimits) -> verdicts`."""

PASS_AT = (1, 10, 100)


Tasks = dict[str, Any]
"""Tasks of lm-evaluation-harness by the part of ours that they are; the key is empty where there is only one."""


def own_tasks(
    name: str, spec: TaskSpec, definition: Definition, splits: dict[str, Rows], *, chat: bool, judge: Judge | None
) -> Tasks:
    """Build the task of a definition over documents in memory, one for each value of the field `definition.parts`."""
    field = definition.parts
    if field is None:
        return {"": _own_task(name, spec, definition, splits, chat=chat, judge=judge)}
    for split, rows in splits.items():
        if any(field not in row for row in rows):
            raise UserError(f"task {name!r}: parts is {field!r}, and {split} documents have no such field.")
        bad = next((row[field] for row in rows if not isinstance(row[field], str | int)), "")
        if bad != "":
            raise UserError(
                f"task {name!r}: parts is {field!r}, and a {split} document has {bad!r:.60} there: need text."
            )
    return {
        str(part): _own_task(
            f"{name}/{part}",
            spec,
            definition,
            {split: [row for row in rows if row[field] == part] for split, rows in splits.items()},
            chat=chat,
            judge=judge,
        )
        for part in dict.fromkeys(row[field] for row in splits["test"])
    }


def _own_task(
    name: str, spec: TaskSpec, definition: Definition, splits: dict[str, Rows], *, chat: bool, judge: Judge | None
) -> ConfigurableTask:
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
    if "articles" in definition.documents:
        config["process_results"] = perplexities
    if spec.temperature is not None:
        config.setdefault("generation_kwargs", {}).update(do_sample=True, temperature=float(spec.temperature))
    config["repeats"] = spec.samples
    _check_fields(name, config, splits)
    config |= {"task": name, "test_split": "test"}
    if "fewshot" in splits:
        config["fewshot_split"] = "fewshot"
    if spec.fewshot is not None:
        config["num_fewshot"] = spec.fewshot
    try:
        loaded = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in splits.items()})
        task = ConfigurableTask(config={**config, "custom_dataset": lambda **_: loaded})
    except (TypeError, LookupError, ValueError, AssertionError, jinja2.TemplateError) as error:
        raise UserError(f"task {name!r}: lm-evaluation-harness refuses its documents or definition: {error}") from error
    wanted = config.get("num_fewshot") or 0
    available = len(splits["fewshot"]) if "fewshot" in splits else len(splits["test"]) - 1
    if wanted > available:
        raise UserError(f"task {name!r}: fewshot is {wanted}, and there are {available} examples: lower it.")
    if config.get("output_type") == "multiple_choice":
        _check_choices(name, task)
    return task


def _check_fields(name: str, config: dict[str, Any], splits: dict[str, Rows]) -> None:
    """Refuse a document without a field that others have and the prompt shows: it would be asked "None"."""
    templates = [config.get(part) for part in ("description", "doc_to_text", "doc_to_choice", "doc_to_target")]
    try:
        shown = {
            field
            for template in templates
            if isinstance(template, str)
            for field in (template, *meta.find_undeclared_variables(jinja2.Environment().parse(template)))
        }
    except jinja2.TemplateError as error:
        raise UserError(f"task {name!r}: no Jinja template: {error}.") from error
    for split, rows in splits.items():
        for field in sorted(shown & set().union(*rows)):
            for number, row in enumerate(rows, start=1):
                if field not in row:
                    raise UserError(
                        f"task {name!r}: {split} document {number} has no field {field!r}, which the prompt shows and "
                        "others have: add it, or drop the document."
                    )


def _check_choices(name: str, task: ConfigurableTask) -> None:
    """Refuse a document whose right answer is none of its choices: it would count as wrong."""
    documents: Any = task.eval_docs
    for number, document in enumerate(documents, start=1):
        choices, gold = task.doc_to_choice(document), task.doc_to_target(document)
        for one in gold if isinstance(gold, list) else [gold]:
            if not (0 <= one < len(choices) if isinstance(one, int) else one in choices):
                raise UserError(
                    f"task {name!r}: the answer of document {number} is {one!r:.60}, none of its "
                    f"{len(choices)} choices: mend the document."
                )


def stock_tasks(name: str, spec: TaskSpec) -> Tasks:
    """Load a task of lm-evaluation-harness, or the parts of a group."""
    try:
        loaded: dict[str, Any] = dict(TaskManager().load([str(spec.stock)])["tasks"])
    except Exception as error:  # the harness raises whatever a data set's loader raises
        raise UserError(f"task {name!r}: lm-evaluation-harness cannot load {spec.stock!r}: {error}") from error
    for task in loaded.values():
        if spec.fewshot is not None:
            task.set_config("num_fewshot", spec.fewshot)
    return {"": next(iter(loaded.values()))} if len(loaded) == 1 else loaded


def check_answer_length(lm: InMemoryLM, name: str, tasks: Tasks) -> None:
    """Refuse a task whose longest answer leaves no place for a question in the model's context."""
    for task in tasks.values():
        if task.OUTPUT_TYPE != "generate_until":
            continue
        settings: Any = normalize_gen_kwargs(task.get_config("generation_kwargs") or {}, lm.max_gen_toks)
        longest = settings["max_gen_toks"]
        if longest >= lm.max_length:
            raise UserError(
                f"task {name!r}: generation_kwargs.max_gen_toks is {longest}, and the model's context has "
                f"{lm.max_length} tokens, which leaves none for the question. Copy the suite without the task, or with "
                "a definition that has a smaller max_gen_toks."
            )


def score(
    lm: InMemoryLM, name: str, tasks: Tasks, *, chat: bool, limit: int | None, fewshot_seed: int
) -> tuple[list[Score], list[Sample]]:
    """Score one task of a suite; its parts, where they have the same metrics, count as one by their documents.

    Args:
        lm: the model.
        name: in the suite.
        tasks: of lm-evaluation-harness, by part.
        chat: put the questions into the chat template.
        limit: documents, taken evenly from the beginnings of the parts; None = all.
        fewshot_seed: of the few-shot examples.

    Returns:
        Scores and documents; on ranks other than the first, nothing.
    """
    chosen = None
    if limit is not None:
        counts = evenly(limit, [len(task.eval_docs) for task in tasks.values()])
        tasks = {part: task for (part, task), count in zip(tasks.items(), counts, strict=True) if count}
        chosen = {part: list(range(count)) for part, count in zip(tasks, filter(None, counts), strict=True)}
    for part, task in tasks.items():
        if (count := len(chosen[part] if chosen else task.eval_docs)) < lm.world_size:
            raise UserError(
                f"task {name!r}{f', part {part!r}' if part else ''}: {count} documents for {lm.world_size} processes: "
                "start no more processes than it has."
            )
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(fewshot_seed)
    loaded: Any = {"tasks": tasks, "groups": {}, "group_map": {}}
    raw: Any = harness_evaluate(
        lm=lm,
        task_dict=loaded,
        samples=chosen,
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        confirm_run_unsafe_code=True,  # only tasks that the caller has permitted get here
    )
    if raw is None:
        return [], []
    pooled = len(tasks) == 1 or _pool(list(tasks.values()))
    scores, samples = [], []
    for group in [tasks] if pooled else [{part: task} for part, task in tasks.items()]:
        label = name if pooled else f"{name}/{next(iter(group))}"
        part = _read(label, group, raw, lm)
        scores += part[0]
        samples += part[1]
    return scores, samples


def evenly(total: int, sizes: list[int]) -> list[int]:
    """Return how many to take of each so that they are `total` in all and differ by one at most, where sizes allow."""
    counts = [0] * len(sizes)
    while total > 0 and any(count < size for count, size in zip(counts, sizes, strict=True)):
        for place, size in enumerate(sizes):
            if counts[place] < size and total > 0:
                counts[place] += 1
                total -= 1
    return counts


def _pool(tasks: list[Any]) -> bool:
    """Whether documents of all `tasks` may be averaged together."""
    aggregations = [task.aggregation() for task in tasks]
    return all(a.keys() == aggregations[0].keys() for a in aggregations) and all(
        getattr(function, "__name__", "") == "mean" for a in aggregations for function in a.values()
    )


def _read(name: str, tasks: Tasks, raw: dict[str, Any], lm: InMemoryLM) -> tuple[list[Score], list[Sample]]:
    first = next(iter(tasks.values()))
    entries = [(part, entry) for part in tasks for entry in sorted(raw["samples"][part], key=lambda e: e["doc_id"])]
    filters = sorted({str(entry["filter"]) for _, entry in entries})
    scores, samples = [], []
    for metric, direction in first.higher_is_better().items():
        for filter_name in filters:
            label = metric if len(filters) == 1 else f"{metric}@{filter_name}"
            chosen = [(p, e) for p, e in entries if e["filter"] == filter_name and metric in e]
            values = [raw["results"][part].get(f"{metric},{filter_name}") for part in tasks]
            if not chosen or any(value is None for value in values):
                continue
            value, error = float(values[0]), None
            if isinstance(chosen[0][1][metric], tuple | list) and metric != "bits_per_byte":
                n = len(chosen)  # a perplexity or a correlation: no mean of values of documents
            else:
                part = _samples(name, metric, label, chosen, tasks, lm)
                samples += part
                n = len(part)
                error = standard_error([sample.value for sample in part])
                if len(tasks) > 1:
                    value = sum(sample.value for sample in part) / n
            error = error if error == error else None
            scores.append(Score(name, label, value, error, n, bool(direction), str(first.VERSION)))
    texts = [sample for sample in samples if isinstance(sample.response, dict)]
    if texts:
        mean = -sum(sample.logprob or 0.0 for sample in texts) / sum(sample.response["tokens"] for sample in texts)
        perplexity = math.exp(min(mean, 700.0))  # else it overflows
        scores.append(Score(name, "token_perplexity", perplexity, None, len(texts), False, str(first.VERSION)))
    return scores, samples


def _samples(
    name: str, metric: str, label: str, entries: list[tuple[str, dict[str, Any]]], tasks: Tasks, lm: InMemoryLM
) -> list[Sample]:
    seen: Counter[str] = Counter()
    samples = []
    for part, entry in entries:
        identity = entry["doc_hash"][:16]
        seen[identity] += 1
        if seen[identity] > 1:
            identity = f"{identity}#{seen[identity]}"  # the same document twice in a data set
        value = entry[metric]
        if isinstance(value, tuple | list):
            loglikelihood, weight = value
            value = bits(loglikelihood, weight)
        else:
            weight = 1.0
        samples.append(
            Sample(
                task=name,
                metric=label,
                id=identity,
                value=float(value),
                target=json.loads(json.dumps(entry["target"])),
                prompt=str(entry["arguments"][0][0]),
                part=part,
                weight=float(weight),
                **_answer(tasks[part], entry, lm),
            )
        )
    return samples


def _answer(task: Any, entry: dict[str, Any], lm: InMemoryLM) -> dict[str, Any]:
    """Return `response`, `choice` and `logprob` of a sample."""
    kind = task.OUTPUT_TYPE
    if kind == "generate_until":
        texts = [str(text) for text in entry["resps"][0]]
        if len(texts) > 1:
            return {"response": texts}
        taken = entry["filtered_resps"][0]
        return {"response": texts[0], "choice": taken if isinstance(taken, str) else texts[0]}
    values = [answers[0] for answers in entry["resps"]]
    if kind == "loglikelihood_rolling":
        sizes = {metric: entry[metric][1] for metric in ("bits_per_byte", "word_perplexity") if metric in entry}
        text = entry["arguments"][0][0]
        counts = {"bytes": sizes.get("bits_per_byte"), "words": sizes.get("word_perplexity")}
        return {"response": {**counts, "tokens": len(lm.tok_encode(text))}, "logprob": float(values[0])}
    likelihoods = [float(value[0]) for value in values]
    if kind == "loglikelihood":
        return {"response": likelihoods, "logprob": likelihoods[0]}
    choices = task.doc_to_choice(entry["doc"])
    likelihoods = likelihoods[: len(choices)]  # behind them stand those without the question, for mutual information
    gold: Any = entry["target"]
    gold = choices.index(gold) if isinstance(gold, str) and gold in choices else gold
    known = isinstance(gold, int) and 0 <= gold < len(likelihoods)
    return {
        "response": likelihoods,
        "choice": max(range(len(likelihoods)), key=likelihoods.__getitem__),
        "logprob": likelihoods[gold] if known else None,
    }
