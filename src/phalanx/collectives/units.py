"""Parse and format amounts as people write them: 64MiB, 30us, 1Gbit."""

from __future__ import annotations

import math
import re

_BYTES = {
    "b": 1.0,
    **{f"{prefix}b": 1000.0**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024.0**power for power, prefix in enumerate("kmgt", start=1)},
}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES_PER_S = {
    **_BYTES,
    "bit": 1 / 8,
    **{f"{prefix}bit": 1000.0**power / 8 for power, prefix in enumerate("kmgt", start=1)},
}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?\s*([a-zµ]*)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse a size such as 64MiB, 100kB, 4096 (bytes); units with an i are powers of 1024. A wrong text is a
    ValueError.
    """
    return round(_parse(text, _BYTES, bare="b", what="size", examples="64MiB, 100kB, 4096"))


def parse_seconds(text: str) -> float:
    """Parse a span such as 30us, 1.5ms, 2s; a number without a unit is a ValueError, except 0."""
    return _parse(text, _SECONDS, bare=None, what="time", examples="30us, 1.5ms, 2s")


def parse_bytes_per_s(text: str) -> float:
    """Parse a bandwidth such as 1Gbit, 10Gbit/s, 8GB/s as bytes per second; it must be more than zero, else
    ValueError.
    """
    bare = text.strip()
    bare = bare[:-2] if bare.endswith("/s") else bare
    value = _parse(bare, _BYTES_PER_S, bare=None, what="bandwidth", examples="1Gbit, 10Gbit/s, 8GB/s")
    if value == 0:
        raise ValueError(f"bandwidth {text!r} must be more than zero")
    return value


def _parse(text: str, units: dict[str, float], *, bare: str | None, what: str, examples: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{what} {text!r} is not a number with a unit, such as {examples}")
    number = float(match[1] + (match[2] or ""))
    unit = match[3].lower() or bare
    if unit is None and number == 0:
        return 0.0
    if unit not in units:
        problem = f"has the unknown unit {match[3]!r}" if unit else "needs a unit"
        raise ValueError(f"{what} {text!r} {problem}; write it such as {examples}")
    value = number * units[unit]
    if not math.isfinite(value):
        raise ValueError(f"{what} {text!r} is too large")
    return value


def format_bytes(nbytes: float) -> str:
    """Format bytes with four significant digits at most: 64 MiB, 1.5 KiB, 96 MiB."""
    for unit, size in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:.4g} B"


def format_seconds(seconds: float) -> str:
    """Format seconds with three significant digits: 30 µs, 1.5 ms, 2 s; from 1000 s on with as many as it takes."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            scaled = seconds / size
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def format_bytes_per_s(bytes_per_s: float) -> str:
    """Format a bandwidth as networks are sold: 1 Gbit/s, 100 Mbit/s."""
    bits = bytes_per_s * 8
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.4g} {unit}"
    return f"{bits:.4g} bit/s"
