"""Conversations: the loss is on the answers, whatever the template, and nothing is lost without a word."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data import ChatData, embedded, load_tokenizer
from lightning_nvfp4.lm.data.conversations import conversation, encode_conversation
from lightning_nvfp4.lm.data.notices import Notice

MESSAGES = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "what is 1 plus 1"},
    {"role": "assistant", "content": "it is 2"},
    {"role": "user", "content": "and the cat?"},
    {"role": "assistant", "content": "on the mat"},
]
CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""A template without generation tags, which ends every turn with a token and a line end."""


@pytest.fixture
def tokenizer(tokenizer_folder: str) -> PreTrainedTokenizerFast:
    return load_tokenizer(tokenizer_folder)


def learned(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> tuple[str, list[str]]:
    """The rendered conversation, and the stretches of it that are learned."""
    tokens, flags = encode_conversation(tokenizer, messages)
    assert len(tokens) == len(flags)
    stretches: list[list[int]] = []
    for index, (token, flag) in enumerate(zip(tokens, flags, strict=True)):
        if flag and (index == 0 or not flags[index - 1]):
            stretches.append([])
        if flag:
            stretches[-1].append(token)
    return tokenizer.decode(tokens), [tokenizer.decode(stretch) for stretch in stretches]


def test_generation_tags_say_what_is_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    whole, stretches = learned(tokenizer, MESSAGES)
    assert whole == (
        "<|system|>be short<|end|><|user|>what is 1 plus 1<|end|><|assistant|>it is 2<|eos|>"
        "<|user|>and the cat?<|end|><|assistant|>on the mat<|eos|>"
    )
    assert stretches == ["it is 2<|eos|>", "on the mat<|eos|>"]


def test_without_tags_the_answers_are_what_their_turns_add(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML
    whole, stretches = learned(tokenizer, MESSAGES)
    assert whole.endswith("<|assistant|>\non the mat<|end|>\n")
    assert stretches == ["it is 2<|end|>", "on the mat<|end|>"]


def test_both_ways_agree(tokenizer: PreTrainedTokenizerFast) -> None:
    tagged = encode_conversation(tokenizer, MESSAGES)
    template = tokenizer.chat_template
    assert isinstance(template, str)
    tokenizer.chat_template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert encode_conversation(tokenizer, MESSAGES) == tagged


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML.replace("m['content']", "(m['content'] if loop.last else 'cut')")
    with pytest.raises(UserError, match=r"turn 3 differently when other turns follow.*\{% generation %\}"):
        encode_conversation(tokenizer, MESSAGES)


def test_a_template_that_refuses_a_role(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="cannot render.*roles are system, user and assistant, not tool"):
        encode_conversation(tokenizer, [{"role": "tool", "content": "x"}])


def test_shapes_of_rows() -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert conversation({"messages": turns}, "") == turns
    assert conversation({"prompt": "q", "completion": "a", "id": 3}, "") == turns
    assert conversation({"question": "q", "answer": "a"}, "") == turns


BAD_ROWS = [
    ({"text": "x"}, "no conversation; the row has 'text'"),
    ({"prompt": "x"}, "no conversation; the row has 'prompt'"),
    ({"prompt": "x", "completion": 3}, "field 'completion' is a int"),
    ({"messages": "x"}, "'messages' must be a list of turns, found a str"),
    ({"messages": []}, "found an empty list"),
    ({"messages": [{"role": "user"}]}, "turn 1 must be"),
    ({"messages": [{"role": "assistant", "content": None}]}, "'content' of turn 1 is a NoneType"),
    ({"messages": [{"role": "user", "content": "x"}]}, "no assistant turn"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_bad_rows_are_named(tmp_path: Path, tokenizer_folder: str, row: dict[str, Any], message: str) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": MESSAGES}) + "\n" + json.dumps(row) + "\n")
    data = ChatData(path=str(file), tokenizer=tokenizer_folder)
    with pytest.raises(UserError, match=f"chat.jsonl, line 2: .*{message}"):
        next(iter(data.train_dataloader()))


def write(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_a_batch_made_by_hand(tmp_path: Path, tokenizer_folder: str) -> None:
    rows = [{"prompt": "q", "completion": "ab"}, {"prompt": "qqqqqqqqqqqqqqqqqqqq", "completion": "c"}]
    path = write(tmp_path, rows)
    data = ChatData(path=path, val_path=path, tokenizer=tokenizer_folder, batch_size=2)
    (batch,) = data.val_dataloader()
    user, assistant, end, eos, pad, q, a, b, c = data.tokenizer.convert_tokens_to_ids(
        ["<|user|>", "<|assistant|>", "<|end|>", "<|eos|>", "<|pad|>", "q", "a", "b", "c"]
    )
    first = [user, q, end, assistant, a, b, eos]
    second = [user, *[q] * 20, end, assistant, c, eos]
    assert batch["input_ids"].tolist() == [first + [pad] * 25, second + [pad] * 7]
    assert batch["labels"].tolist() == [[-100] * 4 + [a, b, eos] + [-100] * 25, [-100] * 23 + [c, eos] + [-100] * 7]
    assert batch["attention_mask"].tolist() == [[1] * 7 + [0] * 25, [1] * 25 + [0] * 7]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_cut_and_left_out_rows_are_counted(
    tmp_path: Path, tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_nvfp4.lm.data.notices._warn", said.append)
    rows = [{"prompt": "q", "completion": "a" * 40}] * 3 + [{"prompt": "q" * 40, "completion": "a"}] * 2
    path = write(tmp_path, [*rows, {"prompt": "q", "completion": "a"}])
    data = ChatData(path=path, val_path=path, tokenizer=tokenizer_folder, max_length=20)
    (batch,) = data.val_dataloader()
    assert batch["attention_mask"].sum(1).tolist() == [20, 20, 20, 6]
    assert said == [
        "1 of the first 1 conversations cut at data.max_length=20 tokens",
        "1 of the first 4 conversations left out, no answer within data.max_length=20 tokens",
    ]
    assert (data._cut.affected, data._dropped.affected, data._dropped.seen) == (3, 2, 6)


def test_notices_do_not_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_nvfp4.lm.data.notices._warn", said.append)
    notice = Notice("rows cut")
    for index in range(3_000):
        notice.count(index % 2 == 0)
    assert said == [f"{n} of the first {2 * n - 1} rows cut" for n in (1, 10, 100, 1000)]


def test_nothing_left(tmp_path: Path, tokenizer_folder: str) -> None:
    path = write(tmp_path, [{"prompt": "q" * 40, "completion": "a"}])
    with pytest.raises(UserError, match="no conversation is left.*Raise data.max_length"):
        next(iter(ChatData(path=path, tokenizer=tokenizer_folder, max_length=20).train_dataloader()))


def test_embedded_conversations(monkeypatch: pytest.MonkeyPatch, tokenizer_folder: str) -> None:
    def stand_in(seed: int, count: int) -> list[dict[str, Any]]:
        return [conversation_row(f"{seed} {i}") for i in range(count)]

    def conversation_row(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]}

    monkeypatch.setattr(embedded, "sft_conversations", stand_in)
    data = ChatData(tokenizer=tokenizer_folder, num_conversations=10, batch_size=5, val_batches=1, seed=4)
    loader = iter(data.train_dataloader())
    texts = [data.tokenizer.decode(row) for _ in range(2) for row in next(loader)["input_ids"]]
    assert sorted(text[8:11] for text in texts) == [f"4 {i}" for i in range(10)]
    assert len(data.val_dataloader()) == 1


def test_plain_text_and_a_tokenizer_without_a_template_are_refused(tmp_path: Path, tokenizer_folder: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="needs rows with fields"):
        ChatData(path=str(tmp_path / "a.txt"), tokenizer=tokenizer_folder).setup()
    bare = load_tokenizer(tokenizer_folder)
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="has no chat template.*instruction-tuned"):
        ChatData(path=write(tmp_path, []), tokenizer=str(tmp_path / "bare")).setup()
