"""Conversations: rows of several shapes made into messages, and messages into tokens with the answers marked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data.readers import Row

Message = dict[str, Any]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHAPES = '{"messages": [{"role", "content"}, ...]}, {"prompt", "completion"} or {"question", "answer"}'


def conversation(row: Row, where: str) -> list[Message]:
    """Return the messages of a row: `messages` as they are, `prompt completion` or `question answer` as two turns.

    Raises `UserError` for a row of another shape, a malformed message, and a conversation with no assistant turn.
    """
    for asked, answered in (("prompt", "completion"), ("question", "answer")):
        if "messages" not in row and asked in row and answered in row:
            for field in (asked, answered):
                _string(row[field], f"{where}: field {field!r}")
            return [{"role": "user", "content": row[asked]}, {"role": "assistant", "content": row[answered]}]
    if "messages" not in row:
        raise UserError(
            f"{where}: no conversation; the row has {', '.join(map(repr, row)) or 'no field'}. Expected {_SHAPES}."
        )
    messages = checked_messages(row["messages"], where)
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where}: the conversation has no assistant turn to learn from. Add one or delete the row.")
    return messages


def checked_messages(messages: Any, where: str) -> list[Message]:
    """Return `messages` if it is a list of objects with a role and a content; raises `UserError` otherwise."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        found = "an empty list" if isinstance(messages, list) else f"a {type(messages).__name__}"
        raise UserError(f"{where}: 'messages' must be a list of turns, found {found}.")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise UserError(f'{where}: turn {number} must be {{"role": ..., "content": ...}}, found {message!r:.80}.')
        for field in ("role", "content"):
            _string(message[field], f"{where}: {field!r} of turn {number}")
    return list(messages)


def _string(value: Any, what: str) -> None:
    if not isinstance(value, str):
        raise UserError(f"{what} is a {type(value).__name__}, not a string. Mend or delete the row.")


def encode_conversation(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and which of them the model learns to write: the assistant's turns.

    The turn's end token belongs to it. A template with `{% generation %}` tags says itself what the assistant writes;
    otherwise it is what each assistant turn adds to the rendering of the turns before it.

    Raises `UserError` for a template that refuses the conversation, and for one that renders a turn differently when
    others follow, so that the answers cannot be told apart.
    """
    template = tokenizer.chat_template
    try:
        if isinstance(template, str) and _GENERATION_TAG.search(template):
            encoding: Any = tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return list(encoding["input_ids"]), [bool(flag) for flag in encoding["assistant_masks"]]
        return _encode_by_prefixes(tokenizer, messages)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the tokenizer's chat template cannot render the conversation {messages!r:.200} "
            f"({type(error).__name__}: {error}). Check its roles and their order."
        ) from error


def _encode_by_prefixes(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> tuple[list[int], list[bool]]:
    def render(turns: list[Message], prompt: bool) -> str:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        assert isinstance(text, str)
        return text

    whole = render(messages, False)
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:number], True), render(messages[: number + 1], False)
        if not (whole.startswith(after) and after.startswith(before)):
            raise UserError(
                f"the tokenizer's chat template renders turn {number + 1} differently when other turns follow it, so "
                "the assistant's tokens cannot be told apart. Put {% generation %} ... {% endgeneration %} around what "
                "the assistant writes in the template."
            )
        stripped = after.rstrip()
        ends_turn = stripped.endswith(tuple(tokenizer.all_special_tokens))
        spans.append((len(before), len(stripped) if ends_turn else len(after)))
    encoding = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets: list[tuple[int, int]] = encoding["offset_mapping"]  # pyright: ignore[reportAssignmentType]
    learned = [any(begin <= start < end for begin, end in spans) for start, _ in offsets]
    return list(encoding["input_ids"]), learned  # pyright: ignore[reportArgumentType]
