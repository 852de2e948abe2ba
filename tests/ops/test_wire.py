"""Rows on the wire: the kernels give the reference's bytes, values and sums."""

import pytest
import torch

from lightning_nvfp4.ops import wire
from lightning_nvfp4.ops.rows import TokenSum, move_rows
from lightning_nvfp4.ops.wire import decode_rows, encode_rows, row_layout
from lightning_nvfp4.recipe import QuantSpec

# The interpreter computes with numpy, which warns of infinities that the GPU computes with as well.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SPECS = {
    "mxfp8": QuantSpec("mxfp8"),
    "e5m2": QuantSpec("mxfp8", element="e5m2"),
    "s2f6": QuantSpec("s2f6"),
    "plain s2f6": QuantSpec("s2f6", hadamard=0),
    "nvfp4": QuantSpec("nvfp4", tensor_scale="row"),
}
DEVICES = [pytest.param("cpu", id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def kernels(request):
    """The kernels on a device; on a CPU in Triton's interpreter."""
    from lightning_nvfp4.ops.triton import runtime
    from lightning_nvfp4.ops.triton import wire as triton_wire

    if request.getfixturevalue("device") == "cpu" and not runtime.INTERPRETED:
        pytest.skip("the interpreter is off where a GPU is")
    return triton_wire


def matrix(rows, columns, device, dtype=torch.bfloat16):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)).to(dtype)
    x[0], x[1, 3], x[2, 5] = 0, float("nan"), float("inf")
    x[:, 1] *= 50
    return x.to(device)


def dtypes(device):
    """The interpreter cuts float32 off where it should round it to BF16."""
    return (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16)


def reference(x):
    """The same tensor where the reference works on it."""
    return None if x is None else x.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [64, 1088])
@pytest.mark.parametrize("name", SPECS)
def test_kernels_encode_and_decode_with_the_references_bits(name, columns, device, kernels):
    spec, x = SPECS[name], matrix(7, columns, device)
    layout = row_layout(spec, columns)
    places = (layout.scales, layout.tensor, layout.size)
    assert kernels.wires(x, spec, layout.tensor, layout.size)
    for index in (None, torch.tensor([6, 0, 1, 1, 2], device=device)):
        bytes_ = kernels.encode_rows(x, spec, index, *places)
        expected = encode_rows(x.cpu(), spec, reference(index))
        assert torch.equal(bytes_.cpu()[:, : layout.end], expected[:, : layout.end])
        target = torch.arange(len(bytes_), device=device).flip(0) + 1
        for dtype in dtypes(device):
            out, same = (torch.full((9, columns), 7.0, dtype=dtype, device=d) for d in (device, "cpu"))
            kernels.decode_rows(bytes_, spec, out, target, *places)
            decode_rows(expected, spec, same, target.cpu())
            torch.testing.assert_close(out.cpu(), same, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*SPECS, None])
@pytest.mark.parametrize("weighted", [True, False])
def test_kernel_sums_by_token_in_the_order_of_the_choices(name, weighted, device, kernels):
    columns, choices = 128, 3
    generator = torch.Generator().manual_seed(5)
    far, kept = (matrix(rows, columns, device, dtypes(device)[-1]).nan_to_num(posinf=9) for rows in (8, 6))
    kept_rows = torch.tensor([5, 0, 2, 4], device=device)
    positions, kept_positions = torch.randperm(12, generator=generator).to(device), slice(3, 7)
    weights = torch.rand(4, choices, generator=generator).to(device) if weighted else None
    rows, coded, decoded = far, None, far
    if name is not None:
        spec = SPECS[name]
        layout = row_layout(spec, columns)
        coded = (spec, layout.scales, layout.tensor, layout.size)
        rows = encode_rows(far.cpu(), spec).to(device)
        decoded = torch.empty_like(far, device="cpu")
        decode_rows(rows.cpu(), spec, decoded)
    found = kernels.sum_rows(
        rows, coded, TokenSum(kept, kept_rows, positions, kept_positions, weights, choices, torch.float32)
    )
    all_rows = torch.cat([decoded.cpu()[:3], kept.cpu()[kept_rows.cpu()], decoded.cpu()[3:]])
    parts = all_rows[positions.cpu()].view(4, choices, columns).float()
    total = None
    for s in range(choices):
        part = parts[:, s] if weights is None else parts[:, s] * weights.cpu()[:, s, None]
        total = part if total is None else total + part
    assert torch.equal(found.cpu(), total)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_moves_rows(dtype, device, kernels):
    x, source, target = matrix(7, 90, device, dtype), torch.tensor([3, 3, 0]), torch.tensor([4, 0, 2])
    for indices in ((source, target), (None, torch.arange(7).flip(0)), (source, None)):
        out, same = (torch.full((7, 90), 7.0, dtype=dtype, device=d) for d in (device, "cpu"))
        out, same = (t if indices[1] is not None else t[:3] for t in (out, same))
        there = [None if i is None else i.to(device) for i in indices]
        kernels.move_rows(x, there[0], out, there[1])
        move_rows(x.cpu(), indices[0], same, indices[1])
        torch.testing.assert_close(out.cpu(), same, rtol=0, atol=0, equal_nan=True)


def test_rows_are_padded_to_whole_loads_only_where_that_is_little():
    assert row_layout(SPECS["s2f6"], 64).size == 66
    assert row_layout(SPECS["nvfp4"], 4096) == (2048, 2304, 2308, 2320)
    assert wire.row_layout(SPECS["s2f6"], 4096).size == 4224
