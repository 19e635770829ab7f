"""Every schedule that the package offers, for the tests that must hold for all of them."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.collectives import ALGORITHMS, Schedule, Topology, build

UNEQUAL = [(1,), (2, 1), (2, 2), (1, 2, 3), (5, 3, 4), (4, 4), (1, 1, 1), (2, 7)]


def flat_topology(algorithm: str, world_size: int) -> Topology:
    return Topology.one_host(world_size) if ALGORITHMS[algorithm].one_host else Topology.flat(world_size)


def every_schedule(world_sizes: range) -> Iterator[Schedule]:
    """All algorithms, operations and roots, and the hierarchy also over hosts of unequal size."""
    for algorithm in ALGORITHMS.values():
        for operation in algorithm.operations:
            for world_size in world_sizes:
                topology = flat_topology(algorithm.name, world_size)
                roots = range(world_size) if operation in ("broadcast", "reduce") else range(1)
                for root in roots:
                    yield build(algorithm.name, operation, topology, root)
    for sizes in UNEQUAL:
        yield build("hierarchical", "all_reduce", Topology.of_sizes(sizes))
