"""torch.compile of a converted model: one graph for all steps, the bits of eager."""

import pytest
import torch
from tiny_models import tiny_model
from torch._dynamo.utils import counters

from lightning_nvfp4 import convert
from lightning_nvfp4.nn.function import COMPILES

pytestmark = pytest.mark.skipif(not COMPILES, reason="before torch 2.13 these layers run outside of compiled graphs")
EVERYTHING = {"keep_first_blocks": 0, "keep_last_blocks": 0}


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_mixture_of_experts_is_one_graph_with_the_bits_of_eager():
    """On the kernels: there the counts of tokens stay on the device."""
    pytest.importorskip("triton")
    torch._dynamo.reset()
    counters.clear()
    model = tiny_model(num_experts=4, moe_intermediate_size=32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    context = convert(model.to(device), "nvfp4-hybrid", overrides=EVERYTHING, backend="triton").context
    block = model.model.layers[0].mlp
    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0)).to(device)

    def results(function):
        found = []
        for step in (1, 2):
            model.zero_grad()
            context.begin(0, 0, step, 0, 0, torch.device(device))
            y = function(x)
            y.square().sum().backward()
            found.append([y.detach(), *(p.grad.clone() for p in block.parameters())])
        return found

    eager = results(block)
    compiled = results(torch.compile(block, backend="aot_eager", fullgraph=True))
    assert counters["stats"]["unique_graphs"] == 1
    for one, other in zip(eager, compiled, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(eager[0][1:], eager[1][1:], strict=True))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_dense_network_on_the_reference_is_one_graph_with_the_bits_of_eager():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    context = convert(net, "nvfp4-hybrid", overrides=EVERYTHING).context
    x = torch.randn(8, 32)

    def gradients(function, step):
        net.zero_grad()
        context.begin(0, 0, step, 0, 0, torch.device("cpu"))
        function(x).square().sum().backward()
        return [p.grad.clone() for p in net.parameters()]

    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for step in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(gradients(net, step), gradients(compiled, step), strict=True))
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_layers_that_are_kept_break_no_graph():
    """On a CPU they ask whether it has BF16 instructions."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 16))
    convert(net, "bf16-gemm", overrides=EVERYTHING | {"rules": [{"match": "0", "use": "keep"}]})
    assert [layer.block_scaled_numerics.kept for layer in net] == [True, False]
    x = torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.compile(net, backend="aot_eager", fullgraph=True)(x), net(x))
    torch._dynamo.reset()
