"""Format numbers for people: three digits and a unit."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Return a time as text: `12.3 ms`, `1.50 s`, `3:07 min`, `2:05:10 h`."""
    if value < 0:
        return f"-{seconds(-value)}"
    if value >= 3600:
        return f"{int(value // 3600)}:{int(value % 3600 // 60):02}:{int(value % 60):02} h"
    if value >= 100:
        return f"{int(round(value) // 60)}:{int(round(value) % 60):02} min"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= factor:
            return f"{three_digits(value / factor)} {unit}"
    return "0 s" if value == 0 else f"{value * 1e9:.0f} ns"


def size(value: float) -> str:
    """Return a size in bytes as text: `4.00 KiB`, `25.6 MiB`."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{three_digits(value / factor)} {unit}"
    return f"{value:.0f} B"


def rate(value: float) -> str:
    """Return bytes per second as text, in powers of 1000 as usual for bandwidth: `7.28 GB/s`."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{three_digits(value / factor)} {unit}/s"
    return f"{value:.0f} B/s"


def three_digits(value: float) -> str:
    """Return a number as text: `1.23`, `12.3`, `123`, `1,234`; a thousandth is `0.001`."""
    magnitude = abs(value)
    if magnitude >= 1e12:
        return f"{value:.3g}"
    if magnitude >= 100:
        return f"{value:,.0f}"
    if magnitude >= 10:
        return f"{value:.1f}"
    if magnitude >= 0.095 or magnitude == 0:
        return f"{value:.2f}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    """Return a share as text: `31 %`, and below one `0.4 %`."""
    value = 100 * share
    return f"{value:.1f} %" if 0 < value < 0.95 else f"{value:.0f} %"
