"""Three jobs on two hosts, and a third host without a key that does to the first job's ports whatever it can."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.system.host_commands import finish, numbered
from tests.system.phalanx_command import Finished, Running, start, write_script
from tests.system.strangers import attacker

from phalanx._comm.control.key import Key
from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

_OPEN_FILES, _HARD_LIMIT = 1024, 4096  # the usual limits
_MOST_OPEN = 3700  # what else a process opens, a checkpoint for example, finds room
_NUM_ADDRESSES = 100  # from which the strangers come
_MOST_MIB = 100  # more than before; a connection's buffers and a few hundred handshakes
_STEPS = 20
_METRICS_PORT, _TOKEN = 9400, "secret"
_LISTEN = "0A"  # the state in the kernel's table
# The ranks add whole numbers, so that what comes out after some steps is known exactly; and they call each other.
_TRAIN = """
import os, sys, time, torch, torch.distributed as dist
from phalanx import rpc

folder, calls = sys.argv[1], "calls" in sys.argv
rank = int(os.environ["RANK"])
dist.init_process_group("phalanx")
if calls:
    rpc.init_rpc(f"w{rank}")
total, step = torch.zeros(1, dtype=torch.float64), 0
progress = os.open(os.path.join(folder, f"step-{rank}"), os.O_CREAT | os.O_WRONLY, 0o600)
os.pwrite(progress, f"{os.getpid()} {step:9}".encode(), 0)
while True:
    mine = torch.tensor([rank + step, os.path.exists(os.path.join(folder, "stop"))], dtype=torch.float64)
    dist.all_reduce(mine)
    large = torch.ones(100_000)
    dist.all_reduce(large)
    total += mine[0] * large[-1] / 2
    step += 1
    if calls:
        assert rpc.rpc_sync(f"w{1 - rank}", torch.add, (total, step)).item() == total.item() + step
    os.pwrite(progress, f"{os.getpid()} {step:9}".encode(), 0)
    if mine[1]:
        break
    time.sleep(0.01)
torch.save(total, os.path.join(folder, f"saved-{rank}"))
print("total", int(total), "steps", step, flush=True)
if calls:
    rpc.shutdown()
dist.destroy_process_group()
"""


@dataclass
class Job:
    """A job of one rank on each of two hosts, and the folder in which its ranks say how far they are."""

    folder: Path
    begin: Callable[[int], None]  # starts the agent of the host with this number
    agents: list[Running] = field(default_factory=list)

    def _said(self, rank: int) -> list[int]:
        try:
            return [int(word) for word in (self.folder / f"step-{rank}").read_text().split()]
        except OSError:
            return []

    def await_step(self, wanted: int) -> None:
        """Return when both ranks have come that far; the test's own timeout ends the wait for what goes on."""
        while any(len(said := self._said(rank)) < 2 or said[1] < wanted for rank in range(2)):
            assert [agent.process.poll() for agent in self.agents] == [None, None], "the job ended"
            time.sleep(0.02)

    def pid(self, rank: int) -> int:
        """The process of a rank, once it has said so."""
        return (self._said(rank) or [0])[0]

    @property
    def step(self) -> int:
        """How far both ranks are."""
        return min(self._said(rank)[1] for rank in range(2))

    @property
    def pids(self) -> list[int]:
        """The agents' processes and the ranks'."""
        return [pid for agent in self.agents for pid in agent.survivors()]

    def stop(self) -> None:
        (self.folder / "stop").touch()


@contextlib.contextmanager
def job(
    machines: list[Host],
    folder: Path,
    port: int,
    *words: str,
    most_open: int = _HARD_LIMIT,
    program: str = _TRAIN,
    first_options: tuple[str, ...] = (),
) -> Iterator[Job]:
    """A job of two hosts; the second one's agent is not started yet: `begin` of it does that."""
    folder.mkdir()
    script = write_script(folder, program)
    environ = {
        "PHALANX_KEY": str(Key.generate()),
        "XDG_CONFIG_HOME": str(folder),
        "PHALANX_METRICS_TOKEN": _TOKEN,
    }
    limit = ("prlimit", f"--nofile={_OPEN_FILES}:{most_open}")
    lines = numbered(machines, script=(script, str(folder), *words), nproc="1")
    with contextlib.ExitStack() as stack:

        def begin(number: int) -> None:
            line, before = lines[number], (*machines[number].command, *limit)
            at = line.index("--master-port") + 1
            line = (*line[:at], str(port), *(first_options if number == 0 else ()), *line[at + 1 :])
            one.agents.append(stack.enter_context(start(*line, env=environ, before=before, stderr=subprocess.STDOUT)))

        one = Job(folder, begin)
        begin(0)
        yield one


def listening(pids: list[int]) -> dict[str, set[int]]:
    """The TCP ports at which these processes listen, by address; of their own network namespaces."""
    found: dict[str, set[int]] = {}
    for pid in pids:
        sockets = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN and f"socket:[{words[9]}]" in sockets:
                    address, port = words[1].split(":")
                    last = struct.pack("<I", int(address[-8:], 16))  # the IPv4 address, also where it is mapped
                    found.setdefault(socket.inet_ntoa(last), set()).add(int(port, 16))
    return found


def mebibytes(pid: int) -> float:
    """The memory that is this process's own part, by the kernel's count (PSS)."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(text.partition("\nPss:")[2].split()[0]) / 1024


def num_open(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextlib.contextmanager
def strangers(machine: Host, kind: str, places: list[str], num_frames: int) -> Iterator[None]:
    """One of the attacker's kinds, at work until the end."""
    line = [*machine.command, sys.executable, attacker.__file__, kind, str(num_frames), *places]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "here\n"
            yield
        finally:
            process.kill()


def add_addresses(machine: Host, number: int) -> None:
    """Give a host so many more addresses in the network that all of them share."""
    first = machine.address.rpartition(".")[0]
    lines = "".join(f"addr add {first}.{100 + n}/24 dev eth0\n" for n in range(number))
    subprocess.run([*machine.command, "ip", "-batch", "-"], input=lines, text=True, check=True)


def scrape(machine: Host, address: str) -> str:
    """What a scraper on this machine gets from the job whose first host has this address."""
    code = f"""if True:
        from urllib.request import Request, urlopen
        asked = Request("http://{address}:{_METRICS_PORT}/metrics", headers={{"Authorization": "Bearer {_TOKEN}"}})
        print(urlopen(asked, timeout=60).read().decode())"""
    line = [*machine.command, sys.executable, "-c", code]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout


def exact_total(num_steps: int) -> int:
    """Return what two ranks have added up after so many steps."""
    return sum(1 + 2 * step for step in range(num_steps))


@pytest.mark.slow
def test_no_stranger_costs_a_job_more_than_a_little_and_those_beside_it_nothing(
    tmp_path: Path, effort: int, seed: int
) -> None:
    rng = random.Random(seed)
    with hosts(3) as machines, contextlib.ExitStack() as stack:
        add_addresses(machines[2], _NUM_ADDRESSES)
        metrics = ("--metrics", f"{machines[0].address}:{_METRICS_PORT}")
        jobs = [
            stack.enter_context(job(machines[:2], tmp_path / name, port, what, first_options=options))
            for name, port, what, options in (
                ("attacked", 29700, "calls", metrics),
                ("one", 29701, "", ()),
                ("another", 29702, "", ()),
            )
        ]
        attacked = jobs[0]
        for one in jobs:
            one.begin(1)
        for one in jobs:
            one.await_step(_STEPS)
        pids = attacked.pids
        assert len(pids) >= 4
        ports = listening(pids)
        assert set(ports) == {machine.address for machine in machines[:2]}, "only addresses of the job's network"
        assert _METRICS_PORT in ports[machines[0].address]
        assert len(ports[machines[0].address]) == 4, "the coordinator, a rank's calls, a rank's tensors, the numbers"
        assert len(ports[machines[1].address]) == 2
        places = [f"{address}:{port}" for address, some in ports.items() for port in sorted(some)]
        memory, descriptors = {pid: mebibytes(pid) for pid in pids}, {pid: num_open(pid) for pid in pids}
        kinds = [*attacker.KINDS]
        rng.shuffle(kinds)
        for kind in kinds:
            with strangers(machines[2], kind, places, 5_000 * effort):
                steps = [one.step for one in jobs]
                for one, step in zip(jobs, steps, strict=True):
                    one.await_step(step + _STEPS)
                assert "phalanx_ranks_running 2" in scrape(machines[1], machines[0].address), kind
                for pid in pids:
                    assert mebibytes(pid) - memory[pid] < _MOST_MIB, kind
                    assert num_open(pid) < _MOST_OPEN, kind
        while any(num_open(pid) > descriptors[pid] + 10 for pid in pids):  # strangers that have gone leave nothing
            time.sleep(0.1)
        assert attacked.pids == pids, "nobody was restarted"
        for one in jobs:
            one.stop()
        ends = [finish(one.agents) for one in jobs]
    for one, end in zip(jobs, ends, strict=True):
        check_end(one, end)
    assert "refused a connection from 10.77.0.1" in "".join(finished.out for finished in ends[0])
    for end in ends[1:]:
        assert not any("lost" in finished.out or "waiting" in finished.out for finished in end)


def test_strangers_who_were_there_first_keep_no_host_out(tmp_path: Path) -> None:
    with hosts(3) as machines, job(machines[:2], tmp_path / "attacked", 29700, most_open=_OPEN_FILES) as attacked:
        while not (ports := listening(attacked.pids)):
            assert attacked.agents[0].process.poll() is None
            time.sleep(0.02)
        (place,) = [f"{address}:{port}" for address, (port,) in ports.items()]
        with strangers(machines[2], "hold", [place], 0):
            attacked.begin(1)
            attacked.await_step(_STEPS)
            attacked.stop()
            end = finish(attacked.agents)
    check_end(attacked, end)
    assert f"refused a connection from {machines[2].address}: " in end[0].out


def check_end(one: Job, end: list[Finished]) -> None:
    """Fail unless the job has ended well, with what its ranks have added up without an error."""
    out = "".join(finished.out for finished in end)
    assert [finished.code for finished in end] == [0, 0], out
    (said,) = {line.partition("total ")[2] for line in out.splitlines() if "total " in line}
    total, _, num_steps = said.partition(" steps ")
    assert int(total) == exact_total(int(num_steps))
    assert (one.folder / "saved-0").exists()
