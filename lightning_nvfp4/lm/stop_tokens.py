"""The tokens that end an answer."""

from __future__ import annotations

from typing import Any

_ANSWER = "answer"


def stop_token_ids(tokenizer: Any) -> list[int]:
    """Return the ids that end generation, sorted.

    They are the tokenizer's eos and the special token that its chat template puts after an assistant's answer.
    """
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
        tail = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(_ANSWER)[2]
        following = tokenizer(tail, add_special_tokens=False)["input_ids"]
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        if following and following[0] in special and following[0] != tokenizer.unk_token_id:
            ids.add(int(following[0]))
    return sorted(ids)
