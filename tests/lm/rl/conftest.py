"""Fixtures of the tests of the sandbox."""

from __future__ import annotations

import pytest

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.rl.sandbox import run_python


@pytest.fixture(scope="module")
def isolation() -> None:
    """Skip where this machine cannot isolate a program."""
    try:
        run_python("pass")
    except UserError as error:
        pytest.skip(f"no namespaces on this machine: {error}")
