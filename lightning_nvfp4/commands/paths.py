"""Where configuration files are found: the working directory first, then the copy that the package carries."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from lightning_nvfp4.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]
# An installed wheel carries recipes/ and eval/ inside the package; an editable install reads the checkout's own.
_ROOTS = (_PACKAGE / "_configs", _PACKAGE.parent)
_FOLDERS = ("recipes", "eval")


def packaged_configs() -> list[str]:
    """Return the names (``recipes/...`` and ``eval/...``) of every configuration file that comes with the package."""
    names = {
        path.relative_to(root).as_posix()
        for root in _ROOTS
        for folder in _FOLDERS
        for path in (root / folder).glob("**/*.yaml")
    }
    return sorted(names)


def find_config(name: str | Path) -> Path:
    """Return the file that a configuration's name stands for.

    Args:
        name: a path, absolute or relative to the working directory; or a packaged name such as ``recipes/sft.yaml``.

    Raises:
        UserError: there is no such file; the message names the nearest packaged one.
    """
    given = Path(name)
    if given.is_file():
        return given
    if given.is_dir():
        raise UserError(f"configuration {str(name)!r} is a folder: name a YAML file in it.")
    if not given.is_absolute():
        for root in _ROOTS:
            if given.parts[:1] and given.parts[0] in _FOLDERS and (root / given).is_file():
                return root / given
    names = packaged_configs()
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    siblings = [known for known in names if known.rpartition("/")[0] == str(name).rpartition("/")[0]]
    listed = siblings or [known for known in names if known.count("/") == 1]
    raise UserError(
        f"configuration file {str(name)!r} does not exist.{hint} Packaged with nvfp4: {', '.join(listed)}. Give one of "
        "these, or the path of your own."
    )


def check_writable(folder: Path, option: str) -> None:
    """Raise a `UserError` where `folder` is not there and cannot be made, or cannot be written."""
    nearest = next((place for place in (folder, *folder.parents) if place.exists()), Path())
    if not nearest.is_dir():
        raise UserError(f"{option} {str(folder)!r}: {str(nearest)!r} is a file: give a folder.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{option} {str(folder)!r}: {str(nearest)!r} cannot be written: give another folder.")
