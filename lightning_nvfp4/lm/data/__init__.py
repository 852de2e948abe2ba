"""Data: text, conversations and prompts as streams that resume exactly, from files, Hugging Face or nothing at all."""

from lightning_nvfp4.lm.data.chat import ChatData
from lightning_nvfp4.lm.data.prompts import PromptData
from lightning_nvfp4.lm.data.text import TextData
from lightning_nvfp4.lm.data.tokenizer import embedded_tokenizer, load_tokenizer

__all__ = ["ChatData", "PromptData", "TextData", "embedded_tokenizer", "load_tokenizer"]
