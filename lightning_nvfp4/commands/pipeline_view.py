"""What a running pipeline shows: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

_LINE_SECONDS = 20.0


@dataclass
class ArmState:
    """Where an arm is. `stage` is a stage's name, or `eval` and the name; `state` waiting, running, done or failed."""

    name: str
    state: str = "waiting"
    stage: str = ""
    step: int = 0
    max_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    started: float | None = None
    seconds: float = 0.0

    def read(self, folder: Path) -> None:
        """Take over what the arm's worker has written."""
        try:
            values: dict[str, Any] = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        self.stage = values.get("stage", self.stage)
        self.step = values.get("step", 0)
        self.max_steps = values.get("max_steps", 0)
        self.metrics = values.get("metrics", {})

    def clock(self) -> str:
        """Return the time the arm has taken, as minutes and seconds."""
        seconds = self.seconds + (time.monotonic() - self.started if self.started is not None else 0.0)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

    def figures(self) -> str:
        """Return the newest loss and reward."""
        return "  ".join(f"{name.split('/')[-1]} {value:.3f}" for name, value in self.metrics.items())


class View:
    """Shows the states of all arms until it is closed; `update` may be called as often as one likes."""

    def __init__(self, arms: list[ArmState], console: Console) -> None:
        self.arms, self.console = arms, console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._shown: dict[str, tuple[str, str, float]] = {}

    def __enter__(self) -> View:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self.update()
            self._live.stop()

    def update(self) -> None:
        """Redraw the table, or print a line for each arm that entered another stage or has been silent for long."""
        if self._live:
            self._live.update(self._table(), refresh=True)
            return
        for arm in self.arms:
            state, stage, when = self._shown.get(arm.name, ("waiting", "", 0.0))
            if arm.state == "running" and not arm.stage:
                continue  # its process is still importing
            changed = (arm.state, arm.stage) != (state, stage)
            if changed or (arm.state == "running" and time.monotonic() - when > _LINE_SECONDS):
                self._shown[arm.name] = (arm.state, arm.stage, time.monotonic())
                steps = f" {arm.step}/{arm.max_steps}" if arm.max_steps else ""
                what = f"{arm.stage}{steps}" if arm.state == "running" else arm.state
                self.console.print(
                    f"[{arm.clock():>5}] {arm.name:<14} {what:<18} {arm.figures()}".rstrip(), markup=False
                )

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for title in ("arm", "stage", "", "step", "", "time"):
            table.add_column(title, no_wrap=True)
        for arm in self.arms:
            bar = ProgressBar(total=arm.max_steps or 1, completed=arm.step, width=24) if arm.max_steps else ""
            steps = f"{arm.step}/{arm.max_steps}" if arm.max_steps else ""
            stage = arm.stage if arm.state == "running" else arm.state
            table.add_row(arm.name, stage or arm.state, bar, steps, arm.figures(), arm.clock())
        return table
