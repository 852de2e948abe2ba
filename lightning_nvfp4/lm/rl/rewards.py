"""Verifiable rewards by name: 1.0 for an answer that is right, 0.0 for one that is not.

A prompt's reference names the reward that judges it, its `kind`; a run may name others, with weights, to add up.
`register_reward` adds names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.lm.rl.math_answers import equal_answers
from lightning_nvfp4.lm.rl.sandbox import Program, run_many


@dataclass(frozen=True)
class RewardOptions:
    """How rewards are computed.

    Attributes:
        timeout: wall seconds for each program, and for each comparison of answers by math-verify.
        workers: sandboxes side by side.
        allow_unsafe: whether limits alone are enough where the machine cannot isolate.
        format: regular expression that a completion matches in full for the reward `format`; the default wants some
            text, then `#### ` and the answer as the last line.
    """

    timeout: float = 2.0
    workers: int = 1
    allow_unsafe: bool = False
    format: str = r"(?s)(?!.*####.*####).*\S.*\n#### \S[^\n]*\s*"

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf or self.workers < 1:
            raise UserError(
                f"reward_options: timeout {self.timeout} must be a number of seconds above 0, workers {self.workers} "
                "at least 1."
            )
        try:
            re.compile(self.format)
        except re.error as error:
            raise UserError(f"reward_options.format is {self.format!r}: not a regular expression ({error}).") from error


Reward = Callable[[Sequence[str], Sequence[Mapping[str, Any]], RewardOptions], list[float]]
"""`(completions, references, options) -> rewards`, all of one length."""

BY_REFERENCE = "reference"
"""Name of the reward that each prompt's reference chooses by its kind."""

_REWARDS: dict[str, Reward] = {}


def register_reward(kind: str) -> Callable[[Reward], Reward]:
    """Make the decorated function the reward of references whose ``kind`` is `kind`."""

    def register(function: Reward) -> Reward:
        _REWARDS[kind] = function
        return function

    return register


def score(completion: str, reference: Mapping[str, Any], *, options: RewardOptions | None = None) -> float:
    """Return the reward of one completion; see `score_many`."""
    return score_many([completion], [reference], options=options)[0]


def score_many(
    completions: Sequence[str],
    references: Sequence[Mapping[str, Any]],
    *,
    options: RewardOptions | None = None,
) -> list[float]:
    """Return the reward of each completion against its reference, each kind's completions scored together.

    Args:
        completions: generated texts without special tokens.
        references: ``{"kind": "exact", "answer": "42"}``, ``{"kind": "code", "entry_point", "tests", "prompt"}`` or
            ``{"kind": "gsm8k", "answer"}``.
        options: limits of the rewards that run code.

    Raises:
        UserError: unequal lengths, an unknown kind, a reference without a needed field, no isolation for code.
    """
    if len(completions) != len(references):
        raise UserError(f"{len(completions)} completions for {len(references)} references: need one for each.")
    rewards = [0.0] * len(completions)
    places: dict[str, list[int]] = {}
    for place, reference in enumerate(references):
        places.setdefault(str(reference.get("kind")), []).append(place)
    for kind, chosen in places.items():
        if kind not in _REWARDS:
            raise unknown("reward kind", kind, _REWARDS, cure="Add it with register_reward.")
        part = _REWARDS[kind](
            [completions[i] for i in chosen], [references[i] for i in chosen], options or RewardOptions()
        )
        for place, reward in zip(chosen, checked(f"the reward {kind!r}", part, len(chosen)), strict=True):
            rewards[place] = reward
    return rewards


def checked(name: str, values: Any, count: int) -> list[float]:
    """Return what a reward function gave for `count` completions as floats.

    Raises:
        UserError: it is not one finite number for each.
    """
    due = f"it must return a list of {count} finite numbers, one for each completion."
    try:
        numbers = None if isinstance(values, (str, bytes, Mapping)) else [float(value) for value in values]
        readable = numbers is not None and not any(isinstance(value, (str, bytes)) for value in values)
    except (TypeError, ValueError, OverflowError):
        readable, numbers = False, None
    if not readable or numbers is None:
        raise UserError(f"{name} returned {shortened(values)}: {due}")
    if len(numbers) != count:
        raise UserError(f"{name} returned {len(numbers)} values: {due}")
    if not all(map(math.isfinite, numbers)):
        raise UserError(f"{name} returned {next(v for v in numbers if not math.isfinite(v))}: {due}")
    return numbers


def shortened(value: Any, limit: int = 80) -> str:
    """Return the repr of a value, cut to a length."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def score_components(
    completions: list[str],
    references: list[dict[str, Any]],
    names: Sequence[str],
    options: RewardOptions,
) -> dict[str, list[float]]:
    """Return the values of each named reward; `reference` is the reward that each reference names."""
    return {
        name: score_many(completions, references, options=options)
        if name == BY_REFERENCE
        else checked(f"the reward {name!r}", _REWARDS[name](completions, references, options), len(completions))
        for name in names
    }


def check_names(names: Iterable[str]) -> None:
    """Raise a `UserError` for a reward that is not registered."""
    for name in names:
        if name != BY_REFERENCE and name not in _REWARDS:
            raise unknown("reward", name, [BY_REFERENCE, *_REWARDS], cure="Add it with register_reward.")


_NUMBER = re.compile(r"[-+]?(\d[\d,]*)?(\.\d+)?")
_FINAL = re.compile(r"####[ \t]*([^\n]*)")


def final_answer(text: str) -> str | None:
    """Return what follows the last ``####`` on its line, without ``$``, thousands commas and a final stop."""
    found = _FINAL.findall(text)
    return _plain(found[-1]) if found else None


def exact_match(completion: str, answer: str) -> bool:
    """Whether the completion gives `answer`: a number after the last ``####``, any other text alone and in full."""
    wanted = _plain(answer)
    if wanted and _NUMBER.fullmatch(wanted):
        return final_answer(completion) == wanted
    return completion.strip() == answer.strip()


def _plain(text: str) -> str:
    text = text.strip().removesuffix(".")
    number = text.replace(",", "").replace("$", "")
    return number if number and _NUMBER.fullmatch(number) else text


@register_reward("exact")
def exact(completions: Sequence[str], references: Sequence[Mapping[str, Any]], options: RewardOptions) -> list[float]:
    """Reward of ``{"answer"}``: see `exact_match`."""
    return [
        float(exact_match(text, str(_field(reference, "answer"))))
        for text, reference in zip(completions, references, strict=True)
    ]


@register_reward("gsm8k")
def gsm8k(completions: Sequence[str], references: Sequence[Mapping[str, Any]], options: RewardOptions) -> list[float]:
    """Reward of ``{"answer"}``: what follows the last ``####``, else the last expression of the text, equals it.

    math-verify judges, so that 1,000 equals 1000.0 and 1/2 equals 0.5. Texts without a digit are wrong unseen.
    """
    rewards = [0.0] * len(completions)
    places = [place for place, text in enumerate(completions) if any(map(str.isdigit, text))]
    pairs = [(final_answer(completions[i]) or completions[i], str(_field(references[i], "answer"))) for i in places]
    for place, equal in zip(places, equal_answers(pairs, options.timeout) if pairs else [], strict=True):
        rewards[place] = float(equal)
    return rewards


@register_reward("format")
def has_format(
    completions: Sequence[str], references: Sequence[Mapping[str, Any]], options: RewardOptions
) -> list[float]:
    """Reward of any reference: the completion matches `RewardOptions.format` in full."""
    pattern = re.compile(options.format)
    return [float(pattern.fullmatch(text) is not None) for text in completions]


@register_reward("code")
def code(completions: Sequence[str], references: Sequence[Mapping[str, Any]], options: RewardOptions) -> list[float]:
    """Reward of ``{"entry_point", "tests", "prompt"}``: the program passes its tests in the sandbox."""
    programs = [
        Program(
            program_source(str(reference.get("prompt", "")), text, str(_field(reference, "entry_point"))),
            str(_field(reference, "tests")),
            str(reference["entry_point"]),
        )
        for text, reference in zip(completions, references, strict=True)
    ]
    results = run_many(programs, timeout=options.timeout, workers=options.workers, allow_unsafe=options.allow_unsafe)
    return [float(result.passed) for result in results]


_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_STATEMENT = re.compile(r"(def|class|import|from|@|async)\b|@")


def program_source(prompt: str, completion: str, entry_point: str) -> str:
    """Join a prompt, which ends inside the function `entry_point`, and a completion to one program.

    The completion is the function's body or the whole function, in a Markdown fence or not. Of the prompt, a whole
    function needs what stands before it (imports, helpers); its own stub is harmless there. A body whose first line
    lost its indentation gets it back.
    """
    fenced = _FENCE.search(completion)
    text = fenced.group(1) if fenced else completion
    if re.search(rf"^(async )?def {re.escape(entry_point)}\b", text, re.MULTILINE):
        start = re.search(rf"^(async )?def {re.escape(entry_point)}\b", prompt, re.MULTILINE)
        return f"{prompt[: start.start()] if start else prompt}\n{text}\n"
    body = text.lstrip("\n")
    if body and not body[0].isspace() and not _STATEMENT.match(body):
        body = f"    {body}"
    return f"{prompt.rstrip()}\n{body}\n" if prompt else f"{body}\n"


def _field(reference: Mapping[str, Any], name: str) -> Any:
    if name not in reference:
        raise UserError(f"the reference {dict(reference)!r:.200} has no field {name!r}, which its kind needs.")
    return reference[name]
