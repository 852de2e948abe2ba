"""Tokenizers: the small one that is trained from the embedded text, and any Hugging Face one by folder or name."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lightning_nvfp4.capability import cache_folder
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.local_names import means_a_folder

EMBEDDED = "embedded"
VOCABULARY_SIZE = 1024

PAD, EOS, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, EOS, SYSTEM, USER, ASSISTANT, END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|eos|>{% endgeneration %}"
    "{% elif message['role'] in ('system', 'user') %}"
    "{{ '<|' + message['role'] + '|>' }}{{ message['content'] }}<|end|>"
    "{% else %}{{ raise_exception('roles are system, user and assistant, not ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""An assistant turn ends with the end-of-text token, so that generation stops there with no further setting."""

_SAMPLE_CHARACTERS = 1_500_000
_RECIPE_VERSION = 1


def embedded_tokenizer() -> PreTrainedTokenizerFast:
    """Return the byte-level BPE tokenizer of the embedded text: at most 1024 entries, every digit a token of its own.

    It is trained from the first 1.5 million characters of the embedded pretraining text (a few seconds) and cached
    under the hash of that text, so it is the same for the same version of Python. Keep the tokenizer of a run's hf/
    folder to go on with its model elsewhere.
    """
    from lightning_nvfp4.lm.data import embedded

    texts = _sample(embedded.pretrain_documents("pretrain", seed=0))
    recipe = json.dumps([_RECIPE_VERSION, VOCABULARY_SIZE, SPECIAL_TOKENS, CHAT_TEMPLATE])
    digest = hashlib.blake2b(recipe.encode(), digest_size=12)
    for text in texts:
        digest.update(hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest())
    file = cache_folder() / "tokenizers" / f"embedded-{digest.hexdigest()}.json"
    try:
        trained = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception:  # absent, unreadable or damaged: the cache can always be made again
        trained = train_tokenizer(texts)
        _write_cache(file, trained.to_str())
    return with_chat_tokens(trained)


def with_chat_tokens(trained: Tokenizer) -> PreTrainedTokenizerFast:
    """Return what `train_tokenizer` trained as transformers takes it, with its special tokens and chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=trained,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def train_tokenizer(texts: Iterable[str], vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    """Train the byte-level BPE on `texts`: a pure function of them, whatever the number of threads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _sample(documents: Iterable[str]) -> list[str]:
    texts: list[str] = []
    size = 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if size >= _SAMPLE_CHARACTERS:
            break
    return texts


def _write_cache(file: Path, text: str) -> None:
    """Write atomically, so that two processes never see half a file; a cache that cannot be written is no error."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".tmp")
    except OSError:
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        os.replace(temporary, file)
    except OSError:
        Path(temporary).unlink(missing_ok=True)


def load_tokenizer(name_or_path: str, *, chat: bool = False) -> PreTrainedTokenizerFast:
    """Load a tokenizer that has an end-of-text token and a padding token.

    Args:
        name_or_path: `"embedded"`, a Hugging Face folder, a stage's run folder (its hf/ is used), or a hub name.
        chat: A chat template is needed.

    Raises:
        UserError: Nothing is found there, or the tokenizer has no fast version, no end-of-text token, or no chat
            template although one is needed.
    """
    tokenizer = embedded_tokenizer() if name_or_path == EMBEDDED else _pretrained(name_or_path)
    if not tokenizer.is_fast:
        raise UserError(f"tokenizer={name_or_path!r} has no fast version (tokenizer.json), which is needed here.")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer={name_or_path!r} has no eos token, which separates documents and ends answers. "
            'Set "eos_token" in its tokenizer_config.json.'
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        rank_zero_info(f"Tokenizer {name_or_path!r} has no pad token: {tokenizer.eos_token!r} is used for padding.")
    if chat and not tokenizer.chat_template:
        raise UserError(
            f"tokenizer={name_or_path!r} has no chat template, which conversations need. Use the tokenizer of an "
            "instruction-tuned model, or put a chat_template.jinja beside its tokenizer.json."
        )
    return tokenizer


def _pretrained(name_or_path: str) -> PreTrainedTokenizerFast:
    folder = Path(name_or_path).expanduser()
    source = name_or_path
    if folder.is_file():
        raise UserError(f"tokenizer={name_or_path!r} is a file: give the folder that holds tokenizer.json.")
    if folder.is_dir():
        candidates = (folder / "hf", folder)
        found = [c for c in candidates if (c / "tokenizer.json").is_file() or (c / "tokenizer_config.json").is_file()]
        if not found:
            raise UserError(
                f"tokenizer={name_or_path!r}: neither the folder nor its hf/ holds a tokenizer.json. Give a Hugging "
                "Face folder, or the run folder of a stage that has finished (it exports hf/ at its end)."
            )
        source = str(found[0])
    elif means_a_folder(name_or_path):
        raise UserError(
            f"tokenizer={name_or_path!r}: there is no such folder (looked in {Path.cwd()}). Run the stage that writes "
            "it first. Give a Hugging Face folder, a stage's run folder, a hub name owner/name, or 'embedded'."
        )
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"tokenizer={name_or_path!r} cannot be loaded ({type(error).__name__}: {reason}). Give a Hugging Face "
            "folder, a stage's run folder, a hub name owner/name (this needs a network or a filled cache), or "
            "'embedded'."
        ) from error


def tokenizer_identity(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a hash of what decides how text becomes tokens; saving, loading and padding do not change it."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    added = sorted((token["id"], token["content"]) for token in backend["added_tokens"])
    parts = [backend["normalizer"], backend["pre_tokenizer"], backend["model"], added, tokenizer.eos_token_id]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
