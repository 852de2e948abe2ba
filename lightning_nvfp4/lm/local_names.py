"""Telling a folder that does not exist from a name on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path


def means_a_folder(name: str) -> bool:
    """Return whether `name`, which is no existing path, can only have meant one: nobody should be asked on the hub.

    So it is where it looks like a path, or where its first part is a folder here, or ``runs``, where recipes write.
    """
    first, *rest = Path(name).parts or ("",)
    looks = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return looks or (bool(rest) and (first == "runs" or Path(first).is_dir()))
