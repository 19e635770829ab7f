"""The MPI engine under MPICH's and Open MPI's own mpiexec."""

import pytest
from tests.engines.mpi_checks import engine_checks
from tests.mpi_jobs import mpi_job


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_messages_groups_deadlines_and_the_end_of_an_engine(mpi):
    """MPI gave a freed communicator's number to the next one, where a late rank's last message was a mismatch."""
    ranks = mpi_job(engine_checks, 3, mpi=mpi).results()
    assert [seen["place"] for seen in ranks] == [(0, 3), (1, 3), (2, 3)]
    assert all(seen["again"] and seen["tags"] and seen["large"] for seen in ranks)
    assert [seen["order"] for seen in ranks] == [[0.0, 1.0, 2.0, -1.0]] * 3  # of one tag; apart from collectives
    assert ranks[0]["anybody"] == {1: 1.0, 2: 2.0}
    assert (ranks[2]["sub-group"], ranks[0]["sub-group"]) == (1.0, 0.0)  # which counts its own ranks
    assert [seen["late"] for seen in ranks] == ["TimedOut: no answer within 0.1 s"] * 3
    assert ranks[0]["left over"] == 2.0
    assert ranks[0]["closing"] == "EngineClosed: this rank has left the group"
    assert [seen["closing"] for seen in ranks[1:]] == ["left by 0"] * 2
