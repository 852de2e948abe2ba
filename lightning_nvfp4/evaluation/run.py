"""Evaluate a checkpoint in one precision or several: lm-evaluation-harness on the converted model."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.code import judge_programs
from lightning_nvfp4.evaluation.documents import load_documents
from lightning_nvfp4.evaluation.journal import Journal
from lightning_nvfp4.evaluation.ranks import shared_ranks
from lightning_nvfp4.evaluation.results import PLAIN, EvalResult, Sample, Score
from lightning_nvfp4.evaluation.sources import open_source, tokenizer_identity
from lightning_nvfp4.evaluation.suite import Definition, Suite, TaskSpec, load_definition, load_suite
from lightning_nvfp4.evaluation.surroundings import no_network, own_random_state, quiet
from lightning_nvfp4.lm.rl.sandbox import run_python
from lightning_nvfp4.nn.inference import inference

UNCONVERTED = {"roles": {}}
NO_PERMISSION = "its answers are programs, which run only with --allow-code-execution"
_PACKAGES = ("lightning-nvfp4", "torch", "transformers", "lm-eval", "datasets")


def evaluate(
    checkpoint: str | Path,
    config: str | Path,
    precision: str,
    out: Path,
    limit: int | None = None,
    allow_code_execution: bool = False,
    seed: int = 0,
    *,
    overrides: Mapping[str, Any] | None = None,
    backend: str = "auto",
    device: str = "auto",
    allow_unsafe_code: bool = False,
    data_dir: str | Path | None = None,
    tokenizer: str | None = None,
    progress: bool = True,
) -> EvalResult:
    """Evaluate one checkpoint in one precision and write the result.

    Under ``torchrun`` or ``accelerate launch`` processes share the documents; all return the result, the first writes.
    An evaluation that was stopped goes on after the last batch it finished: see `Journal`.

    Args:
        checkpoint: a stage's run folder (its ``hf/`` is read), a Lightning checkpoint, a Hugging Face folder, the name
            of a hub model, or a GGUF file; see `sources.open_source`.
        config: a suite (``eval/*.yaml``).
        precision: preset name, or `PLAIN`, which takes no `overrides`.
        out: the result file if it ends in ``.json``, else a folder, which gets ``<checkpoint>-<precision>.json``.
        limit: score at most this many documents of each task.
        allow_code_execution: run model-written code, in the sandbox.
        seed: which embedded documents are drawn, and of sampled answers.
        overrides: fields of the preset to change.
        backend: of the quantized GEMMs.
        device: ``auto``, ``cpu``, ``cuda``.
        allow_unsafe_code: run model-written code with resource limits alone where the machine cannot isolate it.
        data_dir: folder that the files of definitions are relative to; None = the suite's.
        tokenizer: where it is not the checkpoint's own: ``embedded``, a folder, or a hub name.
        progress: show progress bars.

    Raises:
        UserError: bad configuration, checkpoint or precision; code permitted but no isolation on this machine.
    """
    suite = load_suite(config)
    if data_dir is not None:
        suite = replace(suite, data_dir=str(data_dir))
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}: need at least one document.")
    definitions = {
        name: load_definition(suite.folder / spec.definition)
        for name, spec in suite.tasks.items()
        if spec.definition is not None
    }
    if allow_code_execution and not allow_unsafe_code and _runs_code(suite, definitions):
        run_python("pass")  # refuses before minutes are spent on other tasks
    out = Path(out)
    path = out if out.suffix == ".json" else out / f"{Path(checkpoint).name}-{precision}.json"
    judge = (
        partial(judge_programs, workers=_sandboxes(), allow_unsafe=allow_unsafe_code) if allow_code_execution else None
    )
    with (
        no_network(suite.offline),
        quiet(),
        own_random_state(seed),
        shared_ranks(device) as ranks,
        ExitStack() as opened,
    ):
        source = open_source(checkpoint, tokenizer)
        model: Any = source.model
        model.to(ranks.device).eval()
        start = time.monotonic()
        preset, changes = ("bf16-gemm", UNCONVERTED) if precision == PLAIN else (precision, overrides)
        with inference(model, preset, overrides=changes, backend=backend) as report:
            plan = _plan(suite, definitions, source.tokenizer, judge, limit, seed)
            # The limit and the suite decide which documents share a batch.
            identity = [source.fingerprint, precision, overrides, report.backend, seed, limit, ranks.size, _versions()]
            identity += [tokenizer_identity(source.tokenizer), _hardware(model.device), suite.resolved()]
            journal = opened.enter_context(closing(Journal(_journal_path(path, ranks.rank), identity)))
            from lightning_nvfp4.evaluation.wrapped_model import wrap

            lm = wrap(
                model,
                source.tokenizer,
                max_length=suite.max_length,
                journal=journal,
                accelerator=ranks.accelerator,
                seed=seed,
                progress=progress,
            )
            scores, samples = _score(plan, lm, suite, progress)
        seconds = time.monotonic() - start
        result = EvalResult(
            suite=suite.name,
            precision=precision,
            backend=report.backend,
            native=report.native,
            checkpoint=str(checkpoint),
            scores=tuple(scores),
            skipped=plan.skipped,
            notes=tuple(_notes(scores, samples, report.native)),
            seeds={"documents": seed, "sampling": seed, "fewshot": suite.fewshot_seed},
            versions=_versions(),
            hardware=_hardware(model.device),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            config={
                **suite.resolved(),
                "limit": limit,
                "overrides": dict(overrides or {}),
                "ranks": ranks.size,
                "plan_hash": report.plan_hash,
            },
            seconds=seconds if report.native else None,
            samples=tuple(samples),
        )
        result = ranks.from_first(result)
        if ranks.rank == 0:
            result.write(path)
        ranks.barrier()
        journal.delete()
    return result


def evaluate_many(
    checkpoint: str | Path, config: str | Path, precisions: Sequence[str], out: Path, **options: Any
) -> dict[str, EvalResult]:
    """Evaluate one checkpoint in several precisions into the folder `out`; `options` are those of `evaluate`."""
    if not precisions:
        raise UserError("no precision to evaluate in: name at least one preset.")
    if len(precisions) > 1 and Path(out).suffix == ".json":
        raise UserError(f"out is the file {str(out)!r} for {len(precisions)} precisions: name a folder.")
    return {precision: evaluate(checkpoint, config, precision, out, **options) for precision in precisions}


@dataclass(frozen=True)
class _Planned:
    """A task that is ready to be scored."""

    spec: TaskSpec
    tasks: dict[str, Any]
    chat: bool
    limit: int | None


@dataclass(frozen=True)
class _Plan:
    tasks: dict[str, _Planned]
    skipped: dict[str, str]


def _plan(
    suite: Suite, definitions: dict[str, Definition], tokenizer: Any, judge: Any, limit: int | None, seed: int
) -> _Plan:
    """Load the documents of every task: what is missing is said before the first is scored."""
    from lightning_nvfp4.evaluation import harness

    planned: dict[str, _Planned] = {}
    skipped: dict[str, str] = {}
    for name, spec in suite.tasks.items():
        definition = definitions.get(name)
        code = spec.code or (definition is not None and definition.judge == "code")
        if code and judge is None:
            skipped[name] = NO_PERMISSION
            continue
        chat = suite.chat_template if spec.chat_template is None else spec.chat_template
        if chat and not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"task {name!r} wants a chat template and the tokenizer has none: set chat_template: false."
            )
        if definition is not None:
            splits = load_documents(definition.documents, name, seed=seed, count=spec.count, data_dir=suite.data_dir)
            tasks = harness.own_tasks(name, spec, definition, splits, chat=chat, judge=judge if code else None)
        else:
            tasks = harness.stock_tasks(name, spec)
        limits = [value for value in (limit, spec.limit) if value is not None]
        planned[name] = _Planned(spec, tasks, chat, min(limits, default=None))
    return _Plan(planned, skipped)


def _score(plan: _Plan, lm: Any, suite: Suite, progress: bool) -> tuple[list[Score], list[Sample]]:
    from lightning_nvfp4.evaluation import harness

    for name, planned in plan.tasks.items():
        harness.check_answer_length(lm, name, planned.tasks)
    scores: list[Score] = []
    samples: list[Sample] = []
    # One after the other, so that a task's batches, and with them the last digits, do not depend on the other tasks.
    for name, planned in tqdm(plan.tasks.items(), desc="Tasks", disable=not progress or lm.rank != 0):
        lm.batch_size_per_gpu = planned.spec.batch_size or suite.batch_size
        part = harness.score(
            lm, name, planned.tasks, chat=planned.chat, limit=planned.limit, fewshot_seed=suite.fewshot_seed
        )
        scores += part[0]
        samples += part[1]
    return scores, samples


def _journal_path(result: Path, rank: int) -> Path:
    return result.with_name(f".{result.stem}.rank{rank}.journal.jsonl")


def _runs_code(suite: Suite, definitions: dict[str, Definition]) -> bool:
    return any(spec.code for spec in suite.tasks.values()) or any(d.judge == "code" for d in definitions.values())


def _notes(scores: Sequence[Score], samples: Sequence[Sample], native: bool) -> list[str]:
    notes = [] if native else ["Numerics are emulated: scores are those of the format, times say nothing about it."]
    for score in scores:
        if score.value == 0.0 and score.higher_is_better:
            first = next(s for s in samples if (s.task, s.metric) == (score.task, score.metric))
            notes.append(
                f"{score.task} {score.metric} is exactly 0 over {score.n} documents: read the samples before believing "
                f"it. The first answer: {str(first.response)[:120]!r}, wanted {str(first.target)[:60]!r}."
            )
    return notes


def _sandboxes() -> int:
    return max(1, min(16, (os.cpu_count() or 1) // 2))  # half the cores, so that a wall limit means CPU time


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
