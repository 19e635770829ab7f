"""An elastic job loses ranks and goes on: real processes that speak the protocol, and real kills."""

import os
import re
import select
import signal
import socket
from pathlib import Path

import pytest
from tests.system.elastic_job import Job, elastic_job
from tests.system.phalanx_command import Finished, run, said_by, write_script


@pytest.mark.slow
def test_lost_ranks_are_replaced_one_after_the_other_and_the_job_ends_well(tmp_path: Path) -> None:
    with elastic_job(tmp_path) as job:
        first = job.kill(1)
        job.wait_joined(1, 1)
        job.wait_generation(1, 3)
        job.kill(0)
        job.wait_joined(2, 0)
        job.wait_generation(2, 3)
        second = job.pids[2]
        job.order("exit-2")
        job.wait_joined(3, 2)
        job.wait_generation(3, 3)
        finished = job.finish()
    assert finished.code == 0, finished.err
    assert f"rank 1 (pid {first}) is lost: SIGKILL" in finished.err
    assert f"rank 2 (pid {second}) is lost: exit code 7" in finished.err
    assert finished.err.count("3 ranks continue, ") == 3


@pytest.mark.slow
def test_without_replacements_fewer_ranks_go_on_and_below_the_minimum_they_save_and_end(tmp_path: Path) -> None:
    with elastic_job(tmp_path, "--max-restarts", "0", env={"MIN_RANKS": "2"}) as job:
        job.kill(0)
        job.wait_generation(1, 2)  # ranks 1 and 2 are 0 and 1 now
        os.kill(job.pids[1], signal.SIGKILL)
        job.wait("told to end: only 1 of at least 2 ranks are left")
        finished = job.running.finish()
        assert job.running.survivors() == []
    assert finished.code == 75, finished.err
    assert "2 ranks continue without" in finished.err
    assert "1 of at least 2 ranks, and no rank can be replaced (--max-restarts 0 is used up)" in finished.err
    assert "2 ranks were lost during the run:\n  rank 0 (pid " in finished.err
    assert "First failure" not in finished.err


@pytest.mark.slow
def test_an_exception_that_a_replacement_raises_again_is_told_and_ends_the_job(tmp_path: Path) -> None:
    with elastic_job(tmp_path) as job:
        job.order("raise-1")
        job.wait_joined(1, 1)
        job.wait_generation(1, 3)
        job.order("raise-1")
        finished = job.running.finish()
        assert job.running.survivors() == []
    assert finished.code == 1
    assert "rank 1 has raised the same exception at the same step again, and is not replaced" in finished.err
    assert "First failure: rank 1 of 3" in finished.err
    assert "[1] Traceback" not in finished.err  # the command prints it, when the rank is lost and at the end
    assert finished.err.count("\nTraceback (most recent call last") == 2
    assert finished.err.rstrip().endswith("ValueError: the sample is bad")


def test_what_all_ranks_raise_fails_the_job_at_once(tmp_path: Path) -> None:
    with elastic_job(tmp_path, ranks=2) as job:
        for rank in range(2):
            job.order(f"raise-{rank}")
        finished = job.running.finish()
        assert job.running.survivors() == []
    assert finished.code == 1
    assert "First failure: rank " in finished.err
    assert "ValueError: the sample is bad" in finished.err


def find_zygote(job: Job, rank: int = 0) -> int:
    with open(f"/proc/{job.pids[rank]}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def wait_gone(pid: int) -> None:
    """Until a process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([fd], [], [])
    finally:
        os.close(fd)


def test_what_a_lost_rank_has_started_is_ended_with_it(tmp_path: Path) -> None:
    with elastic_job(tmp_path, env={"CHILD": "1"}) as job:
        child = {rank: int(job.wait(rf"child (\d+) of {rank}")[0][1]) for rank in range(3)}
        job.kill(1)
        wait_gone(child[1])
        job.wait_joined(1, 1)
        os.kill(find_zygote(job), signal.SIGKILL)
        job.kill(2)
        wait_gone(child[2])
        assert os.path.exists(f"/proc/{child[0]}")
        job.wait_joined(2, 2)
        assert job.finish().code == 0


@pytest.mark.slow
def test_a_stopped_rank_is_evicted_and_replaced(tmp_path: Path) -> None:
    with elastic_job(tmp_path, "--evict-after", "0.5") as job:
        job.order("stop-1")
        job.wait_joined(1, 1)
        job.wait_generation(1, 3)
        finished = job.finish()
    assert finished.code == 0, finished.err
    assert "stopped (SIGSTOP or Ctrl-Z)" in finished.err
    assert re.search(
        r"rank 1 \(pid \d+\) is lost: killed: it was inactive for .* s \(--evict-after 0.5\)", finished.err
    )


DEADLOCKED = """
import threading
import torch.distributed as dist

def wait_for_myself():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

dist.init_process_group("phalanx")
dist.barrier()
if dist.get_rank() == 1:
    wait_for_myself()
dist.barrier()
"""


@pytest.mark.slow
def test_a_rank_that_waits_for_itself_is_killed_and_told_with_its_stack(tmp_path: Path) -> None:
    script = write_script(tmp_path, DEADLOCKED)
    finished = run("--evict-after", "5", "--nproc-per-node", "3", script)
    assert finished.code == 128 + signal.SIGKILL
    assert "First failure: rank 1 of 3" in finished.err
    assert "It was killed: ranks 0, 2 wait for rank 1" in finished.err
    assert "barrier #" in finished.err
    assert "in wait_for_myself" in finished.err


@pytest.mark.slow
def test_a_loss_after_training_is_a_failure_that_lets_the_others_save(tmp_path: Path) -> None:
    (tmp_path / "save").touch()
    with elastic_job(tmp_path) as job:
        job.order("finish")
        finished = job.running.finish()
        assert job.running.survivors() == []
    assert finished.code == 128 + signal.SIGKILL
    assert sum(len(said_by(line)) for line in finished.out.splitlines() if "saved" in line) == 2
    assert "First failure: rank 1 of 3" in finished.err


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_not_heard(tmp_path: Path) -> None:
    nobody = 65534
    with elastic_job(tmp_path) as job:
        pattern = rf"@(phalanx-agent-{job.running.process.pid}-\w+)"  # which anybody can read
        name = re.findall(pattern, Path("/proc/net/unix").read_text())[0]
        pid = os.fork()
        if pid == 0:
            os.setuid(nobody)
            try:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(f"\0{name}")
                    os._exit(0 if sock.recv(100) == b"" else 1)
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        job.kill(1)
        job.wait_joined(1, 1)
        job.wait_generation(1, 3)
        finished = job.finish()
    assert finished.code == 0
    assert f"a process of user {nobody} (pid {pid}) has connected to the job of another user" in finished.err


LOST_BEFORE = """
import os, signal, sys, time
from pathlib import Path
import torch, phalanx
from phalanx import elastic
waits, struck = Path(sys.argv[1], "waits"), Path(sys.argv[1], "struck")
job = phalanx.init(timeout=60.0)
model = phalanx.DistributedDataParallel(torch.nn.Linear(2, 1), check=False)
state = elastic.State(model=model)
if job.rank == 0:
    group_start = elastic.group.ElasticGroup.start
    def start(group):
        waits.touch()
        group_start(group)
    elastic.group.ElasticGroup.start = start
elif not struck.exists():
    while not waits.exists():
        time.sleep(0.01)
    struck.touch()
    os.kill(os.getpid(), signal.SIGKILL)
print("trained", elastic.run(state)(lambda state: job.rank)())
"""


@pytest.mark.slow
def test_all_ranks_start_again_if_one_is_killed_while_another_waits_in_elastic_run(tmp_path: Path) -> None:
    """The job ended: the waiting rank's report of the loss, with step 0, counted as a step."""
    finished = run("--nproc-per-node", "2", write_script(tmp_path, LOST_BEFORE), str(tmp_path))
    assert finished.code == 0, finished.out + finished.err
    assert "starting all 2 ranks again (a rank was lost before all ranks had begun to train)" in finished.err
    assert {said for line in finished.out.splitlines() if "trained" in line for said in said_by(line)} == {0, 1}


TWO_RUNS = """
import os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist, phalanx
from phalanx import elastic
struck = Path(sys.argv[1], "struck")

def make(run):
    model = phalanx.DistributedDataParallel(torch.nn.Linear(2, 1), check=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def train(state):
        while state.step < 4:
            if (os.environ["STRIKE"], state.step, dist.get_rank()) == (run, 2, 1) and not struck.exists():
                struck.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.commit()
        return state.step
    train.__name__ = run
    return elastic.run(elastic.State(model=model, optimizer=optimizer), wait_s=600.0)(train)

with phalanx.init(timeout=60.0):
    print("first", make("first")())
    print("second", make("second")())
"""


def run_twice_in_a_script(folder: Path, strike: str) -> Finished:
    script = write_script(folder, TWO_RUNS)
    env = {"OMP_NUM_THREADS": "1", "STRIKE": strike}
    finished = run("--nproc-per-node", "2", script, str(folder), env=env)
    assert (folder / "struck").exists()
    return finished


@pytest.mark.slow
def test_a_rank_that_is_lost_in_the_first_run_is_replaced_and_the_second_run_follows(tmp_path: Path) -> None:
    finished = run_twice_in_a_script(tmp_path, "first")
    assert finished.code == 0, finished.out + finished.err
    for line in ("first 4", "second 4"):
        assert {rank for text in finished.out.splitlines() if line in text for rank in said_by(text)} == {0, 1}


@pytest.mark.slow
def test_a_rank_that_is_lost_in_the_second_run_ends_the_job_with_the_advice_to_make_them_one(tmp_path: Path) -> None:
    finished = run_twice_in_a_script(tmp_path, "second")
    said = finished.out + finished.err
    assert finished.code != 0
    assert "First failure: rank 1 of 2" in finished.err
    assert "second is the second elastic.run of this script, so the loss of a rank in it ends the job" in said
    assert "Put both runs into one function" in said
    assert "second 4" not in finished.out
