"""What does a job on three hosts survive, and how fast? `phalanx run`, torchrun with c10d and with etcd, and torchft.

Each host is a network namespace with one rank. One is killed with all that runs on it, stands still for a while, or its
cable is pulled for a while: the first one, where torchrun's c10d store is, or another one. The time runs from the event
to the first step that both others have completed together after it. The services of the peers (etcd, torchft's
lighthouse) are on a fourth host, which is lost in a scenario of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import run
from run import Job, Stamp, harness

from phalanx._comm.control.key import Key
from phalanx.testing.namespaces import Host, hosts

NUM_HOSTS, SERVICE = 3, 3
AWAY_S = 30.0  # for so long a host stands still, or is cut off
GOING_ON_S = 90.0  # for the others to go on, and for the job to be whole again
TIMEOUT_S = "10"  # of the peers' process groups: the default of Gloo is half an hour
RESTARTS = "20"

PHALANX, C10D, ETCD, TORCHFT = "phalanx run", "torchrun, c10d", "torchrun, etcd", "torchft"
Line = tuple[int, list[str], dict[str, str]]  # the number of a host, what is typed there, and more environment


@dataclass(frozen=True)
class Scenario:
    """`victim` is the number of the host to which it happens; `way` is killed, stands still or is cut off."""

    victim: int
    way: str

    def __str__(self) -> str:
        which = {0: "the first host", SERVICE: "the service's host"}.get(self.victim, "another host")
        return f"{which} {self.way}" + (f" for {AWAY_S:.0f} s" if self.comes_back else "")

    @property
    def comes_back(self) -> bool:
        return self.way != "is killed"


SCENARIOS = [
    *(Scenario(victim, way) for way in ("is killed", "stands still", "is cut off") for victim in (1, 0)),
    Scenario(SERVICE, "is killed"),
]


@dataclass(frozen=True)
class Outcome:
    """How a job came through.

    `seconds`: until the others had completed a step together, or None: they did not. `lost`: the steps that were done
    again. `whole`: all hosts trained together again after the one had come back, or None: it does not come back.
    `apart`: steps that the one had completed without the others, meanwhile. `why`: what went wrong.
    """

    seconds: float | None
    lost: int = 0
    whole: bool | None = None
    apart: int = 0
    why: str = ""


def phalanx_lines(machines: list[Host], folder: Path, python: str) -> list[Line]:
    where = ["--nnodes", f"1:{NUM_HOSTS}", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{machines[0].address}:29500"]
    line = [*run.PHALANX[:-1], "1", *where, run.SCRIPT, "elastic", str(folder)]
    return [(number, line, {"PHALANX_KEY": str(Key(bytes(32)))}) for number in range(NUM_HOSTS)]


def torchrun_lines(machines: list[Host], folder: Path, python: str, *, backend: str) -> list[Line]:
    at = machines[SERVICE if backend == "etcd-v2" else 0].address
    endpoint = f"{at}:{2379 if backend == 'etcd-v2' else 29500}"
    lines = etcd_lines(machines, folder) if backend == "etcd-v2" else []
    for number in range(NUM_HOSTS):
        words = [python, "-m", "torch.distributed.run", "--nnodes", f"1:{NUM_HOSTS}", "--nproc-per-node", "1"]
        words += ["--max-restarts", RESTARTS, "--rdzv-id", "job"]
        words += ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint]
        words += ["--local-addr", machines[number].address]
        words += ["--rdzv-conf", f"is_host={int(number == 0)}"] if backend == "c10d" else []
        told = {"GLOO_SOCKET_IFNAME": "eth0", "TIMEOUT_S": TIMEOUT_S, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        lines.append((number, [*words, run.SCRIPT, "gloo", str(folder)], told))
    return lines


def etcd_lines(machines: list[Host], folder: Path) -> list[Line]:
    url = f"http://{machines[SERVICE].address}:2379"
    words = ["etcd", "--enable-v2", "--data-dir", str(folder / "etcd")]
    words += ["--listen-client-urls", url, "--advertise-client-urls", url]
    return [(SERVICE, words, {"ETCD_UNSUPPORTED_ARCH": ""})]


def torchft_lines(machines: list[Host], folder: Path, python: str) -> list[Line]:
    """The lighthouse, and a torchrun for each replica group of one process, as torchft's documentation has it."""
    address = f"{machines[SERVICE].address}:29510"
    lighthouse = [str(Path(python).with_name("torchft_lighthouse")), "--bind", address]
    lighthouse += ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    here = {"TORCHFT_LIGHTHOUSE": f"http://{address}", "NUM_REPLICA_GROUPS": str(NUM_HOSTS)}
    here |= {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    lines: list[Line] = [(SERVICE, lighthouse, here)]
    for number in range(NUM_HOSTS):
        words = [python, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1"]
        words += ["--max-restarts", RESTARTS, "--master-addr", machines[number].address, "--master-port", "29520"]
        lines.append((number, [*words, run.SCRIPT, "torchft", str(folder)], {**here, "REPLICA_GROUP_ID": str(number)}))
    return lines


CONTESTANTS: dict[str, Callable[[list[Host], Path, str], list[Line]]] = {
    PHALANX: phalanx_lines,
    C10D: lambda *given: torchrun_lines(*given, backend="c10d"),
    ETCD: lambda *given: torchrun_lines(*given, backend="etcd-v2"),
    TORCHFT: torchft_lines,
}


Commands = dict[int, "subprocess.Popen[bytes]"]  # by the number of a host, the last one that was typed there


@contextlib.contextmanager
def running(lines: list[Line], machines: list[Host], folder: Path) -> Iterator[tuple[Job, Commands]]:
    """Start a command on each host, and kill what is left on them at the end.

    Each host has a name, which the others can look up: torchft's replicas fetch their state at it.
    """
    started: list[subprocess.Popen[bytes]] = []
    names = "".join(f"{host.address} host{number}\n" for number, host in enumerate(machines))
    with open(folder / "said", "wb") as said:
        try:
            for host in machines:  # `ip netns exec` mounts it as /etc/hosts
                Path("/etc/netns", host.name).mkdir(parents=True)
                Path("/etc/netns", host.name, "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            for number, words, more in lines:
                told = {**os.environ, "OMP_NUM_THREADS": "1", "HOST_NUMBER": str(number), **more}
                named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"host{number}"]
                line = [*machines[number].command, *named, *words]
                started.append(subprocess.Popen(line, env=told, stdout=said, stderr=said, start_new_session=True))
            yield Job(folder, []), dict(zip((number for number, _, _ in lines), started, strict=True))
        finally:
            for host in machines:
                host.signal(signal.SIGKILL)
            for process in started:
                process.wait()
            for host in machines:
                shutil.rmtree(Path("/etc/netns", host.name), ignore_errors=True)


def undergo(job: Job, commands: Commands, machines: list[Host], scenario: Scenario) -> Outcome:
    """Have a scenario happen to a job that trains, and return how it came through."""
    victim, host = scenario.victim, machines[scenario.victim]
    others = [number for number in range(NUM_HOSTS) if number != victim]
    expected = len(others)

    def find(after: float, numbers: list[int], num_ranks: int) -> Callable[[list[Stamp]], list[Stamp]]:
        """A condition: these hosts have completed the same step, with so many ranks, after a time."""

        def condition(stamps: list[Stamp]) -> list[Stamp]:
            if all(commands[number].poll() is not None for number in numbers):
                raise TimeoutError("the commands have ended")
            fits = [s for s in reversed(stamps) if s.at > after and s.num_ranks == num_ranks]
            steps = [{s.step: s for s in fits if s.rank == number} for number in numbers]
            common = sorted(set.intersection(*(set(each) for each in steps)))
            return [each[common[0]] for each in steps] if common else []

        return condition

    everybody = list(range(NUM_HOSTS))
    job.wait(find(time.monotonic() + 3.0, everybody, NUM_HOSTS), run.PATIENCE_S)  # it has trained for three seconds
    at = time.monotonic()
    if scenario.way == "is killed":
        host.signal(signal.SIGKILL)
    elif scenario.way == "stands still":
        host.signal(signal.SIGSTOP)
    else:
        host.cut_off()
    in_flight = 0.05 if victim == SERVICE else 0.0  # of a step that had begun
    try:
        first = job.wait(find(at + in_flight, others, expected), GOING_ON_S)
    except TimeoutError as error:
        return Outcome(None, why=f"the others did not go on: {error}")
    went_on = max(stamp.at for stamp in first)
    done = max(stamp.step for stamp in job.stamps() if stamp.at <= at)
    lost = max(0, done + 1 - first[0].step)
    if victim == SERVICE:  # for a while, the job does not need it; then it loses a host
        killed_at = time.monotonic()
        machines[1].signal(signal.SIGKILL)
        try:
            first = job.wait(find(killed_at, [0, 2], 2), GOING_ON_S)
        except TimeoutError:
            return Outcome(None, why="without the service, the others did not go on after another host")
        return Outcome(max(stamp.at for stamp in first) - killed_at, lost)
    if not scenario.comes_back:
        return Outcome(went_on - at, lost)
    time.sleep(max(0.0, at + AWAY_S - time.monotonic()))
    apart = sum(s.rank == victim and s.num_ranks < NUM_HOSTS and s.at > at for s in job.stamps())
    back = time.monotonic()
    if scenario.way == "stands still":
        host.signal(signal.SIGCONT)
    else:
        host.plug_in()
    try:
        job.wait(find(back, everybody, NUM_HOSTS), GOING_ON_S)
    except TimeoutError:
        return Outcome(went_on - at, lost, whole=False, apart=apart)
    return Outcome(went_on - at, lost, whole=True, apart=apart)


def measure(name: str, scenario: Scenario, python: str) -> Outcome:
    """Run a job of a contestant through a scenario."""
    with hosts(NUM_HOSTS + 1, one_clock=True) as machines, tempfile.TemporaryDirectory() as folder:
        lines = CONTESTANTS[name](machines, Path(folder), python)
        with running(lines, machines, Path(folder)) as (job, commands):
            try:
                return undergo(job, commands, machines, scenario)
            except TimeoutError as error:
                return Outcome(None, why=f"it did not start: {error}\n{(Path(folder) / 'said').read_text()[-2000:]}")


def describe(outcomes: list[Outcome]) -> str:
    """Return the cell of a table."""
    passed = [one.seconds for one in outcomes if one.seconds is not None]
    if not passed:
        return "ends" if all("have ended" in one.why for one in outcomes) else f"not within {GOING_ON_S:.0f} s"
    words = [harness.format_time(median(passed))]
    if len(passed) < len(outcomes):
        words.append(f"{len(passed)} of {len(outcomes)}")
    if steps := max(one.lost for one in outcomes):
        words.append(f"{steps} step{'s' * (steps != 1)} again")
    backs = [one.whole for one in outcomes if one.whole is not None]
    if backs and not all(backs):
        words.append("not whole again")
    if apart := max(one.apart for one in outcomes):
        words.append(f"{apart} step{'s' * (apart != 1)} apart")
    return ", ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peers", metavar="PYTHON", help="a venv's interpreter with torchft and python-etcd (README)")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--scenarios", nargs="+", type=int, metavar="N", default=list(range(len(SCENARIOS))))
    harness.add_output_arguments(parser, run.HERE)
    arguments = parser.parse_args()
    names = [name for name in arguments.contestants if arguments.peers or name in (PHALANX, C10D)]
    if shutil.which("etcd") is None and ETCD in names:
        names.remove(ETCD)
    for name in set(arguments.contestants) - set(names):
        print(f"{name} is absent: --peers names a venv that has it; etcd is Debian's etcd-server.", file=sys.stderr)

    machine = harness.describe_machine()
    chosen = [SCENARIOS[number] for number in arguments.scenarios]
    found: dict[str, dict[str, list[Outcome]]] = {str(scenario): {name: [] for name in names} for scenario in chosen}
    for order in harness.plan_rounds(names, arguments.rounds):
        for scenario in chosen:
            for name in order:
                if scenario.victim == SERVICE and name in (PHALANX, C10D):
                    continue  # they have none
                python = arguments.peers if name in (ETCD, TORCHFT) else sys.executable
                outcome = measure(name, scenario, python)
                print(f"{scenario}: {name}: {outcome}", file=sys.stderr, flush=True)
                found[str(scenario)][name].append(outcome)
    rows = [
        [title, *(describe(outcomes) if outcomes else "has none" for outcomes in each.values())]
        for title, each in found.items()
    ]
    harness.print_table(["", *names], rows, title=f"until the two others train on, {arguments.rounds} rounds")
    results = {title: {n: [asdict(o) for o in some] for n, some in each.items()} for title, each in found.items()}
    harness.write_results(arguments.output, {"outcomes": results}, machine=machine)


if __name__ == "__main__":
    main()
