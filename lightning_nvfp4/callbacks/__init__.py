"""Lightning callbacks."""

from lightning_nvfp4.callbacks.nonfinite_guard import NonfiniteGuard
from lightning_nvfp4.callbacks.numerics_monitor import NumericsMonitor
from lightning_nvfp4.callbacks.precision_schedule import PrecisionSchedule
from lightning_nvfp4.callbacks.save_on_sigterm import SaveOnSigterm

__all__ = ["NonfiniteGuard", "NumericsMonitor", "PrecisionSchedule", "SaveOnSigterm"]
