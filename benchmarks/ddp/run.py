"""How long is a training step on two ranks? Ours and PyTorch's DDP, one process, and two that don't talk.

With --hosts the ranks are on network namespaces, whose links have the rate that is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is
from models import WORKLOADS  # noqa: E402
from team import CONTESTANTS, Place, Team, Times  # noqa: E402

from phalanx.testing import hosts, why_no_hosts  # noqa: E402

PEER = "pytorch-gloo"
BARE = "unconnected"
ROUNDED = "phalanx-bfloat16"  # rounds between hosts: on one host it is the same as without
HEADER = ["", "step", "forward, backward", "update", "beyond", "of the peer", "worst round", "beyond, of the peer's"]


def measure(
    workload: str, names: list[str], place: Place, rounds: int, steps: int, warmup: int
) -> dict[str, list[Times]]:
    """Every contestant's times, round by round."""
    times: dict[str, list[Times]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        teams = {name: Team(name, WORKLOADS[workload], warmup, Path(folder), place) for name in names}
        exact = [name for name in names if CONTESTANTS[name].backend and name != ROUNDED]
        losses = {name: teams[name].final_loss for name in exact}
        if losses and max(losses.values()) - min(losses.values()) > 1e-3 * max(losses.values()):
            raise SystemExit(f"{workload}: the contestants don't train alike, losses after the warm-up: {losses}")
        for order in harness.plan_rounds(names, rounds):
            for name in order:
                times[name].append(teams[name].measure(steps))
        for team in teams.values():
            team.close()
    return times


def row(name: str, times: dict[str, list[Times]]) -> list[str]:
    """One contestant's medians, and its ratios to the peer over the rounds."""
    mine = times[name]
    cells = [name, *(harness.format_time(harness.summarise(one[part] for one in mine).median) for part in mine[0])]
    beyond = {other: _beyond(other, times) for other in (name, PEER)}
    cells.append(harness.format_time(beyond[name]) if beyond[name] > 0 else "-")
    ratios = harness.summarise(one["step"] / peer["step"] for one, peer in zip(mine, times[PEER], strict=True))
    cells += [harness.format_ratio(ratios.median), harness.format_ratio(ratios.high)]
    cells.append(harness.format_ratio(beyond[name] / beyond[PEER]) if min(beyond.values()) > 0 else "-")
    return cells


def _beyond(name: str, times: dict[str, list[Times]]) -> float:
    """Seconds of a step beyond what forward and backward take in two processes that don't talk; median over rounds."""
    pairs = zip(times[name], times[BARE], strict=True)
    return statistics.median(one["step"] - bare["forward_backward"] for one, bare in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), help=f"{PEER} and {BARE} always run"
    )
    parser.add_argument("--hosts", type=int, default=1, help="network namespaces, with --ranks-per-host each")
    parser.add_argument("--ranks-per-host", type=int, default=2, help="with --hosts")
    parser.add_argument("--rate", default="1gbit", help="what each host may send, as tc says it")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="per round")
    parser.add_argument(
        "--warmup", type=int, default=4, help="steps before the first round; buckets are rebuilt in them"
    )
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    if arguments.hosts > 1 and (reason := why_no_hosts()):
        raise SystemExit(f"benchmarks/ddp: {reason}")

    machine = harness.describe_machine()
    wanted = {PEER, BARE, *arguments.contestants} - ({ROUNDED} if arguments.hosts == 1 else set())
    names = [name for name in CONTESTANTS if name in wanted]
    samples = {}
    with contextlib.ExitStack() as stack:
        place, where = Place(), ""
        if arguments.hosts > 1:
            machines = stack.enter_context(hosts(arguments.hosts, rate=arguments.rate, one_clock=True))
            place = Place(arguments.ranks_per_host, machines)
            where = f", {arguments.hosts} hosts x {arguments.ranks_per_host} ranks, {arguments.rate}"
        for workload in arguments.models:
            samples[workload] = measure(workload, names, place, arguments.rounds, arguments.steps, arguments.warmup)
            harness.print_table(HEADER, [row(name, samples[workload]) for name in names], title=workload + where)
    results = {
        "hosts": arguments.hosts,
        "ranks_per_host": place.per_host,
        "rate": arguments.rate,
        "seconds_per_step": samples,
    }
    harness.write_results(arguments.output, results, machine=machine)


if __name__ == "__main__":
    main()
