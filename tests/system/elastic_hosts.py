"""An elastic job on several hosts: network namespaces, each with an agent of its own."""

from __future__ import annotations

import contextlib
import re
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.system import elastic_training
from tests.system.elastic_job import SCRIPT, Job
from tests.system.phalanx_command import Finished, Running, start

from phalanx._comm.control.key import Key
from phalanx.testing.namespaces import Host, hosts

_PORT = "29479"


class Cluster:
    """Hosts, on each of which a command of one elastic job may run."""

    def __init__(
        self,
        machines: list[Host],
        folder: Path,
        nnodes: str,
        env: dict[str, str],
        options: tuple[str, ...] = ("--no-preload",),
    ) -> None:
        self.machines = machines
        self.jobs: dict[int, Job] = {}
        self._stack = contextlib.ExitStack()
        self._folder = folder
        self.environ = {"PHALANX_KEY": str(Key(bytes(32))), **env}
        where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{machines[0].address}:{_PORT}")
        named = tuple(word for name in env for word in ("--env", name))
        self._line = (
            "run", "--nnodes", nnodes, *where, *named, *options,
        )  # fmt: skip

    def start(self, number: int, ranks: int, script: str = SCRIPT, *words: str) -> Job:
        """The command on a host, which is to have so many ranks."""
        line = (*self._line, "--nproc-per-node", str(ranks), script, str(self._folder), *words)
        at = self.command_on(number)
        running = self._stack.enter_context(start(*line, env=self.environ, before=at, stderr=subprocess.STDOUT))
        self.jobs[number] = Job(running, self._folder)
        return self.jobs[number]

    def join(self, number: int, address: str) -> Job:
        """The command of a host that comes to the job at an address."""
        line = ("join", address)
        at = self.command_on(number)
        running = self._stack.enter_context(start(*line, env=self.environ, before=at, stderr=subprocess.STDOUT))
        self.jobs[number] = Job(running, self._folder)
        return self.jobs[number]

    def command_on(self, number: int) -> tuple[str, ...]:
        """The words that, before a command, run it on a host."""
        return self.machines[number].command

    @property
    def first(self) -> Job:
        """The first host shows what all ranks print."""
        return self.jobs[0]

    def kill(self, number: int) -> None:
        """The command of a host, and with it its ranks."""
        self.jobs[number].running.process.kill()

    def wait_for(self, number: int, text: str) -> None:
        """Until the command of a host has said so."""
        job = self.jobs[number]
        while not any(text in line for line in job.lines):
            job.lines.append(job.running.read_until("").rstrip("\n"))

    def wait_connected(self, number: int) -> None:
        """Until the command of a host has a connection to the first one."""
        running = self.jobs[number].running
        connections = Path(f"/proc/{running.process.pid}/net/tcp6")  # ZeroMQ has sockets of IPv6, for IPv4 as well
        established = re.compile(rf"^ *\d+: \S+ [0-9A-F]+:{int(_PORT):04X} 01 ", re.M)
        while not established.search(connections.read_text()):
            assert running.process.poll() is None, running.finish().out
            select.select([], [], [], 0.02)

    def finish(self, *numbers: int) -> list[Finished]:
        """Have all ranks end well, and nothing be left anywhere."""
        self.first.order("finish")
        return self.ended(*numbers)

    def ended_one(self, number: int) -> Finished:
        """The command of a host has ended; those of others go on."""
        job = self.jobs.pop(number)
        end = self._end(job.running, job)
        assert job.running.survivors() == []
        return end

    def ended(self, *numbers: int) -> list[Finished]:
        finished = [self._end(self.jobs[number].running, self.jobs[number]) for number in numbers]
        assert [job.running.survivors() for job in self.jobs.values()] == [[] for _ in self.jobs]
        return finished

    @staticmethod
    def _end(running: Running, job: Job) -> Finished:
        end = running.finish()
        return Finished(end.code, "\n".join([*job.lines, end.out]), end.err)

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def cluster(
    folder: Path,
    *sizes: int,
    nnodes: str,
    spare: int = 0,
    env: dict[str, str] | None = None,
    options: tuple[str, ...] = (),
) -> Iterator[Cluster]:
    """Hosts with so many ranks each, all of which have joined; and `spare` more without a command."""
    with hosts(len(sizes) + spare, both_ways=True) as machines:
        made = Cluster(machines, folder, nnodes, env or {}, ("--no-preload", *options))
        try:
            for number, size in enumerate(sizes):
                made.start(number, size)
                if number:
                    made.wait_connected(number)  # they have their ranks in the order in which they come
            made.first.wait_joined(0, *range(sum(sizes)))
            yield made
        finally:
            made.close()


def wait_for_files(job: Job, paths: list[Path]) -> None:
    """Until all are there; the test's own timeout ends the wait."""
    while not all(path.exists() for path in paths):
        assert job.running.process.poll() is None, job.running.process.communicate()[0]
        select.select([], [], [], 0.02)


def samples_of_epochs(folder: Path) -> list[list[int]]:
    """What the steps that counted used: of a step that was done again the last time counts."""
    lines = [
        [int(word) for word in line.split()]
        for path in folder.glob("samples-*")
        for line in path.read_text().splitlines()
    ]
    latest: dict[int, int] = {}
    for generation, step, *_ in lines:
        latest[step] = max(latest.get(step, 0), generation)
    used: list[list[int]] = [[] for _ in range(elastic_training.EPOCHS)]
    for generation, step, epoch, *samples in lines:
        if latest[step] == generation:
            used[epoch] += samples
    return [sorted(samples) for samples in used]
