"""What an evaluation changes around itself and puts back: random states, verbosity, the network."""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "TRANSFORMERS_OFFLINE")


@contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch inside, and put their states back."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        random.seed(seed)
        np.random.seed(seed)
        torch.random.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what the harness says about its own set-up off the screen; errors pass."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "transformers.generation", "httpx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Third-party code calling third-party code by old names: nothing a user can mend.
            warnings.filterwarnings(
                "ignore", category=DeprecationWarning, module=r"(lm_eval|evaluate|datasets|sacrebleu)"
            )
            warnings.filterwarnings(
                "ignore", category=FutureWarning, module=r"(lm_eval|evaluate|datasets|transformers)"
            )
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def no_network(active: bool) -> Iterator[None]:
    """Make the Hugging Face libraries fail at once instead of reaching for the network."""
    if not active:
        yield
        return
    before = {name: os.environ.get(name) for name in _OFFLINE}
    os.environ.update(dict.fromkeys(_OFFLINE, "1"))
    with ExitStack() as stack:
        # The libraries read the variables once, when they are imported.
        import datasets.config
        import huggingface_hub.constants

        for module, name in ((huggingface_hub.constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")):
            stack.callback(setattr, module, name, getattr(module, name, False))
            setattr(module, name, True)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
