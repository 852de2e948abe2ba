"""`metrics.csv` in a run folder that survives a kill: a resumed run continues the file instead of deleting it."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment


class RunCSVLogger(CSVLogger):
    """Writes `save_dir/metrics.csv`, flushed every `flush_logs_every_n_steps` steps.

    Rows of an earlier process are kept up to the first step logged anew: the steps since the last checkpoint are taken
    again by a resumed run, and their old rows would appear twice. Wall times (metrics `time/...`) go to `timings.csv`,
    so that a resumed run leaves the same `metrics.csv` as one that was not killed.
    """

    def __init__(self, save_dir: str | Path, flush_logs_every_n_steps: int = 1) -> None:
        super().__init__(save_dir, name="", version="", flush_logs_every_n_steps=flush_logs_every_n_steps)

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer, made at first use."""
        if not isinstance(self._experiment, _Writer):
            self._experiment = _Writer(log_dir=self.log_dir)
        return self._experiment


class _Table(ExperimentWriter):
    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir=log_dir)
        self._resumed = False

    def _check_log_dir_exists(self) -> None:
        """Keep what is there; the stock writer deletes it."""

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        """Buffer one row."""
        if not self._resumed and step is not None:
            self._resumed = True
            self._drop_rows_from(step)
        super().log_metrics(metrics_dict, step)

    def _drop_rows_from(self, step: int) -> None:
        path = Path(self.metrics_file_path)
        if not path.is_file():
            return
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a kill in the middle of a write leaves half a line
        reader = csv.DictReader(io.StringIO(whole, newline=""))
        kept = [row for row in reader if row.get("step", "").isdigit() and int(row["step"]) < step]
        self.metrics_keys = sorted(reader.fieldnames or [])
        if not kept:
            path.unlink()
            self.metrics_keys = []
            return
        temporary = path.with_suffix(".csv.tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            writer.writeheader()
            writer.writerows(kept)
        os.replace(temporary, path)


class _Timings(_Table):
    NAME_METRICS_FILE = "timings.csv"


class _Writer(_Table):
    """`metrics.csv`, and beside it `timings.csv` with what begins in `time/`."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self._timings = _Timings(log_dir)

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        """Buffer one row of each file that has something to say."""
        for table, timed in ((super(), False), (self._timings, True)):
            chosen = {name: value for name, value in metrics_dict.items() if name.startswith("time/") is timed}
            if chosen.keys() - {"epoch"}:
                table.log_metrics(chosen, step)

    def save(self) -> None:
        """Write what is buffered."""
        super().save()
        self._timings.save()
