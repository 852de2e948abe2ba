"""What a comparison compares: arms, each of one or several results and training logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.results import EvalResult, read_result, samples_path

METRICS = "metrics.csv"


@dataclass(frozen=True)
class Arm:
    """One arm: `results` and `logs` hold an entry for each seed."""

    label: str
    results: tuple[EvalResult, ...] = ()
    logs: tuple[Path, ...] = ()


def read_arms(paths: Sequence[str | Path], named: Mapping[str, Sequence[str | Path]] | None = None) -> list[Arm]:
    """Read arms from disk.

    Args:
        paths: result files, folders with result files in them or in their ``eval/``, run folders with a `metrics.csv`.
            Each result is an arm of its own, and each log.
        named: label -> such paths, all of them seeds of one arm.

    Raises:
        UserError: no such path, a file given twice, an arm of several precisions or suites.
    """
    named = {label: [Path(path) for path in group] for label, group in (named or {}).items()}
    single = [Path(path) for path in paths]
    files = {label: [file for path in group for file in _result_files(path)] for label, group in named.items()}
    loose = [file for path in single for file in _result_files(path)]
    given = [*loose, *(file for group in files.values() for file in group)]
    twice = [str(file) for file in dict.fromkeys(given) if given.count(file) > 1]
    if twice:
        raise UserError(f"the same result is given twice: {', '.join(twice)}. Name each once.")
    arms = [Arm(label, (read_result(file),)) for label, file in zip(_labels(loose), loose, strict=True)]
    arms += [Arm(str(path), logs=logs) for path in single if (logs := _logs([path]))]
    for label, group in named.items():
        results = tuple(read_result(file) for file in files[label])
        for field in ("precision", "suite"):
            values = sorted({getattr(result, field) for result in results})
            if len(values) > 1:
                raise UserError(
                    f"arm {label!r} has results of {field} {', '.join(values)}: an arm is one {field} in several seeds."
                )
        arms.append(Arm(label, results, _logs(group)))
    return arms


def _logs(folders: Sequence[Path]) -> tuple[Path, ...]:
    return tuple(folder / METRICS for folder in folders if (folder / METRICS).is_file())


def _result_files(path: Path) -> list[Path]:
    if path.is_dir():
        folders = (path, path / "eval")
        return [p for folder in folders for p in sorted(folder.glob("*.json")) if samples_path(p).is_file()]
    if not path.is_file():
        raise UserError(f"{path}: no such result. Give a .json file that nvfp4 eval wrote, or its folder.")
    return [path]


def _labels(files: Sequence[Path]) -> list[str]:
    """Return the shortest tails of the paths that tell them apart."""
    parts = [(*file.parts[:-1], file.stem) for file in files]
    labels: list[str] = []
    for depth in range(1, max((len(p) for p in parts), default=0) + 1):
        labels = ["/".join(p[-depth:]) for p in parts]
        if len(set(labels)) == len(labels):
            break
    return labels
