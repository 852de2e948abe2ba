"""`nvfp4 doctor`: what this machine has, and which backend each precision would use here and why."""

from __future__ import annotations

import json
import os
import platform
import shutil
from dataclasses import asdict
from importlib import metadata
from typing import Any

from rich.table import Table

from lightning_nvfp4.commands.console import make_console
from lightning_nvfp4.commands.parser import Parser
from lightning_nvfp4.commands.paths import packaged_configs

_PACKAGE = "lightning-nvfp4"


def run(arguments: list[str]) -> int:
    """Print the findings; the exit status is 1 if a self-test failed, else 0."""
    parser = Parser("nvfp4 doctor", "Versions, devices, and the backend of each precision on this machine.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(arguments)
    from lightning_nvfp4 import capability

    report = capability.report()
    conflicts = package_conflicts()
    tests = self_tests()
    failed = not all(result["passed"] for results in tests.values() for result in results)
    if options.json:
        report["presets"] = {name: asdict(choice) for name, choice in report["presets"].items()}
        print(
            json.dumps(
                {**report, "python": platform.python_version(), "conflicts": conflicts, "self_test": tests}, indent=1
            )
        )
        return int(failed)
    console = make_console()
    table = _table("package", "version")
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    for name, version in report["versions"].items():
        table.add_row(name, version or "not installed")
    console.print(table)
    console.print()
    table = _table("device", "")
    for device in report["devices"]:
        table.add_row(device, f"{os.cpu_count()} cores" if device == "cpu" else "")
    table.add_row(
        "compiler", report["compiler"] or "none: CPU quantizers run in plain torch (same bits, slower); install gcc"
    )
    table.add_row("disk", f"{shutil.disk_usage('.').free / 2**30:,.1f} GiB free here")
    console.print(table)
    console.print()
    table = _table("precision", "backend", "native", "why")
    for name, choice in report["presets"].items():
        table.add_row(name, choice.backend, "yes" if choice.native else "no", choice.reason)
    console.print(table)
    console.print()
    for device, results in tests.items():
        wrong = [result for result in results if not result["passed"]]
        seconds = sum(result["seconds"] for result in results)
        console.print(f"self-test {device}: {len(results) - len(wrong)} of {len(results)} passed in {seconds:.1f} s")
        for result in wrong:
            console.print(f"  {result['name']}: {result['detail']}", markup=False, soft_wrap=True)
    console.print("packages: " + ("no conflicts" if not conflicts else ""), markup=False)
    for line in conflicts:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    console.print(f"configurations: {len(packaged_configs())} under recipes/ and eval/", markup=False)
    return int(failed)


def self_tests() -> dict[str, list[dict[str, Any]]]:
    """Return the results of the self-test on the CPU and on every CUDA device."""
    import torch

    from lightning_nvfp4.ops import self_test

    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return {device: [asdict(result) for result in self_test.run(device)] for device in devices}


def package_conflicts() -> list[str]:
    """Return one line for each requirement of this package, without extras, that is not met."""
    from packaging.requirements import Requirement

    lines = []
    for text in metadata.requires(_PACKAGE) or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            lines.append(f"{requirement} is not installed: pip install '{requirement}'")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            lines.append(
                f"{requirement.name} {version} is installed, {requirement.specifier} is needed: "
                f"pip install '{requirement}'"
            )
    return lines


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table
