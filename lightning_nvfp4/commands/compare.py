"""`nvfp4 compare`: evaluations side by side, paired by document, with intervals; loss gaps where there are logs."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lightning_nvfp4.commands.parser import Parser
from lightning_nvfp4.commands.paths import check_writable
from lightning_nvfp4.errors import UserError


def run(arguments: list[str]) -> int:
    """Compare what the command line names and return the exit status."""
    parser = Parser("nvfp4 compare", "Compare evaluations of the same documents.")
    parser.add_argument("paths", nargs="+", help="result files of `nvfp4 eval`, folders of them, or run folders (loss)")
    parser.add_argument("--baseline", help="precision or label to compare with (default: the first)")
    parser.add_argument("--out", help="also write the table to this file, .md or .json")
    options = parser.parse_args(arguments)
    out = Path(options.out) if options.out else None
    if out is not None and out.suffix not in (".md", ".json"):
        raise UserError(f"--out {options.out!r} must end in .md or .json: it decides the format.")
    if out is not None:
        check_writable(out.parent, "--out")
    for path in options.paths:
        if not Path(path).exists():
            raise UserError(f"{path!r}: no such file or folder: give what `nvfp4 eval` wrote.")
    from lightning_nvfp4.evaluation.compare import compare

    comparison = compare(options.paths, options.baseline)
    console = Console()
    if comparison.rows:
        console.print(comparison.to_rich())
    for run_name, gap in comparison.losses:
        console.print(f"Loss of {run_name}: {gap.sentence()}", markup=False)
    for note in comparison.notes:
        console.print(f"- {note}", markup=False)
    if out is not None:
        console.print(f"wrote {comparison.write(out)}", markup=False, soft_wrap=True)
    return 0
