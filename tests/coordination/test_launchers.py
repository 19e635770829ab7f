"""Who started this process, read from what launchers set.

`phalanx.init()` trained alone, without a word, under what `srun` sets, with WORLD_SIZE but no RANK, inside mp.spawn:
each process for itself, and all wrote one checkpoint. The variables here are those of Slurm 22.05, seen in real steps.
"""

import os
import subprocess
import sys

import pytest

from phalanx._comm.rendezvous import launchers
from phalanx._comm.rendezvous.launchers import LaunchedProcess, find_incomplete_environment, find_launch, first_of

BODY = {  # of a batch script of four tasks; plain `python train.py` there is one process
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "3,1",
}
STEP = {
    **BODY,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_NODEID": "1",
}
PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "17.0"}


def test_a_step_of_slurm_says_which_task_this_is_and_where_the_first_one_runs() -> None:
    launch = find_launch(STEP)
    assert launch == LaunchedProcess("Slurm", 3, 4, 0, 1, "slurm-17.0", "n1", launch.port)
    assert 20000 <= launch.port < 30000
    assert launch.port == find_launch({**STEP, "SLURM_PROCID": "0"}).port
    assert launch.port != find_launch({**STEP, "SLURM_STEP_ID": "1"}).port
    one_host = find_launch({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_RESV_PORTS": "12003-12005"})
    assert (one_host.local_size, one_host.port) == (4, 12003)
    assert find_launch({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}).local_size == 2
    assert find_launch({**STEP, **PMI2}).launcher == "Slurm"  # srun --mpi=pmi2 speaks MPICH's language


@pytest.mark.parametrize(
    "changed",
    [
        None,
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_ID": "4294967291"},  # a batch script, as newer versions number it
        {"SLURM_STEP_ID": "4294967290"},  # an interactive shell
        {"SLURM_STEP_ID": "batch"},
        {"SLURM_PROCID": "x"},
    ],
)
def test_a_program_in_a_batch_script_or_an_allocated_shell_is_alone(changed) -> None:
    environ = BODY if changed is None else {**STEP, **changed}
    assert find_launch(environ) is None
    assert find_incomplete_environment(environ, is_spawned=False) == ""


def test_what_a_step_left_in_the_environment_of_another_job_means_nothing(monkeypatch) -> None:
    """`sbatch` and `salloc` inside of a step hand its variables on; the process above says whose this one is."""
    above = ["bash", "slurmstepd: [18.batch]"]
    monkeypatch.setattr(launchers, "_titles_above", lambda: iter(above))
    assert find_launch({**STEP, "SLURM_JOB_ID": "18"}) is None
    above[1] = "slurmstepd: [18.0]"
    assert find_launch({**STEP, "SLURM_JOB_ID": "18"}).rank == 3
    assert find_launch({**STEP, "SLURM_JOB_ID": "18", "SLURM_STEP_ID": "1"}) is None


def test_the_titles_above_lead_to_the_first_process() -> None:
    assert any("pytest" in title for title in [*launchers._titles_above(), " ".join(sys.orig_argv)])


def test_a_command_typed_into_the_shell_of_a_step_is_alone() -> None:
    """`srun -n4 --pty bash`: only the first shell goes on. It gives each command a process group of its own."""
    code = "import os; from phalanx._comm.rendezvous.launchers import find_launch; print(find_launch(os.environ))"
    environ = {**os.environ, **STEP, "SLURM_PTY_PORT": "1", "SLURM_TASK_PID": str(os.getpid())}
    for typed, expected in ((True, "None\n"), (False, "LaunchedProcess(launcher='Slurm', rank=3")):
        said = subprocess.run(
            [sys.executable, "-c", code],
            env=environ,
            preexec_fn=os.setpgrp if typed else None,  # `process_group=` came with Python 3.11
            capture_output=True,
            text=True,
        )
        assert said.stdout.startswith(expected), said.stderr


def test_an_mpiexec_goes_before_the_step_in_which_it_starts_its_helpers() -> None:
    hydra = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    assert find_launch({**STEP, **hydra}) == LaunchedProcess("MPICH", 5, 8, 1, 4)
    open_mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prte-7"}
    assert find_launch({**STEP, **open_mpi}) == LaunchedProcess("Open MPI", 1, 2, 1, 0, "prte-7")
    assert find_launch({}) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("n[03-05,9],m1", "n03"),
        ("a,b[1-2]", "a"),
        ("rack1-n[7,9]-ib", "rack1-n7-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(hosts, first) -> None:
    assert first_of(hosts) == first


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 in the environment"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "WORLD_SIZE=2 in the environment"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 in the environment"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0 in the environment"),
        ({"PMI_RANK": "1"}, "PMI_RANK=1 in the environment"),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4"}, "FLUX_TASK_RANK=1, FLUX_JOB_SIZE=4 in the environment"),
        ({}, ""),
        ({"WORLD_SIZE": "1"}, ""),
        ({"WORLD_SIZE": ""}, ""),
        ({"LOCAL_RANK": "-1"}, ""),
        ({"LOCAL_RANK": "0"}, ""),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ""),
        ({"PMIX_RANK": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, ""),
    ],
)
def test_what_an_incomplete_environment_holds_is_named(environ, said) -> None:
    assert find_incomplete_environment(environ, is_spawned=False) == said


def test_a_process_of_multiprocessing_is_probably_one_of_several() -> None:
    assert "multiprocessing (mp.spawn)" in find_incomplete_environment({}, is_spawned=True)


def test_variables_of_mpi_that_are_emptied_mean_nothing() -> None:
    assert find_launch({"PMI_RANK": "", "PMI_SIZE": ""}) is None
