"""Rules about the text of the sources themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_CODE = sorted((_ROOT / "lightning_nvfp4").rglob("*.py"))
_TEXT = [
    path
    for folder in ("lightning_nvfp4", "tests", "recipes", "eval", "docs", "benchmarks")
    for suffix in ("*.py", "*.yaml", "*.md")
    for path in sorted((_ROOT / folder).rglob(suffix))
] + [_ROOT / name for name in ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml")]
_MOST_LINES = 400
_UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
_LOCAL = re.compile(r"/wo" + r"rk/|/tmp/\w+/venv")


def test_there_is_something_to_check() -> None:
    assert len(_CODE) > 40


@pytest.mark.parametrize("path", _CODE, ids=lambda path: path.relative_to(_ROOT).as_posix())
def test_files_are_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= _MOST_LINES


@pytest.mark.parametrize("pattern", [_UNFINISHED, _LOCAL], ids=["unfinished", "local paths"])
def test_no_text_has(pattern: re.Pattern[str]) -> None:
    found = [
        f"{path.relative_to(_ROOT)}:{number}: {line.strip()}"
        for path in _TEXT
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


def test_the_patterns_match_what_they_forbid() -> None:
    assert _UNFINISHED.search("# TO" + "DO: later")
    assert _LOCAL.search("open('/wo" + "rk/data')")


def test_no_module_shadows_another_package() -> None:
    # `evaluate.py` on sys.path would hide the package that lm-eval's HumanEval imports.
    assert not [path for path in _CODE if path.name == "evaluate.py"]
