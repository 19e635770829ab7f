"""Buffers in segments: the same sums in more steps, and less time where links were idle."""

from __future__ import annotations

import pytest

from phalanx.collectives import ALGORITHMS, Link, Links, Topology, build, check
from phalanx.collectives.segments import in_segments
from phalanx.collectives.simulate import simulate

MIB = 1 << 20
FREE = Links(inter=Link(0.0, 1e8), reduce_bytes_per_s=1e18)
FLAT = [a.name for a in ALGORITHMS.values() if not a.one_host and a.name != "hierarchical"]


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_algorithm_keeps_its_promise_in_segments(name: str, world_size: int, count: int) -> None:
    whole = build(name, "all_reduce", Topology.flat(world_size))
    cut = in_segments(whole, count)
    check(cut)
    assert cut.num_chunks == whole.num_chunks * count
    assert cut.num_steps == (whole.num_steps + count - 1 if whole.num_steps else 0)


def test_a_tree_in_segments_fills_its_links_and_a_ring_gains_nothing() -> None:
    topology = Topology.flat(2)
    tree, ring = (build(name, "all_reduce", topology) for name in ("tree", "ring"))
    whole = MIB / 1e8
    assert simulate(tree, MIB, topology, FREE).seconds == pytest.approx(2 * whole)
    assert simulate(in_segments(tree, 64), MIB, topology, FREE).seconds == pytest.approx(whole * 65 / 64)
    assert simulate(ring, MIB, topology, FREE).seconds == pytest.approx(whole)
    assert simulate(in_segments(ring, 64), MIB, topology, FREE).seconds == pytest.approx(whole)


def test_no_segment_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="a buffer has at least 1 segment, got 0"):
        in_segments(build("ring", "all_reduce", Topology.flat(2)), 0)


@pytest.mark.parametrize("sizes", [[2, 2], [3, 1], [1, 1]])
def test_memory_is_read_once_for_all_segments(sizes: list[int]) -> None:
    whole = build("hierarchical", "all_reduce", Topology.of_sizes(sizes))
    cut = in_segments(whole, 3)
    check(cut)
    assert cut.num_steps == whole.num_steps + 2
