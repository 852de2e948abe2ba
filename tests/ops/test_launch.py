"""Kernels are compiled once for what Triton distinguishes, and called with their own numbers."""

import pytest
import torch

pytest.importorskip("triton")
from lightning_nvfp4.ops.triton import runtime


class Kernel:
    """Counts compilations; a compiled one notes its calls."""

    arg_names = ("x", "n", "TILE")

    def __init__(self):
        self.compiled, self.calls = [], []

    def __getitem__(self, grid):
        def run(x, n, **options):
            self.compiled.append(n)
            self.calls.append((grid, n, options["TILE"]))
            return self.of(n)

        return run

    def of(self, first):
        kernel = self

        class Compiled:
            def __getitem__(self, grid):
                def run(x, n, tile):
                    assert runtime._kind(n) == runtime._kind(first)
                    kernel.calls.append((grid, n, tile))

                return run

        return Compiled()


def test_a_kernel_is_compiled_once_for_each_kind_of_number(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "_MOST_CALLED", 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    kernel, x = Kernel(), torch.zeros(4)
    numbers = [32, 48, 32, 1, 7, 9, 1, 32, 64, 80, 96, 1 << 40, 7]
    for n in numbers:
        runtime.launch(kernel, (n, 2), x, x, n, TILE=8, num_warps=4)
    assert [call[1] for call in kernel.calls] == numbers
    assert all(grid[:2] == (n, 2) and tile == 8 for grid, n, tile in kernel.calls)
    assert kernel.compiled == [32, 1, 7, 1 << 40]
    runtime.launch(kernel, (1, 2), x, x.bfloat16(), 32, TILE=8, num_warps=4)
    runtime.launch(kernel, (1, 2), x, x, 32, TILE=16, num_warps=4)
    assert len(kernel.compiled) == 6
