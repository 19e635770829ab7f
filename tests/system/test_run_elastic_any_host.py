"""Any host of an elastic job is lost, leaves, is stopped or cut off, drawn at random: the one that leads, too.

It may be cut off in one direction only. Each host has a clock of its own; the second job has links of 2 Mbit/s.
The others go on each time, never two halves at once, and whoever is out comes back. By hand: --any-host-losses 200.
"""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from typing import Literal

import pytest
from tests.system.test_run_elastic_first_host import WAITS, await_standbys
from tests.system.test_run_elastic_hosts import Cluster, cluster
from tests.system.test_run_elastic_hosts_generated import Listener

from phalanx.testing import why_no_hosts

pytestmark = [pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()), pytest.mark.slow]

NUM_HOSTS = 5  # a majority of which is left, also where the last loss is not agreed on yet
WAYS = (
    "killed", "told to leave", "stopped", "cut off", "heard by nobody", "deaf to all", "cut off for a moment",
)  # fmt: skip
ONE_WAY: dict[str, Literal["sent", "received"]] = {"heard by nobody": "sent", "deaf to all": "received"}
IS_OUT = ("waiting up to", "this host leads the job, and does not go on")


class LedJob(Listener):
    """A `LedJob` knows which host leads the job now, too, and loses hosts of it."""

    def __init__(self, made: Cluster) -> None:
        self.leader = 0
        self.address = ""  # where hosts join a leader that was elected; the first host's stands in the command line
        super().__init__(made)
        for line in made.first.lines:
            self.note(0, line)

    def note(self, number: int, line: str) -> None:
        super().note(number, line)
        if match := re.search(r"this host leads the job now.* phalanx join (\S+)$", line):
            self.leader, self.address = number, match[1]

    def signal_host(self, number: int, signum: int) -> None:
        """Send a signal to every process of a host."""
        machine = self.made.machines[number]
        inode = f"net:[{os.stat(f'/run/netns/{machine.name}').st_ino}]"
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{name}/ns/net") == inode:
                    os.kill(int(name), signum)
            except OSError:
                continue

    def lose(self, number: int, way: str, what: str) -> None:
        """Lose a host; return once the others go on without it, and it is out or has ended."""
        process, before = self.made.jobs[number].running.process, self.newest
        told = len(self.lines[number])
        if way == "killed":
            process.kill()
        elif way == "told to leave":
            process.terminate()
        elif way == "stopped":
            self.signal_host(number, signal.SIGSTOP)
        else:
            self.made.machines[number].cut_off(ONE_WAY.get(way, ""))
        self.wait(f"{what}: the others go on", lambda: self.is_whole(before, NUM_HOSTS - 1))
        if way == "stopped":
            self.signal_host(number, signal.SIGCONT)
        elif way == "cut off" or way in ONE_WAY:
            self.made.machines[number].plug_in()

        def is_out() -> bool:
            said = "".join(self.lines[number][told:])
            return process.poll() is not None or any(text in said for text in IS_OUT)

        self.wait(f"{what}: it is out", is_out)
        if way == "told to leave":
            assert process.wait() == 128 + signal.SIGTERM, "".join(self.lines[number])

    def bring_back(self, number: int, what: str) -> None:
        """Have a host that has ended join again, unless it comes by itself; return once the job is whole."""
        process = self.made.jobs[number].running.process
        said = "".join(self.lines[number])
        if process.poll() is not None or IS_OUT[1] in said:
            process.wait()
            assert self.made.jobs[number].running.survivors() == []
            before = self.newest
            if self.address:
                self.made.join(number, self.address)
            else:
                self.made.start(number, 1)
            self.listen(number)
            self.wait(f"{what}: it comes back", lambda: self.is_whole(before, NUM_HOSTS))
        else:
            self.wait(f"{what}: it is taken in again", lambda: self.is_whole(0, NUM_HOSTS))


@pytest.mark.parametrize("rate", [None, "2mbit"])
def test_whichever_host_is_lost_the_others_go_on_and_it_comes_back(
    rate: str | None, tmp_path: Path, num_any_host_losses: int
) -> None:
    draw = random.Random(f"{num_any_host_losses} {rate}")
    options, sizes = ("--host-timeout", "3"), (1,) * NUM_HOSTS
    with cluster(tmp_path, *sizes, nnodes=f"1:{NUM_HOSTS}", env=WAITS, options=options, rate=rate) as made:
        await_standbys(made, 0)
        job = LedJob(made)
        for number in range(num_any_host_losses):
            way = draw.choice(WAYS)
            host = job.leader if draw.random() < 0.5 else draw.randrange(NUM_HOSTS)
            what = f"loss {number}: host {host}{', which leads,' * (host == job.leader)} is {way}"
            if way == "cut off for a moment":
                made.machines[host].cut_off()
                made.machines[host].plug_in()
                continue
            job.lose(host, way, what)
            job.bring_back(host, what)
            assert job.halves == [], what
        made.jobs[job.leader].order("finish")
        for thread in job.threads:
            thread.join()
        codes = {number: one.running.process.wait() for number, one in made.jobs.items()}
        assert codes == dict.fromkeys(codes, 0), "".join(job.lines[job.leader][-20:])
        assert [one.running.survivors() for one in made.jobs.values()] == [[]] * NUM_HOSTS
