"""The `nvfp4` command: our own subcommands by name, the Trainer's through LightningCLI."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable

from lightning_nvfp4.errors import UserError, unknown

# subcommand -> (module with run(arguments) -> exit status, line of help)
_OWN = {
    "pipeline": (
        "lightning_nvfp4.commands.pipeline",
        "run all stages in several precisions side by side, then evaluate",
    ),
    "eval": ("lightning_nvfp4.commands.eval", "score a checkpoint on downstream tasks"),
    "compare": ("lightning_nvfp4.commands.compare", "compare evaluations, paired by document"),
    "plan": ("lightning_nvfp4.commands.plan", "show which layers a precision converts, without building weights"),
    "estimate": (
        "lightning_nvfp4.commands.estimate",
        "model, on paper, what a precision gains on a GPU, part by part",
    ),
    "doctor": (
        "lightning_nvfp4.commands.doctor",
        "versions, devices and the backend of each precision on this machine",
    ),
}
_TRAINER = {
    "fit": "train one stage: nvfp4 fit --config recipes/pretrain.yaml",
    "validate": "run the validation loop",
    "test": "run the test loop",
    "predict": "run the prediction loop",
}


_FULL = "Free space or choose another folder; a run goes on from its last checkpoint with --ckpt_path last."
_DENIED = "Give a path that this user can use."
# What the machine refuses: errno -> cure
_SURROUNDINGS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR), _DENIED),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), _DENIED),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0 success, 1 a failure of the program, 2 a mistake in the input.

    A `UserError` prints as one message; `--debug` or `NVFP4_DEBUG=1` shows the traceback too.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or os.environ.get("NVFP4_DEBUG", "") not in ("", "0")
    words = [word for word in words if word != "--debug"]
    try:
        return _dispatch(words)
    except UserError as error:
        if debug:
            traceback.print_exc()
        print(f"nvfp4: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in _SURROUNDINGS:
            raise
        if debug:
            traceback.print_exc()
        name = f"{os.fsdecode(error.filename)!r}: " if error.filename is not None else ""
        print(f"nvfp4: error: {name}{error.strerror}. {_SURROUNDINGS[error.errno]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("nvfp4: interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"nvfp4 {importlib.metadata.version('lightning-nvfp4')}")
        return 0
    name, rest = words[0], words[1:]
    if name in _OWN:
        command: Callable[[list[str]], int] = importlib.import_module(_OWN[name][0]).run
        return command(rest)
    if name in _TRAINER:
        importlib.import_module("lightning_nvfp4.commands.fit").run([name, *rest])
        return 0
    raise unknown("subcommand", name, {**_OWN, **_TRAINER}, "`nvfp4 --help` describes each.")


def _help() -> str:
    width = max(map(len, {**_OWN, **_TRAINER}))
    lines = ["usage: nvfp4 SUBCOMMAND [OPTIONS]", "", "End-to-end NVFP4 training on PyTorch Lightning.", ""]
    lines += [f"  {name:<{width}}  {text}" for name, text in _TRAINER.items()]
    lines += [f"  {name:<{width}}  {text}" for name, (_, text) in _OWN.items()]
    lines += ["", "`nvfp4 SUBCOMMAND --help` lists the options; `--debug` shows tracebacks; `--version` the version."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
