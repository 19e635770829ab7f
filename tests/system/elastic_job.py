"""An elastic job of ranks that do nothing but stay together, on one host."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.system.phalanx_command import Finished, Running, said_by, start

SCRIPT = str(Path(__file__).with_name("elastic_rank.py"))


class Job:
    """A running elastic job of ranks that do nothing but stay together."""

    def __init__(self, running: Running, folder: Path) -> None:
        self.running = running
        self.folder = folder
        self.lines: list[str] = []
        self.pids: dict[int, int] = {}

    def wait(self, pattern: str, times: int = 1) -> list[re.Match[str]]:
        """Until so many ranks have said it since the beginning: the same line of several is shown once, with all."""
        while True:
            found = [(line, match) for line in self.lines if (match := re.search(pattern, line))]
            if sum(len(said_by(line)) for line, _ in found) >= times:
                return [match for _, match in found]
            self.lines.append(self.running.read_until("").rstrip("\n"))

    def wait_joined(self, generation: int, *ranks: int) -> None:
        """Until these ranks have joined, which were started in that generation; their processes are in `pids`."""
        for rank in ranks:
            found = self.wait(rf"joined {generation} as {rank} of \d+ (\d+)")
            self.pids[rank] = int(found[-1][1])

    def wait_generation(self, number: int, num_ranks: int) -> None:
        """Until so many ranks are in that generation."""
        self.wait(rf"generation {number} as \d+ of {num_ranks} ", num_ranks)

    def kill(self, rank: int) -> int:
        """SIGKILL; returns which process it was."""
        os.kill(self.pids[rank], signal.SIGKILL)
        return self.pids[rank]

    def order(self, what: str) -> None:
        (self.folder / what).touch()

    def finish(self) -> Finished:
        """Have the ranks end well."""
        self.order("finish")
        finished = self.running.finish()
        assert self.running.survivors() == []
        return finished


@contextmanager
def elastic_job(folder: Path, *words: str, ranks: int = 3, env: dict[str, str] | None = None) -> Iterator[Job]:
    count = ("--nproc-per-node", str(ranks))
    with start("run", "--no-preload", *count, *words, SCRIPT, str(folder), env=env) as running:
        job = Job(running, folder)
        job.wait_joined(0, *range(ranks))
        yield job
