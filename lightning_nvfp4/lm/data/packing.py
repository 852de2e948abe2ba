"""From rows to examples: documents packed into sequences, or one example a row. Both say where each example ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data.stream import Position, RowStream

Item = TypeVar("Item")
Example = TypeVar("Example")

IGNORED = -100
"""The label that the loss leaves out."""

_DOCUMENTS_AT_ONCE = 16


def pack_sequences(
    rows: RowStream[str],
    encode: Callable[[list[str]], list[list[int]]],
    sequence_length: int,
    position: Position | None = None,
    *,
    keep_tail: bool = False,
) -> Iterator[tuple[list[int], Position]]:
    """Yield sequences of `sequence_length` tokens, and the position after each.

    The tokens of the documents follow one another without a gap and are cut every `sequence_length`: each is in
    exactly one sequence a pass. What is left at the end of a pass begins the next one. `encode` gives a document's
    tokens with the end-of-text token. `keep_tail` yields a shorter last sequence where the rows end.
    """
    tokens: list[int] = []
    for block in rows.blocks(position):
        offset = block.offset
        for first in range(block.taken, len(block.items), _DOCUMENTS_AT_ONCE):
            documents = encode(block.items[first : first + _DOCUMENTS_AT_ONCE])
            for index, document in enumerate(documents, start=first):
                while offset < len(document):
                    piece = document[offset : offset + sequence_length - len(tokens)]
                    tokens += piece
                    offset += len(piece)
                    if len(tokens) == sequence_length:
                        yield tokens, block.position(index, offset)
                        tokens = []
                offset = 0
    if tokens and keep_tail:
        yield tokens, {}


def row_examples(
    rows: RowStream[Item], make: Callable[[Item], Example | None], position: Position | None = None, *, lost: str
) -> Iterator[tuple[Example, Position]]:
    """Yield one example a row, and the position after it; rows of which `make` makes None are left out.

    Raises `UserError(lost)` when a whole pass gives no example.
    """
    start = (position or {"epoch": 0})["epoch"]
    made = position is not None
    for block in rows.blocks(position):
        if block.start["epoch"] != start:
            if not made:
                raise UserError(lost)
            start, made = block.start["epoch"], False
        for index in range(block.taken, len(block.items)):
            example = make(block.items[index])
            if example is not None:
                made = True
                yield example, block.position(index + 1)
    if not made:
        raise UserError(lost)


Labelled = tuple[list[int], list[int]]
"""Tokens and labels of one document."""


def pack_examples(
    examples: Iterator[tuple[Labelled, Position]], length: int
) -> Iterator[tuple[list[Labelled], Position]]:
    """Yield lists of whole documents that fit into `length` tokens together, and the position after their last one.

    A document goes into the list that is open; the first one that does not fit begins the next. None is cut, so none
    may be longer than `length`.
    """
    pack: list[Labelled] = []
    room, after = length, None
    for document, position in examples:
        if pack and len(document[0]) > room:
            assert after is not None
            yield pack, after
            pack, room = [], length
        pack.append(document)
        room -= len(document[0])
        after = position
    if pack and after is not None:
        yield pack, after


def collate_packs(packs: list[list[Labelled]], length: int, fill: int) -> dict[str, Tensor]:
    """Return `input_ids`, `labels` and `position_ids`, int64 of shape (B, length).

    Positions begin at 0 in every document, from which Hugging Face's models see, without an attention mask, that no
    document attends to another. No document predicts the first token of the next. The fill is a document of its own.
    """
    input_ids = torch.full((len(packs), length), fill, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED)
    position_ids = torch.zeros_like(input_ids)
    for row, pack in enumerate(packs):
        start = 0
        for tokens, targets in pack:
            end = start + len(tokens)
            input_ids[row, start:end] = torch.tensor(tokens)
            labels[row, start + 1 : end] = torch.tensor(targets[1:], dtype=torch.int64)
            position_ids[row, start:end] = torch.arange(len(tokens))
            start = end
        position_ids[row, start:] = torch.arange(length - start)
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


def collate_sequences(sequences: list[list[int]], sequence_length: int, fill: int) -> dict[str, Tensor]:
    """Return `input_ids` and `labels`, both int64 of shape (B, L); a short sequence is filled, its fill ignored.

    Labels equal the inputs: Hugging Face's models shift them inside, so the first token of a sequence is context only.
    """
    input_ids = torch.full((len(sequences), sequence_length), fill, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED)
    for row, tokens in enumerate(sequences):
        input_ids[row, : len(tokens)] = labels[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    return {"input_ids": input_ids, "labels": labels}
