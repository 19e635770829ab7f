"""How long from Enter to the end of the first all_reduce, or of the first step? `phalanx run` and torchrun, in turns.

With --train the script trains a small network with DDP and AdamW, as most scripts do, for one step. With --hosts the
command is typed on each of so many network namespaces at once, and torchrun's hosts meet by its c10d rendezvous.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is

from phalanx.coordination.key import Key  # noqa: E402
from phalanx.testing.namespaces import Host, hosts  # noqa: E402

SCRIPTS = {False: str(HERE / "first_all_reduce.py"), True: str(HERE / "first_step.py")}  # by --train
PHALANX = [sys.executable, "-m", "phalanx.cli", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
PEER = "torchrun, gloo"
TARGET = 1 / 3
TARGET_WITH_HOSTS = 0.4
RENDEZVOUS_PORT = 29400

# The agent as it is, noting when it is about to start the zygote: all that lies between Enter and the import of torch.
AGENT = """
import sys, time
from phalanx.launch import run_job
start_zygote = run_job.ZygoteProcess
def noted(*args, **kwargs):
    print("done at", time.monotonic(), file=sys.stderr, flush=True)
    return start_zygote(*args, **kwargs)
run_job.ZygoteProcess = noted
from phalanx.launch.command import main
sys.exit(main(sys.argv[1:]))
"""


def plan_contestants(ranks: int, script: str) -> dict[str, Callable[[], float]]:
    count = ["--nproc-per-node", str(ranks)]
    commands = {
        "phalanx run, phalanx": ([*PHALANX, *count, script, "phalanx"], ranks),
        "phalanx run, gloo": ([*PHALANX, *count, script, "gloo"], ranks),
        PEER: ([*TORCHRUN, *count, script, "gloo"], ranks),
        "agent until the zygote starts": ([sys.executable, "-c", AGENT, "--no-python", *count, "true"], 1),
    }
    return {name: lambda command=command, n=n: seconds_to_done([command], n) for name, (command, n) in commands.items()}


def plan_contestants_on(machines: Sequence[Host], ranks: int, script: str) -> dict[str, Callable[[], float]]:
    """The same, with `ranks` on each of several hosts: one line for all, as it is typed."""
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{machines[0].address}:{RENDEZVOUS_PORT}"]
    options = ["--nnodes", str(len(machines)), "--nproc-per-node", str(ranks), *where]
    total = ranks * len(machines)

    def contest(program: list[str], backend: str, *, is_peer: bool = False) -> Callable[[], float]:
        # Namespaces have one name in common: torchrun must be told each host's address, and which one is the first.
        told = [
            ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(host is machines[0])}"] if is_peer else []
            for host in machines
        ]
        commands = [
            [*host.command, *program, *options, *words, script, backend]
            for host, words in zip(machines, told, strict=True)
        ]
        return lambda: seconds_to_done(commands, total)

    return {
        "phalanx run, phalanx": contest(PHALANX, "phalanx"),
        "phalanx run, gloo": contest(PHALANX, "gloo"),
        PEER: contest([sys.executable, "-m", "torch.distributed.run"], "gloo", is_peer=True),
    }


def seconds_to_done(commands: Sequence[list[str]], times: int) -> float:
    """Seconds from the start of `commands` to the last of the `times` moments that they print."""
    # One thread is torchrun's default: the same for both. Gloo cannot tell the interface from a name that all share.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PHALANX_KEY": str(Key(bytes(32)))}
    if len(commands) > 1:
        environment["GLOO_SOCKET_IFNAME"] = "eth0"
    start = time.monotonic()
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    output = "".join(process.communicate()[0] for process in started)
    found = [float(at) for at in re.findall(r"done at ([0-9.]+)", output)]
    codes = [process.returncode for process in started]
    if any(codes) or len(found) != times:
        raise SystemExit(f"{' '.join(commands[0])} ended with {codes}:\n{output}")
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
        if arguments.hosts == 1:
            contestants = plan_contestants(ranks, SCRIPTS[arguments.train])
        else:
            machines = stack.enter_context(hosts(arguments.hosts, one_clock=True))
            contestants = plan_contestants_on(machines, ranks, SCRIPTS[arguments.train])
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
