"""`nvfp4 eval`: score one checkpoint in one or several precisions."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rich.table import Table

from lightning_nvfp4.commands.console import make_console
from lightning_nvfp4.commands.parser import Parser
from lightning_nvfp4.commands.paths import check_writable, find_config
from lightning_nvfp4.commands.yaml_files import read_mapping
from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.evaluation.results import PRECISIONS


def run(arguments: list[str]) -> int:
    """Evaluate as the command line says and return the exit status."""
    parser = Parser("nvfp4 eval", "Score a checkpoint on downstream tasks.")
    parser.add_argument("--config", default="eval/embedded.yaml", help="evaluation YAML (default: %(default)s)")
    parser.add_argument(
        "--checkpoint", help="run folder, Lightning checkpoint, Hugging Face folder or hub name, or GGUF file"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="evaluate nothing: fetch the suite's data and list what is missing"
    )
    parser.add_argument("--tokenizer", help="where it is not the checkpoint's own: embedded, a folder, or a hub name")
    parser.add_argument(
        "--precision", nargs="+", action="extend", default=[], help=f"{', '.join(PRECISIONS)} (default: bf16-gemm)"
    )
    parser.add_argument("--out", help="folder of the results (default: eval/ in the checkpoint's folder)")
    parser.add_argument("--limit", type=int, help="documents per task (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of generation (default: %(default)s)")
    parser.add_argument(
        "--allow-code-execution", action="store_true", help="let the sandbox run code that the model writes"
    )
    parser.add_argument(
        "--allow-unsafe-code", action="store_true", help="run it even where this machine cannot isolate it"
    )
    parser.add_argument("--data-dir", help="folder that a suite's JSON Lines files are in (default: the suite's)")
    options = parser.parse_args(arguments)
    if options.data_dir is not None and not Path(options.data_dir).is_dir():
        raise UserError(f"--data-dir {options.data_dir!r} is no folder: name the one that holds the suite's files.")
    config = find_config(options.config)
    read_mapping(config)
    if options.prepare:
        return _prepare(config, options.data_dir)
    if options.checkpoint is None:
        raise UserError("--checkpoint is missing: name what to evaluate.")
    for precision in options.precision:
        if precision not in PRECISIONS:
            raise unknown("--precision", precision, PRECISIONS)
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit {options.limit}: must be at least 1; leave it out for all documents.")
    from lightning_nvfp4.evaluation.sources import find_source

    source = find_source(options.checkpoint)
    if options.out:
        out = Path(options.out)
    elif source is None:
        raise UserError(
            f"--checkpoint {options.checkpoint!r} is no folder here, so it means a model of the Hugging Face hub: say "
            "with --out where the results go. If it should be a folder, mend the path."
        )
    else:
        out = (source if source.is_dir() and source.suffix != ".ckpt" else source.parent) / "eval"
    check_writable(out, "--out")
    from lightning_nvfp4.evaluation.run import evaluate

    console = make_console()
    console.quiet = os.environ.get("RANK", "0") != "0"
    table = Table(box=None, pad_edge=False)
    for title in ("precision", "task", "metric", "score", "±", "documents"):
        table.add_column(title)
    for precision in dict.fromkeys(options.precision or ["bf16-gemm"]):
        target = out / f"{re.sub(r'[^A-Za-z0-9._-]', '-', config.stem)}.{precision}.json"
        result = evaluate(
            options.checkpoint,
            config,
            precision,
            target,
            limit=options.limit,
            allow_code_execution=options.allow_code_execution,
            seed=options.seed,
            allow_unsafe_code=options.allow_unsafe_code,
            data_dir=options.data_dir,
            tokenizer=options.tokenizer,
        )
        for score in result.scores:
            error = "" if score.stderr is None else f"{score.stderr:.3f}"
            table.add_row(precision, score.task, score.metric, f"{score.value:.3f}", error, str(score.n))
        for task, reason in result.skipped.items():
            table.add_row(precision, task, "", "skipped", "", reason)
        console.print(f"wrote {target}", markup=False, soft_wrap=True)
    console.print(table)
    return 0


def _prepare(config: Path, data_dir: str | None) -> int:
    from lightning_nvfp4.evaluation.prepare import prepare

    table = Table(box=None, pad_edge=False)
    for title in ("task", "needs", "state", "why"):
        table.add_column(title, overflow="fold")
    needs = prepare(config, data_dir)
    for need in needs:
        table.add_row(need.task, need.what, need.state, need.reason)
    make_console().print(table, markup=False)
    return 1 if any(need.state == "missing" for need in needs) else 0
