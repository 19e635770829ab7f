"""How long from Enter to the end of the first all_reduce, or of the first step? `phalanx run` and torchrun, in turns.

With --train the script trains a small network with DDP and AdamW, as most scripts do, for one step. With --hosts the
command is typed on each of so many network namespaces at once, and torchrun's hosts meet by its c10d rendezvous.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is
from harness.jobs import run_lines, type_lines  # noqa: E402

from phalanx.testing import Host, hosts  # noqa: E402

SCRIPTS = {False: str(HERE / "first_all_reduce.py"), True: str(HERE / "first_step.py")}  # by --train
PEER = "torchrun, gloo"
TARGET = 1 / 3
TARGET_WITH_HOSTS = 0.4

# The agent as it is, noting when it is about to start the zygote: all that lies between Enter and the import of torch.
AGENT = """
import sys, time
from phalanx._job.launch import command
start_zygote = command.ZygoteProcess
def noted(*args, **kwargs):
    print("done at", time.monotonic(), file=sys.stderr, flush=True)
    return start_zygote(*args, **kwargs)
command.ZygoteProcess = noted
sys.exit(command.main(sys.argv[1:]))
"""


def plan_contestants(ranks: int, script: str, machines: Sequence[Host]) -> dict[str, Callable[[], float]]:
    """Return the contestants, with `ranks` here or on each of several hosts; the agent alone only here."""

    def contest(launcher: str, backend: str) -> Callable[[], float]:
        lines = type_lines(launcher, ranks, [script, backend], machines)
        return lambda: seconds_to_done(lines, ranks * max(1, len(machines)))

    contestants = {
        "phalanx run, phalanx": contest("phalanx run", "phalanx"),
        "phalanx run, gloo": contest("phalanx run", "gloo"),
        PEER: contest("torchrun", "gloo"),
    }
    if not machines:
        line = [sys.executable, "-c", AGENT, "--no-python", "--nproc-per-node", str(ranks), "true"]
        contestants["agent until the zygote starts"] = lambda: seconds_to_done([line], 1)
    return contestants


def seconds_to_done(lines: Sequence[list[str]], times: int) -> float:
    """Seconds from the start of `lines` to the last of the `times` moments that they print."""
    start = time.monotonic()
    ended = run_lines(lines)
    found = [float(at) for at in re.findall(r"done at ([0-9.]+)", ended.output)]
    if any(ended.codes) or len(found) != times:
        raise SystemExit(f"{' '.join(lines[0])} ended with {ended.codes}:\n{ended.output}")
    return max(found) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=1, help="network namespaces, each with --ranks of its own")
    parser.add_argument("--ranks", type=int, help="default: 4; with --hosts 2 on each")
    parser.add_argument("--train", action="store_true", help="until the first step of a training is over")
    parser.add_argument("--rounds", type=int, default=5)
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()

    machine = harness.describe_machine()
    ranks = arguments.ranks or (4 if arguments.hosts == 1 else 2)
    target = None if arguments.train else TARGET if arguments.hosts == 1 else TARGET_WITH_HOSTS
    with contextlib.ExitStack() as stack:
        machines: Sequence[Host] = ()
        if arguments.hosts > 1:
            machines = stack.enter_context(hosts(arguments.hosts, one_clock=True))
        contestants = plan_contestants(ranks, SCRIPTS[arguments.train], machines)
        for contestant in contestants.values():
            contestant()  # once unmeasured: the files come into the page cache
        samples = harness.interleave(contestants, arguments.rounds)
    summaries = {name: harness.summarise(values) for name, values in samples.items()}
    peer = summaries[PEER].median
    rows = [
        [
            name,
            harness.format_time(one.median),
            f"{harness.format_time(one.low)} to {harness.format_time(one.high)}",
            harness.format_ratio(one.median / peer),
        ]
        for name, one in summaries.items()
    ]
    of_hosts = f"{arguments.hosts} hosts x " if arguments.hosts > 1 else ""
    title = f"{of_hosts}{ranks} ranks, median of {arguments.rounds} rounds"
    event = "first step" if arguments.train else "first all_reduce"
    harness.print_table(["command, backend", f"{event} done", "range", "of torchrun"], rows, title=title)
    ratio = summaries["phalanx run, phalanx"].median / peer
    if not arguments.train:  # a target was set for the first all_reduce
        reached = "reached" if ratio <= target else "missed"
        print(f"\nTarget, at most {harness.format_ratio(target)} of torchrun: {reached}.")
    results = {
        "hosts": arguments.hosts,
        "ranks": ranks,
        "event": event,
        "target": target,
        "ratio": ratio,
        "seconds": samples,
    }
    harness.write_results(arguments.output, results, machine=machine)


if __name__ == "__main__":
    main()
