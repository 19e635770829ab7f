"""How does an all_reduce's cost grow with ranks and hosts? Counted for Gloo and for us.

On one host 2 to 32 ranks share the cores, so that time says little: processor time, waits and bytes through sockets are
counted. Between hosts bytes and time are counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402 - the line above says where it is
from harness.curves import Panel, Point, draw  # noqa: E402
from rank import BACKENDS, Sample, Samples, rank_main  # noqa: E402

from phalanx.testing import hosts, run_ranks, why_no_hosts  # noqa: E402

LAYOUTS = "1x2,1x4,1x8,1x16,1x32,2x1,3x1,4x1,6x1,8x1"
UNITS = {"MiB": 1 << 20, "KiB": 1 << 10, "": 1}

Table = dict[tuple[int, int], Samples]  # by hosts and ranks on each


def median(samples: list[Sample]) -> Sample:
    """Return the median of each figure."""
    return Sample(**{name: statistics.median(getattr(one, name) for one in samples) for name in asdict(samples[0])})


def parse_bytes(text: str) -> int:
    """Return 65536 for "64KiB"."""
    unit = text.lstrip("0123456789")
    return int(text.removesuffix(unit)) * UNITS[unit]


def format_bytes(nbytes: int) -> str:
    """Return "64 KiB" for 65536."""
    unit = next(unit for unit, size in UNITS.items() if nbytes >= size)
    return f"{nbytes // UNITS[unit]} {unit or 'B'}"


def rows_on_one_host(table: Table, sizes: list[int]) -> list[list[str]]:
    """Return a row for each size and number of ranks of one host."""
    rows = []
    for nbytes in sizes:
        for (num_hosts, per_host), samples in table.items():
            if num_hosts > 1:
                continue
            gloo, ours = (median(samples[name, nbytes]) for name in BACKENDS)
            rows.append(
                [
                    f"{format_bytes(nbytes)}, {per_host} ranks",
                    harness.format_time(gloo.cpu_s),
                    harness.format_time(ours.cpu_s),
                    harness.format_ratio(ours.cpu_s / gloo.cpu_s),
                    f"{gloo.waits:.1f}",
                    f"{ours.waits:.1f}",
                    f"{gloo.packets:.1f}",
                    f"{ours.packets:.1f}",
                    harness.format_ratio(ours.seconds / gloo.seconds),
                ]
            )
    return rows


def rows_between_hosts(table: Table, sizes: list[int]) -> list[list[str]]:
    """Return a row for each size and number of hosts: what was counted."""
    rows = []
    for nbytes in sizes:
        for (num_hosts, per_host), samples in table.items():
            if num_hosts == 1:
                continue
            gloo, ours = (median(samples[name, nbytes]) for name in BACKENDS)
            least = 2 * (num_hosts - 1) / num_hosts
            rows.append(
                [
                    f"{format_bytes(nbytes)}, {num_hosts} x {per_host}",
                    f"{gloo.sent * per_host / nbytes:.2f}",
                    f"{ours.sent * per_host / nbytes:.2f}",
                    f"{least:.2f}",
                    harness.format_time(gloo.cpu_s),
                    harness.format_time(ours.cpu_s),
                    harness.format_time(gloo.seconds),
                    harness.format_time(ours.seconds),
                    harness.format_ratio(ours.seconds / gloo.seconds),
                ]
            )
    return rows


def panels(table: Table, sizes: list[int]) -> list[Panel]:
    """Return what to draw: processor time over ranks, and time over hosts."""
    made = []
    for nbytes in sizes:
        curves: dict[str, list[Point]] = {
            name: [
                (per_host, median(samples[name, nbytes]).cpu_s * 1e6)
                for (num_hosts, per_host), samples in table.items()
                if num_hosts == 1
            ]
            for name in BACKENDS
        }
        if all(len(curve) > 1 for curve in curves.values()):
            made.append(Panel(f"one host, {format_bytes(nbytes)}: CPU, µs a rank", curves))
    for nbytes in sizes:
        curves = {
            name: [
                (num_hosts, median(samples[name, nbytes]).seconds * 1e3)
                for (num_hosts, _), samples in table.items()
                if num_hosts > 1
            ]
            for name in BACKENDS
        }
        if all(len(curve) > 1 for curve in curves.values()):
            made.append(Panel(f"hosts, {format_bytes(nbytes)}: ms, over hosts", curves))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", default=LAYOUTS, help="hosts x ranks on each, comma-separated")
    parser.add_argument("--sizes", default="4,64KiB,1MiB,4MiB", help="of the tensor, comma-separated")
    parser.add_argument("--rate", default="200mbit", help="what each host may send, as tc says it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", type=Path, help="draw the curves into this file")
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    if reason := why_no_hosts():
        raise SystemExit(f"benchmarks/scaling: {reason}")

    machine = harness.describe_machine()
    sizes = [parse_bytes(size) for size in arguments.sizes.split(",")]
    table: Table = {}
    for layout in arguments.layouts.split(","):
        num_hosts, per_host = map(int, layout.split("x"))
        # Small buckets: what a host may send at once after a pause is no part of the model.
        with hosts(num_hosts, rate=arguments.rate, burst_bytes=4096, one_clock=True) as machines:
            job = (machines, per_host, sizes, arguments.rounds)
            table[num_hosts, per_host] = run_ranks(rank_main, num_hosts * per_host, *job, init=False, timeout=1800)[0]
        print(f"{layout} done", file=sys.stderr, flush=True)

    if one_host := rows_on_one_host(table, sizes):
        header = ["one host", "CPU a rank, gloo", "phalanx", "of Gloo's"]
        header += ["waits, gloo", "phalanx", "packets, gloo", "phalanx", "time, of Gloo's"]
        harness.print_table(header, one_host, title=f"a call and rank, median of {arguments.rounds} rounds")
    if between := rows_between_hosts(table, sizes):
        header = ["hosts x ranks", "bytes out / tensor, gloo", "phalanx", "least"]
        header += ["CPU a rank, gloo", "phalanx", "time, gloo", "phalanx"]
        harness.print_table([*header, "of Gloo's"], between, title=f"{arguments.rate} between the hosts")
    if arguments.figure:
        arguments.figure.write_text(str(draw("all_reduce over ranks and hosts", panels(table, sizes))))
    raw = {
        f"{num_hosts}x{per_host}": {
            f"{name} {nbytes}": [asdict(s) for s in all_] for (name, nbytes), all_ in by.items()
        }
        for (num_hosts, per_host), by in table.items()
    }
    harness.write_results(arguments.output, {"rate": arguments.rate, "samples": raw}, machine=machine)


if __name__ == "__main__":
    main()
