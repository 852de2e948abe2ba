"""Text data as a Lightning user meets it: batches, ranks, validation, epochs, messages."""

import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data import TextData, embedded
from lightning_nvfp4.lm.data.loader import StreamLoader, in_background

CORPUS = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "corpus"


@pytest.fixture
def files(tmp_path: Path) -> str:
    for name in "ab":
        rows = [{"text": f"document {name} {i} of the cat and the dog " + "x" * (i % 9)} for i in range(25)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "*.jsonl")


@pytest.fixture
def make(files: str, tokenizer_folder: str) -> Any:
    def make(**kwargs: Any) -> TextData:
        defaults = {"path": files, "tokenizer": tokenizer_folder, "sequence_length": 16, "batch_size": 3}
        return TextData(**{**defaults, "shuffle_rows": 8, **kwargs})

    return make


def take(data: TextData, count: int) -> list[torch.Tensor]:
    return [batch["input_ids"] for batch in itertools.islice(data.train_dataloader(), count)]


def texts_of(files: str) -> list[str]:
    lines = [line for f in "ab" for line in Path(files).with_name(f"{f}.jsonl").read_text().splitlines()]
    return [json.loads(line)["text"] for line in lines]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_batches(make: Any) -> None:
    batch = next(iter(make().train_dataloader()))
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "input_ids": ((3, 16), torch.int64),
        "labels": ((3, 16), torch.int64),
    }
    assert torch.equal(batch["input_ids"], batch["labels"])


def test_a_pass_has_every_document_once_ended_by_eos(make: Any, files: str) -> None:
    data = make()
    tokens = torch.cat(take(data, 60)).flatten().tolist()
    eos = data.tokenizer.eos_token_id
    documents = data.tokenizer.decode(tokens).split(data.tokenizer.eos_token)[:50]
    assert tokens.count(eos) > 50
    texts = texts_of(files)
    assert Counter(documents) == Counter(texts)


def test_batches_are_a_function_of_arguments_and_seed(make: Any) -> None:
    first = take(make(), 20)
    assert equal(first, take(make(), 20))
    assert not equal(first, take(make(seed=1), 20))
    state = torch.get_rng_state()
    take(make(), 2)
    assert torch.equal(state, torch.get_rng_state())


def test_a_background_thread_changes_nothing(make: Any) -> None:
    data = make(num_workers=1)
    assert equal(take(data, 20), take(make(), 20))
    loader, plain = data.train_dataloader(), make().train_dataloader()
    for _ in zip(range(5), loader, plain, strict=False):
        assert loader.state_dict()["position"] == plain.state_dict()["position"]


def test_errors_of_the_background_thread_arrive() -> None:
    def items() -> Any:
        yield 1
        raise UserError("line 7")

    batches = in_background(items(), 1)
    assert next(batches) == 1
    with pytest.raises(UserError, match="line 7"):
        next(batches)
    assert list(in_background(iter("ab"), 1)) == ["a", "b"]


def test_ranks_are_disjoint_and_their_union_is_one_rank(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = take(make(), 12)
    ranks: list[list[torch.Tensor]] = []
    states: list[Any] = []
    for rank in range(2):
        monkeypatch.setattr(TextData, "_place", lambda self, rank=rank: (rank, 2))
        loader = make().train_dataloader()
        ranks.append([batch["input_ids"] for batch in itertools.islice(loader, 6)])
        states.append(loader.state_dict())
    assert equal([batch for pair in zip(*ranks, strict=True) for batch in pair], alone)
    assert states[0] == states[1], "Lightning keeps only the state of rank 0"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_state_of_rank_0_serves_every_number_of_ranks(
    make: Any, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    alone = take(make(), 14)
    monkeypatch.setattr(TextData, "_place", lambda self: (0, 2))
    loader = make().train_dataloader()
    list(itertools.islice(loader, 4))
    state = loader.state_dict()
    resumed: list[Any] = []
    for rank in range(num_ranks):
        monkeypatch.setattr(TextData, "_place", lambda self, rank=rank: (rank, num_ranks))
        loader = make().train_dataloader()
        loader.load_state_dict(state)
        resumed.append([batch["input_ids"] for batch in itertools.islice(loader, 6 // num_ranks)])
    assert equal([batch for step in zip(*resumed, strict=True) for batch in step], alone[8:14])


def test_a_state_loads_with_weights_only(make: Any, tmp_path: Path) -> None:
    loader = make().train_dataloader()
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == loader.state_dict()
    assert (tmp_path / "state.pt").stat().st_size < 5_000


def test_a_batch_in_flight_is_given_again() -> None:
    in_flight = False
    loader = StreamLoader(
        lambda position: ((i, {"at": i + 1}) for i in range((position or {"at": 0})["at"], 99)),
        lambda examples: {"ids": examples},
        batch_size=2,
        length=9,
        fingerprint="",
        in_flight=lambda: in_flight,
    )
    batches = iter(loader)
    assert [next(batches)["ids"], next(batches)["ids"]] == [[0, 1], [2, 3]]
    assert loader.state_dict()["position"] == {"at": 4}
    in_flight = True
    assert loader.state_dict()["position"] == {"at": 2}


@pytest.mark.parametrize("change", [{"seed": 1}, {"shuffle_rows": 9}, {"path": "other"}, {"tokenizer": "other"}])
def test_other_data_start_at_their_beginning(
    make: Any, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_nvfp4.lm.data.loader.rank_zero_info", said.append)
    if "path" in change:
        (tmp_path / "other.jsonl").write_text('{"text": "something else about a dog"}\n' * 9)
        change = {"path": str(tmp_path / "other.jsonl")}
    loader = make().train_dataloader()
    list(itertools.islice(loader, 3))
    same = make().train_dataloader()
    same.load_state_dict(loader.state_dict())
    assert said == []
    if "tokenizer" in change:
        monkeypatch.setattr("lightning_nvfp4.lm.data.base.tokenizer_identity", lambda tokenizer: "other")
        change = {}
    other = make(**change).train_dataloader()
    other.load_state_dict(loader.state_dict())
    assert len(said) == 1 and "starts at its beginning" in said[0]
    assert equal([next(iter(other))["input_ids"]], take(make(**change), 1))


def test_files_may_move(make: Any, files: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    moved = tmp_path_factory.mktemp("moved")
    for file in Path(files).parent.glob("*.jsonl"):
        (moved / file.name).write_bytes(file.read_bytes())
    state = make().train_dataloader().state_dict()
    assert make(path=str(moved)).train_dataloader().state_dict() == state


def test_validation_has_every_token_once(make: Any, files: str) -> None:
    data = make(val_path=files, val_batches=None)
    batches = list(data.val_dataloader())
    assert len(batches) == len(data.val_dataloader())
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    texts = texts_of(files)
    expected = "".join(text + data.tokenizer.eos_token for text in texts)
    assert data.tokenizer.decode(labels[labels != -100]) == expected
    first = [batch["input_ids"] for batch in make(val_path=files, val_batches=2).val_dataloader()]
    assert equal([batch["input_ids"] for batch in batches[:2]], first)


def test_validation_is_shared_evenly_by_ranks(make: Any, files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [batch["input_ids"] for batch in make(val_path=files, val_batches=5).val_dataloader()]
    shares: list[list[torch.Tensor]] = []
    for rank in range(2):
        monkeypatch.setattr(TextData, "_place", lambda self, rank=rank: (rank, 2))
        shares.append([batch["input_ids"] for batch in make(val_path=files, val_batches=5).val_dataloader()])
    assert equal(shares[0], alone[0::2]) and equal(shares[1], [alone[1], alone[3], alone[0]])


def test_files_have_no_validation_of_their_own(make: Any) -> None:
    assert list(make().val_dataloader()) == []
    assert list(make(val_path="embedded", val_batches=0).val_dataloader()) == []


def stand_in(stage: str, seed: int) -> Any:
    return iter([f"{stage} {seed} the cat sat {i}" for i in range(20)])


def test_embedded_text(monkeypatch: pytest.MonkeyPatch, tokenizer_folder: str) -> None:
    monkeypatch.setattr(embedded, "pretrain_documents", stand_in)

    def text(**kwargs: Any) -> str:
        data = TextData(tokenizer=tokenizer_folder, **kwargs)
        return data.tokenizer.decode(torch.cat(take(data, 2)).flatten())

    assert "pretrain 0 the cat" in text() and "pretrain 1000003 the cat" in text(), "a pass has text of its own"
    assert "decay 5 the cat" in text(stage="decay", seed=5)
    validation = [TextData(tokenizer=tokenizer_folder, seed=seed).val_dataloader() for seed in (0, 1)]
    first, second = ([batch["input_ids"] for batch in batches] for batches in validation)
    assert equal(first, second), "runs with different seeds are validated on the same text"
    assert "validation" in TextData(tokenizer=tokenizer_folder).tokenizer.decode(first[0].flatten())
    pretrain, decay = (TextData(tokenizer=tokenizer_folder, stage=s).train_dataloader() for s in ("pretrain", "decay"))
    assert pretrain.state_dict()["fingerprint"] != decay.state_dict()["fingerprint"]


def fake_trainer(**kwargs: Any) -> Any:
    defaults = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 1.0, "accumulate_grad_batches": 1}
    defaults |= {"val_check_interval": 1.0, "distributed_sampler_kwargs": None, "lightning_module": None}
    return SimpleNamespace(**{**defaults, **kwargs})


@pytest.mark.parametrize(
    ("trainer", "arguments", "length"),
    [
        ({"max_steps": 10}, {}, 10),
        ({"max_steps": 10, "accumulate_grad_batches": 4}, {}, 40),
        ({"max_steps": 10, "val_check_interval": 50}, {}, 50),
        ({"max_steps": 10}, {"batches_per_epoch": 7}, 7),
        ({"max_epochs": 3}, {"batches_per_epoch": 7}, 7),
        ({"max_epochs": -1}, {}, 10**9),
        ({"limit_train_batches": 5}, {}, 10**9),
    ],
)
def test_length_of_an_epoch(make: Any, trainer: dict[str, Any], arguments: dict[str, Any], length: int) -> None:
    data = make(**arguments)
    data.trainer = fake_trainer(**trainer)
    assert len(data.train_dataloader()) == length


def test_a_run_without_an_end_is_refused(make: Any) -> None:
    data = make()
    data.trainer = fake_trainer()
    with pytest.raises(UserError, match=r"trainer.max_steps.*data.batches_per_epoch"):
        data.train_dataloader()


def test_vocabulary_mismatch(make: Any) -> None:
    data = make()
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=100))
    data.trainer = fake_trainer(max_steps=1, lightning_module=SimpleNamespace(model=model))
    with pytest.raises(UserError, match=r"vocabulary mismatch.*vocab_size is 100.*at least"):
        data.train_dataloader()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "data.batch_size=0 must be an integer of at least 1"),
        ({"sequence_length": 1}, "data.sequence_length=1"),
        ({"seed": -1}, "data.seed=-1"),
        ({"shuffle_rows": True}, "data.shuffle_rows=True"),
        ({"num_workers": 4}, "data.num_workers=4.*background thread"),
        ({"stage": "dekay"}, "data.stage 'dekay'.*Did you mean 'decay'"),
        ({"path": "absent.jsonl"}, "data.path='absent.jsonl'"),
        ({"val_path": "absent.jsonl"}, "data.val_path='absent.jsonl'"),
    ],
)
def test_bad_arguments(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(**arguments).setup()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "x", "id": 1}, "bad.jsonl, line 2: there is no field 'text'; the row has 'body', 'id'.*text_field"),
        ({"text": 3}, "bad.jsonl, line 2: field 'text' is a int, not a string"),
        ({"text": None}, "bad.jsonl, line 2: field 'text' is a NoneType"),
    ],
)
def test_bad_rows(make: Any, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "fine"}\n' + json.dumps(row) + "\n")
    with pytest.raises(UserError, match=message):
        take(make(path=str(file)), 1)


def test_nothing_but_blank_texts(make: Any, tmp_path: Path) -> None:
    (tmp_path / "blank.jsonl").write_text('{"text": " \\n"}\n')
    with pytest.raises(UserError, match="blank.jsonl: no usable row"):
        take(make(path=str(tmp_path / "blank.jsonl")), 1)


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus is not beside this repository")
def test_a_real_corpus(tokenizer_folder: str) -> None:
    data = TextData(
        path=str(CORPUS / "train-*.jsonl.gz"),
        val_path=str(CORPUS / "validation.jsonl.gz"),
        tokenizer=tokenizer_folder,
        sequence_length=512,
        shuffle_rows=400,
        val_batches=2,
    )
    whole = take(data, 6)
    loader = data.train_dataloader()
    list(itertools.islice(loader, 3))
    resumed = data.train_dataloader()
    resumed.load_state_dict(loader.state_dict())
    assert equal([batch["input_ids"] for batch in itertools.islice(resumed, 3)], whole[3:])
    assert len(data.val_dataloader()) == 2
