"""Run a hook right after a package has been imported, so that importing ours need not import it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def after_import(name: str, hook: Callable[[], None]) -> None:
    """Call `hook` once the package `name` is imported: now if it is, else at the end of its import."""
    if name in sys.modules:
        hook()
    else:
        sys.meta_path.insert(0, _Finder(name, hook))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, hook: Callable[[], None]) -> None:
        self.name, self.hook = name, hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.hook()

            loader.exec_module = exec_module
        return spec
