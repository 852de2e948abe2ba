"""Token files for `convergence.py`: made once from text, mapped into memory by every run, small enough to carry along.

    FOLDER/tokenizer/          Hugging Face folder of the BPE tokenizer that was trained on the text
    FOLDER/train.u16[.xz]      documents in a seeded random order, each ended by the eos token; uint16, little endian
    FOLDER/validation.u16[.xz] held-out documents in file order, the same way
    FOLDER/tokens.json         how many tokens, the vocabulary, and a hash of each file

The tokenizer is not needed to train.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from transformers import PreTrainedTokenizerFast

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data.base import ENDLESS
from lightning_nvfp4.lm.data.loader import Batch, BatchList, StreamLoader
from lightning_nvfp4.lm.data.sources import resolve
from lightning_nvfp4.lm.data.stream import Position, RowStream
from lightning_nvfp4.lm.data.tokenizer import train_tokenizer, with_chat_tokens

_ORDER_SEED = 0
_ROWS_AT_ONCE = 256
_DIGEST_BYTES = 16
_PARTS = ("train", "validation")


def prepare(
    folder: Path,
    train: Sequence[str],
    validation: Sequence[str],
    *,
    vocabulary_size: int = 16384,
    tokenizer_characters: int = 60_000_000,
    max_tokens: int | None = None,
    compress: bool = False,
) -> dict[str, Any]:
    """Train a tokenizer on the training text, tokenize everything once, and return what `tokens.json` holds.

    Args:
        folder: where the files go.
        train: files, folders or globs, as `TextData` takes them.
        validation: the same for the held-out text.
        vocabulary_size: at most 65536, so that a token is two bytes.
        tokenizer_characters: the tokenizer is trained on documents, in random order, up to so many characters.
        max_tokens: training tokens, from documents in random order; all without it.
        compress: leave .xz files only (they are unpacked at first use).

    Raises:
        UserError: no text, or a vocabulary that needs more than 16 bits.
    """
    if not 300 <= vocabulary_size <= 1 << 16:
        raise UserError(f"vocabulary_size = {vocabulary_size} must be 300 to {1 << 16}: a token is stored in 16 bits.")
    documents = list(_texts(train, "train"))
    order = np.random.default_rng(_ORDER_SEED).permutation(len(documents))
    documents = [documents[i] for i in order]
    tokenizer = with_chat_tokens(train_tokenizer(_first(documents, tokenizer_characters), vocabulary_size))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    about: dict[str, Any] = {"vocab_size": len(tokenizer), "eos": tokenizer.eos_token_id}
    for part, texts, limit in (
        ("train", documents, max_tokens),
        ("validation", _texts(validation, "validation"), None),
    ):
        about[part] = _write(folder / f"{part}.u16", _encoded(tokenizer, texts), limit, compress)
    (folder / "tokens.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return about


def _texts(path: Sequence[str], field: str) -> Iterator[str]:
    def read(row: dict[str, Any], where: str) -> str | None:
        text = row.get("text")
        if not isinstance(text, str):
            raise UserError(f"{where}: no field 'text' that holds a string: give files with one.")
        return text if text.strip() else None

    rows = RowStream(
        resolve(list(path), field=field, text_field="text"),
        read,
        seed=None,
        shuffle_rows=_ROWS_AT_ONCE,
        repeat=False,
    )
    for block in rows.blocks():
        yield from block.items


def _first(documents: Sequence[str], characters: int) -> Iterator[str]:
    total = 0
    for text in documents:
        yield text
        total += len(text)
        if total >= characters:
            return


def _encoded(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str] | Iterator[str]) -> Iterator[list[int]]:
    eos: Any = tokenizer.eos_token_id
    batch: list[str] = []

    def encode() -> Iterator[list[int]]:
        encoding: Any = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
        yield from ([*document, eos] for document in encoding["input_ids"])

    for text in texts:
        batch.append(text)
        if len(batch) == _ROWS_AT_ONCE:
            yield from encode()
            batch = []
    if batch:
        yield from encode()


def _write(path: Path, documents: Iterator[list[int]], limit: int | None, compress: bool) -> dict[str, Any]:
    """Write tokens to `path`, or to `path`.xz; return their number and the hash of the raw bytes."""
    digest, count = hashlib.blake2b(digest_size=_DIGEST_BYTES), 0
    target = path.with_name(f"{path.name}.xz") if compress else path
    with lzma.open(target, "wb", preset=6) if compress else target.open("wb") as out:
        for document in documents:
            tokens = np.asarray(document, dtype="<u2")
            tokens = tokens[: None if limit is None else limit - count]
            out.write(tokens.tobytes())
            digest.update(tokens.tobytes())
            count += len(tokens)
            if limit is not None and count >= limit:
                break
    path.with_name(path.name if compress else f"{path.name}.xz").unlink(missing_ok=True)
    return {"tokens": count, "blake2b": digest.hexdigest()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).hexdigest()


def unpack(folder: Path) -> dict[str, Any]:
    """Return what `tokens.json` holds, after unpacking the files that are there as .xz only.

    Raises:
        UserError: no token files there, or one that is not the file that was prepared.
    """
    about_path = folder / "tokens.json"
    if not about_path.is_file():
        raise UserError(f"{folder}: no tokens.json: make it with `python benchmarks/convergence.py prepare`.")
    try:
        about = json.loads(about_path.read_text(encoding="utf-8"))
        sizes = {part: 2 * int(about[part]["tokens"]) for part in _PARTS}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{about_path}: damaged ({error!r}): prepare the folder again.") from error
    for part in _PARTS:
        path = folder / f"{part}.u16"
        packed = path.with_name(f"{path.name}.xz")
        if not path.is_file() and packed.is_file():
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                with lzma.open(packed, "rb") as source, temporary.open("wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
            except (EOFError, lzma.LZMAError) as error:
                temporary.unlink(missing_ok=True)
                raise UserError(
                    f"{packed}: not a whole .xz file ({error}): copy it again, or prepare again."
                ) from error
            os.replace(temporary, path)
        if not path.is_file() or path.stat().st_size != sizes[part]:
            raise UserError(
                f"{path}: not the {about[part]['tokens']} tokens that {about_path} names. Delete it if its .xz is "
                "there, or prepare the folder again."
            )
        if (found := _digest(path)) != about[part]["blake2b"]:
            raise UserError(
                f"{path}: its hash is {found}, and {about_path} names {about[part]['blake2b']}: it is not what was "
                "prepared. Delete it if its .xz is there, or prepare the folder again."
            )
    return about


class TokenData(LightningDataModule):
    """Sequences cut from a token file without gaps, in an order drawn from the seed; one epoch, no repeats.

    Batches are those of `TextData`: `input_ids` and `labels`, int64 (batch_size, sequence_length), equal to each other.
    Batch k is a pure function of the arguments and k, and a checkpoint holds the place.

    Args:
        folder: what `prepare` made.
        sequence_length: tokens of a sequence.
        batch_size: sequences of a batch.
        seed: of the order.
        val_batches: the most validation batches, from the beginning of the held-out tokens.
    """

    def __init__(self, folder: Path, sequence_length: int, batch_size: int, seed: int, val_batches: int) -> None:
        super().__init__()
        self.about = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        self.folder, self.sequence_length, self.batch_size = folder, sequence_length, batch_size
        self.val_batches, self.order_seed = val_batches, seed
        self._train = self._rows("train")
        self.num_batches = len(self._train) // batch_size
        """Whole batches of the one epoch."""

    def _rows(self, part: str) -> np.ndarray:
        tokens = np.memmap(self.folder / f"{part}.u16", dtype="<u2", mode="r")
        rows = len(tokens) // self.sequence_length
        return tokens[: rows * self.sequence_length].reshape(rows, self.sequence_length)

    def _collate(self, rows: list[np.ndarray]) -> Batch:
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        return {"input_ids": tokens, "labels": tokens.clone()}

    def train_dataloader(self) -> StreamLoader:
        """Return the batches from the beginning; a checkpoint's place is put in by Lightning."""
        order = np.random.default_rng(self.order_seed).permutation(len(self._train))

        def examples(position: Position | None) -> Iterator[tuple[np.ndarray, Position]]:
            for taken in range((position or {"taken": 0})["taken"], len(order)):
                yield self._train[order[taken]], {"taken": taken + 1}

        parts = [self.order_seed, self.sequence_length, self.about["train"]["blake2b"]]
        return StreamLoader(
            examples,
            self._collate,
            batch_size=self.batch_size,
            length=ENDLESS,
            fingerprint=json.dumps(parts),
            background=True,
        )

    def validation(self) -> BatchList:
        """Return the held-out batches."""
        rows = self._rows("validation")[: self.val_batches * self.batch_size]
        starts = range(0, len(rows) - self.batch_size + 1, self.batch_size)
        if not len(starts):
            raise UserError(
                f"{self.folder}: {len(rows)} held-out sequences of {self.sequence_length} tokens are no batch of "
                f"{self.batch_size}: prepare more validation text."
            )
        return BatchList([self._collate(list(rows[start : start + self.batch_size])) for start in starts])
