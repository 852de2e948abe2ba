"""lm-evaluation-harness's view of a model in memory: answers are journalled, ranks share the documents.

Importing this module imports lm_eval, which takes seconds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_nvfp4.evaluation.journal import Journal, request_key
from lightning_nvfp4.lm.stop_tokens import stop_token_ids

_HFLM: Any = HFLM  # its decorator hides the class from type checkers


class InMemoryLM(_HFLM):
    """HFLM on a model object.

    Args:
        journal: where answers are kept as they come, and looked up.
        accelerator: of accelerate, where documents are shared among processes.
        seed: of sampled answers.
        progress: show progress bars.
    """

    def __init__(
        self, *args: Any, journal: Journal, accelerator: Any = None, seed: int = 0, progress: bool = True, **kwargs: Any
    ) -> None:
        # HFLM's defaults switch autocast off around the model, and leave log-likelihoods the eight bits of the logits,
        # too few to tell precisions apart.
        super().__init__(*args, mixed_precision_dtype="bfloat16", softmax_dtype="float32", **kwargs)
        self._journal = journal
        self._seed = seed
        self._quiet = not progress
        self.cache_hook = self  # HFLM reports each answer to it
        if accelerator is not None:
            self.accelerator = accelerator
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    def add_partial(self, kind: str, arguments: Iterable[Any], answer: Any) -> None:
        """Take down an answer of the batch under way."""
        self._journal.add(request_key(kind, tuple(arguments)), answer)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return one's own number for every rank.

        The harness pads the requests of ranks to one length by it, for models that are sharded; the answers to the
        padding would count as further samples of the last document.
        """
        return tensor.reshape(1).expand(self._world_size)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-likelihood, is greedy) of each request's continuation."""
        answers = self._answer("loglikelihood", requests, lambda left: self._super("loglikelihood", left))
        return [(value, greedy) for value, greedy in answers]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, one text after the other: it depends on no other."""

        def compute(left: list[Any]) -> list[float]:
            answers = []
            quiet, self._quiet = self._quiet, True  # the bar is ours
            try:
                for request in tqdm(left, desc="Texts", disable=quiet or self._rank != 0):
                    answers += self._super("loglikelihood_rolling", [request])
                    self._journal.flush()
            finally:
                self._quiet = quiet
            return answers

        return self._answer("loglikelihood_rolling", requests, compute)

    @torch.no_grad()
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text generated for each request, up to its stop strings or the end of the answer."""
        return self._answer("generate_until", requests, lambda left: self._super("generate_until", left))

    def _super(self, kind: str, requests: list[Any]) -> list[Any]:
        return getattr(super(), kind)(requests, disable_tqdm=self._quiet)

    def _answer(self, kind: str, requests: list[Any], compute: Callable[[list[Any]], list[Any]]) -> list[Any]:
        answers = self._journal.answers([request_key(kind, request.args) for request in requests])
        left = [place for place, answer in enumerate(answers) if answer is None]
        if left:
            for place, answer in zip(left, compute([requests[place] for place in left]), strict=True):
                answers[place] = answer
            self._journal.flush()
        return answers

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **kwargs: Any) -> Any:
        return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm or self._quiet, **kwargs)

    def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._journal.flush()  # a new batch begins, so the one before is whole
        return super()._model_call(inps, *args, **kwargs)

    def _model_generate(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._journal.flush()
        if kwargs.get("do_sample"):
            self._reseed(context)
        return super()._model_generate(context, *args, **kwargs)

    def _reseed(self, context: torch.Tensor) -> None:
        # From what is asked and how often, not from what ran before: a resumed evaluation draws the same.
        key = request_key("batch", context.tolist())
        torch.manual_seed(zlib.crc32(f"{self._seed} {key} {self._journal.count(key)}".encode()))
        self._journal.add(key, True)


def wrap(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, max_length: int | None = None, **options: Any
) -> InMemoryLM:
    """Wrap a model; its generation ends at the tokens that end an answer in the tokenizer's chat template."""
    generation = model.generation_config
    if generation is not None:
        generation.eos_token_id = stop_token_ids(tokenizer)
    return InMemoryLM(pretrained=model, tokenizer=tokenizer, max_length=max_length, **options)
