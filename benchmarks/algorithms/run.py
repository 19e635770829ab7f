"""Do runs take what the model says? Fit latency and bandwidth to single messages, then predict every algorithm."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402 - the line above says where it is
from predictions import of_backend, of_schedule  # noqa: E402
from rank import COMBINED, Interval, Samples, rank_main  # noqa: E402

from phalanx.collectives import ALGORITHMS as KNOWN  # noqa: E402
from phalanx.collectives import Link, Links, Topology  # noqa: E402
from phalanx.collectives.fit import Fit, Measurement, fit  # noqa: E402
from phalanx.collectives.units import (  # noqa: E402
    format_bytes,
    format_bytes_per_s,
    format_seconds,
    parse_bytes,
    parse_bytes_per_s,
)
from phalanx.testing import hosts, run_ranks, why_no_hosts  # noqa: E402

ALGORITHMS = tuple(name for name, known in KNOWN.items() if not known.one_host and name != "hierarchical")
NETWORKS = "2x1@1gbit,2x1@100mbit,3x1@100mbit,4x1@100mbit,8x1@100mbit,2x2@1gbit"
# What a host may send at once after a pause, which a model of links knows nothing of: as little as tc can do. A packet,
# or what the link carries in the time between two timers of the kernel.
_PACKET_BYTES = 2 * 2**10
_BURST_S = 125e-6


@dataclass(frozen=True)
class Row:
    """One all_reduce on one network, measured and predicted; `how`: the schedule over the engine, or the backend."""

    how: str
    hosts: int
    per_host: int
    rate: str
    algorithm: str
    nbytes: int
    measured_s: float
    simulated_s: float
    formula_s: float

    @property
    def error(self) -> float:
        """Of the simulation: 0.1 is 10% too slow."""
        return self.simulated_s / self.measured_s - 1

    @property
    def formula_error(self) -> float:
        """Of the formula."""
        return self.formula_s / self.measured_s - 1


def whole(by_rank: Sequence[Sequence[Interval]]) -> list[float]:
    """From when the last rank had begun to when the last one was done, round by round."""
    return [
        (max(s.end for s in spans) - max(s.begin for s in spans)) / spans[0].times
        for spans in zip(*by_rank, strict=True)
    ]


def links_of(samples: Sequence[Samples]) -> tuple[Fit, float]:
    """The link between hosts, fitted to swapped messages, and the seconds that the backend takes for nothing."""
    combined = statistics.median((s.end - s.begin) / s.times for one in samples for s in one.combined)
    guess = Links(inter=Link(1e-4, 1e8), reduce_bytes_per_s=COMBINED / combined)
    swaps = [
        Measurement(
            "ring", "all_gather", Topology.flat(2), 2 * size, statistics.median(whole([s.swaps[size] for s in samples]))
        )
        for size in samples[0].swaps
    ]
    empty_s = statistics.median(whole([s.empty for s in samples]))
    return fit(swaps, guess), empty_s


def measure(
    count: int, per_host: int, rate: str, algorithms: Sequence[str], sizes: Sequence[int], rounds: int
) -> tuple[Fit, float, list[Row]]:
    """All algorithms and sizes on one network."""
    burst_bytes = max(_PACKET_BYTES, int(parse_bytes_per_s(rate) * _BURST_S))
    with hosts(count, rate=rate, burst_bytes=burst_bytes, both_ways=True) as machines:
        job = (machines, per_host, algorithms, sizes, rounds)
        samples = run_ranks(rank_main, count * per_host, *job, init=False, timeout=3600)
    fitted, empty_s = links_of(samples)
    topology = Topology.of_sizes([per_host] * count)
    rows = []
    for how, name, size in samples[0].reductions:
        measured = statistics.median(whole([s.reductions[how, name, size] for s in samples]))
        if how == "schedule":
            predicted = of_schedule(name, size, topology, fitted.links)
        else:
            predicted = of_backend(name, size, topology, fitted.links, empty_s)
        rows.append(Row(how, count, per_host, rate, name, size, measured, *predicted))
    return fitted, empty_s, rows


def table(rows: Iterable[Row]) -> list[list[str]]:
    """A row of text for each row."""
    return [
        [
            f"{row.hosts} x {row.per_host}, {row.rate}, {format_bytes(row.nbytes)}, {row.algorithm}",
            harness.format_time(row.measured_s),
            harness.format_time(row.simulated_s),
            f"{row.error:+.1%}",
            harness.format_time(row.formula_s),
            f"{row.formula_error:+.1%}",
        ]
        for row in rows
    ]


def summary(rows: Sequence[Row]) -> list[list[str]]:
    """How far off the predictions are, on each network, where latency counts and where bandwidth does."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        size = "from 1 MiB" if row.nbytes >= 2**20 else "below 1 MiB"
        for title in (f"{row.hosts} x {row.per_host}, {row.rate}, {size}", f"all, {size}"):
            parts.setdefault(title, []).append(row)
    lines = []
    for title, some in sorted(parts.items()):
        played, priced = [abs(row.error) for row in some], [abs(row.formula_error) for row in some]
        values = [statistics.median(played), max(played), statistics.median(priced), max(priced)]
        lines.append([title, str(len(some)), *(f"{value:.1%}" for value in values)])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--networks", default=NETWORKS, help="hosts x ranks on each @ what a host may send and receive, comma-separated"
    )
    parser.add_argument("--sizes", default="4,64KiB,1MiB,4MiB", help="of the buffers, comma-separated")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--rounds", type=int, default=7)
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    if reason := why_no_hosts():
        raise SystemExit(f"benchmarks/algorithms: {reason}")

    machine = harness.describe_machine()
    algorithms = arguments.algorithms.split(",")
    sizes = [parse_bytes(size) for size in arguments.sizes.split(",")]
    networks = []
    rows: list[Row] = []
    for network in arguments.networks.split(","):
        layout, _, rate = network.partition("@")
        count, per_host = map(int, layout.split("x"))
        fitted, empty_s, measured = measure(count, per_host, rate, algorithms, sizes, arguments.rounds)
        link = fitted.links.inter
        print(
            f"{network}: {format_seconds(link.latency_s)} and {format_bytes_per_s(link.bytes_per_s)} fitted to "
            f"messages (error {fitted.median_error:.1%}, at most {fitted.worst_error:.1%}), combining at "
            f"{fitted.links.reduce_bytes_per_s / 1e9:.2g} GB/s, nothing reduced in {format_seconds(empty_s)}",
            flush=True,
        )
        networks.append({"hosts": count, "ranks_per_host": per_host, "rate": rate, "links": asdict(fitted.links)})
        networks[-1]["empty_s"] = empty_s
        rows += measured
    header = ["hosts x ranks, rate, size, algorithm", "measured", "simulated", "error", "formula", "error"]
    for how in dict.fromkeys(row.how for row in rows):
        some = [row for row in rows if row.how == how]
        title = f"all_reduce of float32 by the {how}, median of {arguments.rounds} rounds"
        harness.print_table(header, table(some), title=title)
        harness.print_table(
            ["absolute error", "rows", "simulated", "worst", "formula", "worst"], summary(some), title=f"by the {how}"
        )
    raw = [asdict(row) for row in rows]
    harness.write_results(arguments.output, {"networks": networks, "rows": raw}, machine=machine)


if __name__ == "__main__":
    main()
