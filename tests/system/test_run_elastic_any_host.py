"""Hosts of an elastic job are lost at random, the one that leads, too: killed, told to leave, stopped, or cut off.

Two may be lost one after the other, the second one in the recovery from the first, and one while another comes back.
A host may be cut off in one direction only, and each has clocks of its own. The others go on each time, never two
halves at once, and whoever is out comes back. By hand: --any-host-losses 200.
"""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest
from tests.system.test_run_elastic_first_host import ONE_WAY, WAITS, await_standbys
from tests.system.test_run_elastic_hosts import Cluster, cluster
from tests.system.test_run_elastic_hosts_generated import Listener

from phalanx.testing import why_no_hosts

pytestmark = [pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()), pytest.mark.slow]

WAYS = (
    "killed", "killed with all its ranks", "told to leave", "stopped", "cut off", "heard by nobody", "deaf to all",
    "cut off for a moment",
)  # fmt: skip
IS_OUT = ("waiting up to", "this host leads the job, and does not go on", "this host waits while the others choose")
MOST_TRIES = 5  # of a host to come back: the one that it comes to may be lost meanwhile


class LedJob(Listener):
    """A `LedJob` knows which host leads the job now, too, and loses hosts of it."""

    def __init__(self, made: Cluster, num_hosts: int, num_ranks: int) -> None:
        self.leader = 0
        self.address = ""  # where hosts join a leader that was elected; the first host's stands in the command line
        self.num_hosts, self.num_ranks = num_hosts, num_ranks
        self._told: dict[int, int] = {}  # how many lines a host had said before it was lost
        self._joins_at: dict[int, str] = {}  # the address at which a host that was lost joins
        self.may_be_led = True  # whether the leader has said who would lead in its place
        super().__init__(made)
        for line in made.first.lines:
            self.note(0, line)

    def note(self, number: int, line: str) -> None:
        super().note(number, line)
        if match := re.search(r"this host leads the job now.* phalanx join (\S+)$", line):
            self.leader, self.address, self.may_be_led = number, match[1], False
        if number == self.leader and "without this host, " in line:
            self.may_be_led = True

    def strike(self, number: int, way: str) -> None:
        """Begin the loss of a host."""
        process = self.made.jobs[number].running.process
        self._told[number] = len(self.lines[number])
        if way == "killed":
            process.kill()
        elif way == "killed with all its ranks":
            self.made.machines[number].signal(signal.SIGKILL)
        elif way == "told to leave":
            process.terminate()
        elif way == "stopped":
            self.made.machines[number].signal(signal.SIGSTOP)
        else:
            self.made.machines[number].cut_off(ONE_WAY.get(way, ""))

    def end_strike(self, number: int, way: str, what: str, *, alone: bool = True) -> None:
        """Let a host that is stopped or cut off go on; return once it is out or has ended.

        One that was told to leave may fail to, if it is not lost `alone`: its leader may be lost as well.
        """
        process = self.made.jobs[number].running.process
        if way == "stopped":
            self.made.machines[number].signal(signal.SIGCONT)
        elif way == "cut off" or way in ONE_WAY:
            self.made.machines[number].plug_in()
        self.wait(f"{what}: host {number} is out", lambda: process.poll() is not None or self.says_out(number))
        if way == "told to leave":
            codes = (128 + signal.SIGTERM, *(() if alone else (1,)))
            assert process.wait() in codes, "".join(self.lines[number])

    def says_out(self, number: int) -> bool:
        said = "".join(self.lines[number][self._told[number] :])
        return any(text in said for text in IS_OUT)

    def bring_back(self, number: int) -> None:
        """Have a host that has ended join again, unless it comes by itself."""
        job = self.made.jobs[number]
        if job.running.process.poll() is None and IS_OUT[1] not in "".join(self.lines[number][self._told[number] :]):
            return
        job.running.process.wait()
        job.running.wait_gone()
        self._told[number] = 0
        self._joins_at[number] = self.address
        if self.address:
            self.made.join(number, self.address)
        else:
            self.made.start(number, self.num_ranks)
        self.listen(number)

    def find_strays(self) -> list[int]:
        """Return the hosts that wait at the address of one that leads no more."""
        return [
            number
            for number, address in self._joins_at.items()
            if address != self.address
            and self.made.jobs[number].running.process.poll() is None
            and not any("of the job at" in line or "this one waits" in line for line in self.lines[number])
        ]

    def send_on(self) -> None:
        """Have the strays come to the host that leads now."""
        for number in self.find_strays():
            self.made.kill(number)
            self.made.jobs[number].running.process.wait()
            self.bring_back(number)

    def await_whole(self, what: str, after: int) -> None:
        """Return once all hosts train together, in a generation later than `after`, and another one could lead.

        A host whose leader was lost as it came tries again.
        """
        for _ in range(MOST_TRIES):
            ended = [number for number, job in self.made.jobs.items() if job.running.process.poll() is not None]
            for number in ended:
                self.bring_back(number)
            self.send_on()
            self.wait(
                f"{what}: all are back",
                lambda: (
                    self.is_whole(after, self.num_hosts * self.num_ranks)
                    or any(job.running.process.poll() is not None for job in self.made.jobs.values())
                    or self.find_strays()
                ),
            )
            if self.is_whole(after, self.num_hosts * self.num_ranks):
                self.wait(f"{what}: another one could lead", lambda: self.may_be_led)
                time.sleep(1.0)  # those that stand by may be others now
                return
        said = "".join(f"--- host {n}\n{''.join(lines)}" for n, lines in self.lines.items())
        raise AssertionError(f"{what}: not all hosts came back in {MOST_TRIES} tries; the commands said:\n{said}")


def draw_victims(job: LedJob, draw: random.Random) -> list[tuple[int, str]]:
    """Return who is lost, and how: at times two hosts, where the others are a majority."""
    chosen = [job.leader if draw.random() < 0.5 else draw.randrange(job.num_hosts)]
    if 2 * (job.num_hosts - 2) > job.num_hosts and draw.random() < 0.4:
        chosen.append(draw.choice([number for number in range(job.num_hosts) if number not in chosen]))
    return [(number, draw.choice(WAYS)) for number in chosen]


def lose(job: LedJob, draw: random.Random, what: str) -> None:
    """Lose one host or two, at once or one in the recovery from the other, and have them back."""
    victims = draw_victims(job, draw)
    what += ": " + " and ".join(
        f"host {number}{', which leads,' * (number == job.leader)} is {way}" for number, way in victims
    )
    before = job.newest
    for place, (number, way) in enumerate(victims):
        time.sleep(draw.choice((0.0, 0.3, 1.0, 3.0, 4.0)) if place else 0.0)
        job.strike(number, way)
        if way == "cut off for a moment":
            time.sleep(draw.choice((0.0, 1.0)))
            job.made.machines[number].plug_in()
    out = [(number, way) for number, way in victims if way != "cut off for a moment"]
    if not out:
        return
    left = (job.num_hosts - len(out)) * job.num_ranks
    job.wait(f"{what}: the others go on", lambda: job.is_whole(before, left))
    after = job.newest
    time.sleep(draw.choice((0.0, 0.0, 5.0)))
    for number, way in out:
        job.end_strike(number, way, what, alone=len(victims) == 1)
        job.bring_back(number)
    if draw.random() < 0.3:  # another one is lost while they come back
        time.sleep(draw.choice((0.0, 1.0, 3.0)))
        staying = [number for number in range(job.num_hosts) if number not in dict(out)]
        third = job.leader if job.leader in staying and draw.random() < 0.5 else draw.choice(staying)
        majority = 2 * (job.num_hosts - len(out) - 1) > job.num_hosts - len(out)
        if majority and job.num_hosts - len(out) >= 3 and (third != job.leader or job.may_be_led):
            what += f"; host {third}{', which leads,' * (third == job.leader)} is killed meanwhile"
            after = job.newest
            job.strike(third, "killed")
            job.end_strike(third, "killed", what)
            if third == job.leader:
                job.wait(f"{what}: another one leads", lambda: job.leader != third)
            job.bring_back(third)
    job.await_whole(what, after)
    assert job.halves == [], what


@pytest.mark.parametrize(
    ("num_hosts", "num_ranks", "rate"),
    [(5, 1, "1gbit"), (5, 1, "2mbit"), (3, 2, "1gbit"), (3, 1, "1gbit"), (5, 2, "1gbit")],
)
def test_whichever_hosts_are_lost_the_others_go_on_and_they_come_back(
    num_hosts: int, num_ranks: int, rate: str, tmp_path: Path, num_any_host_losses: int
) -> None:
    draw = random.Random(f"{num_any_host_losses} {num_hosts} {num_ranks} {rate}")
    options, sizes = ("--host-timeout", "3"), (num_ranks,) * num_hosts
    with cluster(tmp_path, *sizes, nnodes=f"1:{num_hosts}", env=WAITS, options=options, rate=rate) as made:
        await_standbys(made, 0)
        job = LedJob(made, num_hosts, num_ranks)
        for number in range(num_any_host_losses):
            lose(job, draw, f"loss {number}")
        job.await_whole("the end", 0)
        made.jobs[job.leader].order("finish")
        for thread in job.threads:
            thread.join()
        codes = {number: one.running.process.wait() for number, one in made.jobs.items()}
        assert codes == dict.fromkeys(codes, 0), "".join(job.lines[job.leader][-20:])
        assert [one.running.survivors() for one in made.jobs.values()] == [[]] * num_hosts
