"""The console that commands print to."""

from __future__ import annotations

from rich.console import Console

_FILE_WIDTH = 400  # no table is wider; rich takes 80 columns for a file or a pipe, and cuts


def make_console() -> Console:
    """Return a console as wide as the terminal; in a file or a pipe as wide as the text.

    There COLUMNS is not asked: it belongs to a terminal that some parent of this process had. What it prints stands as
    it is: names of files and tasks may have brackets in them.
    """
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console
