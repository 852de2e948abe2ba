"""Fixtures of the tests that need Transformer Engine on a GPU."""

from __future__ import annotations

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
    reason = capability.te_uncovered(("fp8_block",))
    if reason:
        pytest.skip(reason)
    import transformer_engine.pytorch as te

    yield te
