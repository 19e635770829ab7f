"""Time the start of a job over ssh, by hand, and by `mpirun` with its ssh launcher.

The hosts are network namespaces, each with a real sshd. The job is `true` on two ranks of each host: nothing but the
start is measured, from Enter to the end. "by hand" types a line on each host at once; `ssh true` is one login.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import harness  # noqa: E402 - the line above says where it is
from harness.jobs import run_lines, type_lines  # noqa: E402
from tests.system.sshd import SshHosts, ssh_hosts, why_no_sshd  # noqa: E402

LOGIN, BY_HAND, OVER_SSH, MPIRUN = "ssh true", "phalanx run, by hand", "phalanx run --hosts", "mpirun, over ssh"
TARGET_LOGINS = 1.0


def plan_contestants(cluster: SshHosts, ranks: int, mpirun: str) -> dict[str, Callable[[], float]]:
    machines = [host.machine for host in cluster.hosts]
    terminal = [*cluster.terminal.command]
    script = ["--no-python", "true"]
    here = type_lines("phalanx run", ranks, script)[0]
    wrapper = cluster.folder / "mpi-ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {cluster.ssh} "$@"\n')
    wrapper.chmod(0o755)
    lines = {
        LOGIN: [[*terminal, *cluster.ssh.split(), machines[0].address, "true"]],
        BY_HAND: type_lines("phalanx run", ranks, script, machines),
        OVER_SSH: [[*terminal, *here[:4], "--hosts", cluster.names, "--ssh", cluster.ssh, *here[4:]]],
    }
    if mpirun:
        hydra = ["-launcher", "ssh", "-launcher-exec", str(wrapper), "-iface", "eth0"]
        lines[MPIRUN] = [[*terminal, mpirun, *hydra, "-hosts", cluster.names, "-ppn", str(ranks), "-n",
                          str(ranks * len(machines)), "true"]]  # fmt: skip
    return {name: lambda typed=typed: seconds(typed) for name, typed in lines.items()}  # type: ignore[misc]


def seconds(lines: Sequence[Sequence[str]]) -> float:
    start = time.monotonic()
    ended = run_lines(lines)
    took = time.monotonic() - start
    if any(ended.codes):
        raise SystemExit(f"{' '.join(lines[0])} ended with {ended.codes}:\n{ended.output}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--mpirun", default="mpirun", help="MPICH's, or an empty word to leave it out")
    parser.add_argument("--rounds", type=int, default=7)
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    if reason := why_no_sshd():
        raise SystemExit(reason)
    machine = harness.describe_machine()
    with tempfile.TemporaryDirectory() as folder, ssh_hosts(arguments.hosts, Path(folder)) as cluster:
        contestants = plan_contestants(cluster, arguments.ranks, arguments.mpirun)
        for contestant in contestants.values():
            contestant()  # once unmeasured: the files come into the page cache
        samples = harness.interleave(contestants, arguments.rounds)
    summaries = {name: harness.summarise(values) for name, values in samples.items()}
    rows = [
        [name, harness.format_time(one.median), f"{harness.format_time(one.low)} to {harness.format_time(one.high)}"]
        for name, one in summaries.items()
    ]
    title = f"{arguments.hosts} hosts x {arguments.ranks} ranks, median of {arguments.rounds} rounds"
    harness.print_table(["command", "from Enter to the end", "range"], rows, title=title)
    extra = summaries[OVER_SSH].median - summaries[BY_HAND].median
    logins = extra / summaries[LOGIN].median
    reached = "reached" if logins <= TARGET_LOGINS else "missed"
    print(
        f"\nMore than by hand: {harness.format_time(max(extra, 0.0))}, {logins:.2f} logins. "
        f"Target, at most one: {reached}."
    )
    results = {"hosts": arguments.hosts, "ranks": arguments.ranks, "logins": logins, "target": TARGET_LOGINS,
               "seconds": samples}  # fmt: skip
    harness.write_results(arguments.output, results, machine=machine)


if __name__ == "__main__":
    main()
