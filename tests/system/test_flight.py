"""What a job's ranks were doing can be seen from outside: while they hang, after they died, and when all went well."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.system.phalanx_command import run, start, write_script

from phalanx._job.agent import worker

HANG = """
import threading, torch, torch.distributed as dist
dist.init_process_group("phalanx")
tensor = torch.ones(2, 3)
dist.all_reduce(tensor)
def forget_to_call():
    print("waiting", flush=True)
    threading.Event().wait()
if dist.get_rank() == 1:
    forget_to_call()
dist.all_reduce(tensor)
"""


def stacks(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx.cli", "stacks", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_hang_is_seen_while_it_lasts_and_told_when_it_is_ended(tmp_path: Path) -> None:
    script = write_script(tmp_path, HANG)
    with start("run", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs"), script) as running:
        running.read_until("waiting")
        waited = None
        while waited is None or float(waited.group(1)) < 1.5:  # the command's own answer is our clock
            shown = stacks(str(running.process.pid))
            assert shown.returncode == 0, shown.stderr
            waited = re.search(r"has been in all_reduce #2 \(.+script\.py:11\) for (\S+) s", shown.stdout)
        ranks = re.split(r"^rank \d.*\n", shown.stdout, flags=re.MULTILINE)
        assert ranks[0] == f"Job {running.process.pid}: {script}, 2 of 2 ranks running\n\n"
        assert "last finished all_reduce #1" in ranks[2]
        assert 'script.py", line 11 in <module>' in ranks[1]
        assert 'script.py", line 8 in forget_to_call' in ranks[2]
        assert worker.__file__ not in shown.stdout
        running.process.send_signal(signal.SIGINT)
        finished = running.finish()
    assert re.search(
        r"Last in group '0' \(flight recorder\):\n"
        r"  rank 0 waited in all_reduce #2 \(.+script\.py:11\) for \d+\.\d s, until it was interrupted\n"
        r"  rank 1 last finished all_reduce #1 \(.+script\.py:5\)",
        finished.err,
    )


DIE = """
import os, signal, sys, torch, torch.distributed as dist
dist.init_process_group("phalanx")
rank, tensor = dist.get_rank(), torch.ones(2, 3)
pair = dist.new_group([1, 2])
dist.all_reduce(tensor)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if rank:
    dist.barrier(pair)
    works = [dist.isend(tensor, 3 - rank), dist.irecv(torch.empty(2, 3), 3 - rank)]
    for work in works:
        work.wait()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_each_rank_was_doing_is_told_and_kept_when_one_is_killed_and_when_all_goes_well(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    script = write_script(tmp_path, DIE)
    finished = run("--nproc-per-node", "3", "--max-restarts", "1", "--log-dir", str(logs), script)
    assert finished.code == 0, finished.err
    told = finished.err.partition("First failure: rank 1 of 3")[0]
    assert "Last in group '0' (flight recorder):\n  rank 0 waited in barrier #2" in told
    assert re.search(r"rank 1 last finished all_reduce #1 \(.+script\.py:6\)", told)
    assert re.search(r"Last in group '1' .*\n.*rank 1 had called nothing yet\n  rank 2 waited in barrier #1", told)
    assert re.search(r"rank 0: (phalanx\.errors\.)?PeerLostError: barrier #2 in group '0' on rank 0: rank 1 ", told)

    failed = json.loads((logs / "flight_attempt_0.json").read_text())
    killed = failed["groups"][0]["ranks"][1]
    assert (killed["rank"], killed["left"], len(killed["operations"])) == (1, False, 1)
    operation = killed["operations"][0]
    assert (operation["operation"], operation["dtype"], operation["shape"]) == ("all_reduce", "float32", [2, 3])
    assert operation["enter_ns"] <= operation["leave_ns"] <= killed["ended_ns"] <= failed["taken_ns"]

    kept = json.loads((logs / "flight.json").read_text())
    assert [[rank["rank"] for rank in group["ranks"]] for group in kept["groups"]] == [[0, 1, 2], [1, 2]]
    assert all(rank["left"] for group in kept["groups"] for rank in group["ranks"])
    messages = [operation for operation in kept["groups"][0]["ranks"][2]["operations"] if operation["peer"] is not None]
    assert sorted((message["operation"], message["peer"]) for message in messages) == [("recv", 1), ("send", 1)]


def test_a_job_that_is_not_there_is_said_to_be_so() -> None:
    shown = stacks("1")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "1 is not the pid of a `phalanx run` of yours on this host" in shown.stderr
