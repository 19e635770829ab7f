"""The MPI engine under MPICH's and Open MPI's own mpiexec."""

import pytest
from tests.engines.mpi_checks import engine_checks
from tests.mpi_jobs import mpi_job


@pytest.fixture(scope="module", params=["mpich", "openmpi"])
def ranks(request):
    return mpi_job(engine_checks, 3, mpi=request.param).results()


@pytest.mark.slow
def test_the_engine_is_where_mpi_says(ranks):
    assert [seen["place"] for seen in ranks] == [(0, 3), (1, 3), (2, 3)]
    assert all(seen["again"] and seen["tags"] for seen in ranks)


@pytest.mark.slow
def test_messages_with_one_tag_arrive_in_order_and_apart_from_collectives(ranks):
    assert [seen["order"] for seen in ranks] == [[0.0, 1.0, 2.0, -1.0]] * 3


@pytest.mark.slow
def test_large_messages_and_empty_ones_arrive(ranks):
    assert all(seen["large"] for seen in ranks)


@pytest.mark.slow
def test_a_receive_from_anybody_says_who_it_was(ranks):
    assert ranks[0]["anybody"] == {1: 1.0, 2: 2.0}


@pytest.mark.slow
def test_a_sub_group_counts_its_own_ranks(ranks):
    assert (ranks[2]["sub-group"], ranks[0]["sub-group"]) == (1.0, 0.0)


@pytest.mark.slow
def test_a_wait_ends_at_its_deadline(ranks):
    assert [seen["late"] for seen in ranks] == ["TimedOut: no answer within 0.1 s"] * 3


@pytest.mark.slow
def test_a_group_receives_nothing_that_was_left_over_in_an_earlier_one(ranks):
    """MPI gave a freed communicator's number to the next one, where a late rank's last message was a mismatch."""
    assert ranks[0]["left over"] == 2.0


@pytest.mark.slow
def test_close_wakes_the_waits_of_this_rank_and_of_its_peers(ranks):
    assert ranks[0]["closing"] == "EngineClosed: this rank has left the group"
    assert [seen["closing"] for seen in ranks[1:]] == ["left by 0"] * 2
