"""Laws of the all-to-all: on gloo with 2 and 4 processes, against one process that holds every expert."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from lightning_nvfp4.comm.all_to_all import Combine, Dispatch, Exchange
from lightning_nvfp4.comm.codec import CODECS
from lightning_nvfp4.comm.link import LEGS, Link, Traffic
from lightning_nvfp4.comm.routing import plan_routes
from lightning_nvfp4.ops import quantize

HIDDEN, EXPERTS, TOKENS = 128, 12, 20
ROUTINGS = ("spread", "a rank has no row", "all to one rank", "a rank holds no token")
CASES = [(routing, codec, consistent) for routing in ROUTINGS for codec in CODECS for consistent in (False, True)]


def batch(rank, size, routing):
    """Tokens, ids, routing weights and the output's gradient of a rank."""
    generator = torch.Generator().manual_seed(7 * rank + len(routing))
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    x[:, 3] *= 30
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(TOKENS)])
    local = EXPERTS // size
    if routing == "a rank has no row":
        ids = ids % (EXPERTS - local)
    elif routing == "all to one rank":
        ids = EXPERTS - local + ids % local
    rows = slice(0, 0) if routing == "a rank holds no token" and rank == size - 1 else slice(None)
    weights, dout = torch.rand(TOKENS, 2, generator=generator), torch.randn(TOKENS, HIDDEN, generator=generator)
    return x[rows], ids[rows], weights[rows], dout[rows]


def experts_of(rows, groups, first):
    """Stand-in for experts: each multiplies its rows elementwise by its own vector."""
    scale = torch.linspace(0.5, 2, EXPERTS * HIDDEN).view(EXPERTS, HIDDEN).to(rows.device)
    expert = groups.expert_of(torch.arange(len(rows), device=rows.device)).clamp(max=groups.num - 1)
    return rows * scale[first + expert]


def forward_backward(x, ids, weights, dout, link, codec, consistent=False, alignment=32, device="cpu"):
    """Return the rows at the experts, then output and gradients."""
    x, ids, weights, dout = (tensor.to(device) for tensor in (x, ids, weights, dout))
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    local = EXPERTS // link.size
    exchange = Exchange(
        link,
        dict.fromkeys(LEGS, CODECS[codec]),
        plan_routes(ids, local, link, alignment, per_source=consistent)[0],
        consistent,
    )
    rows = Dispatch(x, exchange, torch.float32, torch.float32).rows()
    out = Combine(experts_of(rows, exchange.route.groups, local * link.rank), exchange).sum(weights)
    out.backward(dout)
    return [found.detach().cpu() for found in (rows, out, x.grad, weights.grad)]


def all_cases(rank, size, device="cpu"):
    if device == "cuda":
        torch.cuda.set_device(rank)
    link = Link(dist.group.WORLD, Traffic())
    results = {}
    for case in CASES:
        found = forward_backward(*batch(rank, size, case[0]), link, *case[1:], device=device)
        results[case] = (found, dict(link.traffic.sent), dict(link.traffic.bf16))
        link.traffic.take()
    return results


@pytest.fixture(scope="module", params=[2, 4])
def found(request):
    """Results of all cases, by rank."""
    return run_ranks(all_cases, request.param, request.param)


def alone(size, routing, codec="none", consistent=False):
    """One process with every rank's tokens."""
    together = [torch.cat(parts) for parts in zip(*(batch(r, size, routing) for r in range(size)), strict=True)]
    return forward_backward(*together, Link(None, Traffic()), codec, consistent)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_without_codec_everything_is_bitwise_that_of_one_process(found, routing):
    """FP32: the same rows, the same products, sums over the choices of a token in the same order."""
    _, *expected = alone(len(found), routing)
    for consistent in (False, True):
        _, *parts = zip(*(ranks[routing, "none", consistent][0] for ranks in found), strict=True)
        for a, b in zip(expected, parts, strict=True):
            assert torch.equal(a, torch.cat(b))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_results_do_not_depend_on_the_number_of_ranks_when_consistent(found, routing, codec):
    _, *expected = alone(len(found), routing, codec, consistent=True)
    _, *parts = zip(*(ranks[routing, codec, True][0] for ranks in found), strict=True)
    for a, b in zip(expected, parts, strict=True):
        assert torch.equal(a, torch.cat(b))
    if codec != "none" and routing == "spread":  # and the codec does show, except in rows that stay
        _, *plain = zip(*(ranks[routing, codec, False][0] for ranks in found), strict=True)
        assert not torch.equal(expected[0], torch.cat(plain[0]))


@pytest.mark.parametrize("codec", [c for c in CODECS if c != "none"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_only_rows_that_leave_the_rank_are_encoded_unless_consistent(found, routing, codec):
    """Each row at the experts is either the token itself, from the same rank, or the decoded one, from another."""
    for rank, ranks in enumerate(found):
        mixed, exact, decoded = (
            ranks[routing, name, consistent][0][0]
            for name, consistent in ((codec, False), ("none", False), (codec, True))
        )
        x, ids, *_ = batch(rank, len(found), routing)
        local = EXPERTS // len(found)
        own = ((mixed == exact).all(1) & (exact != 0).any(1)).sum()
        assert own == ((ids >= local * rank) & (ids < local * (rank + 1))).sum()
        others = mixed[(mixed != exact).any(1)]
        assert {tuple(row.tolist()) for row in others} <= {tuple(row.tolist()) for row in decoded}


def decoded_before_or_after(rank, size):
    """For each codec: rows and outputs decoded at the end of the way, and those that traveled decoded."""
    link, results = Link(dist.group.WORLD, Traffic()), {}
    for routing in ROUTINGS:
        x, ids, weights, _ = batch(rank, size, routing)
        (route,) = plan_routes(ids, EXPERTS // size, link, 1, per_source=False)
        plain = Exchange(link, dict.fromkeys(LEGS, CODECS["none"]), route)
        for name, codec in CODECS.items():
            coded = Exchange(link, dict.fromkeys(LEGS, codec), route, consistent=True)

            def decoded(rows, codec=codec):
                return codec.decode(codec.encode(rows, torch.float32), HIDDEN, torch.float32)

            after = Dispatch(x, coded, torch.float32, torch.float32).rows()
            before = Dispatch(decoded(x), plain, torch.float32, torch.float32).rows()
            outputs = experts_of(after, route.groups, 0)
            combined = Combine(outputs, coded).sum(weights), Combine(decoded(outputs), plain).sum(weights)
            results[routing, name] = (after, before, *combined)
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_decoding_after_the_all_to_all_is_the_all_to_all_after_decoding(size):
    for ranks in run_ranks(decoded_before_or_after, size, size):
        for after, before, combined_after, combined_before in ranks.values():
            assert torch.equal(after, before) and torch.equal(combined_after, combined_before)


def codes_before_or_after(rank, size):
    """NVFP4 codes that traveled, and those made of the rows that traveled in BF16."""
    link = Link(dist.group.WORLD, Traffic())
    codec, pairs = CODECS["nvfp4"], []
    for routing in ROUTINGS:
        x, ids, *_ = batch(rank, size, routing)
        x[:3] = torch.tensor([0.0, 1e-38, 3e38])[: len(x[:3]), None]
        x = x.bfloat16()
        exchange = Exchange(link, dict.fromkeys(LEGS, codec), plan_routes(ids, EXPERTS // size, link, 32, False)[0])
        _, before = Dispatch(x, exchange, torch.bfloat16, torch.bfloat16).codes()
        plain = Exchange(link, dict.fromkeys(LEGS, CODECS["none"]), exchange.route)
        after = quantize(Dispatch(x, plain, torch.bfloat16, torch.bfloat16).rows(), codec.spec)
        pairs.append((before.tensors()[:3], after.tensors()[:3]))
    return pairs


def test_quantizing_before_the_wire_gives_the_bits_of_quantizing_after_it():
    for ranks in run_ranks(codes_before_or_after, 2, 2):
        for before, after in ranks:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_bytes_counted_are_those_of_the_codecs_formula(found):
    size = len(found)
    for routing, codec, consistent in CASES:
        owners = [batch(r, size, routing)[1] // (EXPERTS // size) for r in range(size)]
        row = CODECS[codec].row_bytes(HIDDEN, torch.float32)
        for rank, ranks in enumerate(found):
            _, sent, bf16 = ranks[routing, codec, consistent]
            leaving = int((owners[rank] != rank).sum())
            arriving = sum(int((owners[r] == rank).sum()) for r in range(size) if r != rank)
            rows = dict(zip(LEGS, (leaving, arriving, arriving, leaving), strict=True))
            assert sent == {leg: n * row for leg, n in rows.items()}
            assert bf16 == {leg: n * HIDDEN * 2 for leg, n in rows.items()}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_nccl_and_the_kernels_give_what_gloo_and_the_reference_give():
    """Rows, outputs and the gradients of tokens bitwise; those of weights are sums over columns in another order."""
    on_cpu, on_gpu = run_ranks(all_cases, 2, 2), run_ranks(all_cases, 2, 2, "cuda", group="nccl", limit=240)
    for expected, found in zip(on_cpu, on_gpu, strict=True):
        for case in CASES:
            assert found[case][1:] == expected[case][1:]
            *exact, dweights = zip(found[case][0], expected[case][0], strict=True)
            assert all(torch.equal(a, b) for a, b in exact), case
            torch.testing.assert_close(*dweights, rtol=1e-5, atol=1e-5)
