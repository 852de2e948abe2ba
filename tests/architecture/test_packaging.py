"""Metadata, pins and the files that travel with the package."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightning_nvfp4

_ROOT = Path(__file__).resolve().parents[2]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
_PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^([\w.-]+)==(\S+)$", (_ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M
    )
}


def _requirements(*extras: str) -> list[Requirement]:
    project = _PROJECT["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(text) for texts in lists for text in texts]


@pytest.mark.parametrize("requirement", _requirements("eval", "dev"), ids=lambda requirement: requirement.name)
def test_every_direct_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(_PINS[canonicalize_name(requirement.name)])


def test_pins_are_closed_under_requirements() -> None:
    missing = set()
    for name in _PINS:
        try:
            texts = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in texts:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                missing.add((name, canonicalize_name(requirement.name)))
    # CUDA builds of torch bring exactly pinned nvidia packages and triton of their own.
    cuda = re.compile(r"nvidia-|cuda-|triton|pip$")
    assert not {pair for pair in missing if pair[1] not in _PINS and not cuda.match(pair[1])}


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
def test_compromised_uploads_are_excluded(name: str) -> None:
    specifier = next(r.specifier for r in _requirements("dev") if r.name == name)
    assert not specifier.contains("2.6.2")
    assert not specifier.contains("2.6.3")
    assert specifier.contains("2.6.6")


def test_every_direct_dependency_says_why_it_is_here() -> None:
    text = (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("### Dependencies")[2]
    for requirement in _requirements("te", "triton", "eval", "dev"):
        assert re.search(rf"\b{re.escape(requirement.name)}\b", text), requirement.name


def test_versions_agree() -> None:
    assert lightning_nvfp4.__version__ == _PROJECT["project"]["version"]


def test_recipes_and_suites_are_packed_where_the_command_looks() -> None:
    packed = _PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert packed == {name: f"lightning_nvfp4/_configs/{name}" for name in ("recipes", "eval")}
