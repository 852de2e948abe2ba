"""Conversations for supervised fine-tuning: the loss is on what the assistant writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from lightning_nvfp4.lm.data.base import StreamDataModule, at_least
from lightning_nvfp4.lm.data.conversations import Message, conversation, encode_conversation
from lightning_nvfp4.lm.data.loader import Batch, Examples
from lightning_nvfp4.lm.data.notices import Notice
from lightning_nvfp4.lm.data.packing import IGNORED, collate_packs, pack_examples, row_examples
from lightning_nvfp4.lm.data.readers import Row
from lightning_nvfp4.lm.data.sources import Shard
from lightning_nvfp4.lm.data.stream import Position, RowStream

LENGTH_MULTIPLE = 16
"""Batches are padded to a multiple of this, which the block formats like."""


class ChatData(StreamDataModule):
    """Batches `{"input_ids", "labels", "attention_mask"}`, int64 of shape (batch_size, T), padded on the right.

    T is the longest conversation of the batch rounded up to a multiple of 16. Labels are the inputs in the assistant's
    turns, the token that ends the turn included, and -100 elsewhere. A conversation longer than `max_length` is cut;
    one whose answers are cut off whole is left out; both are counted in the log.

    With `packing`, a row holds as many whole conversations as fit into `max_length` tokens, none of which attends to
    another; batches are then `{"input_ids", "labels", "position_ids"}`, int64 of shape (batch_size, max_length).

    Order, ranks and resuming are those of `TextData`.

    Args:
        path: Rows `{"messages": [{"role", "content"}, ...]}`, `{"prompt", "completion"}` or `{"question", "answer"}` in
            .jsonl, .jsonl.gz or .parquet files, a Hugging Face data set, or `embedded`.
        val_path: The same for validation; `embedded` has its own, files have none without it.
        tokenizer: As for `TextData`; it needs a chat template.
        max_length: The most tokens of a conversation.
        batch_size: Conversations, or rows of packed ones, of a batch of one rank.
        val_batches: The most validation batches, over all ranks; null for all, 0 for none.
        seed: Seeds the order, and the embedded conversations.
        num_conversations: Conversations of a pass over the embedded data.
        packing: Put several conversations into a row. For models whose layers see other tokens by attention alone.
        shuffle_rows: Rows that are held in memory and shuffled together.
        batches_per_epoch: What Lightning counts as an epoch; null for the whole run.
        num_workers: 0, or 1 to prepare batches in a background thread.
    """

    needs_chat_template = True

    def __init__(
        self,
        path: str | list[str] = "embedded",
        val_path: str | list[str] | None = None,
        tokenizer: str = "embedded",
        max_length: int = 256,
        batch_size: int = 16,
        val_batches: int | None = 8,
        seed: int = 0,
        num_conversations: int = 4_000,
        packing: bool = False,
        shuffle_rows: int = 10_000,
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
        self.max_length = at_least("data.max_length", max_length, 2)
        self.num_conversations = at_least("data.num_conversations", num_conversations, 1)
        self.packing = packing
        self._cut = Notice(f"conversations cut at data.max_length={max_length} tokens")
        self._dropped = Notice(f"conversations left out, no answer within data.max_length={max_length} tokens")

    @override
    def embedded_rows(self, seed: int, *, validation: bool) -> Iterator[Row]:
        from lightning_nvfp4.lm.data import embedded

        count = self.num_conversations
        if validation and self.val_batches is not None:
            count = min(count, self.val_batches * self.batch_size)
        return iter(embedded.sft_conversations(seed, count))

    @override
    def embedded_identity(self) -> tuple[str | int, ...]:
        return (self.num_conversations,)

    @override
    def examples(self, shards: list[Shard], *, seed: int | None, shuffle_rows: int, repeat: bool) -> Examples:
        rows = RowStream(shards, conversation, seed=seed, shuffle_rows=shuffle_rows, repeat=repeat)
        lost = (
            f"no conversation is left: none has an answer within data.max_length={self.max_length} tokens. Raise "
            "data.max_length, or check the roles in the data and the tokenizer's chat template."
        )

        def examples(position: Position | None) -> Iterator[tuple[Any, Position]]:
            conversations = row_examples(rows, self._encode, position, lost=lost)
            return pack_examples(conversations, self.max_length) if self.packing else conversations

        return examples

    def _encode(self, messages: list[Message]) -> tuple[list[int], list[int]] | None:
        """Tokens and labels of one conversation; None where nothing of an answer is left."""
        tokens, learned = encode_conversation(self.tokenizer, messages)
        cut = len(tokens) > self.max_length
        tokens, learned = tokens[: self.max_length], learned[: self.max_length]
        # the first token of a sequence is never predicted
        kept = any(learned[1:])
        self._dropped.count(not kept)
        self._cut.count(cut and kept)
        return (tokens, [t if flag else IGNORED for t, flag in zip(tokens, learned, strict=True)]) if kept else None

    @override
    def collate(self, examples: list[Any]) -> Batch:
        if self.packing:
            pad = self.tokenizer.pad_token_id
            assert isinstance(pad, int)
            return collate_packs(examples, self.max_length, pad)
        longest = max(len(tokens) for tokens, _ in examples)
        width = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int)
        input_ids = torch.full((len(examples), width), pad, dtype=torch.int64)
        labels = torch.full_like(input_ids, IGNORED)
        attention_mask = torch.zeros_like(input_ids)
        for row, (tokens, targets) in enumerate(examples):
            input_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            labels[row, : len(tokens)] = torch.tensor(targets, dtype=torch.int64)
            attention_mask[row, : len(tokens)] = 1
        return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}
