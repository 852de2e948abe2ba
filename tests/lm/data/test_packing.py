"""Every token once a pass, in a drawn order, and the same order from any position on."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data.packing import IGNORED, collate_sequences, pack_sequences, row_examples
from lightning_nvfp4.lm.data.readers import GeneratedReader
from lightning_nvfp4.lm.data.sources import Shard
from lightning_nvfp4.lm.data.stream import RowStream

EOS = -1
SIZES = (5, 9, 3)
"""Rows of three shards."""


def shards() -> list[Shard]:
    def shard(index: int, size: int) -> Shard:
        rows = [{"text": f"{index}:{row}"} for row in range(size)]
        return Shard(f"s{index}", (index,), lambda cursor, epoch: GeneratedReader(f"s{index}", iter(rows), cursor))

    return [shard(index, size) for index, size in enumerate(SIZES)]


def stream(seed: int | None = 0, shuffle_rows: int = 4, repeat: bool = True) -> RowStream[str]:
    return RowStream(shards(), lambda row, where: row["text"], seed=seed, shuffle_rows=shuffle_rows, repeat=repeat)


def encode(texts: list[str]) -> list[list[Any]]:
    """Tokens that say where they come from: document, index. Documents have 0 to 12 tokens and EOS."""
    return [[(text, i) for i in range(sum(map(ord, text)) % 13)] + [EOS] for text in texts]


def rows_of(stream: RowStream[str], count: int) -> list[str]:
    return list(itertools.islice(itertools.chain.from_iterable(b.items[b.taken :] for b in stream.blocks()), count))


NUM_ROWS = sum(SIZES)
ALL = sorted(f"{shard}:{row}" for shard, size in enumerate(SIZES) for row in range(size))


@pytest.mark.parametrize("shuffle_rows", [1, 4, 100])
def test_every_pass_has_every_row_once(shuffle_rows: int) -> None:
    rows = rows_of(stream(shuffle_rows=shuffle_rows), 3 * NUM_ROWS)
    passes = [rows[i * NUM_ROWS : (i + 1) * NUM_ROWS] for i in range(3)]
    assert all(sorted(one) == ALL for one in passes)
    assert shuffle_rows == 1 or passes[0] != passes[1] != passes[2]


def test_the_order_is_drawn_from_the_seed_and_mixes_shards() -> None:
    first = rows_of(stream(seed=0, shuffle_rows=100), NUM_ROWS)
    assert first == rows_of(stream(seed=0, shuffle_rows=100), NUM_ROWS)
    assert first != rows_of(stream(seed=1, shuffle_rows=100), NUM_ROWS)
    assert len({row[0] for row in first[:6]}) > 1, "the shards are mixed within a block"
    orders = {tuple(dict.fromkeys(r[0] for r in rows_of(stream(seed, 1), NUM_ROWS))) for seed in range(20)}
    assert len(orders) == 6, "every order of the shards occurs"


def test_without_a_seed_the_order_is_kept_and_one_pass_ends() -> None:
    rows = [row for block in stream(seed=None, repeat=False).blocks() for row in block.items]
    assert rows == [f"{shard}:{row}" for shard, size in enumerate(SIZES) for row in range(size)]


@pytest.mark.parametrize("length", [2, 7, 64])
def test_every_token_of_every_document_once_a_pass_in_order(length: int) -> None:
    documents = rows_of(stream(), 4 * NUM_ROWS)
    expected = [token for document in encode(documents) for token in document]
    packed = itertools.chain.from_iterable(tokens for tokens, _ in pack_sequences(stream(), encode, length))
    assert list(itertools.islice(packed, len(expected))) == expected
    one_pass = [token for document in encode(documents[:NUM_ROWS]) for token in document]
    assert Counter(one_pass) == Counter(token for document in encode(ALL) for token in document)


def test_a_single_pass_keeps_its_tail() -> None:
    sequences = [t for t, _ in pack_sequences(stream(None, repeat=False), encode, 8, keep_tail=True)]
    assert [len(tokens) for tokens in sequences[:-1]] == [8] * (len(sequences) - 1)
    assert 0 < len(sequences[-1]) < 8
    assert Counter(itertools.chain(*sequences)) == Counter(t for document in encode(ALL) for t in document)


@pytest.mark.parametrize("shuffle_rows", [1, 4, 100])
@pytest.mark.parametrize("length", [3, 16])
def test_packing_goes_on_from_every_position(shuffle_rows: int, length: int) -> None:
    whole = list(itertools.islice(pack_sequences(stream(shuffle_rows=shuffle_rows), encode, length), 90))
    for done, (_, position) in enumerate(whole[:60], start=1):
        position = json.loads(json.dumps(position))
        rest = pack_sequences(stream(shuffle_rows=shuffle_rows), encode, length, position)
        assert list(itertools.islice(rest, 12)) == whole[done : done + 12]


def test_a_position_does_not_depend_on_the_sequence_length() -> None:
    whole = [t for s, _ in itertools.islice(pack_sequences(stream(), encode, 4), 80) for t in s]
    position = list(itertools.islice(pack_sequences(stream(), encode, 4), 10))[-1][1]
    longer = [t for s, _ in itertools.islice(pack_sequences(stream(), encode, 10, position), 20) for t in s]
    assert longer == whole[40:240]


def test_resuming_reads_no_row_before_the_block() -> None:
    opened: list[tuple[str, Any]] = []

    def spied(shard: Shard) -> Shard:
        def open_shard(cursor: Any, epoch: int) -> Any:
            opened.append((shard.label, cursor))
            return shard.open(cursor, epoch)

        return Shard(shard.label, shard.identity, open_shard)

    def spied_stream() -> RowStream[str]:
        return RowStream([spied(s) for s in shards()], lambda row, _: row["text"], seed=3, shuffle_rows=4)

    position = list(itertools.islice(pack_sequences(spied_stream(), encode, 5), 13))[-1][1]
    assert position["block"] > 1
    opened.clear()
    next(pack_sequences(spied_stream(), encode, 5, position))
    assert opened[0][1] == position["cursor"] is not None


def make_even(text: str) -> str | None:
    return text if int(text[2:]) % 2 == 0 else None


def test_examples_go_on_from_every_position_and_leave_rows_out() -> None:
    whole = list(itertools.islice(row_examples(stream(), make_even, lost="-"), 40))
    assert {example for example, _ in whole} == {row for row in ALL if make_even(row)}
    for done, (_, position) in enumerate(whole[:25], start=1):
        rest = row_examples(stream(), make_even, json.loads(json.dumps(position)), lost="-")
        assert list(itertools.islice(rest, 12)) == whole[done : done + 12]


@pytest.mark.parametrize("repeat", [True, False])
def test_a_pass_without_an_example_is_an_error(repeat: bool) -> None:
    examples: Iterator[Any] = row_examples(stream(repeat=repeat), lambda text: None, lost="nothing is left")
    with pytest.raises(UserError, match="nothing is left"):
        next(examples)


def test_a_pass_without_a_row_is_an_error() -> None:
    with pytest.raises(UserError, match="s0, s1, s2: no usable row"):
        next(RowStream(shards(), lambda row, where: None, seed=0, shuffle_rows=4).blocks())


def test_labels_are_the_inputs_and_the_fill_is_ignored() -> None:
    batch = collate_sequences([[5, 6, 7], [8]], 3, fill=1)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 1, 1]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, IGNORED, IGNORED]]
