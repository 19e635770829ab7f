"""Print the findings: a table on a terminal, plain lines in a pipe, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from phalanx._tools.doctor.checks import CheckResult, CheckStatus, would_train
from phalanx._tools.doctor.facts import DoctorFacts

_COLOURS = {CheckStatus.OK: "green", CheckStatus.WARNING: "yellow", CheckStatus.PROBLEM: "bold red"}


def as_json(facts: DoctorFacts, findings: Sequence[CheckResult]) -> str:
    """Return findings and the facts behind them, as one JSON object."""
    words: dict[str, Any] = {
        "format": "phalanx-doctor",
        "version": 1,
        "would_train": would_train(list(findings)),
        "findings": [{**dataclasses.asdict(finding), "status": finding.status.value} for finding in findings],
        "facts": dataclasses.asdict(facts),
    }
    return json.dumps(words, indent=2)


def as_text(findings: Sequence[CheckResult]) -> str:
    """Return plain lines: status, topic and fact, with the advice indented below."""
    lines = []
    for finding in findings:
        first, *rest = finding.fact.splitlines() or [""]
        lines.append(f"{finding.status.value:8} {finding.topic:10} {first}".rstrip())
        lines += textwrap.indent("\n".join(rest), 20 * " ").splitlines()
        if finding.advice:
            lines.append(f"{'':19} -> {finding.advice}")
    return "\n".join([*lines, "", conclude(findings)])


def print_table(findings: Sequence[CheckResult]) -> None:
    """Print the findings in colour, for a person at a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        text = Text(finding.fact)
        if finding.advice:
            text.append(f"\n{finding.advice}", style="italic")
        table.add_row(Text(finding.status.value, style=_COLOURS[finding.status]), finding.topic, text)
    console = Console()
    console.print(table)
    console.print()
    console.print(conclude(findings), style="bold" if would_train(list(findings)) else "bold red", highlight=False)


def conclude(findings: Sequence[CheckResult]) -> str:
    """Return one sentence that summarizes the findings."""
    problems = sum(finding.status is CheckStatus.PROBLEM for finding in findings)
    warnings = sum(finding.status is CheckStatus.WARNING for finding in findings)
    if problems:
        return f"Training would not work here: {_count(problems, 'problem')}, {_count(warnings, 'warning')}."
    return "Training works here" + (f", with {_count(warnings, 'warning')}." if warnings else ".")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
