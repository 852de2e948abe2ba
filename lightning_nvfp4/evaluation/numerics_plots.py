"""A picture of what `NumericsMonitor` logged: every operand of every kind of layer, block by block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lightning_nvfp4.callbacks.numerics_monitor import PREFIX
from lightning_nvfp4.evaluation.curves import Curve
from lightning_nvfp4.evaluation.plots import STYLE, to_svg
from lightning_nvfp4.recipe import OPERANDS

_BLOCK = re.compile(r"^.*?\.(\d+)\.(.+)$")
_PANELS = (("sqnr", "SQNR, dB"), ("flushed", "flushed to zero"), ("saturated", "saturated"))


def numerics_plot(curves: Mapping[str, Curve]) -> str | None:
    """Draw the last observation: one panel for SQNR and each share, rows of operands by layer, columns of blocks.

    Args:
        curves: columns of a `metrics.csv`; those of the monitor are found by name.
    """
    cells: dict[str, dict[tuple[tuple[str, int], int], float]] = {what: {} for what, _ in _PANELS}
    for name, curve in curves.items():
        prefix, _, rest = name.partition("/")
        parts = rest.rsplit("/", 2)
        if prefix != PREFIX or len(parts) != 3 or parts[2] not in cells or parts[1] not in OPERANDS:
            continue
        found = _BLOCK.match(parts[0])
        block, kind = (int(found[1]), found[2]) if found else (0, parts[0])
        cells[parts[2]][(kind, OPERANDS.index(parts[1])), block] = float(curve.values[-1])
    if not cells["sqnr"]:
        return None
    rows = sorted({row for row, _ in cells["sqnr"]})
    blocks = sorted({block for _, block in cells["sqnr"]})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 0.8 + 0.2 * len(rows)), layout="constrained")
        axes = figure.subplots(1, len(_PANELS), sharey=True)
        for axis, (what, title) in zip(axes, _PANELS, strict=True):
            values = np.array([[cells[what].get((row, block), np.nan) for block in blocks] for row in rows])
            shares = what != "sqnr"
            # Shares are mostly close to 0: the root leaves small ones visible.
            norm = PowerNorm(0.5, 0, max(float(np.nanmax(values)), 1e-6)) if shares else None
            picture = axis.imshow(values, aspect="auto", cmap="viridis_r" if shares else "viridis", norm=norm)
            bar: Any = figure.colorbar(picture, ax=axis, location="bottom", pad=0.02, shrink=0.9)
            if shares:
                bar.ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
            bar.ax.xaxis.set_major_locator(MaxNLocator(4))
            axis.set_title(title)
            axis.grid(False)
            axis.set_xticks(range(len(blocks)), [str(block) for block in blocks], fontsize=7)
            axis.set_xlabel("block")
        axes[0].set_yticks(range(len(rows)), [f"{kind} {OPERANDS[number]}" for kind, number in rows], fontsize=7)
        return to_svg(figure, "Quantization of each operand by layer")
