"""`nvfp4 estimate`: what a precision would gain on a GPU, on paper; the share of each part, and what claims need."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from lightning_nvfp4.commands.console import make_console
from lightning_nvfp4.commands.parser import Parser
from lightning_nvfp4.commands.paths import check_writable, find_config, packaged_configs
from lightning_nvfp4.commands.plan import find_model, find_recipe, meta_model
from lightning_nvfp4.commands.yaml_files import read_mapping
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.estimate.hardware import Hardware, load_hardware
from lightning_nvfp4.estimate.step_model import CODECS
from lightning_nvfp4.recipe import PRESETS

_HARDWARE = "recipes/hardware"
_GPUS = ("gb300", "gb200", "b200", "h200")
_WORKLOAD = "recipes/estimate/workload.yaml"
_PUBLISHED = "recipes/estimate/published.yaml"
_OUT = (".csv", ".json", ".md")


def run(arguments: list[str]) -> int:
    """Print the estimate that the command line asks for and return the exit status."""
    parser = Parser("nvfp4 estimate", "Model, on paper, the time of a step on a GPU, part by part.")
    parser.add_argument("--config", action="append", help="run recipe or model overlay; may be repeated")
    parser.add_argument(
        "--precision", help=f"{', '.join(PRESETS)}; default: that of the configuration, or nvfp4-hybrid"
    )
    parser.add_argument(
        "--hardware", action="append", help=f"{', '.join(_GPUS)} or a YAML file; may be repeated (default: all four)"
    )
    parser.add_argument("--workload", default=_WORKLOAD, help=f"what is run (default: {_WORKLOAD})")
    parser.add_argument("--codec", default="s2f6", choices=CODECS, help="wire of a second arm (default: s2f6)")
    parser.add_argument("--validate", action="store_true", help="set published gains beside the model's and stop")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--out", help="also write to this file: .csv (every part), .json or .md (the tables)")
    options = parser.parse_args(arguments)
    out = Path(options.out) if options.out else None
    if out is not None:
        if out.suffix not in _OUT:
            raise UserError(f"--out {options.out!r} must end in {', '.join(_OUT)}: it decides the format.")
        check_writable(out.parent, "--out")
    found = _published() if options.validate else _estimate(options)
    if options.json:
        print(json.dumps(found["data"], indent=1))
    else:
        _print(found)
    if out is not None:
        _write(out, found)
        if not options.json:
            print(f"wrote {out}")
    return 0


def find_hardware(name: str) -> Hardware:
    """Return the hardware of a packaged name such as ``gb300``, or of a YAML file.

    Raises:
        UserError: no such file, or a value in it that cannot be.
    """
    is_path = name.endswith((".yaml", ".yml")) or Path(name).exists()
    path = find_config(name if is_path else f"{_HARDWARE}/{name}.yaml")
    return load_hardware(read_mapping(path), str(path if path.is_relative_to(Path.cwd()) else name))


def _estimate(options: Any) -> dict[str, Any]:
    if not options.config:
        raise UserError(
            "nvfp4 estimate: --config is missing: name a model overlay or a run recipe, such as "
            f"{', '.join(name for name in packaged_configs() if name.startswith('recipes/model/'))}."
        )
    hardware = [find_hardware(name) for name in options.hardware or _GPUS]
    from lightning_nvfp4.estimate.report import NOTICE, estimate, records, tables
    from lightning_nvfp4.estimate.workload import load_workload

    workload = load_workload(read_mapping(find_config(options.workload)), options.workload)
    sections = [read_mapping(find_config(name)) for name in options.config]
    recipe = find_recipe(sections, options.precision)
    model = meta_model(*find_model(sections, " + ".join(options.config)))
    groups = estimate(model, recipe, hardware, workload, options.codec)
    numel = sum(parameter.numel() for parameter in model.parameters())
    what = f"{type(model).__name__}, {numel / 1e6:,.1f} M parameters, precision {recipe.name}, {options.workload}"
    claims = [
        {"gpu": arm.hardware, "stack": arm.stack, "precision": arm.label, "pretraining": asdict(p), "rl": asdict(r)}
        for group in groups
        for arm, p, r in group.others
    ]
    return {
        "notice": NOTICE,
        "what": what,
        "tables": tables(groups),
        "records": records(groups),
        "data": {"notice": NOTICE, "what": what, "parts": records(groups), "claims": claims},
    }


def _published() -> dict[str, Any]:
    from lightning_nvfp4.estimate.published import validate
    from lightning_nvfp4.estimate.report import NOTICE, published_table, verdict

    content = read_mapping(find_config(_PUBLISHED))
    outcomes = validate(content, _PUBLISHED, lambda fields: meta_model(fields, None), find_hardware)
    rows = [
        {
            "name": one.case.name,
            "source": one.case.source,
            "assumed": one.case.assumed,
            "gpu": one.case.hardware,
            "baseline": one.case.baseline,
            "candidate": one.case.candidate,
            "published": {
                key: None if math.isnan(value) else value for key, value in asdict(one.case.published).items()
            },
            "modelled": {
                "gain": one.gain,
                "baseline_tokens": one.baseline_tokens,
                "candidate_tokens": one.candidate_tokens,
            },
        }
        for one in outcomes
    ]
    return {
        "notice": NOTICE,
        "what": verdict(outcomes),
        "tables": [published_table(outcomes)],
        "records": [
            {**row, **row.pop("published"), **{f"model_{k}": v for k, v in row.pop("modelled").items()}}
            for row in map(dict, rows)
        ],
        "data": {"notice": NOTICE, "what": verdict(outcomes), "published": rows},
    }


def _print(found: dict[str, Any]) -> None:
    console = make_console()
    console.print(found["what"], markup=False)
    for one in found["tables"]:
        table = RichTable(title=one.title, title_justify="left", box=None, pad_edge=False)
        for index, name in enumerate(one.header):
            table.add_column(name, overflow="fold", justify="left" if index < 3 or name == "source" else "right")
        for row in one.rows:
            table.add_row(*row)
        console.print()
        console.print(table)
    console.print()
    console.print(found["notice"], markup=False)


def _write(out: Path, found: dict[str, Any]) -> None:
    if out.suffix == ".json":
        text = json.dumps(found["data"], indent=1) + "\n"
    elif out.suffix == ".csv":
        text = _csv(found["records"])
    else:
        text = _markdown(found)
    partial = out.with_name(f"{out.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, out)


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _markdown(found: dict[str, Any]) -> str:
    from lightning_nvfp4.evaluation.page import markdown_table

    lines = [found["what"], "", found["notice"]]
    for one in found["tables"]:
        lines += ["", f"### {one.title}", "", *markdown_table([one.header, *one.rows])]
    return "\n".join(lines) + "\n"
