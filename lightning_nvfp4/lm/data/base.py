"""What all data modules share: the tokenizer, the shards, the loaders, and their place among the ranks."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from transformers import PreTrainedTokenizerFast

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data.loader import Batch, BatchList, Examples, NoLoader, StreamLoader
from lightning_nvfp4.lm.data.readers import Row
from lightning_nvfp4.lm.data.sources import EMBEDDED, Shard, resolve
from lightning_nvfp4.lm.data.tokenizer import load_tokenizer, tokenizer_identity

ENDLESS = 10**9
"""Length of a loader whose run is ended by something else than its number of steps."""

_PASS_STRIDE = 1_000_003
_VALIDATION_SEED = 500_000_007
"""Apart from the seeds of the training passes, and the same for every `seed`, so that runs compare."""

_VALIDATION_ROWS = 64
"""Validation rows are read a few at a time and not shuffled."""


class StreamDataModule(pl.LightningDataModule):
    """A data module whose training data are an endless, exactly resumable stream. Subclasses say what an example is."""

    needs_chat_template = False
    text_column: str | None = None

    def __init__(
        self,
        *,
        path: str | list[str],
        val_path: str | list[str] | None,
        tokenizer: str,
        batch_size: int,
        val_batches: int | None,
        seed: int,
        shuffle_rows: int,
        batches_per_epoch: int | None,
        num_workers: int,
    ) -> None:
        super().__init__()
        self.path, self.val_path = path, val_path
        self.tokenizer_name = tokenizer
        self.batch_size = at_least("data.batch_size", batch_size, 1)
        self.val_batches = None if val_batches is None else at_least("data.val_batches", val_batches, 0)
        self.seed = at_least("data.seed", seed, 0)
        self.shuffle_rows = at_least("data.shuffle_rows", shuffle_rows, 1)
        self.batches_per_epoch = (
            None if batches_per_epoch is None else at_least("data.batches_per_epoch", batches_per_epoch, 1)
        )
        if num_workers not in (0, 1):
            raise UserError(
                f"data.num_workers={num_workers}: rows are read in one order so that a run resumes exactly. Use 0, or "
                "1 to prepare batches in a background thread (tokenizing itself uses every core)."
            )
        self.num_workers = num_workers
        self._tokenizer: PreTrainedTokenizerFast | None = None
        self._train: list[Shard] | None = None
        self._validation: list[Shard] | None = None
        self._val_list: list[Batch] | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, loaded when it is first asked for."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer_name, chat=self.needs_chat_template)
        return self._tokenizer

    def prepare_data(self) -> None:
        """Download or train the tokenizer once on each node."""
        _ = self.tokenizer

    def setup(self, stage: str | None = None) -> None:
        """Load the tokenizer and find the files. Raises `UserError` for a path that cannot be used."""
        _ = self.tokenizer
        if self._train is None:
            self._train = self._resolve(self.path, "data.path", validation=False)
            val_path = self.val_path
            if val_path is None and self.path == EMBEDDED:
                val_path = EMBEDDED
            if val_path is not None and self.val_batches != 0:
                self._validation = self._resolve(val_path, "data.val_path", validation=True)

    def _resolve(self, path: str | Sequence[str], field: str, *, validation: bool) -> list[Shard]:
        def rows(epoch: int) -> Iterator[Row]:
            return self.embedded_rows(self.pass_seed(epoch, validation=validation), validation=validation)

        return resolve(
            path,
            field=field,
            text_field=self.text_column,
            embedded=rows,
            embedded_identity=(*self.embedded_identity(), self.seed),
        )

    def pass_seed(self, epoch: int, *, validation: bool) -> int:
        """Return the seed of the embedded data of one pass; each pass generates other rows."""
        return _VALIDATION_SEED if validation else self.seed + _PASS_STRIDE * epoch

    @abstractmethod
    def embedded_rows(self, seed: int, *, validation: bool) -> Iterator[Row]:
        """Return the rows of one pass over the embedded data."""

    def embedded_identity(self) -> tuple[str | int, ...]:
        """Return what the embedded rows depend on besides the seed."""
        return ()

    @abstractmethod
    def examples(self, shards: list[Shard], *, seed: int | None, shuffle_rows: int, repeat: bool) -> Examples:
        """Return the examples of the shards: endless, or (`repeat=False`) of one pass with nothing left over."""

    @abstractmethod
    def collate(self, examples: list[Any]) -> Batch:
        """Make a batch of examples."""

    def train_dataloader(self) -> StreamLoader:
        """Return the training batches of this rank."""
        self.setup("fit")
        self._check_vocabulary()
        assert self._train is not None
        rank, num_ranks = self._place()
        return StreamLoader(
            self.examples(self._train, seed=self.seed, shuffle_rows=self.shuffle_rows, repeat=True),
            self.collate,
            batch_size=self.batch_size,
            length=self._epoch_length(),
            fingerprint=self._fingerprint(self._train),
            rank=rank,
            num_ranks=num_ranks,
            background=self.num_workers == 1,
            in_flight=self._batch_in_flight,
        )

    def val_dataloader(self) -> BatchList | NoLoader:
        """Return this rank's share of the validation batches; nothing where there are no validation data.

        Every rank gets the same number: where it does not divide, the first batches are taken again.
        """
        self.setup("validate")
        if self._validation is None:
            return NoLoader()
        self._check_vocabulary()
        if self._val_list is None:
            self._val_list = self._validation_batches(self._validation)
        rank, num_ranks = self._place()
        batches = self._val_list
        share = -(-len(batches) // num_ranks)
        return BatchList([batches[(rank + i * num_ranks) % len(batches)] for i in range(share)])

    def _validation_batches(self, shards: list[Shard]) -> list[Batch]:
        batches: list[Batch] = []
        examples: list[Any] = []
        one_pass = self.examples(shards, seed=None, shuffle_rows=_VALIDATION_ROWS, repeat=False)
        for example, _ in one_pass(None):
            examples.append(example)
            if len(examples) == self.batch_size:
                batches.append(self.collate(examples))
                examples = []
                if len(batches) == self.val_batches:
                    return batches
        return [*batches, self.collate(examples)] if examples else batches

    def _place(self) -> tuple[int, int]:
        """The rank among the data-parallel ranks, and their number."""
        trainer = self.trainer
        kwargs = None if trainer is None else trainer.distributed_sampler_kwargs
        return (kwargs["rank"], kwargs["num_replicas"]) if kwargs else (0, 1)

    def _epoch_length(self) -> int:
        """Batches of an epoch of Lightning's: the whole run where it is counted in steps."""
        if self.batches_per_epoch is not None:
            return self.batches_per_epoch
        trainer = self.trainer
        if trainer is None:
            return ENDLESS
        if trainer.max_steps > 0:
            # a validation interval longer than a short trial run is no error
            interval = trainer.val_check_interval if isinstance(trainer.val_check_interval, int) else 0
            return max(trainer.max_steps * trainer.accumulate_grad_batches, interval)
        if trainer.max_epochs == -1 or isinstance(trainer.limit_train_batches, int):
            return ENDLESS
        raise UserError(
            "the training data are a stream without an end: set trainer.max_steps, or data.batches_per_epoch to give "
            "trainer.max_epochs a meaning."
        )

    def _batch_in_flight(self) -> bool:
        """A batch was delivered and its training step has not ended: an emergency checkpoint must give it again."""
        trainer = self.trainer
        if trainer is None:
            return False
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.ready > progress.processed

    def _fingerprint(self, shards: list[Shard]) -> str:
        parts = [
            type(self).__name__,
            self.text_column,
            self.seed,
            self.shuffle_rows,
            tokenizer_identity(self.tokenizer),
            [shard.identity for shard in shards],
        ]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def _check_vocabulary(self) -> None:
        """A token id that the model's embedding does not have would be an obscure error later on."""
        module = None if self.trainer is None else self.trainer.lightning_module
        config = getattr(getattr(module, "model", None), "config", None)
        size = getattr(config, "vocab_size", None)
        if isinstance(size, int) and size < len(self.tokenizer):
            raise UserError(
                f"vocabulary mismatch: the tokenizer {self.tokenizer_name!r} has {len(self.tokenizer)} entries and the "
                f"model's vocab_size is {size}. Set model.vocab_size to at least {len(self.tokenizer)}, or use the "
                "tokenizer that the model was trained with."
            )


def at_least(field: str, value: int, least: int) -> int:
    """Return `value`, an integer that is not below `least`; raises `UserError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{field}={value!r} must be an integer of at least {least}.")
    return value
