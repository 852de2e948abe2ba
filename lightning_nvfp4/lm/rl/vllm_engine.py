"""Sampling by a vLLM server over HTTP; nothing of vLLM is imported.

The server is started by the user, with the development routes that let a trainer replace its weights:

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --logprobs-mode processed_logprobs

It is asked for completions of token ids with their log-probabilities (`/v1/completions`), loads the weights of each
step from a shared folder (`/collective_rpc`, the worker's `reload_weights`) and drops what it cached under the old ones
(`/reset_prefix_cache`). Its numerics are its own: `rl/logp_diff` measures the gap, `tis_cap` corrects for it.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.export import export
from lightning_nvfp4.lm.rl.rollout import Rollout, Sampling, check_prompts, from_completions, without_padding

_REQUESTS_AT_ONCE = 64
_START = "Start it with VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --logprobs-mode processed_logprobs."


class VLLMEngine:
    """Client of one server.

    Args:
        url: address of the server.
        weights_folder: where weights are left for it; both see the folder under this name.
        timeout: seconds for each request.
    """

    needs_weights = True

    def __init__(self, url: str, weights_folder: str, timeout: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.weights_folder = Path(weights_folder).absolute()
        self.timeout = timeout
        self._model: str | None = None

    def update_weights(self, model: PreTrainedModel, weights: Any, tokenizer: Any) -> None:
        """Write the weights as a Hugging Face folder and make the server load it."""
        export(model, weights, self.weights_folder, tokenizer)
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(self.weights_folder)}}
        self._request("/collective_rpc", call)
        self._request("/reset_prefix_cache", {})

    @torch.no_grad()
    def sample(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        attention_mask: Tensor,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollout:
        """See `rollout.sample`; the generator gives each prompt the seed that the server samples with."""
        check_prompts(model, input_ids, attention_mask, sampling.max_new_tokens)
        seeds = torch.randint(2**31, (len(input_ids),), generator=generator, device=generator.device).tolist()
        prompts = without_padding(input_ids, attention_mask)
        self._model = self._model or self._served_model()
        settings = {
            "model": self._model,
            "n": sampling.group_size,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "logprobs": 0,
            "stop_token_ids": list(sampling.stop_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        bodies = [settings | {"prompt": prompt, "seed": seed} for prompt, seed in zip(prompts, seeds, strict=True)]
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            answers = list(pool.map(lambda body: self._request("/v1/completions", body), bodies))
        rows = [row for answer in answers for row in self._completions(answer, sampling.group_size)]
        return from_completions(
            input_ids.repeat_interleave(sampling.group_size, dim=0),
            attention_mask.repeat_interleave(sampling.group_size, dim=0),
            rows,
            sampling.pad_id,
        )

    def _served_model(self) -> str:
        answer = self._request("/v1/models", None)
        try:
            return str(answer["data"][0]["id"])
        except (TypeError, KeyError, IndexError) as error:
            raise self._mistake("/v1/models", f"the answer names no model: {answer!r:.200}") from error

    def _completions(self, answer: Any, count: int) -> list[tuple[list[int], list[float], bool]]:
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            rows = [
                (
                    [int(token) for token in choice["token_ids"]],
                    [float(logp) for logp in choice["logprobs"]["token_logprobs"]],
                    choice["finish_reason"] == "length",
                )
                for choice in choices
            ]
        except (TypeError, KeyError, ValueError) as error:
            raise self._mistake(
                "/v1/completions",
                f"a completion lacks {error}, of token_ids, logprobs.token_logprobs and finish_reason (vLLM 0.10.2 and "
                "later give all)",
            ) from error
        if len(rows) != count or any(not tokens or len(tokens) != len(logps) for tokens, logps, _ in rows):
            raise self._mistake(
                "/v1/completions",
                f"{len(rows)} completions for n = {count}, with {[(len(t), len(p)) for t, p, _ in rows][:4]} tokens "
                "and log-probabilities",
            )
        return rows

    def _request(self, route: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + route, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                text = response.read()
            return json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:300]
            raise self._mistake(route, f"status {error.code}: {detail}") from error
        except (OSError, ValueError) as error:
            raise self._mistake(route, str(error)) from error

    def _mistake(self, route: str, what: str) -> UserError:
        return UserError(f"rollout.url = {self.url!r}: {route}: {what}. {_START}")
