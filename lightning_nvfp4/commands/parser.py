"""The argument parser of our own subcommands."""

from __future__ import annotations

import argparse
from typing import NoReturn

from lightning_nvfp4.errors import UserError


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose complaints are `UserError`s, and whose options are never abbreviated."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting, so that every mistake prints alike."""
        raise UserError(f"{self.prog}: {message}. `{self.prog} --help` lists the options.")
