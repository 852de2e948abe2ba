"""Counts of rows that were not used as they are, told in the log without flooding it."""

from __future__ import annotations

import logging

from lightning.pytorch.utilities.rank_zero import rank_zero_only

_log = logging.getLogger("lightning.pytorch.lightning_nvfp4.data")


class Notice:
    """Says how many of the rows seen so far were affected, when that number reaches 1, 10, 100 and so on."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.seen = 0
        self.affected = 0

    def count(self, affected: bool, which: str = "") -> None:
        """Count one row; `which` names it in the log."""
        self.seen += 1
        if affected:
            self.affected += 1
            if self.affected == 10 ** (len(str(self.affected)) - 1):
                named = f"; the last is {which}" if which else ""
                _warn(f"{self.affected} of the first {self.seen} {self._what}{named}")


@rank_zero_only
def _warn(message: str) -> None:
    _log.warning(message)
