"""Tables as they are printed and pasted into a README: aligned Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def format_time(seconds: float) -> str:
    """Three significant digits in the unit that a reader expects: 1.05 µs, 730 µs, 2.07 ms, 1.30 s."""
    for unit, scale in (("µs", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds)} s"


def format_ratio(ratio: float) -> str:
    """A ratio with three significant digits: 0.081x, 1.20x, 14.3x."""
    return f"{_three_digits(ratio)}x"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns also line up on a terminal; all but the first are right-aligned."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join([first, *rest]) + " |"

    ruler = "|" + "|".join("-" * (width + 1) + ("-" if column == 0 else ":") for column, width in enumerate(widths))
    return "\n".join([line(header), ruler + "|", *(line(row) for row in rows)])


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Print a table under its title, if it has one."""
    if title:
        print(f"\n{title}\n")
    print(format_table(header, rows), flush=True)


def _three_digits(value: float) -> str:
    # The thresholds are where rounding adds a digit: 9.996 is 10.0, not 10.00.
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    if value >= 0.9995:
        return f"{value:.2f}"
    return f"{value:.3f}"
