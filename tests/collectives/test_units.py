"""Amounts as people write them."""

from __future__ import annotations

import pytest

from phalanx.collectives.units import (
    format_bytes,
    format_bytes_per_s,
    format_seconds,
    parse_bytes,
    parse_bytes_per_s,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64MiB", 64 << 20),
        ("1.5 KiB", 1536),
        ("100kB", 100_000),
        ("4096", 4096),
        ("0", 0),
        ("1e3B", 1000),
        ("2gib", 2 << 30),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(("text", "seconds"), [("30us", 30e-6), ("1.5 ms", 1.5e-3), ("2s", 2), ("0", 0), ("7ns", 7e-9)])
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("1Gbit", 1.25e8), ("10Gbit/s", 1.25e9), ("8GB/s", 8e9), ("1MiB/s", 1 << 20)]
)
def test_bandwidths(text: str, bytes_per_s: float) -> None:
    assert parse_bytes_per_s(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("text", ["", "MiB", "-4", "four", "1..2", "3 4"])
def test_what_is_no_number_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number with a unit, such as 64MiB, 100kB, 4096"):
        parse_bytes(text)


def test_an_unknown_unit_is_named() -> None:
    with pytest.raises(ValueError, match="size '3 parsecs' has the unknown unit 'parsecs'"):
        parse_bytes("3 parsecs")


def test_a_bare_number_is_no_time_and_no_bandwidth() -> None:
    with pytest.raises(ValueError, match="time '30' needs a unit; write it such as 30us"):
        parse_seconds("30")
    with pytest.raises(ValueError, match="bandwidth '5' needs a unit"):
        parse_bytes_per_s("5")


def test_no_bandwidth_and_too_much_are_refused() -> None:
    with pytest.raises(ValueError, match="must be more than zero"):
        parse_bytes_per_s("0Gbit")
    with pytest.raises(ValueError, match="is too large"):
        parse_bytes("1e999GB")


def test_amounts_are_written_short() -> None:
    assert [format_bytes(n) for n in (0, 512, 1536, 96 << 20, 3 << 40)] == [
        "0 B",
        "512 B",
        "1.5 KiB",
        "96 MiB",
        "3 TiB",
    ]
    assert [format_seconds(s) for s in (0, 2e-9, 30e-6, 0.0126, 65, 2207.8)] == [
        "0 s", "2 ns", "30 µs", "12.6 ms", "65 s", "2208 s",
    ]  # fmt: skip
    assert [format_bytes_per_s(b) for b in (125e6, 8e9, 10)] == ["1 Gbit/s", "64 Gbit/s", "80 bit/s"]
