"""Who sits where, and who drives the rails."""

from phalanx._comm.transport.hierarchical.layout import Layout


def test_hosts_are_numbered_by_their_first_rank_whatever_they_are_called():
    layout = Layout.of(["b", "a", "b", "a"], rank=2)
    assert layout.topology.hosts == ((0, 2), (1, 3))
    assert (layout.host, layout.local_rank, layout.local_ranks) == (0, 1, (0, 2))
    assert layout.by_host == (0, 2, 1, 3)


def test_there_are_as_many_rails_as_the_smallest_host_has_ranks():
    rails = [Layout.of(["a", "a", "a", "b", "b"], rank).rail for rank in range(5)]
    assert rails == [(0, 3), (1, 4), (), (0, 3), (1, 4)]
    assert Layout.of(["a", "a", "a", "b", "b"], 0).num_rails == 2


def test_single_ranks_form_one_rail():
    assert [Layout.of(["a", "b", "c"], rank).rail for rank in range(3)] == [(0, 1, 2)] * 3
