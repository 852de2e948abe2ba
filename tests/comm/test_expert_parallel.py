"""An experts module spread over ranks against the same module in one process, in every kind of numerics."""

import pytest
import torch
from ranks import run_ranks
from spread_experts import HIDDEN, MODELS, experts_of, spread
from torch.distributed.device_mesh import init_device_mesh

from lightning_nvfp4.comm.codec import CODECS
from lightning_nvfp4.comm.expert_parallel import Communication, takes_codes
from lightning_nvfp4.comm.link import LEGS
from lightning_nvfp4.recipe import PRESETS
from lightning_nvfp4.testing import sqnr_db

TOKENS = 11


def batch(rank, experts):
    generator = torch.Generator().manual_seed(rank)
    ids = torch.stack([torch.randperm(experts.num_experts, generator=generator)[:2] for _ in range(TOKENS)])
    ids = ids % (experts.num_experts - 1)  # the last expert has no token
    x, dout = torch.randn(2, TOKENS, HIDDEN, generator=generator)
    return x, ids, torch.rand(TOKENS, 2, generator=generator), dout


def forward_backward(experts, forward, x, ids, weights, dout):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = forward(x, ids, weights)
    out.backward(dout)
    return [out.detach(), x.grad, weights.grad, *(p.grad.detach() for p in experts.parameters())]


def one_rank(rank, size, cases):
    """Results of one rank, for each (model, precision, legs)."""
    mesh = init_device_mesh("cpu", (size,))
    results = []
    for name, precision, legs in cases:
        _, experts = experts_of(name, precision)
        arguments = batch(rank, experts)
        communication = Communication({**dict.fromkeys(LEGS, "none"), **legs})
        forward = spread(experts, mesh, rank, size, communication)
        results.append((forward_backward(experts, forward, *arguments), dict(communication.traffic.sent)))
    return results


def together(size, name, precision):
    _, experts = experts_of(name, precision)
    batches = [batch(rank, experts) for rank in range(size)]
    return forward_backward(experts, experts, *(torch.cat(parts) for parts in zip(*batches, strict=True)))


# Rounding to nearest: stochastic rounding draws by a row's place, which is another in each layout.
EXACT = [(name, precision, {}) for name in MODELS for precision in (None, "bf16-gemm", "mxfp8")]


@pytest.mark.parametrize("size", [2, 4])
def test_without_codec_every_output_and_gradient_is_bitwise_that_of_one_process(size):
    """Per expert the same rows in the same order, so the gradients of the weights too.

    Except that the model's own experts, unconverted, take an expert's rows by slot and then token. Equal up to that
    order are the latter, and what goes through a sigmoid (gpt_oss), whose last bits depend on an element's place in a
    vector of AVX-512.
    """
    ranks = run_ranks(one_rank, size, size, EXACT)
    for (name, precision, _), found in zip(EXACT, zip(*ranks, strict=True), strict=True):
        expected = together(size, name, precision)
        for i, (a, *b) in enumerate(zip(expected, *(results for results, _ in found), strict=True)):
            if precision is None and (i >= 3 or name == "gpt_oss"):
                torch.testing.assert_close(a, torch.cat(b), rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(a, torch.cat(b)), (name, precision, i)


def test_codes_that_travel_are_the_codes_that_the_experts_would_make():
    """NVFP4 dispatch under the hybrid: bitwise the forward without codec, in 4.5 bits an element."""
    cases = [("qwen3_moe", "nvfp4-hybrid", {}), ("qwen3_moe", "nvfp4-hybrid", {"dispatch_forward": "nvfp4"})]
    plain, coded = zip(*run_ranks(one_rank, 2, 2, cases), strict=True)
    expected = together(2, "qwen3_moe", "nvfp4-hybrid")[0]
    for found in (plain, coded):
        assert torch.equal(expected, torch.cat([results[0] for results, _ in found]))
    for (_, sent), (_, plain_sent) in zip(coded, plain, strict=True):
        row = HIDDEN // 2 + HIDDEN // 16 + 4
        assert sent["dispatch_forward"] * 2 * HIDDEN == plain_sent["dispatch_forward"] * row


def test_which_recipes_take_codes():
    hybrid = PRESETS["nvfp4-hybrid"].gemms["experts"]
    assert takes_codes(hybrid, CODECS["nvfp4"])
    assert not any(takes_codes(hybrid, CODECS[name]) for name in ("none", "mxfp8", "s2f6"))
    assert not takes_codes(PRESETS["nvfp4"].gemms["experts"], CODECS["nvfp4"])  # one scale for all rows of an expert
    assert not takes_codes(PRESETS["mxfp8"].gemms["experts"], CODECS["mxfp8"])  # its wgrad needs the original


def test_every_codec_stays_near_the_exact_result():
    cases = [("qwen3_moe", "bf16-gemm", dict.fromkeys(LEGS, codec)) for codec in ("nvfp4", "mxfp8", "s2f6")]
    expected = together(2, "qwen3_moe", "bf16-gemm")
    at_least = {"nvfp4": 15, "mxfp8": 25, "s2f6": 35}
    for (*_, legs), found in zip(cases, zip(*run_ranks(one_rank, 2, 2, cases), strict=True), strict=True):
        for a, *b in zip(expected, *(results for results, _ in found), strict=True):
            assert sqnr_db(a, torch.cat(b)) > at_least[legs["combine_forward"]]


def consistent(rank, size, codec):
    """Results of one of four ranks with experts spread over one, two and four of them; random bits differ by rank."""
    results = []
    for ranks in (1, 2, 4):
        _, experts = experts_of("qwen3_moe", "nvfp4-hybrid", rank)
        x, ids, w, dout = batch(rank, experts)
        # Sources so far apart that a block along tokens with rows of two of them would lose the smaller one's.
        arguments = x * 32**rank, ids, w, dout / 32**rank
        mesh = init_device_mesh("cpu", (size // ranks, ranks), mesh_dim_names=("copies", "ep"))["ep"]
        communication = Communication(dict.fromkeys(LEGS, codec), consistent=True)
        forward = spread(experts, mesh if ranks > 1 else None, rank % ranks, ranks, communication)
        results.append(forward_backward(experts, forward, *arguments))
    return results


@pytest.mark.parametrize("codec", ["s2f6", "nvfp4"])
def test_consistent_results_do_not_depend_on_how_many_ranks_share_the_experts(codec):
    """Outputs and gradients of what each rank holds bitwise, stochastic rounding and blocks along tokens included.

    Gradients of the weights are sums over all tokens, here of copies and there in one product: equal up to that order.
    """
    ranks = run_ranks(consistent, 4, 4, codec)
    weights = []
    for i, size in enumerate((1, 2, 4)):
        for found in ranks:
            assert all(torch.equal(a, b) for a, b in zip(found[0][:3], found[i][:3], strict=True)), size
        copies = [ranks[first : first + size] for first in range(0, 4, size)]
        weights.append([sum(torch.cat([found[i][k] for found in copy]) for copy in copies) for k in (3, 4)])
    for other in weights[1:]:
        for a, b in zip(weights[0], other, strict=True):
            assert sqnr_db(a, b) > 110  # FP32
