"""A small tokenizer on disk, and a cache of the tests' own."""

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_nvfp4.lm.data.tokenizer import ASSISTANT, CHAT_TEMPLATE, END, EOS, PAD, SYSTEM, USER, train_tokenizer

TEXTS = ["the cat sat on the mat and the dog sat on the log", "what is 12 plus 30? it is 42, said the cat to the dog"]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Hugging Face folder with a byte-level tokenizer and the chat template with generation tags."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(TEXTS),
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, END],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """No test writes to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_NVFP4_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
