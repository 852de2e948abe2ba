"""What an evaluation needs before it can run without a network: fetch what can be fetched, name what cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.documents import load_documents
from lightning_nvfp4.evaluation.suite import Suite, TaskSpec, load_definition, load_suite
from lightning_nvfp4.evaluation.surroundings import no_network, quiet


@dataclass(frozen=True)
class Need:
    """One thing that a task needs.

    Attributes:
        task: of the suite.
        what: a file, a data set of the hub, a task of the harness.
        state: ``here`` before, ``fetched`` now, or ``missing``.
        reason: why it is missing.
    """

    task: str
    what: str
    state: Literal["here", "fetched", "missing"]
    reason: str = ""


def prepare(config: str | Path, data_dir: str | Path | None = None) -> list[Need]:
    """Return what the tasks of a suite need, one after the other, after fetching what the hub has.

    Nothing is fetched for a suite with ``offline: true``, nor where HF_HUB_OFFLINE is set.

    Raises:
        UserError: bad configuration.
    """
    suite = load_suite(config)
    if data_dir is not None:
        suite = replace(suite, data_dir=str(data_dir))
    with quiet():
        return [need for name, spec in suite.tasks.items() for need in _needs(suite, name, spec)]


def _needs(suite: Suite, name: str, spec: TaskSpec) -> Iterator[Need]:
    if spec.stock is not None:
        from lightning_nvfp4.evaluation import harness

        yield _fetch(name, f"harness task {spec.stock}", lambda: harness.stock_tasks(name, spec), suite.offline)
        return
    documents = load_definition(suite.folder / str(spec.definition)).documents
    for source, what in _sources(documents):

        def load(source: dict[str, Any] = source) -> Any:
            return load_documents(source, name, seed=0, count=spec.count, data_dir=suite.data_dir)

        yield _fetch(name, what, load, suite.offline)


def _sources(documents: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The data of a definition one by one."""
    if "hub" in documents:
        for source in (documents, documents.get("fewshot")):
            if isinstance(source, dict):
                alone = {key: source[key] for key in ("hub", "name", "split") if key in source}
                yield alone, " ".join(["data set", *(str(value) for value in alone.values())])
    elif "test" in documents:
        for split in ("test", "fewshot"):
            if split in documents:
                yield {"test": documents[split]}, f"file {documents[split]}"
    else:
        yield documents, " ".join(f"{kind} {value}" for kind, value in documents.items())


def _fetch(task: str, what: str, load: Callable[[], Any], offline: bool) -> Need:
    try:
        with no_network(True):
            load()
        return Need(task, what, "here")
    except UserError as error:
        reason = str(error)
    if not offline:
        try:
            load()
            return Need(task, what, "fetched")
        except UserError as error:
            reason = str(error)
    return Need(task, what, "missing", " ".join(reason.split()))
