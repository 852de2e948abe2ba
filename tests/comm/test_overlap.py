"""A rank's tokens in parts, one on its way while the experts work on another: the same numbers, in another order."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from spread_experts import HIDDEN, experts_of, spread
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lightning_nvfp4.comm.codec import CODECS
from lightning_nvfp4.comm.expert_parallel import Communication
from lightning_nvfp4.comm.link import LEGS, Link, Pending, Traffic
from lightning_nvfp4.comm.routing import plan_routes, split_sizes
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.recipe import PRESETS
from lightning_nvfp4.testing import sqnr_db

EXPERTS = 12
LENGTHS = {  # tokens of each rank
    "not divisible": lambda rank: 11,
    "fewer tokens than parts": lambda rank: 2 + rank,
    "a rank holds no token": lambda rank: 0 if rank == 1 else 9,
}


def batch(rank, length, first=0):
    """Tokens, ids, routing weights and the output's gradient; experts below `first` have none."""
    generator = torch.Generator().manual_seed(rank)
    ids = [first + torch.randperm(EXPERTS - first, generator=generator)[:2] for _ in range(length)]
    ids = torch.stack(ids) if ids else torch.empty(0, 2, dtype=torch.int64)
    x, dout = torch.randn(2, length, HIDDEN, generator=generator)
    return x, ids, torch.rand(length, 2, generator=generator), dout


def experts_and_forward(rank, size, precision, codec, degree, mesh=None):
    """This rank's share of the experts, and their forward in `degree` parts."""
    _, experts = experts_of("qwen3_moe", precision, rank)
    communication = Communication(dict.fromkeys(LEGS, codec), overlap_degree=degree)
    return experts, spread(experts, mesh or init_device_mesh("cpu", (size,)), rank, size, communication)


def forward_backward(experts, forward, x, ids, weights, dout):
    """Return output and gradients; those of the parameters are added to what they have."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = forward(x, ids, weights)
    out.backward(dout)
    return [out.detach(), x.grad, weights.grad], [p.grad.clone() for p in experts.parameters()]


def in_parts(experts, forward, degree, *tensors):
    """The same, each part a forward and backward by itself, the last one first."""
    parts = list(zip(*(tensor.split(split_sizes(len(tensor), degree)) for tensor in tensors), strict=True))
    results = [forward_backward(experts, forward, *part) for part in reversed(parts)]
    of_tokens = [torch.cat(found) for found in zip(*(found for found, _ in reversed(results)), strict=True)]
    return of_tokens, results[-1][1]


# With rounding to nearest: draws differ by part.
SETTINGS = [(None, "none"), *(("mxfp8", codec) for codec in CODECS)]
CASES = [(length, 0, *setting) for length in LENGTHS for setting in SETTINGS]
CASES.append(("not divisible", 9, "mxfp8", "s2f6"))  # all to the last rank's experts


def laws(rank, size, degree):
    mesh, results = init_device_mesh("cpu", (size,)), []
    for length, first, precision, codec in CASES:
        tensors = batch(rank, LENGTHS[length](rank), first)
        overlapped, apart, whole = (
            experts_and_forward(rank, size, precision, codec, parts, mesh) for parts in (degree, 1, 1)
        )
        results.append(
            (
                forward_backward(*overlapped, *tensors),
                in_parts(*apart, degree, *tensors),
                forward_backward(*whole, *tensors),
                [dict(forward.communication.traffic.sent) for _, forward in (overlapped, apart, whole)],
            )
        )
    return results


@pytest.mark.parametrize(("size", "degree"), [(2, 3), (2, 4), (4, 2)])
def test_parts_give_bitwise_what_each_gives_alone_and_tokens_what_all_give_at_once(size, degree):
    """Gradients of the weights are sums over the parts, the last one first, each with blocks along its own tokens.

    FP32 by the model's own experts: a GEMM adds in another order for another number of rows, so near what all give at
    once.
    """
    for ranks in run_ranks(laws, size, size, degree, limit=120):
        for case, (parts, apart, whole, sent) in zip(CASES, ranks, strict=True):
            assert all(torch.equal(a, b) for a, b in zip([*parts[0], *parts[1]], [*apart[0], *apart[1]], strict=True))
            if "mxfp8" in case:
                assert all(torch.equal(a, b) for a, b in zip(parts[0], whole[0], strict=True)), case
            else:
                for a, b in zip([*parts[0], *parts[1]], [*whole[0], *whole[1]], strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            assert sent[0] == sent[1] == sent[2]


class Logged(torch.autograd.Function):
    """Notes when the experts' backward comes by."""

    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append("experts")
        return grad, None


def order(rank, degree, precision, codec):
    """Events of the forward, and of the backward; the second rank holds no token."""
    experts, forward = experts_and_forward(rank, 2, precision, codec, degree)
    events, names, original, wait = [], {}, Link.start, Pending.wait

    def start(self, rows, send, receive, leg, num_columns):
        pending = original(self, rows, send, receive, leg, num_columns)
        names[id(pending)] = f"{leg} {sum(name.startswith('start ' + leg) for name in events)}"
        events.append(f"start {names[id(pending)]}")
        return pending

    def waited(self):
        events.append(f"wait {names[id(self)]}")
        return wait(self)

    own = forward.experts_forward

    def logged(*arguments):
        events.append("experts")
        return Logged.apply(own(*arguments), events)

    forward.experts_forward = logged
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "start", start)
        patch.setattr(Pending, "wait", waited)
        x, ids, weights, dout = batch(rank, 0 if rank == 1 else 5)
        out = forward(x.requires_grad_(), ids, weights.requires_grad_())
        split = len(events)
        out.backward(dout)
    return events[:split], events[split:]


def expected(degree, there, back):
    parts = range(degree)
    middle = [[f"wait {there} {i}", "experts", f"start {back} {i}"] for i in parts]
    return [
        *(f"start {there} {i}" for i in parts),
        *(event for part in middle for event in part),
        *(f"wait {back} {i}" for i in parts),
    ]


@pytest.mark.parametrize(("precision", "codec"), [(None, "none"), ("mxfp8", "s2f6"), ("nvfp4-hybrid", "nvfp4")])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_parts_travel_while_the_experts_work_on_others_in_forward_and_backward(degree, precision, codec):
    """And every rank makes the same collectives, one that holds no token too."""
    for forward, backward in run_ranks(order, 2, degree, precision, codec):
        assert forward == expected(degree, "dispatch_forward", "combine_forward")
        assert backward == expected(degree, "combine_backward", "dispatch_backward")


def recomputed(rank, precision, codec):
    tensors = batch(rank, 11)
    results = []
    for again in (False, True):
        experts, forward = experts_and_forward(rank, 2, precision, codec, 3)

        def run(*arguments, again=again, forward=forward):
            return checkpoint(forward, *arguments, use_reentrant=False) if again else forward(*arguments)

        # Two micro-batches: the second's gradients are added to the first's.
        results.append([forward_backward(experts, run, *tensors) for _ in range(2)])
    return results


@pytest.mark.parametrize(("precision", "codec"), [(None, "none"), ("nvfp4-hybrid", "nvfp4")])
def test_recomputing_the_forward_and_accumulating_change_nothing(precision, codec):
    for kept, again in run_ranks(recomputed, 2, precision, codec):
        for (tokens, weights), (tokens_again, weights_again) in zip(kept, again, strict=True):
            found = zip([*tokens, *weights], [*tokens_again, *weights_again], strict=True)
            assert all(torch.equal(a, b) for a, b in found)
        for first, both in zip(kept[0][1], kept[1][1], strict=True):
            assert torch.equal(2 * first, both)


def stochastic(rank, degree):
    """Gradients where both halves of the tokens are the same, under stochastic rounding."""
    experts, forward = experts_and_forward(rank, 2, "nvfp4-hybrid", "none", degree)
    twice = [torch.cat([tensor, tensor]) for tensor in batch(rank, 8)]
    return forward_backward(experts, forward, *twice)[0]


def test_parts_draw_random_bits_of_their_own():
    """Equal tokens have equal outputs, whatever their part, and gradients that were rounded apart."""
    for out, dx, _ in run_ranks(stochastic, 2, 2):
        assert torch.equal(out[:8], out[8:])
        assert not torch.equal(dx[:8], dx[8:])


def chosen(rank):
    _, forward = experts_and_forward(rank, 2, "nvfp4-hybrid", "auto", 2)
    x, ids, weights, _ = batch(rank, 3 if rank else 11)
    return forward(x, ids, weights).shape, forward.communication.names


def test_auto_measures_a_part():
    (shape, names), (other_shape, other) = run_ranks(chosen, 2)
    assert (shape, other_shape) == ((11, HIDDEN), (3, HIDDEN))
    assert names == other and "auto" not in names.values()


def routed(rank, size, parts):
    link, pairs = Link(dist.group.WORLD, Traffic()), []
    for length in LENGTHS.values():
        for per_source in (False, True):
            _, ids, *_ = batch(rank, length(rank))
            arguments = EXPERTS // size, link, 8, per_source
            routes = plan_routes(ids, *arguments, parts=parts)
            alone = [plan_routes(part, *arguments)[0] for part in ids.split(split_sizes(len(ids), parts))]
            pairs += [(dataclasses.asdict(a), dataclasses.asdict(b)) for a, b in zip(routes, alone, strict=True)]
    return pairs


@pytest.mark.parametrize(("size", "parts"), [(2, 1), (2, 3), (4, 4)])
def test_the_route_of_a_part_is_that_of_its_tokens_alone(size, parts):
    for pairs in run_ranks(routed, size, size, parts):
        for found, alone in pairs:
            for name, value in alone.items():
                same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
                assert same, name


def test_tokens_are_split_as_evenly_as_they_can_be():
    assert split_sizes(11, 3) == [4, 4, 3] and split_sizes(2, 4) == [1, 1, 0, 0] and split_sizes(5, 1) == [5]


@pytest.mark.parametrize(
    ("degree", "consistent", "words"),
    [
        (0, False, ["overlap_degree = 0", "whole number"]),
        (65, False, ["overlap_degree = 65", "at most 64"]),
        (True, False, ["overlap_degree = True", "whole number"]),
        (2.0, False, ["overlap_degree = 2.0", "whole number"]),
        (2, True, ["overlap_degree = 2", "consistent", "to 1"]),
    ],
)
def test_bad_degrees_are_refused_with_the_cure(degree, consistent, words):
    with pytest.raises(UserError) as caught:
        Communication(dict.fromkeys(LEGS, "none"), consistent, degree)
    assert all(word in str(caught.value) for word in words)


def gradients(precision, degree):
    """Output and gradients by one process that holds every expert."""
    _, experts = experts_of("qwen3_moe", precision)
    settings = Communication(dict.fromkeys(LEGS, "none"), overlap_degree=degree)
    tokens, weights = forward_backward(experts, spread(experts, None, 0, 1, settings), *batch(0, 512))
    return [*tokens, *weights]


@pytest.mark.parametrize("precision", PRESETS)
def test_what_parts_change_in_each_precision(precision):
    """Outputs only where a scale is shared by an expert's rows; gradients where they are rounded at random.

    An E8M0 scale of other tokens moves exponents and no mantissas, so that blocks along tokens hardly matter. Nothing
    gets less exact.
    """
    exact, whole, parts = gradients(None, 1), gradients(precision, 1), gradients(precision, 3)
    of_tokens = [torch.equal(a, b) for a, b in zip(whole[:3], parts[:3], strict=True)]
    assert of_tokens == {"nvfp4": [False, False, False], "nvfp4-hybrid": [True, False, True]}.get(precision, [True] * 3)
    if "nvfp4" not in precision:
        assert all(sqnr_db(a, b) > 90 for a, b in zip(whole[3:], parts[3:], strict=True))
    for reference, a, b in zip(exact, whole, parts, strict=True):
        assert sqnr_db(reference, b) > sqnr_db(reference, a) - 0.3
