"""`nvfp4 compare`: evaluations side by side, paired by document, with intervals; loss gaps where there are logs."""

from __future__ import annotations

from pathlib import Path

from lightning_nvfp4.commands.console import make_console
from lightning_nvfp4.commands.parser import Parser
from lightning_nvfp4.commands.paths import check_writable
from lightning_nvfp4.errors import UserError


def run(arguments: list[str]) -> int:
    """Compare what the command line names and return the exit status."""
    parser = Parser("nvfp4 compare", "Compare evaluations of the same documents.")
    parser.add_argument("paths", nargs="*", help="result files of `nvfp4 eval`, folders of them, or run folders (loss)")
    parser.add_argument(
        "--arm",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "PATH"),
        help="results of several training seeds that count as one run; can be given again",
    )
    parser.add_argument("--baseline", help="precision or label to compare with (default: the first)")
    parser.add_argument("--out", help="also write to this file, .html, .md or .json, or all three into a folder")
    options = parser.parse_args(arguments)
    arms: dict[str, list[str]] = {}
    for name, *paths in options.arm:
        if not paths:
            raise UserError(f"--arm {name}: no path behind the name. Write --arm NAME PATH PATH ...")
        if name in arms:
            raise UserError(f"--arm {name} is given twice: name all of its paths once.")
        arms[name] = paths
    out = Path(options.out) if options.out else None
    if out is not None and out.suffix not in ("", ".html", ".md", ".json"):
        raise UserError(f"--out {options.out!r} must end in .html, .md or .json, or name a folder for all three.")
    if out is not None:
        check_writable(out.parent if out.suffix else out, "--out")
    for path in (*options.paths, *(path for paths in arms.values() for path in paths)):
        if not Path(path).exists():
            raise UserError(f"{path!r}: no such file or folder: give what `nvfp4 eval` wrote.")
    from lightning_nvfp4.evaluation.compare import compare
    from lightning_nvfp4.evaluation.compare_page import explanation, rich_tables, write

    comparison = compare(options.paths, options.baseline, arms)
    console = make_console()
    for table in rich_tables(comparison):
        console.print(table)
        console.print()
    for run_name, gap in comparison.losses:
        console.print(f"Loss of {run_name}: {gap.sentence()}", markup=False)
    for note in (*([explanation(comparison)] if comparison.rows else []), *comparison.notes):
        console.print(f"- {note}", markup=False)
    if out is not None:
        for path in write(comparison, out):
            console.print(f"wrote {path}", markup=False, soft_wrap=True)
    return 0
