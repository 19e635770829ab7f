"""`phalanx.init()`: as the rank that something says this process is, alone where nothing does, refused in between.

It trained alone, without a word, in tasks of `srun`, with WORLD_SIZE and no RANK, inside mp.spawn; all ranks of what
was meant as one job wrote the same checkpoint.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.containers import hide_proc, why_no_containers
from tests.on_ranks import on_ranks

import phalanx
from phalanx.errors import DeadlineError, PhalanxError
from phalanx.testing import RankFailed, run_ranks

TASK = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}


def _total(**given):
    with phalanx.init(timeout=30, **given) as job:
        total = torch.ones(1)
        dist.all_reduce(total)
        return job.rank, job.world_size, job.local_rank, total.item()


def _under_slurm(rank, world_size, job_id):
    task = {**TASK, "SLURM_JOB_ID": job_id, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    os.environ.update(task)
    return [_total(), _total(backend="gloo")]


def test_two_tasks_of_slurm_are_one_job(tmp_path) -> None:
    job_id = str(os.getpid())  # a number of ours, should these tests run twice at once
    for rank, results in enumerate(run_ranks(_under_slurm, 2, job_id, init=False)):
        assert results == [(rank, 2, rank, 2.0)] * 2


def _on_hosts_without_names(rank, world_size):
    os.environ.update(TASK, SLURM_PROCID="1", SLURM_STEP_NUM_NODES="2", SLURM_STEP_NODELIST="no-such-host[1-2]")
    os.environ["WORLD_SIZE"] = "3"
    with pytest.raises(ValueError, match="Slurm started 2 processes, but the environment has WORLD_SIZE=3"):
        phalanx.init(timeout=5)
    os.environ["WORLD_SIZE"] = "2"
    phalanx.init(timeout=5)


def test_hosts_of_slurm_that_have_no_address_are_told_to_set_one() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_on_hosts_without_names, 1, init=False)
    message = str(caught.value.errors[0])
    assert (
        "on rank 1 of 2: the ranks are on several hosts, but the name of the first host, 'no-such-host1', does not"
        in message
    )
    assert "Set MASTER_ADDR" in message


def _spawned(rank, world_size, folder):
    with pytest.raises(ValueError, match=r"one of several \(it was started by multiprocessing") as caught:
        phalanx.init()
    assert "phalanx.init(rank=rank, world_size=n)" in str(caught.value)
    results = [_total(rank=rank, world_size=world_size) for _ in range(2)]
    results.append(_total(rank=rank, world_size=world_size, init_method=f"file://{folder}/store"))
    results.append(_total(rank=0, world_size=1))
    (folder / str(rank)).write_text(str(results))


def _trial(number, folder) -> None:
    ranks = [mp.get_context("fork").Process(target=_rank_of_trial, args=(rank, number, folder)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


def _rank_of_trial(rank, number, folder) -> None:
    with phalanx.init(rank=rank, world_size=2, timeout=60):
        total = torch.full((1,), float(number))
        for _ in range(20):
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
    (folder / f"{number}-{rank}").write_text(str(total.item()))


def test_two_trials_of_one_program_that_spawn_ranks_at_once_do_not_mix(tmp_path) -> None:
    """All descendants of a process have its key: ranks of both met under one name, and reduced with each other's."""
    trials = [mp.get_context("fork").Process(target=_trial, args=(number, tmp_path)) for number in range(3)]
    for trial in trials:
        trial.start()
    for trial in trials:
        trial.join()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        f"{number}-{rank}": str(float(number)) for number in range(3) for rank in range(2)
    }


@pytest.mark.slow
def test_processes_that_a_program_starts_join_through_it(tmp_path) -> None:
    mp.spawn(_spawned, (3, tmp_path), nprocs=3)
    for rank in range(3):
        assert (tmp_path / str(rank)).read_text() == str([(rank, 3, rank, 3.0)] * 3 + [(0, 1, 0, 1.0)])


def _alone_of_two(rank, world_size):
    with pytest.raises(DeadlineError) as caught:
        phalanx.init(rank=rank, world_size=3, timeout=0.5)
    return caught.value.missing, str(caught.value)


def test_a_sibling_that_never_comes_is_named() -> None:
    (first, said), (second, _) = run_ranks(_alone_of_two, 2, init=False)
    assert first == (2,)
    assert "under multiprocessing on rank 0" in said
    assert second in ((2,), (0, 2), (0,))  # rank 0 gives up a little earlier, or later


@pytest.mark.skipif(bool(why_no_containers()), reason=why_no_containers())
@on_ranks(2, init=False)
def test_without_proc_the_ranks_are_told_at_once_what_is_missing(rank, world_size) -> None:
    """They were silent for 307 s, whatever the timeout: torch looks for the file of its store for five minutes."""
    hide_proc()
    with pytest.raises(PhalanxError) as caught:
        phalanx.init(rank=rank, world_size=world_size, timeout=60)
    said = str(caught.value)
    assert f"on rank {rank}: the job's store is in anonymous memory, which ranks open through /proc" in said
    assert "Mount /proc, or set MASTER_ADDR and MASTER_PORT." in said


def _meet_without_proc(rank, world_size, folder):
    hide_proc()
    with phalanx.init(rank=rank, world_size=world_size, init_method=f"file://{folder}/store"):
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item(), dist.group.WORLD.shares_memory


@pytest.mark.skipif(bool(why_no_containers()), reason=why_no_containers())
def test_without_proc_ranks_with_an_address_meet_and_share_no_memory(tmp_path) -> None:
    """Each ended in a FileNotFoundError of /proc/self/fd, before it had said anything."""
    assert run_ranks(_meet_without_proc, 2, tmp_path, init=False) == [(2.0, False)] * 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rank": 1}, "rank and world_size go together"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"rank": 1, "world_size": 2}, "has no rendezvous address"),
        ({"init_method": "tcp://localhost:1"}, "the rank of this process is unknown"),
    ],
)
def test_a_wrong_call_is_refused_before_anybody_waits(given, said) -> None:
    with pytest.raises(ValueError, match=said):
        phalanx.init(**given)


@pytest.mark.slow
def test_a_script_that_nobody_launched_is_alone_and_one_with_half_of_the_variables_is_not() -> None:
    code = "import phalanx; print(phalanx.init())"
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    batch = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    for variables, alone in (({}, True), (batch, True), ({"WORLD_SIZE": "2"}, False)):
        said = subprocess.run([sys.executable, "-c", code], env={**plain, **variables}, capture_output=True, text=True)
        assert ("Job(rank=0, world_size=1" in said.stdout) == alone, said.stderr
        assert ("this process is one of several (WORLD_SIZE=2 in the environment)" in said.stderr) != alone
