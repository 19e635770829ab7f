"""How does an all_reduce's cost grow with ranks and hosts? Counted for Gloo and for us, beside what the model predicts.

On one host 2 to 32 ranks share the cores, so that time says little: processor time, waits and bytes through sockets are
counted. Between hosts bytes and time are held against the prediction, which goes on to 1,024 ranks.
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
from harness.curves import Panel, Point, draw, extend  # noqa: E402
from rank import BACKENDS, Sample, Samples, rank_main  # noqa: E402

from phalanx.collectives import Link, Links, Topology, build, hierarchical  # noqa: E402
from phalanx.collectives.simulate import simulate  # noqa: E402
from phalanx.collectives.units import format_bytes, parse_bytes, parse_bytes_per_s  # noqa: E402
from phalanx.testing import hosts, run_ranks, why_no_hosts  # noqa: E402

LAYOUTS = "1x2,1x4,1x8,1x16,1x32,2x1,3x1,4x1,6x1,8x1"
PAYLOAD = 1448 / 1514  # of a packet of Ethernet
FAR = 1024  # ranks
# What is assumed there: 8 ranks a host, joined by 10 Gbit/s with the latency of a switch and of two kernels.
FAR_PER_HOST, FAR_LINK = 8, Link(50e-6, 1.25e9 * PAYLOAD)

Table = dict[tuple[int, int], Samples]  # by hosts and ranks on each


def median(samples: list[Sample]) -> Sample:
    """Return the median of each figure."""
    return Sample(**{name: statistics.median(getattr(one, name) for one in samples) for name in asdict(samples[0])})


def predicted_s(num_hosts: int, per_host: int, nbytes: int, link: Link) -> float:
    """Return what the model predicts for the ring between hosts, with memory inside of them."""
    topology = Topology.of_sizes([per_host] * num_hosts)
    schedule = build("ring", "all_reduce", Topology.flat(num_hosts))
    if per_host > 1:
        schedule = hierarchical.all_reduce(topology, schedule)
    return simulate(schedule, nbytes, topology, Links(inter=link)).seconds


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


def rows_between_hosts(table: Table, sizes: list[int], link: Link | None) -> list[list[str]]:
    """Return a row for each size and number of hosts: what was counted, and what is predicted."""
    rows = []
    for nbytes in sizes:
        for (num_hosts, per_host), samples in table.items():
            if num_hosts == 1:
                continue
            gloo, ours = (median(samples[name, nbytes]) for name in BACKENDS)
            least = 2 * (num_hosts - 1) / num_hosts
            predicted = float("nan") if link is None else predicted_s(num_hosts, per_host, nbytes, link)
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
                    harness.format_time(predicted),
                    harness.format_ratio(ours.seconds / predicted),
                ]
            )
    return rows


def panels(table: Table, sizes: list[int], link: Link | None) -> list[Panel]:
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
            at = [num_hosts for num_hosts, _ in curves["phalanx"]]
            dashed = {"predicted": [(n, predicted_s(int(n), 1, nbytes, link) * 1e3) for n in at]} if link else {}
            made.append(Panel(f"hosts, {format_bytes(nbytes)}: ms, over hosts", curves, dashed))
    return made


def far_rows(table: Table, sizes: list[int]) -> list[list[str]]:
    """Predict for many ranks: time by the model, processor time as a power through what was counted."""
    rows = []
    for nbytes in sizes:
        counted = [
            (per_host, median(samples["phalanx", nbytes]).cpu_s)
            for (num_hosts, per_host), samples in table.items()
            if num_hosts == 1
        ]
        time_s = predicted_s(FAR // FAR_PER_HOST, FAR_PER_HOST, nbytes, FAR_LINK)
        cpu_s = extend(counted, 64)[-1][1] if len(counted) > 1 else float("nan")
        rows.append([format_bytes(nbytes), harness.format_time(time_s), harness.format_time(cpu_s)])
    return rows


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

    link = None  # without two hosts nothing is known of its latency, and nothing is predicted
    smallest = [median(samples["phalanx", sizes[0]]) for (n, _), samples in table.items() if n == 2]
    if smallest:  # what two hosts take for the smallest tensor, which is one exchange
        link = Link(smallest[0].seconds, parse_bytes_per_s(arguments.rate) * PAYLOAD)
    if one_host := rows_on_one_host(table, sizes):
        header = ["one host", "CPU a rank, gloo", "phalanx", "of Gloo's"]
        header += ["waits, gloo", "phalanx", "packets, gloo", "phalanx", "time, of Gloo's"]
        harness.print_table(header, one_host, title=f"a call and rank, median of {arguments.rounds} rounds")
    if between := rows_between_hosts(table, sizes, link):
        header = ["hosts x ranks", "bytes out / tensor, gloo", "phalanx", "least"]
        header += ["CPU a rank, gloo", "phalanx", "time, gloo", "phalanx"]
        harness.print_table([*header, "predicted", "of it"], between, title=f"{arguments.rate} between the hosts")
    far = f"{FAR:,} ranks, {FAR_PER_HOST} on a host"
    harness.print_table(
        [far, "time, predicted", "CPU a rank, 64 ranks on a host"], far_rows(table, sizes), title="predicted"
    )
    if arguments.figure:
        arguments.figure.write_text(str(draw("all_reduce over ranks and hosts", panels(table, sizes, link))))
    raw = {
        f"{num_hosts}x{per_host}": {
            f"{name} {nbytes}": [asdict(s) for s in all_] for (name, nbytes), all_ in by.items()
        }
        for (num_hosts, per_host), by in table.items()
    }
    harness.write_results(arguments.output, {"rate": arguments.rate, "samples": raw}, machine=machine)


if __name__ == "__main__":
    main()
