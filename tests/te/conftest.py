"""Fixtures of the tests that need Transformer Engine on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_nvfp4 import capability


@pytest.fixture
def te() -> Iterator[Any]:
    """Transformer Engine, where it can be loaded and runs FP8."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        reason = capability.te_uncovered(("fp8_block",))
    if reason:
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # its own warnings are not ours to fail for
        import transformer_engine.pytorch as te

        yield te
