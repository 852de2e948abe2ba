"""Packed weights, quantized once per optimizer step: the same bits as without, whatever happens in between."""

import copy

import pytest
import torch
from tiny_models import tiny_model, tokens
from torch.utils.checkpoint import checkpoint

from lightning_nvfp4 import convert
from lightning_nvfp4.nn import function

EVERYTHING = {"keep_first_blocks": 0, "keep_last_blocks": 0}


def gradients(change=None, recompute=False, cached=True):
    """Two micro-batches of one step, with `change` in between; return every gradient."""
    torch.manual_seed(0)
    model = tiny_model()
    context = convert(model, "nvfp4-hybrid", overrides=EVERYTHING).context
    for micro_batch in range(2):
        context.begin(1, 0, 5, micro_batch)
        if not cached:
            context.weights.next_generation()
        inputs = tokens(2, 8)
        if recompute:
            loss = checkpoint(lambda ids: model(input_ids=ids, labels=ids).loss, inputs, use_reentrant=False)
        else:
            loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        if change is not None and micro_batch == 0:
            change(model)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def load_in_place(model):
    model.load_state_dict({name: 1.5 * t for name, t in model.state_dict().items()})


def load_by_assignment(model):
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.load_state_dict({name: 1.5 * t for name, t in model.state_dict().items()}, assign=True)
    for name, p in model.named_parameters():
        p.grad = grads[name]


def validate_with_an_average(model):
    """Swap an average in, as weight averaging does, validate, and swap back."""
    kept = {name: p.data.clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data.mul_(0.5)
    with torch.no_grad():
        average = model(input_ids=tokens(1, 8)).logits
    for name, p in model.named_parameters():
        p.data.copy_(kept[name])
    with torch.no_grad():
        assert not torch.equal(average, model(input_ids=tokens(1, 8)).logits)


def step_in_place(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad, alpha=-0.1)


CHANGES = [None, load_in_place, load_by_assignment, validate_with_an_average, step_in_place]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__ if c else "nothing")
def test_the_cache_changes_no_bit(change, recompute):
    ours, plain = gradients(change, recompute), gradients(change, recompute, cached=False)
    assert ours.keys() == plain.keys() and len(ours) > 10
    assert all(torch.equal(ours[name], plain[name]) for name in ours)


def test_a_weight_is_quantized_once_in_a_step_and_again_in_the_next(monkeypatch):
    model = tiny_model()
    context = convert(model, "nvfp4-hybrid", overrides=EVERYTHING).context
    calls = []
    original = function.quantize_with_values

    def counting(x, *arguments, **options):
        if x.requires_grad and x.is_leaf or x._base is not None and x._base.is_leaf:
            calls.append(x.data_ptr())
        return original(x, *arguments, **options)

    monkeypatch.setattr(function, "quantize_with_values", counting)

    def micro_batch(step, number):
        context.begin(0, 0, step, number)
        model(input_ids=tokens(2, 8), labels=tokens(2, 8)).loss.backward()

    micro_batch(0, 0)
    first = len(calls)
    assert first == len(set(calls)) > 0
    micro_batch(0, 1)
    assert len(calls) == first
    micro_batch(1, 0)
    assert len(calls) == 2 * first


def test_without_begin_there_is_no_cache():
    model = tiny_model()
    context = convert(model, "nvfp4-hybrid", overrides=EVERYTHING).context
    before = copy.copy(context.weights._entries)
    model(input_ids=tokens(2, 8), labels=tokens(2, 8)).loss.backward()
    assert context.weights._entries == before == {}
