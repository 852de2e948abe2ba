"""Makes the preset names known to Trainer and Fabric, of ``lightning`` and of ``pytorch_lightning``.

Each connector's argument check is wrapped once: one of our names, or one of our plugins, becomes the plugin of that
class tree; everything else takes the stock path untouched.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from typing import Any, Literal

from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.plugins.precision import (
    BlockScaledMixin,
    BlockScaledPrecision,
    FabricBlockScaledPrecision,
    TrainerPart,
)
from lightning_nvfp4.recipe import PRESETS

_REFUSED = {
    "deepspeed": "DeepSpeed owns precision itself",
    "fsdp": "FSDP1 flattens parameters, which hides the layers",
    "xla": "XLA devices have no block-scaled GEMM here",
}


def register_lightning() -> None:
    """Register with ``lightning``."""
    import lightning
    from lightning.fabric.connector import _Connector
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    _wrap(_AcceleratorConnector, lightning.Trainer, BlockScaledPrecision)
    _wrap(_Connector, lightning.Fabric, FabricBlockScaledPrecision)


def register_pytorch_lightning() -> None:
    """Register with ``pytorch_lightning``, whose classes are others than those of ``lightning.pytorch``."""
    import pytorch_lightning
    from pytorch_lightning.plugins.precision.amp import MixedPrecision
    from pytorch_lightning.trainer.connectors.accelerator_connector import _AcceleratorConnector

    plugin = type("PytorchLightningBlockScaledPrecision", (TrainerPart, MixedPrecision), {"__module__": __name__})
    globals()[plugin.__name__] = plugin
    _wrap(_AcceleratorConnector, pytorch_lightning.Trainer, plugin)


def register_lightning_fabric() -> None:
    """Register with ``lightning_fabric``."""
    import lightning_fabric
    from lightning_fabric.connector import _Connector
    from lightning_fabric.plugins.precision.amp import MixedPrecision

    bases = (FabricBlockScaledPrecision, MixedPrecision)
    plugin = type("LightningFabricBlockScaledPrecision", bases, {"__module__": __name__})
    globals()[plugin.__name__] = plugin
    _wrap(_Connector, lightning_fabric.Fabric, plugin)


def _wrap(connector: type, user_class: type, plugin_class: Callable[..., Any]) -> None:
    name = "_check_config_and_set_final_flags"
    original = getattr(connector, name)
    if hasattr(original, "block_scaled"):
        return

    @functools.wraps(original)
    def check(self: Any, *, strategy: Any, precision: Any, plugins: Any, **rest: Any) -> None:
        items = list(plugins) if isinstance(plugins, list | tuple | set) else [] if plugins is None else [plugins]
        ours = [p for p in items if isinstance(p, BlockScaledMixin)]
        if isinstance(precision, str) and precision in PRESETS:
            if ours:
                raise UserError(
                    f"Received both precision={precision!r} and plugins={type(ours[0]).__name__}"
                    f"({ours[0].precision!r}): give one. In a YAML overlay, set precision: null beside the plugin."
                )
            items.append(plugin_class(precision))
            ours, precision = [items[-1]], None
        elif isinstance(precision, str) and difflib.get_close_matches(precision.lower(), PRESETS, n=1, cutoff=0.75):
            raise unknown("precision", precision, PRESETS, "Lightning's own names are spelt as in its documentation.")
        else:
            items = [
                plugin_class(**p.arguments) if isinstance(p, BlockScaledMixin) and type(p) is not plugin_class else p
                for p in items
            ]
        if not ours:
            return original(self, strategy=strategy, precision=precision, plugins=plugins, **rest)
        _refuse(strategy, ours[0].precision)
        return original(self, strategy=strategy, precision=precision, plugins=items, **rest)

    check.block_scaled = True  # type: ignore[attr-defined]
    setattr(connector, name, check)
    init: Any = user_class.__init__
    while init is not None:
        # jsonargparse reads this annotation: YAML, command line and a stock LightningCLI accept the names through it.
        annotations = init.__annotations__
        annotations["precision"] = annotations["precision"] | Literal[tuple(PRESETS)]
        init = getattr(init, "__wrapped__", None)


def _refuse(strategy: Any, preset: str) -> None:
    name = (strategy if isinstance(strategy, str) else type(strategy).__name__).lower()
    for word, reason in _REFUSED.items():
        if word in name:
            raise UserError(
                f"precision={preset!r} cannot run with strategy={strategy!r}: {reason}. Use 'auto', 'ddp' or FSDP2 "
                "(lightning.pytorch.strategies.ModelParallelStrategy)."
            )
