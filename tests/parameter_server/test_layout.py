"""Where values are, without a server."""

import pytest
import torch
from tests.comparisons import assert_equal

from phalanx.parameter_server.layout import join_states, plan_dense, ring, split_state


def test_dense_tensors_go_to_the_server_that_has_least():
    assert plan_dense({"a": 1, "b": 5, "c": 4, "d": 2}, 2) == {"b": 0, "c": 1, "d": 1, "a": 0}
    assert plan_dense({}, 3) == {}


def test_the_next_server_of_the_ring_replaces_a_lost_primary():
    assert ring(["a", "b", "c"], 1, lambda server: "host") == ["b", "c", "a"]


def test_a_server_of_another_host_replaces_a_primary_before_one_of_the_same():
    """Otherwise a host with two neighbours in the ring would take a shard and its copy with it."""
    hosts = dict(zip("abcdef", "112233", strict=True))
    assert "".join(ring("abcdef", 0, hosts.__getitem__)) == "acdefb"
    assert "".join(ring("abcdef", 3, hosts.__getitem__)) == "defabc"


@pytest.mark.parametrize("num_servers", [1, 2, 3, 4])
def test_a_state_that_is_split_and_joined_is_the_same(num_servers):
    state = {
        "step": 7,
        "dense": {name: torch.randn(n, 2) for name, n in (("a", 3), ("b", 1), ("c", 5))},
        "tables": {name: torch.randn(n, 2) for name, n in (("t", 7), ("u", 2))},
        "optimizer": {
            "a": {"step": torch.tensor(3.0), "m": torch.randn(3, 2)},
            "t": {"step": 3, "m": torch.randn(7, 2)},
            "u": {"step": torch.tensor(2.0), "sum": torch.randn(2, 2)},
        },
    }
    state["optimizer"]["u"]["momentum"] = torch.sparse_coo_tensor(
        [[1, 0, 1]], torch.randn(3, 2), (2, 2), check_invariants=True
    )
    shards = split_state(state, plan_dense({"a": 6, "b": 2, "c": 10}, num_servers), num_servers)
    assert len(shards) == num_servers
    joined = join_states(shards)
    for one in (state, joined):
        one["optimizer"]["u"]["momentum"] = one["optimizer"]["u"]["momentum"].to_dense()
    assert_equal(joined, state)
