"""Show a comparison: a table on a terminal, plain lines in a pipe, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from phalanx.bench.comparison import Comparison, explain
from phalanx.bench.contestants import DDP
from phalanx.bench.sample import PARTS


def as_json(comparisons: Sequence[Comparison], usable_cores: int) -> str:
    """Return every round's figures in seconds, their medians, the sentences, and what they were measured with, as
    JSON.
    """
    words: dict[str, Any] = {
        "machine": {
            "usable_cores": usable_cores,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": f"{platform.system()} {platform.release()}",
        },
        "comparisons": [
            {
                "workload": dataclasses.asdict(comparison.workload),
                "world_size": comparison.world_size,
                "cores_taken_by_others": comparison.others,
                "medians": {name: dataclasses.asdict(sample) for name, sample in comparison.medians.items()},
                "rounds": {
                    name: [dataclasses.asdict(sample) for sample in samples]
                    for name, samples in comparison.samples.items()
                },
                "explanation": list(explain(comparison, usable_cores)),
            }
            for comparison in comparisons
        ],
    }
    return json.dumps(words, indent=2)


def as_text(comparisons: Sequence[Comparison], usable_cores: int) -> Iterator[str]:
    """Yield the results as plain lines."""
    for comparison in comparisons:
        yield _headline(comparison)
        rows = [_header(), *_rows(comparison)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            first, *rest = (text.rjust(width) for text, width in zip(row, widths, strict=True))
            yield "  ".join([row[0].ljust(len(first)), *rest]).rstrip()
        yield ""
        yield from explain(comparison, usable_cores)
        yield ""


def print_tables(comparisons: Sequence[Comparison], usable_cores: int) -> None:
    """Print the results in colour, for a person at a terminal; green is the fastest."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for comparison in comparisons:
        table = Table(title=_headline(comparison), title_justify="left", title_style="bold", box=None)
        for number, name in enumerate(_header()):
            table.add_column(name, justify="left" if number == 0 else "right", no_wrap=number > 0)
        medians = comparison.medians
        fastest = min(medians, key=lambda name: medians[name].step)
        for name, row in zip(medians, _rows(comparison), strict=True):
            table.add_row(*row, style="green" if name == fastest else None)
        console.print(table, "")
        for sentence in explain(comparison, usable_cores):
            console.print(f"- {sentence}", highlight=False)
        console.print()


def _headline(comparison: Comparison) -> str:
    workload = comparison.workload
    return f"{workload.name}: {workload.title}; a batch of {workload.batch}; median milliseconds of a step"


def _header() -> list[str]:
    return ["", "a step", "of DDP's", *PARTS.values()]


def _rows(comparison: Comparison) -> Iterator[list[str]]:
    medians = comparison.medians
    for name, sample in medians.items():
        parts = [f"{1e3 * sample.parts[part]:.2f}" if part in sample.parts else "-" for part in PARTS]
        ratio = sample.step / medians[DDP].step
        yield [comparison.title_of(name), f"{1e3 * sample.step:.2f}", f"{ratio:.2f}", *parts]
