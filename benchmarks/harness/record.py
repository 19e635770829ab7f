"""Results as files: what was measured, on which machine, by which command."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping
from datetime import date, datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe_machine() -> dict[str, object]:
    """The facts that a number depends on: processor, cores this process may use, memory, load, versions."""
    return {
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "phalanx": _version("phalanx"),
    }


def add_output_arguments(parser: argparse.ArgumentParser, folder: Path) -> None:
    """`--output` and `--record`, both read as `.output`: where the results of the benchmark in `folder` go.

    Unless asked, into a folder that git ignores: a run for oneself changes no file of the repository.
    """
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--output",
        type=Path,
        default=folder / ".results" / f"{date.today()}.json",
        help="the file for every sample, as JSON (default .results/<today>.json, which git ignores)",
    )
    where.add_argument(
        "--record",
        dest="output",
        metavar="NAME",
        type=lambda name: folder / "results" / f"{name.removesuffix('.json')}.json",
        default=argparse.SUPPRESS,
        help="write them to results/NAME.json, for the README to quote and git to keep",
    )


def write_results(path: Path, results: Mapping[str, object], *, machine: Mapping[str, object]) -> Path:
    """Write `results` under the date, the command and the machine; makes the folder, replaces the file."""
    # The interpreter and the script go in by name only: a results file holds no path of the machine it was made on.
    command = [Path(sys.executable).name, *(Path(word).name if os.path.isabs(word) else word for word in sys.argv)]
    document = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(command),
        "machine": dict(machine),
        **results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
