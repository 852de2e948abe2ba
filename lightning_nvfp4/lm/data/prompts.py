"""Prompts with verifiable references, for reinforcement learning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.lm.data.base import StreamDataModule, at_least
from lightning_nvfp4.lm.data.conversations import Message, checked_messages
from lightning_nvfp4.lm.data.loader import Batch, Examples
from lightning_nvfp4.lm.data.notices import Notice
from lightning_nvfp4.lm.data.packing import row_examples
from lightning_nvfp4.lm.data.readers import Row
from lightning_nvfp4.lm.data.sources import Shard
from lightning_nvfp4.lm.data.stream import Position, RowStream

Prompt = tuple[list[Message], dict[str, Any]]
NamedPrompt = tuple[list[Message], dict[str, Any], str]
"""With the name of its row for messages."""

_REFERENCE_FIELDS = {"exact": ("answer",), "gsm8k": ("answer",), "code": ("entry_point", "tests")}
_FINAL_ANSWER = "####"
_SHAPES = (
    '{"messages" or "prompt", "reference": {"kind": "exact", "answer"} or {"kind": "code", "entry_point", "tests"}}, '
    '{"question", "answer": "... #### 42"}, or {"prompt", "entry_point", "test"}'
)


class PromptData(StreamDataModule):
    """Batches `{"input_ids", "attention_mask", "references"}`: int64 of shape (prompts_per_step, P), and dicts.

    The tensors are padded on the left to the longest prompt.

    A reference is `{"kind": "exact", "answer": "42"}` or `{"kind": "code", "entry_point": "f", "tests": "def check(f):
    ..."}`; further fields of a row's reference are passed on. Prompts are rendered with the tokenizer's chat template
    up to where the assistant begins. A prompt longer than `max_prompt_length` is left out and counted in the log.

    A row's difficulty is its reference's number `difficulty`, or the row's own; of rows with a worked answer, such as
    GSM8K's, the lines of working; else the characters of the prompt.

    Order, ranks and resuming are those of `TextData`; there is no validation.

    Args:
        path: Rows `{"messages", "reference"}`, `{"prompt", "reference"}`, `{"question", "answer": "... #### 42"}` or
            `{"prompt", "entry_point", "test"}` in .jsonl, .jsonl.gz or .parquet files, a Hugging Face data set, or
            `embedded`.
        tokenizer: As for `TextData`; it needs a chat template.
        prompts_per_step: Prompts of a batch of one rank.
        max_prompt_length: The most tokens of a prompt.
        seed: Seeds the order, and the embedded prompts.
        num_prompts: Prompts of a pass over the embedded data.
        system: A system message to put before every prompt that has none.
        curriculum: 0 shuffles, 1 goes from the easiest to the hardest prompt of each `shuffle_rows`; between them both.
        shuffle_rows: Rows that are held in memory and shuffled together.
        batches_per_epoch: What Lightning counts as an epoch; null for the whole run.
        num_workers: 0, or 1 to prepare batches in a background thread.
    """

    needs_chat_template = True

    def __init__(
        self,
        path: str | list[str] = "embedded",
        tokenizer: str = "embedded",
        prompts_per_step: int = 24,
        max_prompt_length: int = 192,
        seed: int = 0,
        num_prompts: int = 4_000,
        system: str | None = None,
        curriculum: float = 0.0,
        shuffle_rows: int = 10_000,
        batches_per_epoch: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            path=path,
            val_path=None,
            tokenizer=tokenizer,
            batch_size=at_least("data.prompts_per_step", prompts_per_step, 1),
            val_batches=0,
            seed=seed,
            shuffle_rows=shuffle_rows,
            batches_per_epoch=batches_per_epoch,
            num_workers=num_workers,
        )
        self.prompts_per_step = prompts_per_step
        self.max_prompt_length = at_least("data.max_prompt_length", max_prompt_length, 1)
        self.num_prompts = at_least("data.num_prompts", num_prompts, 1)
        self.system = system
        if not 0 <= curriculum <= 1:
            raise UserError(f"data.curriculum={curriculum!r} must be from 0, any order, to 1, the easiest first.")
        self.curriculum = curriculum
        self._dropped = Notice(f"prompts left out, longer than data.max_prompt_length={max_prompt_length} tokens")

    @override
    def embedded_rows(self, seed: int, *, validation: bool) -> Iterator[Row]:
        from lightning_nvfp4.lm.data import embedded

        return iter(embedded.rl_prompts(seed, self.num_prompts))

    @override
    def embedded_identity(self) -> tuple[str | int, ...]:
        return (self.num_prompts,)

    @override
    def _fingerprint(self, shards: list[Shard]) -> str:
        order = super()._fingerprint(shards)
        return f"{order} curriculum {self.curriculum}" if self.curriculum else order

    @override
    def examples(self, shards: list[Shard], *, seed: int | None, shuffle_rows: int, repeat: bool) -> Examples:
        rows = RowStream(
            shards,
            lambda row, where: (*prompt_of_row(row, where), where),
            seed=seed,
            shuffle_rows=shuffle_rows,
            repeat=repeat,
            difficulty=_difficulty,
            curriculum=self.curriculum,
        )
        lost = (
            f"no prompt is left: all are longer than data.max_prompt_length={self.max_prompt_length} tokens. Raise it."
        )

        def examples(position: Position | None) -> Iterator[tuple[Any, Position]]:
            return row_examples(rows, self._encode, position, lost=lost)

        return examples

    def _encode(self, prompt: NamedPrompt) -> tuple[list[int], dict[str, Any]] | None:
        messages, reference, where = prompt
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            encoding: Any = self.tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=True
            )
        except Exception as error:
            raise UserError(
                f"{where}: the tokenizer's chat template cannot render the prompt {messages!r:.200} "
                f"({type(error).__name__}: {error}). Check its roles and their order."
            ) from error
        tokens = list(encoding["input_ids"])
        too_long = len(tokens) > self.max_prompt_length
        self._dropped.count(too_long, f"{where}, with {len(tokens)} tokens")
        return None if too_long else (tokens, reference)

    @override
    def collate(self, examples: list[Any]) -> Batch:
        width = max(len(tokens) for tokens, _ in examples)
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int)
        input_ids = torch.full((len(examples), width), pad, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, (tokens, _) in enumerate(examples):
            input_ids[row, width - len(tokens) :] = torch.tensor(tokens, dtype=torch.int64)
            attention_mask[row, width - len(tokens) :] = 1
        references = [dict(reference) for _, reference in examples]
        return {"input_ids": input_ids, "attention_mask": attention_mask, "references": references}


def prompt_of_row(row: Row, where: str) -> Prompt:
    """Return the messages of a row's prompt and its reference. Raises `UserError` for a row of no known shape."""
    if "messages" in row:
        messages = checked_messages(row["messages"], where)
        if messages[-1]["role"] == "assistant":
            raise UserError(
                f"{where}: the last turn is the assistant's; a prompt ends before the answer. Drop the turn."
            )
    else:
        asked = next((row[name] for name in ("prompt", "question") if name in row), None)
        if not isinstance(asked, str):
            raise _no_prompt(row, where)
        messages = [{"role": "user", "content": asked}]
    return messages, _reference(row, where)


def _reference(row: Row, where: str) -> dict[str, Any]:
    if row.get("reference") is not None:
        reference = row["reference"]
        if isinstance(reference, dict) and "difficulty" in row:
            reference = {"difficulty": row["difficulty"], **reference}
    elif "entry_point" in row and ("test" in row or "tests" in row):
        reference = {"kind": "code", "entry_point": row["entry_point"], "tests": row.get("tests", row.get("test"))}
        if isinstance(row.get("prompt"), str):
            reference["prompt"] = row["prompt"]
    elif isinstance(row.get("answer"), str):
        # GSM8K's answers end in "#### 1,234"
        working, _, answer = row["answer"].rpartition(_FINAL_ANSWER)
        reference = {"kind": "exact", "answer": answer.strip().replace(",", "")}
        if "difficulty" in row or working.strip():
            reference["difficulty"] = row.get("difficulty", len(working.strip().splitlines()))
    else:
        raise _no_prompt(row, where)
    return _checked_reference(reference, where)


def _checked_reference(reference: Any, where: str) -> dict[str, Any]:
    if not isinstance(reference, dict):
        raise UserError(f"{where}: 'reference' must be an object, found a {type(reference).__name__}.")
    kind = reference.get("kind")
    if kind not in _REFERENCE_FIELDS:
        raise unknown(f"{where}: reference kind", kind, _REFERENCE_FIELDS)
    for field in _REFERENCE_FIELDS[kind]:
        value = reference.get(field)
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{where}: a reference of kind {kind!r} needs the string {field!r}, found {value!r:.60}.")
    # a Parquet column of objects holds every field, those of the other kind being null
    return {name: value for name, value in reference.items() if value is not None}


def _difficulty(prompt: NamedPrompt) -> float:
    messages, reference, where = prompt
    value = reference.get("difficulty")
    if value is None:
        return float(sum(len(message["content"]) for message in messages))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}: the difficulty {value!r:.60} must be a number.")
    return float(value)


def _no_prompt(row: Row, where: str) -> UserError:
    return UserError(
        f"{where}: no prompt with a reference; the row has {', '.join(map(repr, row)) or 'no field'}. "
        f"Expected {_SHAPES}."
    )
