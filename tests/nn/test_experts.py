"""The experts function against the model's own forward, and the routing it rests on."""

import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_model, tokens

from lightning_nvfp4 import convert, restore
from lightning_nvfp4.nn.experts import route
from lightning_nvfp4.testing import sqnr_db

EVERYTHING = {"keep_first_blocks": 0, "keep_last_blocks": 0}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("alignment", [1, 32])
def test_routing_sorts_by_expert_keeps_token_order_and_pads(alignment, on_device):
    ids = torch.tensor([[2, 0], [0, 2], [5, 9], [2, 0]])  # 9 is a sentinel: at or above the 6 experts
    routing = route(ids, 6, alignment, on_device)
    counts = [-(-n // alignment) * alignment for n in (3, 0, 3, 0, 0, 1)]
    starts = [sum(counts[:e]) for e in range(6)]
    if on_device:  # the last expert owns the rows to spare
        counts[-1] += len(routing.choices) - sum(counts)
    assert list(routing.groups.on_host()) == counts and sum(counts) == len(routing.choices)
    expected = [starts[2], starts[0], starts[0] + 1, starts[2] + 1, starts[5], -1, starts[2] + 2, starts[0] + 2]
    rows = routing.rows if routing.live is None else routing.rows.masked_fill(~routing.live, -1)
    assert rows.flatten().tolist() == expected
    choices = torch.full((len(routing.choices),), -1)
    for choice, row in enumerate(expected):
        if row >= 0:
            choices[row] = choice
    assert torch.equal(routing.choices, choices)


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n != "llama"])
def test_bf16_gemm_equals_the_models_own_experts(name):
    """Biases, interleaved gates, transposed and non-gated experts, with the routing weights: BF16 rounding apart."""
    model = tiny_model(name)
    experts = next(m for m in model.modules() if hasattr(m, "has_gate"))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(11, 64, generator=generator)
    ids = torch.randint(0, experts.num_experts, (11, 2), generator=generator)
    weights = torch.rand(11, 2, generator=generator)

    def outputs():
        leaf = x.clone().requires_grad_()
        y = experts(leaf, ids, weights)
        model.zero_grad()
        y.sum().backward()
        return [y.detach(), leaf.grad, *(p.grad.clone() for p in experts.parameters())]

    own = outputs()
    convert(model, "bf16-gemm", overrides=EVERYTHING)
    ours = outputs()
    assert all(sqnr_db(a, b) > 35 for a, b in zip(own, ours, strict=True))
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(own, outputs(), strict=True))


@pytest.mark.parametrize("preset", ["nvfp4-hybrid", "nvfp4", "mxfp8", "fp8"])
def test_a_token_does_not_depend_on_the_others_routed_with_it(preset):
    """One-token batches, tokens all on one expert and experts without tokens give the same rows.

    Not bitwise: a matrix library sums one row in another order than nine, and a last-bit difference in between may fall
    on the other side of a code. A wrong scale or row would leave a few dB.
    """
    model = tiny_model()
    convert(model, preset, overrides=EVERYTHING)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[3, 5]] * 9)
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = experts(x, ids, weights)
        alone = torch.cat([experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(9)])
        nothing = experts(x[:0], ids[:0], weights[:0])
    assert nothing.shape == (0, 64)
    # nvfp4 has one scale per expert: the rows share their amax by definition.
    assert sqnr_db(together, alone) > (15 if preset == "nvfp4" else 30)


def test_sentinels_of_expert_parallelism_are_dropped():
    model = tiny_model()
    convert(model, "mxfp8", overrides=EVERYTHING)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    weights = torch.ones(3, 2)
    with torch.no_grad():
        y = experts(x, torch.tensor([[0, 8], [8, 8], [1, 2]]), weights)
        only = experts(x[:1], torch.tensor([[0]]), weights[:1, :1])
    assert torch.equal(y[1], torch.zeros(64))
    torch.testing.assert_close(y[:1], only)


def test_generation_of_one_token_runs_in_the_converted_numerics():
    model = tiny_model().eval()
    convert(model, "nvfp4-hybrid", overrides=EVERYTHING)
    out = model.generate(tokens(1, 3), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 6)
    assert model.config._experts_implementation == "block_scaled"
