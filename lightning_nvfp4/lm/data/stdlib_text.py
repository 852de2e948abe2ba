"""Real text that is on every machine: source and docstrings of the Python standard library.

The modules are a fixed list of long-lived pure-Python files that change little between Python versions, read in list
order from the folder that `sysconfig` names. A file is cut at its top-level definitions and at its methods, so that a
document is one function with its docstring. Nothing outside the standard library is read.
"""

from __future__ import annotations

import functools
import re
import sysconfig
import textwrap
from pathlib import Path

from lightning_nvfp4.errors import UserError

TRAIN_MODULES = (
    *("abc", "argparse", "ast", "base64", "bdb", "bisect", "cmd", "code", "codecs", "collections/__init__", "colorsys"),
    *("configparser", "contextlib", "copy", "csv", "difflib", "doctest", "email/message", "email/utils", "enum"),
    *("fileinput", "filecmp", "fnmatch", "fractions", "ftplib", "functools", "getopt", "gettext", "glob", "gzip"),
    *("html/parser", "http/client", "http/cookiejar", "http/server", "imaplib", "inspect", "ipaddress", "json/decoder"),
    *("json/encoder", "linecache", "logging/__init__", "logging/handlers", "mailbox", "mimetypes", "netrc", "ntpath"),
    *("numbers", "optparse", "os", "pickle", "pickletools", "pkgutil", "plistlib", "poplib", "posixpath", "pprint"),
    *("profile", "pstats", "queue", "quopri", "random", "reprlib", "sched", "selectors", "shelve", "shutil", "smtplib"),
    *("socket", "socketserver", "sqlite3/dump", "stat", "string", "stringprep", "subprocess", "tarfile", "tempfile"),
    *("threading", "timeit", "tokenize", "trace", "traceback", "types", "unittest/case", "unittest/mock"),
    *("urllib/parse", "urllib/request", "uuid", "warnings", "weakref", "webbrowser", "xml/dom/minidom", "zipapp"),
)
VALIDATION_MODULES = ("calendar", "heapq", "shlex", "statistics", "textwrap", "unittest/loader", "wsgiref/headers")

MAX_CHARACTERS = 900
_MIN_CHARACTERS = 120
_BOUNDARY = re.compile(r"^(?=(?:@|def |class |    @|    def ))", re.MULTILINE)


@functools.cache
def stdlib_documents(split: str = "train") -> tuple[str, ...]:
    """Return the documents of one split, `"train"` or `"validation"`, in a fixed order.

    Each is between 120 and 900 characters of source, dedented, longer pieces being cut at line ends. The two splits
    have no module in common. Raises `UserError` where this Python has no readable standard library source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = {"train": TRAIN_MODULES, "validation": VALIDATION_MODULES}[split]
    documents: list[str] = []
    for module in modules:
        file = root / f"{module}.py"
        if file.is_file():
            documents.extend(_cut(file.read_text(encoding="utf-8", errors="replace")))
    if not documents:
        raise UserError(
            f"data.path='embedded' needs the source of the Python standard library, and {root} has none of it: "
            "use a Python that ships its .py files, or set data.path to text files of your own."
        )
    return tuple(documents)


def _cut(source: str) -> list[str]:
    """Cut one module's source into documents at definitions, a decorator staying with its function."""
    documents: list[str] = []
    pending = ""
    for piece in _BOUNDARY.split(source):
        pending += piece
        last = pending.rstrip().rsplit("\n", 1)[-1].lstrip()
        if last.startswith("@"):
            continue
        documents.extend(_pages(textwrap.dedent(pending).strip("\n")))
        pending = ""
    return documents


def _pages(text: str) -> list[str]:
    """Split `text` at line ends into pages of at most `MAX_CHARACTERS`, dropping scraps."""
    pages: list[str] = []
    page = ""
    for line in text.splitlines():
        line = line.rstrip()[:MAX_CHARACTERS]
        if len(page) + len(line) + 1 > MAX_CHARACTERS:
            pages.append(page)
            page = ""
        page = f"{page}\n{line}" if page else line
    pages.append(page)
    return [p for p in pages if len(p) >= _MIN_CHARACTERS]
