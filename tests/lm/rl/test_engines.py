"""Laws of the other sampling engines: log-probabilities of what they drew, seeds, and the contract with a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.hf_model import build_model
from lightning_nvfp4.lm.optim import OptimizerConfig
from lightning_nvfp4.lm.rl.continuous import ContinuousEngine
from lightning_nvfp4.lm.rl.grpo import GRPO
from lightning_nvfp4.lm.rl.objective import token_logps
from lightning_nvfp4.lm.rl.rollout import Sampling, rollout_generator
from lightning_nvfp4.lm.rl.vllm_engine import VLLMEngine
from lightning_nvfp4.nn.inference import inference

STOPS = (1, 2)


def draw(engine: Any, model: Any, batch: dict[str, Any], seed: int = 0, **options: Any) -> Any:
    settings = {"max_new_tokens": 5, "temperature": 0.7, "stop_ids": STOPS, "pad_id": 0, "group_size": 2}
    generator = rollout_generator(seed, 0, 0, 0, torch.device("cpu"))
    return engine.sample(model, batch["input_ids"], batch["attention_mask"], Sampling(**settings | options), generator)


def check_rows(rollout: Any, prompts: torch.Tensor) -> None:
    assert torch.equal(rollout.sequences[:, : prompts.shape[1]], prompts.repeat_interleave(2, 0))
    for tokens, mask, truncated in zip(rollout.completions, rollout.completion_mask, rollout.truncated, strict=True):
        length = int(mask.sum())
        assert mask[:length].all() and (tokens[length:] == 0).all() and (int(tokens[length - 1]) in STOPS) != truncated
        assert not any(int(token) in STOPS for token in tokens[: length - 1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", [None, "nvfp4-hybrid"])
def test_continuous_batching_samples_the_policy_it_reports(moe_fields, prompt_data, precision: str | None) -> None:
    model = build_model(moe_fields, seed=0).train()
    batch = prompt_data().make(0)
    bound = 1e-4
    if precision:
        with inference(model, precision):
            rollout = draw(ContinuousEngine(), model, batch)
            logits = _logits(model, rollout)
        bound = 0.1  # operands in BF16, and attention over another layout
    else:
        state = torch.get_rng_state()
        rollout = draw(ContinuousEngine(), model, batch)
        assert torch.equal(state, torch.get_rng_state())
        assert not torch.equal(rollout.sequences, draw(ContinuousEngine(), model, batch, seed=1).sequences)
        logits = _logits(model, rollout)
    check_rows(rollout, batch["input_ids"])
    trainer = token_logps(logits[:, -rollout.logps.shape[1] - 1 : -1], rollout.completions, 0.7)
    assert (trainer - rollout.logps)[rollout.completion_mask].abs().max() < bound
    assert model.training and "forward" not in vars(model) and model.config._attn_implementation == "sdpa"


@torch.no_grad()
def _logits(model: Any, rollout: Any) -> torch.Tensor:
    inputs = {"attention_mask": rollout.attention_mask, "position_ids": rollout.position_ids}
    return model(rollout.sequences, **inputs, output_router_logits=False).logits


class Stub(BaseHTTPRequestHandler):
    """The routes of a vLLM server that the engine uses; completions are a function of prompt and seed."""

    calls: list[tuple[str, Any]]
    damage: dict[str, Any]

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.calls.append((self.path, body))
        if self.path in self.damage:
            return self._answer(self.damage[self.path])
        if self.path != "/v1/completions":
            return self._answer(None)
        choices = []
        for index in reversed(range(body["n"])):
            length = 1 + (body["prompt"][-1] + index) % (body["max_tokens"] + 1)
            stopped = length <= body["max_tokens"]
            tokens = [6 + (body["seed"] + index + i) % 50 for i in range(min(length, body["max_tokens"]))]
            tokens = [*tokens[:-1], body["stop_token_ids"][0]] if stopped else tokens
            logps = {"token_logprobs": [-4.0 - i / 8 for i in range(len(tokens))]}
            reason = "stop" if stopped else "length"
            choices.append({"index": index, "token_ids": tokens, "logprobs": logps, "finish_reason": reason})
        return self._answer({"choices": choices})

    def _answer(self, value: Any) -> None:
        self.send_response(500 if isinstance(value, str) else 200)
        self.end_headers()
        self.wfile.write(
            b"" if value is None else value.encode() if isinstance(value, str) else json.dumps(value).encode()
        )

    def log_message(self, *_: Any) -> None:
        """Be silent."""


@pytest.fixture
def server() -> Iterator[Any]:
    handler = type("Handler", (Stub,), {"calls": [], "damage": {}})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    handler.url = f"http://127.0.0.1:{http.server_port}"  # type: ignore[attr-defined]
    yield handler
    http.shutdown()
    thread.join()
    http.server_close()


def test_a_server_is_asked_for_tokens_and_their_log_probabilities(moe_fields, prompt_data, server, tmp_path) -> None:
    model, batch = build_model(moe_fields, seed=0), prompt_data().make(0)
    engine = VLLMEngine(server.url, str(tmp_path / "w"))
    rollout = draw(engine, model, batch)
    check_rows(rollout, batch["input_ids"])
    assert rollout.truncated.any() and not rollout.truncated.all() and rollout.routing is None
    expected = -4.0 - torch.arange(rollout.logps.shape[1]) / 8
    assert torch.equal(rollout.logps, torch.where(rollout.completion_mask, expected, 0.0))
    bodies = [body for _, body in server.calls]
    assert sorted(body["prompt"] for body in bodies) == sorted(
        row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    )
    assert len({body["seed"] for body in bodies}) == 6
    assert {(body["model"], body["temperature"], body["top_p"], body["n"]) for body in bodies} == {
        ("served", 0.7, 1.0, 2)
    }
    assert torch.equal(draw(engine, model, batch).sequences, rollout.sequences)
    assert not torch.equal(draw(engine, model, batch, seed=1).sequences, rollout.sequences)


def test_the_server_gets_the_weights_of_every_step(
    moe_fields, prompt_data, make_trainer, server, tmp_path: Path
) -> None:
    folder = tmp_path / "shared" / "weights"
    loaded: list[torch.Tensor] = []
    post = server.do_POST

    def do_POST(self: Any) -> None:
        if self.path == "/collective_rpc":
            loaded.append(load_file(folder / "model.safetensors")["model.embed_tokens.weight"])
        post(self)

    server.do_POST = do_POST
    module = GRPO(
        moe_fields,
        optimizer=OptimizerConfig(lr=1e-2),
        group_size=2,
        max_new_tokens=4,
        reward=lambda texts, _: [float(len(text)) for text in texts],
        rollout={"engine": "vllm", "url": server.url, "weights_folder": str(folder)},
        abort={"max_logp_diff": None},
        log_prompts=0,
    )
    trainer = make_trainer(2)
    trainer.fit(module, prompt_data())
    routes = [path for path, _ in server.calls]
    assert routes == (["/collective_rpc", "/reset_prefix_cache"] + ["/v1/completions"] * 6) * 2
    rpc = next(body for path, body in server.calls if path == "/collective_rpc")
    assert rpc == {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    assert len(loaded) == 2 and not torch.equal(*loaded)
    assert "rl/routing_agreement" not in trainer.callback_metrics and trainer.callback_metrics["rl/logp_diff"] > 0


@pytest.mark.parametrize(
    ("route", "answer", "message"),
    [
        ("/v1/completions", "no such model", "/v1/completions: status 500: no such model. Start it with"),
        ("/v1/completions", {"choices": []}, "0 completions for n = 2"),
        ("/v1/completions", {"choices": [{"index": 0, "text": "x"}]}, "a completion lacks 'token_ids'"),
        ("/collective_rpc", "not found", "/collective_rpc: status 500: not found. Start it with VLLM_SERVER_DEV_MODE"),
    ],
)
def test_a_server_that_does_not_keep_the_contract(
    moe_fields, prompt_data, server, tmp_path, route: str, answer: Any, message: str
) -> None:
    server.damage[route] = answer
    engine, model = VLLMEngine(server.url, str(tmp_path / "w")), build_model(moe_fields, seed=0)
    with pytest.raises(UserError, match=message):
        if route == "/collective_rpc":
            engine.update_weights(model, model.state_dict(), None)
        draw(engine, model, prompt_data().make(0))


def test_a_server_that_is_not_there(moe_fields, prompt_data, tmp_path) -> None:
    with pytest.raises(UserError, match=r"rollout.url = 'http://127.0.0.1:9': /v1/models: .*refused"):
        draw(VLLMEngine("http://127.0.0.1:9/", str(tmp_path)), build_model(moe_fields, seed=0), prompt_data().make(0))
