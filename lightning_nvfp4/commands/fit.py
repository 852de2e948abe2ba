"""`nvfp4 fit | validate | test | predict`: LightningCLI with our defaults wired in and errors a user can act on."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf.errors import OmegaConfBaseException

from lightning_nvfp4.callbacks import NonfiniteGuard, SaveOnSigterm
from lightning_nvfp4.commands.config_errors import explain
from lightning_nvfp4.commands.metrics_log import RunCSVLogger
from lightning_nvfp4.commands.paths import find_config
from lightning_nvfp4.commands.progress_bar import StepProgressBar
from lightning_nvfp4.commands.run_folder import RunFolder
from lightning_nvfp4.commands.yaml_files import read_mapping
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data.base import StreamDataModule
from lightning_nvfp4.lm.export import HFExport
from lightning_nvfp4.lm.model import CausalLM
from lightning_nvfp4.plugins.checkpoint_io import AtomicCheckpointIO

_PEEK_ROWS = 16
_LIGHTNING, _PARSER = f"{os.sep}lightning{os.sep}", f"{os.sep}jsonargparse{os.sep}"
_LONGEST = 800
SUBCOMMANDS = ("fit", "validate", "test", "predict")
# Advice of the libraries that does not apply to a run of ours.
_QUIET = (
    r".*does not have many workers.*",
    r".*is smaller than the logging interval.*",
    r"The dirpath has changed from.*",  # decay continues pretrain's checkpoint in its own folder, on purpose
    r"Checkpoint directory .* exists and is not empty.*",
    r".*LeafSpec.*",
    r"\s*By default only one JsonargparseDeprecationWarning",  # Lightning's calls of jsonargparse by older names
    r"\s*``\w+`` was deprecated in v4",
    r"GPU available but not used.*",
    r"You're resuming from a checkpoint that ended before the epoch ended.*",
    r"LightningCLI's args parameter is intended to run from within Python.*",
)


class SaveConfigAtStart(SaveConfigCallback):
    """Saves `config.yaml` once training starts, so that a run refused before leaves an earlier one's file alone."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait for the first step."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save."""
        super().setup(trainer, pl_module, "fit")


class RunCLI(LightningCLI):
    """LightningCLI over any LightningModule and LightningDataModule named by class path.

    Adds, where the configuration does not say otherwise: `metrics.csv` and TensorBoard logs in
    `trainer.default_root_dir`, atomic checkpoints, `NonfiniteGuard`, `SaveOnSigterm`, and the Hugging Face export after
    a fit.
    """

    def __init__(self, arguments: list[str], extra_callbacks: list[Callback], folder: RunFolder) -> None:
        self._extra_callbacks = extra_callbacks
        self._folder = folder
        self._fits = arguments[:1] == ["fit"]
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            save_config_callback=SaveConfigAtStart if self._fits else None,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"parser_mode": "omegaconf+", "exit_on_error": False},
            args=arguments,
        )

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration alone: the stock CLI lets the checkpoint's hyperparameters win over the YAML."""

    def before_instantiate_classes(self) -> None:
        """Check what can be checked before anything is built or written."""
        section = self.config[str(self.subcommand)]
        checkpoint = section.get("ckpt_path")
        named = checkpoint in ("last", "best", "hpc", "registry") or str(checkpoint).startswith("registry:")
        root = Path(section["trainer"].get("default_root_dir") or ".")
        if checkpoint == "last" and not any(root.rglob("last*.ckpt")):
            raise UserError(
                f"ckpt_path = 'last': {root} holds no checkpoint last.ckpt to continue. Leave --ckpt_path out: the run "
                "then starts as its recipe says."
            )
        if checkpoint and not named and not Path(checkpoint).exists():
            raise UserError(
                f"ckpt_path = {str(checkpoint)!r}: there is no such checkpoint. Run the stage that writes it first, or "
                "give the path of another one; --ckpt_path null starts anew."
            )

    def before_fit(self) -> None:
        """Read the first example before anything is written: an empty file or a broken line stops here."""
        data = self.datamodule
        if isinstance(data, StreamDataModule) and self.trainer.is_global_zero:
            data.prepare_data()
            data.setup("fit")
            assert data._train is not None
            next(iter(data.examples(data._train, seed=None, shuffle_rows=_PEEK_ROWS, repeat=False)(None)), None)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        for name in ("accumulate_grad_batches", "check_val_every_n_epoch"):
            if config.get(name) is not None and config[name] < 1:
                raise UserError(f"trainer.{name} = {config[name]} must be at least 1.")
        root = config.get("default_root_dir") or "."
        config["default_root_dir"] = root
        if self._fits and rank_zero_only.rank == 0 and "://" not in str(root):
            self._folder.enter(Path(root))
        if config.get("logger") in (None, True):
            config["logger"] = (
                [RunCSVLogger(root), TensorBoardLogger(root, name="tensorboard", version="")] if self._fits else False
            )
        plugins = config.get("plugins") or []
        plugins = list(plugins) if isinstance(plugins, list | tuple) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(AtomicCheckpointIO())
        config["plugins"] = plugins
        given = config.get("callbacks") or []
        given = list(given) if isinstance(given, list) else [given]
        defaults: list[Callback] = [NonfiniteGuard(), SaveOnSigterm()]
        if config.get("enable_progress_bar") is not False and not any(isinstance(have, ProgressBar) for have in given):
            defaults.append(StepProgressBar())
        if self._fits and isinstance(self.model, CausalLM):
            defaults.append(HFExport())
        missing = [default for default in defaults if not any(isinstance(have, type(default)) for have in given)]
        config["callbacks"] = [*given, *missing, *self._extra_callbacks]
        try:
            return super()._instantiate_trainer(config, callbacks)
        except UserError:
            raise
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"trainer: {' '.join(str(error).split())} Mend that field of the trainer.") from error


def run(arguments: list[str], extra_callbacks: list[Callback] | None = None) -> Trainer:
    """Run one of `SUBCOMMANDS` and return its trainer.

    Args:
        arguments: the subcommand, then its options, as on the command line; `--config` may be given several times.
        extra_callbacks: appended to the configuration's.

    Raises:
        UserError: bad configuration or data; nothing has been written.
    """
    arguments, files = _resolve_configs(arguments)
    with _own_argv(arguments), _quiet():
        try:
            with RunFolder() as folder:
                return RunCLI(arguments, extra_callbacks or [], folder).trainer
        except ArgumentError as error:
            raise explain(error.message, files, arguments, _known_keys(arguments[0])) from error
        except UserError:
            raise
        except Exception as error:
            if explained := _mistake(error, arguments):
                raise explained from error
            raise


def _mistake(error: Exception, arguments: list[str]) -> UserError | None:
    """Return what an exception of the libraries says about the configuration or the checkpoint, if it is about them."""
    # jsonargparse wraps what a constructor says about its arguments into a text about unions of types.
    cause: BaseException | None = error
    while isinstance(error, ValueError) and cause is not None:
        if isinstance(cause, UserError):
            return cause
        cause = cause.__cause__ or cause.__context__
    # Of a text about every type of a union, the line that knows the mistake.
    telling = [line.strip(" -") for line in str(error).splitlines() if "Did you mean" in line]
    text = " ".join((telling[0] if telling else str(error)).split())[:_LONGEST]
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    words = " ".join(arguments).replace("--ckpt_path=", "--ckpt_path ").partition("--ckpt_path ")[2].split()
    checkpoint = f"ckpt_path = {words[0]!r}" if words else "ckpt_path"
    if isinstance(error, RuntimeError) and text.startswith("Error(s) in loading state_dict"):
        return UserError(f"{checkpoint}: the checkpoint is of another model. {text} Give the model that wrote it.")
    if isinstance(error, KeyError) and _LIGHTNING in innermost:
        return UserError(
            f"{checkpoint}: no checkpoint of a Trainer, it has no entry {text}. Give one that a fit wrote."
        )
    # What these raise themselves is about their arguments; an error in a model or a reward comes from deeper down.
    theirs = isinstance(error, ValueError | TypeError) and (_LIGHTNING in innermost or _PARSER in innermost)
    stopping = isinstance(error, RuntimeError) and text.startswith("Early stopping conditioned on metric")
    if theirs or stopping or isinstance(error, MisconfigurationException | OmegaConfBaseException):
        return UserError(f"{text} Mend that field of the configuration.")
    return None


def _resolve_configs(arguments: list[str]) -> tuple[list[str], list[Path]]:
    """Replace the names of packaged configurations by their paths, and check that every file is sound YAML."""
    resolved, files = [], []
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option not in ("-c", "--config"):
            resolved.append(word)
            continue
        if not equals:
            value = next(words, "")
        path = find_config(value)
        section = read_mapping(path)
        if "stages" in section:
            raise UserError(f"{path} describes a pipeline: run it with `nvfp4 pipeline --config {value}`.")
        if not section:
            continue  # the parser does not take an empty file
        files.append(path)
        resolved += ["--config", str(path)]
    return resolved, files


def _known_keys(subcommand: str) -> list[str]:
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(Trainer, "trainer")
    parser.add_method_arguments(Trainer, subcommand, skip={"model", "datamodule"})
    own = {"config", "seed_everything", "model", "data"}
    return sorted(own | {action.dest for action in parser._actions if action.dest != "help"})


@contextmanager
def _own_argv(arguments: list[str]) -> Iterator[None]:
    """Make the run's words the process's own: Lightning starts the other ranks of a machine with them."""
    before = sys.argv
    sys.argv = [*before[:1], *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _quiet() -> Iterator[None]:
    class NoTips(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return "💡" not in record.getMessage()

    from transformers.utils import logging as hf_logging

    tips = NoTips()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # "Writing model shards" and the like, in the middle of ours
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(tips)
    with warnings.catch_warnings():
        for message in _QUIET:
            warnings.filterwarnings("ignore", message=message)
        try:
            yield
        finally:
            logger.removeFilter(tips)
            if bars:
                hf_logging.enable_progress_bar()
