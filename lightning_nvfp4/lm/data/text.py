"""Text for pretraining: documents, shuffled, tokenized, packed without gaps into sequences of one length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from typing_extensions import override

from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.lm.data.base import StreamDataModule, at_least
from lightning_nvfp4.lm.data.loader import Batch, Examples
from lightning_nvfp4.lm.data.packing import collate_sequences, pack_sequences
from lightning_nvfp4.lm.data.readers import Row
from lightning_nvfp4.lm.data.sources import Shard
from lightning_nvfp4.lm.data.stream import Position, RowStream

_STAGES = ("pretrain", "decay")


class TextData(StreamDataModule):
    """Batches `{"input_ids", "labels"}`, both int64 of shape (batch_size, sequence_length), for a causal LM.

    Documents follow one another, each ended by the tokenizer's eos token, and are cut every `sequence_length` tokens;
    what is left at the end of a pass begins the next. Labels equal the inputs (Hugging Face's models shift them
    inside), so the first token of a sequence is context only; attention may look across documents.

    Batch k is a pure function of the arguments and k. Ranks take the sequences in turn. A checkpoint holds the place in
    the stream, whatever batch size, sequence length and number of ranks go on with it; with other files, seed,
    tokenizer or shuffling the stream starts at its beginning and says so.

    Args:
        path: `embedded`, a file, a folder, a glob, `hf://owner/name[:config][@split]`, or a list of these. Files end in
            .jsonl, .jsonl.gz, .parquet, .txt or .txt.gz; a text file's documents are separated by blank lines.
        val_path: The same for validation: one pass in file order. Without it, `embedded` has its own validation split
            and files have no validation.
        tokenizer: `embedded`, a Hugging Face folder or name, or the run folder of a finished stage.
        text_field: The field of a row that holds the text.
        sequence_length: Tokens of a sequence.
        batch_size: Sequences of a batch of one rank.
        val_batches: The most validation batches, over all ranks; null for all that there are, 0 for no validation.
        seed: Seeds the order, and the embedded text.
        shuffle_rows: Rows held in memory and shuffled together; the order of the files is drawn anew each pass.
        stage: The mixture of the embedded text.
        batches_per_epoch: What Lightning counts as an epoch; null for the whole run (then set trainer.max_steps).
        num_workers: 0, or 1 to prepare batches in a background thread.
    """

    def __init__(
        self,
        path: str | list[str] = "embedded",
        val_path: str | list[str] | None = None,
        tokenizer: str = "embedded",
        text_field: str = "text",
        sequence_length: int = 128,
        batch_size: int = 16,
        val_batches: int | None = 16,
        seed: int = 0,
        shuffle_rows: int = 10_000,
        stage: Literal["pretrain", "decay"] = "pretrain",
        batches_per_epoch: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            path=path,
            val_path=val_path,
            tokenizer=tokenizer,
            batch_size=batch_size,
            val_batches=val_batches,
            seed=seed,
            shuffle_rows=shuffle_rows,
            batches_per_epoch=batches_per_epoch,
            num_workers=num_workers,
        )
        if stage not in _STAGES:
            raise unknown("data.stage", stage, _STAGES)
        self.stage = stage
        self.text_field = self.text_column = text_field
        self.sequence_length = at_least("data.sequence_length", sequence_length, 2)

    @override
    def embedded_rows(self, seed: int, *, validation: bool) -> Iterator[Row]:
        from lightning_nvfp4.lm.data import embedded

        documents = embedded.pretrain_documents("validation" if validation else self.stage, seed)
        return ({self.text_field: document} for document in documents)

    @override
    def embedded_identity(self) -> tuple[str | int, ...]:
        return (self.stage,)

    @override
    def examples(self, shards: list[Shard], *, seed: int | None, shuffle_rows: int, repeat: bool) -> Examples:
        rows = RowStream(shards, self._read, seed=seed, shuffle_rows=shuffle_rows, repeat=repeat)

        def examples(position: Position | None) -> Iterator[tuple[list[int], Position]]:
            return pack_sequences(rows, self._encode, self.sequence_length, position, keep_tail=not repeat)

        return examples

    @override
    def collate(self, examples: list[Any]) -> Batch:
        fill = self.tokenizer.pad_token_id
        assert isinstance(fill, int)
        return collate_sequences(examples, self.sequence_length, fill)

    def _read(self, row: Row, where: str) -> str | None:
        """The text of a row; None where it is blank."""
        if self.text_field not in row:
            raise UserError(
                f"{where}: there is no field {self.text_field!r}; the row has "
                f"{', '.join(map(repr, row)) or 'no field'}. "
                "Set data.text_field to the one that holds the text."
            )
        text = row[self.text_field]
        if not isinstance(text, str):
            raise UserError(
                f"{where}: field {self.text_field!r} is a {type(text).__name__}, not a string. Set data.text_field to "
                "the field that holds the text, or mend the row."
            )
        return text if text.strip() else None

    def _encode(self, texts: list[str]) -> list[list[int]]:
        eos: Any = self.tokenizer.eos_token_id
        encoding: Any = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [[*document, eos] for document in encoding["input_ids"]]
