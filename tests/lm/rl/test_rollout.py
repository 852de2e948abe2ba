"""Laws of sampling: the right distribution, from its own randomness, with the trainer's log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.hf_model import build_model
from lightning_nvfp4.lm.rl.objective import token_logps
from lightning_nvfp4.lm.rl.rollout import GumbelSampler, Sampling, position_ids, rollout_generator, sample
from lightning_nvfp4.lm.stop_tokens import stop_token_ids

CPU = torch.device("cpu")
STOP, PAD = (1, 2), 0


@pytest.fixture
def model(moe_fields: dict[str, Any]) -> torch.nn.Module:
    return build_model(moe_fields, seed=0).train()


@pytest.fixture
def prompts(prompt_data: Any) -> dict[str, torch.Tensor]:
    batch = prompt_data().make(0)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def draw(model: Any, prompts: dict[str, torch.Tensor], seed: int = 0, **options: Any) -> Any:
    settings = {"max_new_tokens": 12, "temperature": 1.0, "stop_ids": STOP, "pad_id": PAD, "group_size": 4}
    return sample(
        model, **prompts, sampling=Sampling(**settings | options), generator=rollout_generator(seed, 0, 0, 0, CPU)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_and_trainer_log_probabilities_agree(model, prompts, temperature: float) -> None:
    """The alignment self-check: same weights, FP32, padded prompts; shifted by one token they differ by nats."""
    rollout = draw(model, prompts, temperature=temperature)
    with torch.no_grad():
        inputs = {"attention_mask": rollout.attention_mask, "position_ids": rollout.position_ids}
        logits = model(rollout.sequences, **inputs, output_router_logits=False).logits
    width = rollout.completion_mask.shape[1]
    trainer = token_logps(logits[:, -width - 1 : -1], rollout.completions, temperature)
    difference = (trainer - rollout.logps)[rollout.completion_mask].abs()
    assert difference.max() < 1e-4 and rollout.completion_mask.any(1).all()
    shifted = token_logps(logits[:, -width:], rollout.completions, temperature)
    assert (shifted - rollout.logps)[rollout.completion_mask].abs().mean() > 0.05


def test_rows_end_with_the_stop_token_and_padding_is_masked(model, prompts) -> None:
    rollout = draw(model, prompts, max_new_tokens=40)
    assert rollout.sequences.shape[0] == 24 and not rollout.truncated.all()
    prompt = prompts["input_ids"].repeat_interleave(4, 0)
    assert torch.equal(rollout.sequences[:, : prompt.shape[1]], prompt)
    for tokens, mask, logps, truncated in zip(
        rollout.completions, rollout.completion_mask, rollout.logps, rollout.truncated, strict=True
    ):
        length = int(mask.sum())
        assert mask[:length].all() and not mask[length:].any()
        assert (tokens[length:] == PAD).all() and (logps[length:] == 0).all() and (logps[:length] < 0).all()
        assert not any(int(token) in STOP for token in tokens[: length - 1])
        assert (int(tokens[length - 1]) in STOP) is not bool(truncated)


def test_sampling_is_a_function_of_the_generator_and_moves_no_global_state(model, prompts) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draw(model, prompts)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(first.sequences, draw(model, prompts).sequences)
    assert not torch.equal(first.sequences, draw(model, prompts, seed=1).sequences)
    assert len({tuple(row) for row in first.completions[:4].tolist()}) > 1


def test_every_argument_of_the_generator_gives_another_stream() -> None:
    streams = [
        tuple(torch.randint(2**31, (4,), generator=rollout_generator(*arguments, CPU)).tolist())
        for arguments in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))
    ]
    assert len(set(streams)) == 5


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_the_gumbel_maximum_has_the_softmax_distribution(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    sampler = GumbelSampler(temperature, torch.Generator().manual_seed(0))
    count = 200_000
    drawn = sampler(torch.empty(0), logits.expand(count, -1)).argmax(-1)
    frequencies = torch.bincount(drawn, minlength=4) / count
    expected = torch.softmax(logits / temperature, -1)
    assert ((frequencies - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all()
    torch.testing.assert_close(sampler.logps[0], torch.log_softmax(logits / temperature, -1)[drawn])


def test_temperature_zero_is_greedy(model, prompts) -> None:
    greedy = draw(model, prompts, temperature=0.0, group_size=1)
    ours = model.eval().generate(
        **prompts,
        output_router_logits=False,
        generation_config=GenerationConfig(
            max_new_tokens=12, do_sample=False, eos_token_id=list(STOP), pad_token_id=PAD
        ),
    )
    assert torch.equal(greedy.sequences, ours)


def test_the_model_is_left_as_it_was_and_its_own_generation_settings_do_not_leak_in(model, prompts) -> None:
    plain = draw(model, prompts)
    own = GenerationConfig(repetition_penalty=50.0, top_k=1, suppress_tokens=list(range(6, 40)))
    model.generation_config = own
    rollout = draw(model, prompts)
    assert torch.equal(rollout.sequences, plain.sequences)
    assert model.generation_config is own and model.training and "_optimize_model_for_decode" not in vars(model)
    assert torch.is_grad_enabled() and all(parameter.requires_grad for parameter in model.parameters())


def test_the_experts_implementation_stays_while_decoding(model, prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator `generate` would swap grouped for batched experts; the meta device stands for one here."""
    model.set_experts_implementation("grouped_mm")
    seen = set()
    model.register_forward_pre_hook(lambda module, _: seen.add(module.config._experts_implementation))
    real = type(model)._optimize_model_for_decode
    monkeypatch.setattr(
        type(model), "device", property(lambda self: torch.device("meta" if "decoding" in vars(self) else "cpu"))
    )

    def stock(self: Any) -> Any:
        vars(self)["decoding"] = True
        return real(self)

    monkeypatch.setattr(type(model), "_optimize_model_for_decode", stock)
    model.generate(
        **prompts,
        output_router_logits=False,
        generation_config=GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=PAD),
    )
    assert seen == {"grouped_mm", "batched_mm"}
    del vars(model)["decoding"]
    seen.clear()
    model.set_experts_implementation("grouped_mm")
    draw(model, prompts, max_new_tokens=3)
    assert seen == {"grouped_mm"}


def test_weights_are_quantized_once_for_the_whole_rollout(model, prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager

    from lightning_nvfp4.nn import inference

    events: list[str] = []

    @contextmanager
    def recorded(module: Any) -> Any:
        assert module is model
        events.append("open")
        yield
        events.append("close")

    model.register_forward_hook(lambda *_: events.append("forward"))
    monkeypatch.setattr(inference, "cached_weights", recorded)
    draw(model, prompts, max_new_tokens=3)
    assert events == ["open", "forward", "forward", "forward", "close"]


def test_a_rollout_inside_autocast_leaves_gradients_as_they_are_without_it(model, prompts) -> None:
    """Autocast caches weight casts; those made without a graph must not serve the training forward."""

    def gradients(rollout_first: bool) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            if rollout_first:
                draw(model, prompts, max_new_tokens=3)
            loss = model(prompts["input_ids"], labels=prompts["input_ids"]).loss
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain, after = gradients(False), gradients(True)
    assert len(plain) == len(after) == len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, after, strict=True))


def test_what_cannot_be_sampled_is_refused(model, prompts) -> None:
    with pytest.raises(UserError, match="5 tokens and max_new_tokens = 60 exceed.*max_position_embeddings = 64"):
        draw(model, prompts, max_new_tokens=60)
    right_padded = {name: value.flip(1) for name, value in prompts.items()}
    with pytest.raises(UserError, match="ends in padding"):
        draw(model, right_padded)


def test_positions_count_real_tokens() -> None:
    assert position_ids(torch.tensor([[0, 0, 1, 1, 1, 0]])).tolist() == [[0, 0, 0, 1, 2, 2]]


def test_answers_end_with_eos_or_the_templates_turn_end(tokenizer) -> None:
    assert stop_token_ids(tokenizer) == [1, 2]
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        assert stop_token_ids(tokenizer) == [1]
        tokenizer.chat_template = template.replace("<turn>", "w9")
        assert stop_token_ids(tokenizer) == [1]
    finally:
        tokenizer.chat_template = template
