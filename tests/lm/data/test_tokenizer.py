"""The embedded tokenizer, its cache, and what is said about tokenizers that cannot be used."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data import embedded, embedded_tokenizer, load_tokenizer
from lightning_nvfp4.lm.data import tokenizer as module
from lightning_nvfp4.lm.data.tokenizer import (
    SPECIAL_TOKENS,
    VOCABULARY_SIZE,
    tokenizer_identity,
    train_tokenizer,
)


def stand_in(stage: str, seed: int) -> Any:
    return iter(["the cat sat on the mat 12 + 30 = 42\n", "def f(x):\n    return x + 1\n", "größer 🙂\n"] * 30)


@pytest.fixture
def stand_in_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A little embedded text, and a cache folder that does not exist yet."""
    monkeypatch.setattr(embedded, "pretrain_documents", stand_in)
    monkeypatch.setenv("LIGHTNING_NVFP4_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_real_embedded_tokenizer() -> None:
    tokenizer = embedded_tokenizer()
    assert len(tokenizer) == VOCABULARY_SIZE
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(len(SPECIAL_TOKENS)))
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|eos|>")
    for text in ("x = 1234.5 + 67", "  tab\t\n\nüñí 🙂 \r\n", "<a> & b's"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
    pieces = tokenizer.tokenize("in 1234 or 56")
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == list("123456")


def test_training_is_deterministic(stand_in_text: Path) -> None:
    first = embedded_tokenizer().backend_tokenizer.to_str()
    (file,) = stand_in_text.rglob("*.json")
    file.unlink()
    assert embedded_tokenizer().backend_tokenizer.to_str() == first
    texts = list(stand_in("", 0))
    assert train_tokenizer(texts).to_str() == train_tokenizer(texts).to_str()


def test_the_cache_is_used_and_mended(stand_in_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = embedded_tokenizer().backend_tokenizer.to_str()
    (file,) = stand_in_text.rglob("*.json")
    content = file.read_text()
    assert list(stand_in_text.rglob("*.tmp")) == []
    with monkeypatch.context() as patch:
        patch.setattr(module, "train_tokenizer", lambda texts: pytest.fail("trained again"))
        assert embedded_tokenizer().backend_tokenizer.to_str() == first
    file.write_text(content[: len(content) // 2])
    assert embedded_tokenizer().backend_tokenizer.to_str() == first
    assert file.read_text() == content


def test_other_text_has_another_tokenizer(stand_in_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded_tokenizer()
    monkeypatch.setattr(embedded, "pretrain_documents", lambda stage, seed: iter(["quite other words"] * 9))
    embedded_tokenizer()
    assert len(list(stand_in_text.rglob("*.json"))) == 2


def test_a_cache_that_cannot_be_written_is_no_error(
    stand_in_text: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIGHTNING_NVFP4_CACHE", str(tmp_path / "file" / "below"))
    assert embedded_tokenizer().eos_token == "<|eos|>"


def _load_in_child(barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put(embedded_tokenizer().backend_tokenizer.to_str())


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_two_processes_at_once(stand_in_text: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_load_in_child, args=(barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    texts = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert texts == {embedded_tokenizer().backend_tokenizer.to_str()}
    assert len(list(stand_in_text.rglob("*"))) == 2, "the folder and one file"


def test_folders_and_run_folders(tokenizer_folder: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder, chat=True)
    tokenizer.save_pretrained(tmp_path / "run" / "hf")
    again = load_tokenizer(str(tmp_path / "run"), chat=True)
    assert again.chat_template == tokenizer.chat_template
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_the_identity_is_that_of_the_tokens(stand_in_text: Path, tmp_path: Path, tokenizer_folder: str) -> None:
    tokenizer = embedded_tokenizer()
    identity = tokenizer_identity(tokenizer)
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert tokenizer_identity(tokenizer) == identity
    tokenizer.save_pretrained(tmp_path / "saved")
    assert tokenizer_identity(load_tokenizer(str(tmp_path / "saved"))) == identity
    assert tokenizer_identity(load_tokenizer(tokenizer_folder)) != identity


def test_a_missing_pad_token_is_the_eos_token(
    tokenizer_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "rank_zero_info", said.append)
    backend = load_tokenizer(tokenizer_folder).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id is not None
    assert said == [f"Tokenizer {str(tmp_path)!r} has no pad token: '<|eos|>' is used for padding."]


def test_tokenizers_that_cannot_be_used(tokenizer_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load_tokenizer(tokenizer_folder).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "no_eos")
    with pytest.raises(UserError, match='has no eos token.*"eos_token"'):
        load_tokenizer(str(tmp_path / "no_eos"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither the folder nor its hf/ holds a tokenizer.json.*has finished"):
        load_tokenizer(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="there is no such folder"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(UserError, match="is a file: give the folder"):
        load_tokenizer(f"{tokenizer_folder}/tokenizer.json")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="broken' cannot be loaded"):
        load_tokenizer(str(tmp_path / "broken"))
    monkeypatch.setattr(module.AutoTokenizer, "from_pretrained", lambda name: (_ for _ in ()).throw(OSError("offline")))
    with pytest.raises(UserError, match=r"tokenizer='owner/name' cannot be loaded \(OSError: offline\).*network"):
        load_tokenizer("owner/name")
