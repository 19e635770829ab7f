"""`phalanx top` on real jobs: it sees what they do, in a pipe, for programs and on a terminal, until they end."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.system.hanging import _HANG
from tests.system.phalanx_command import BATCHES, start, write_script

from phalanx._job.inspect.top.view import SHARES
from phalanx.testing import hosts, why_no_hosts

# Rank 1 is the slow one.
_TRAIN = f"""
import os, sys, time, torch, torch.distributed as dist, phalanx
dist.init_process_group("phalanx")
rank = dist.get_rank()
model = phalanx.DistributedDataParallel(torch.nn.Linear(8, 8))
{BATCHES}
print("running", flush=True)
for x in phalanx.progress(batches(), total=1_000_000, live=False) if "progress" in sys.argv else batches():
    model(x).sum().backward()
    time.sleep(0.06 if rank == 1 else 0.001)
"""


def top(*words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "phalanx.cli", "top", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def wait_for(job: str, said: Callable[[dict[str, Any]], bool], before: tuple[str, ...] = ()) -> dict[str, Any]:
    """What `phalanx top --json` says once it says that; the test's own timeout ends the wait."""
    while True:
        done = top(job, "--json", before=before)
        assert done.returncode == 0, done.stderr
        seen: dict[str, Any] = json.loads(done.stdout)
        if said(seen):
            return seen


@dataclass
class Terminal:
    """`phalanx top` on a terminal of its own; `said` is all that it has drawn."""

    process: subprocess.Popen[bytes]
    fd: int
    said: str = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def read_until(self, pattern: str) -> str:
        """What is drawn from now on, up to where it matches."""
        fresh = ""
        while not re.search(pattern, fresh):
            fresh += self._read()
        return fresh

    def _read(self) -> str:
        data = os.read(self.fd, 65536).decode(errors="replace")
        assert data, f"it ended; it said: {self.said}"
        self.said += data
        return data

    def end(self) -> int:
        """Read to the end; its exit code."""
        try:
            while True:
                self._read()
        except OSError:  # nobody has the other side open any more
            return self.process.wait()

    @property
    def mode(self) -> list[Any]:
        return termios.tcgetattr(self.fd)


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "phalanx.cli", "top", *words],
            stdin=theirs, stdout=theirs, stderr=theirs, env={**kept, "TERM": "xterm-256color"}, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # the one that tells of its new size
        )  # fmt: skip
        os.close(theirs)
        with process:
            try:
                yield Terminal(process, ours)
            finally:
                process.kill()
    finally:
        os.close(ours)


@pytest.mark.slow
def test_a_job_that_trains_is_seen_in_a_pipe_by_programs_and_on_a_terminal_until_it_ends(tmp_path: Path) -> None:
    script, over = write_script(tmp_path, _TRAIN), tmp_path / "over"
    with start("run", "--nproc-per-node", "3", "--max-restarts", "2", script, str(over), "progress") as running:
        running.read_until_all("running", 3)
        job = str(running.process.pid)
        seen = wait_for(job, lambda seen: seen["slowest"] is not None and seen["samples_per_s"] is not None)
        assert seen["slowest"]["rank"] == 1
        assert seen["target"] == script
        assert (seen["world_size"], seen["restart_count"], seen["max_restarts"]) == (3, 0, 2)
        assert [rank["rank"] for rank in seen["ranks"]] == [0, 1, 2]
        for rank in seen["ranks"]:
            assert (rank["steps_of"], rank["total_steps"]) == ("phalanx.progress", 1_000_000)
            assert rank["memory_bytes"] > 1 << 20
            assert rank["memory_is_pss"]
            assert 0.99 < sum(rank[share] or 0.0 for share in SHARES) < 1.01
        later = wait_for(script, lambda later: later["step"] > seen["step"])  # by its name, as well
        assert later["pid"] == running.process.pid

        plain = top(job).stdout.splitlines()
        assert re.fullmatch(rf"Job {job}: script\.py, 3 of 3 ranks running, for \d+:\d\d", plain[0])
        assert re.fullmatch(
            r"step [\d,]+ of 1,000,000, [\d.]+ steps/s, [\d.,]+ samples/s, .* left in this loop", plain[1]
        )
        assert plain[2] == "restarts 0 of 2, generation 0"
        assert plain[-4].split()[:2] == ["rank", "pid"]
        assert [line.split()[0] for line in plain[-3:]] == ["0", "1", "2"]
        assert "\x1b" not in "".join(plain)

        with terminal(job) as view:
            usual = view.mode
            view.read_until(r"rank +pid +step")
            assert not view.mode[3] & termios.ECHO
            view.resize(40, 10)
            assert "pid" not in view.read_until(r"rank +step[^\n]*\n(?s:.)*q: quit")[-500:]
            view.press("s")
            view.read_until("s: order by rank")
            view.press("q")
            assert view.end() == 0
            assert view.said.rstrip().endswith("\x1b[?25h\x1b[?1049l")  # cursor and screen as they were
        with terminal(script) as view:
            view.read_until("step")
            assert view.mode != usual
            view.process.send_signal(signal.SIGINT)
            assert view.end() == 0
        with terminal(job) as view:
            view.read_until("step")
            over.touch()
            assert view.end() == 0
            assert re.search(rf"Job {job}: .*\n(?s:.)*Job {job} has ended\.\s+$", view.said)
        finished = running.finish()
    assert finished.code == 0, finished.err
    gone = top(job)
    assert gone.returncode == 2
    assert f"{job} is not the pid of a `phalanx run` of yours on this host" in gone.stderr


@pytest.mark.slow
def test_who_waits_for_whom_and_who_is_stopped_is_said_without_a_change_in_the_script(tmp_path: Path) -> None:
    script = write_script(tmp_path, _HANG)
    with start("run", "--nproc-per-node", "3", script) as running:
        running.read_until_all("running", 3)
        job = str(running.process.pid)
        seen = wait_for(job, lambda seen: seen["stuck"] is not None and len(seen["stuck"]["inside"]) == 2)
        assert seen["stuck"]["inside"] == [0, 2]
        assert seen["stuck"]["missing"] == [1]
        asleep = wait_for(job, lambda seen: (seen["ranks"][1]["idle"] or 0.0) > 0.5)
        assert asleep["ranks"][1]["computing"] < 0.5
        assert re.fullmatch(r"all_reduce #8 \(.*script\.py:9\)", seen["stuck"]["operation"])
        assert seen["step"] is None
        os.kill(seen["ranks"][2]["pid"], signal.SIGSTOP)
        wait_for(job, lambda seen: seen["ranks"][2]["state"] == "T")
        said = top(job).stdout
        assert re.search(r"ranks 0, 2 wait in all_reduce #8 \(script\.py:9\) for .* s; rank 1 has not reached it", said)
        assert re.search(r"^ +1 .* after all_reduce #7 \(script\.py:5\)$", said, re.MULTILINE)
        assert re.search(r"^ +2 .* stopped \(SIGSTOP or Ctrl-Z\)$", said, re.MULTILINE)
        running.process.send_signal(signal.SIGTERM)
        running.finish()


_ELASTIC = """
import os, sys, torch, torch.distributed as dist, phalanx
from phalanx import elastic
dist.init_process_group("phalanx")
model = phalanx.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
state = elastic.State(model=model, optimizer=optimizer)
@elastic.run(state)
def train(state):
    for epoch in state.epochs(1_000_000):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            state.commit()
train(state)
"""


@pytest.mark.slow
def test_an_elastic_job_shows_its_steps_its_generation_and_whom_it_has_lost(tmp_path: Path) -> None:
    script = write_script(tmp_path, _ELASTIC)
    with start("run", "--nproc-per-node", "2", "--max-restarts", "2", script) as running:
        job = ""
        while not job:  # until its socket is there
            job = str(running.process.pid) if top(str(running.process.pid)).returncode == 0 else ""
        before = wait_for(job, lambda seen: seen["steps_of"] == "phalanx.elastic.State" and seen["step"] > 5)
        assert (before["generation"], before["lost"]) == (0, [])
        lost = before["ranks"][1]["pid"]
        os.kill(lost, signal.SIGKILL)
        after = wait_for(
            job,
            lambda seen: (
                seen["generation"] == 1
                and seen["lost"] != []
                and len(seen["ranks"]) == 2
                and lost not in [rank["pid"] for rank in seen["ranks"]]
            ),
        )
        assert [(each["rank"], each["pid"]) for each in after["lost"]] == [(1, lost)]
        assert "SIGKILL" in after["lost"][0]["why"]
        assert after["ranks"][0]["pid"] == before["ranks"][0]["pid"]
        wait_for(job, lambda seen: (seen["step"] or 0) > before["step"] + 5 and len(seen["ranks"]) == 2)
        assert re.search(
            rf"lost so far: 1 rank, the last one rank 1 \(pid {lost}\), 0:\d\d ago: SIGKILL", top(job).stdout
        )
        running.process.send_signal(signal.SIGTERM)
        running.finish()


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_the_ranks_of_all_hosts_are_shown_on_the_first_and_no_job_is_said(tmp_path: Path) -> None:
    from tests.system.host_commands import commands, numbered

    script, over = write_script(tmp_path, _TRAIN), tmp_path / "over"
    with hosts(2) as machines:
        nothing = top(before=machines[0].command)
        assert (nothing.returncode, nothing.stdout) == (1, "")
        assert "no job of yours is running on this host" in nothing.stderr
        arguments = numbered(machines, script=(script, str(over), "progress"), nproc="1")
        with commands(machines, *arguments) as jobs:
            jobs[0].read_until_all("running", 2)
            first, second = (str(job.process.pid) for job in jobs)
            seen = wait_for(first, lambda seen: seen["slowest"] is not None and seen["step"] > 3, machines[0].command)
            assert seen["slowest"]["rank"] == 1
            assert seen["num_hosts"] == 2
            assert [rank["node"] for rank in seen["ranks"]] == [0, 1]
            assert "10.77.0.2" in seen["ranks"][1]["host"]
            assert {rank["steps_of"] for rank in seen["ranks"]} == {"phalanx.progress"}
            said = top(first, before=machines[0].command).stdout
            assert "2 of 2 ranks running on 2 hosts" in said
            assert re.search(r"\(10\.77\.0\.2\): rank 1, \d+ MiB\n +1 ", said)
            there = top(second, before=machines[1].command).stdout
            assert "Ranks of 1 other host are shown on the host that leads the job, usually the first" in there
            assert "1 of 2 ranks running on 2 hosts" in there
            over.touch()
            for job in jobs:
                assert job.finish().code == 0


@pytest.mark.slow
def test_a_name_with_escape_codes_is_shown_as_text(tmp_path: Path) -> None:
    """It cleared the screen of whoever asked."""
    script = tmp_path / "clear\x1b[2J\x1b]0;title\x07.py"
    script.write_text(_HANG)
    with start("run", "--nproc-per-node", "2", str(script)) as job:
        job.read_until_all("running", 2)
        for command in ("top", "stacks"):
            words = [command, str(job.process.pid), *(["--once"] if command == "top" else [])]
            done = subprocess.run([sys.executable, "-m", "phalanx.cli", *words], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert "clear\\x1b[2J\\x1b]0;title" in done.stdout  # rich leaves the bell out
            assert not {"\x1b", "\x07"} & set(done.stdout)
        refused = subprocess.run([sys.executable, "-m", "phalanx.cli", "stacks", "1"], capture_output=True, text=True)
        assert "clear\\x1b[2J" in refused.stderr
        assert "\x1b" not in refused.stderr
        found = subprocess.run(
            [sys.executable, "-m", "phalanx.cli", "stacks", script.stem], capture_output=True, text=True
        )
        assert "2 of 2 ranks running" in found.stdout, found.stderr
