"""Losses of ranks, hosts and links at random: an elastic job on three hosts goes on after each, and leaves nothing."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.system.phalanx_command import said_by
from tests.system.test_run_elastic_hosts import Cluster, cluster

from phalanx.testing import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

SIZES = (2, 1, 2)


class Listener:
    """What the commands say, read as it comes; and which ranks are in which generation."""

    def __init__(self, made: Cluster) -> None:
        self.made = made
        self.changed = threading.Condition()
        self.lines: dict[int, list[str]] = {}
        self.ranks: dict[int, set[int]] = {}  # by generation
        self.sizes: dict[int, int] = {}
        self.halves: list[str] = []  # lines of a generation that is of another size elsewhere: two halves go on
        self.pids: dict[int, int] = {}  # seat -> pid
        self.threads: list[threading.Thread] = []
        for number in made.jobs:
            self.listen(number)

    def listen(self, number: int) -> None:
        """Read what the command on a host says, to its end."""
        lines = self.lines[number] = []
        stdout = self.made.jobs[number].running.process.stdout
        assert stdout is not None

        def read() -> None:
            for line in stdout:
                with self.changed:
                    lines.append(line)
                    self.note(number, line)
                    self.changed.notify_all()

        thread = threading.Thread(target=read)
        thread.start()
        self.threads.append(thread)

    def note(self, number: int, line: str) -> None:
        """Note a line of the command on host `number`; the one that leads the job shows what all ranks say."""
        if match := re.search(r"joined \d+ as \d+ of \d+ (\d+)", line):
            for seat in said_by(line):
                self.pids[seat] = int(match[1])
        if match := re.search(r"generation (\d+) as (\d+) of (\d+) ", line):
            generation, rank, size = (int(word) for word in match.groups())
            self.ranks.setdefault(generation, set()).add(rank)
            if self.sizes.setdefault(generation, size) != size:
                self.halves.append(line)

    def wait(self, what: str, ready: Callable[[], object]) -> None:
        """Until it is ready."""
        with self.changed:
            if not self.changed.wait_for(ready, 90.0):
                everything = "".join(f"--- host {n}\n{''.join(lines)}" for n, lines in self.lines.items())
                raise AssertionError(f"{what} has not come; the commands said:\n{everything}")

    def is_whole(self, after: int, num_ranks: int) -> bool:
        """Whether so many ranks are in one generation, the newest, later than `after`."""
        newest = max(self.ranks, default=0)
        return newest > after and self.sizes[newest] == num_ranks == len(self.ranks[newest])

    @property
    def newest(self) -> int:
        return max(self.ranks, default=0)


def lose_something(listener: Listener, draw: random.Random, what: str) -> None:
    """One loss; returns when all are in one generation again."""
    made, host = listener.made, draw.choice((1, 2))
    what = f"{what} (host {host})"
    with listener.changed:
        before = listener.newest
    if "rank" in what:
        for seat in draw.sample(sorted(listener.pids), 2 if "ranks" in what else 1):
            os.kill(listener.pids[seat], signal.SIGKILL)
    elif "host is killed" in what:
        made.kill(host)
        listener.wait(what, lambda: listener.newest > before)
        made.start(host, SIZES[host])
        listener.listen(host)
    else:
        lines = listener.lines[host]
        told = len(lines)
        made.machines[host].cut_off()
        if "for long" in what:
            listener.wait(what, lambda: "waiting up to" in "".join(lines[told:]))
        made.machines[host].plug_in()
        if "for long" not in what:
            return  # nobody notices
    listener.wait(what, lambda: listener.is_whole(before, sum(SIZES)))


def test_whatever_is_lost_the_job_goes_on_and_is_whole_again(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """By hand: --host-losses 100."""
    count = request.config.getoption("host_losses")
    draw = random.Random(request.config.getoption("host_losses_seed"))
    with cluster(tmp_path, *SIZES, nnodes="1:3", env={"WAIT_S": "600"}, options=("--host-timeout", "1.5")) as made:
        listener = Listener(made)
        for line in made.first.lines:
            listener.note(0, line)
        first, before = made.first.running.process.pid, 0
        for number in range(count):
            what = draw.choice(("a rank", "two ranks", "a host is killed", "a link is cut for long", "a link is cut"))
            lose_something(listener, draw, f"loss {number}: {what}")
            if number == count // 2:
                before = len(os.listdir(f"/proc/{first}/fd"))
        assert len(os.listdir(f"/proc/{first}/fd")) < before + max(5, count // 4)
        made.first.order("finish")
        for thread in listener.threads:
            thread.join()
        codes = {number: job.running.process.wait() for number, job in made.jobs.items()}
        assert codes == dict.fromkeys(codes, 0), listener.lines[0][-20:]
        assert [job.running.survivors() for job in made.jobs.values()] == [[]] * len(made.jobs)
