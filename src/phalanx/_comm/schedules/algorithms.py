"""Look up algorithms by name, and build the schedule of an operation for a topology."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phalanx._comm.schedules import direct, doubling, halving_doubling, hierarchical, ring, single, tree
from phalanx._comm.schedules.network import Topology
from phalanx._comm.schedules.schedule import OPERATIONS, Operation, Schedule

Build = Callable[[Topology, int], Schedule]

# No host has more ranks than this, and each step of a direct schedule lists P·(P-1) transfers.
_MOST_DIRECT = 1024


@dataclass(frozen=True)
class Algorithm:
    """An `Algorithm` is a family of schedules; `operations` maps each operation to its builder."""

    name: str
    title: str
    operations: Mapping[Operation, Build]
    one_host: bool = False


def _flat(build: Callable[[int], Schedule]) -> Build:
    return lambda topology, root: build(topology.world_size)


def _rooted(build: Callable[[int, int], Schedule]) -> Build:
    return lambda topology, root: build(topology.world_size, root)


def _two_levels(topology: Topology, root: int) -> Schedule:
    return hierarchical.all_reduce(topology, ring.all_reduce(len(topology.hosts)))


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            "direct",
            "the shared memory of one host",
            {
                "all_reduce": _flat(direct.all_reduce),
                "reduce_scatter": _flat(direct.reduce_scatter),
                "all_gather": _flat(direct.all_gather),
                "broadcast": _rooted(direct.broadcast),
            },
            one_host=True,
        ),
        Algorithm(
            "hierarchical", "the hierarchy of memory inside hosts and a ring between them", {"all_reduce": _two_levels}
        ),
        Algorithm(
            "ring",
            "the ring",
            {
                "all_reduce": _flat(ring.all_reduce),
                "reduce_scatter": _flat(ring.reduce_scatter),
                "all_gather": _flat(ring.all_gather),
            },
        ),
        Algorithm(
            "halving_doubling",
            "recursive halving and doubling",
            {
                "all_reduce": _flat(halving_doubling.all_reduce),
                "reduce_scatter": _flat(halving_doubling.reduce_scatter),
                "all_gather": _flat(halving_doubling.all_gather),
            },
        ),
        Algorithm("doubling", "recursive doubling", {"all_reduce": _flat(doubling.all_reduce)}),
        Algorithm(
            "tree",
            "the binomial tree",
            {
                "all_reduce": _flat(tree.all_reduce),
                "broadcast": _rooted(tree.broadcast),
                "reduce": _rooted(tree.reduce),
            },
        ),
        Algorithm(
            "single",
            "the single reducer",
            {
                "all_reduce": _flat(single.all_reduce),
                "broadcast": _rooted(single.broadcast),
                "reduce": _rooted(single.reduce),
            },
        ),
    )
}


def find(name: str) -> Algorithm:
    """Return the algorithm called `name`; dashes and underscores are equivalent. A ValueError lists the valid names."""
    algorithm = ALGORITHMS.get(name.replace("-", "_").lower())
    if algorithm is None:
        raise ValueError(f"algorithm {name!r} is unknown{_close(name, ALGORITHMS)} Valid: {', '.join(ALGORITHMS)}")
    return algorithm


def offering(operation: str) -> list[Algorithm]:
    """Return the algorithms that offer `operation`. A ValueError lists the valid operations."""
    if operation not in OPERATIONS:
        close = _close(operation, OPERATIONS)
        raise ValueError(f"operation {operation!r} is unknown{close} Valid: {', '.join(OPERATIONS)}")
    return [algorithm for algorithm in ALGORITHMS.values() if operation in algorithm.operations]


def build(name: str, operation: Operation, topology: Topology, root: int = 0) -> Schedule:
    """Return the schedule of `operation` by the algorithm `name` for the ranks of `topology`.

    Raises:
        ValueError: the name or operation is unknown, or the algorithm does not support the operation or topology.
    """
    algorithm = find(name)
    able = offering(operation)
    if algorithm not in able:
        others = ", ".join(other.name for other in able)
        raise ValueError(f"algorithm {algorithm.name!r} does not support {operation}; these do: {others}")
    if root and operation not in ("broadcast", "reduce"):
        raise ValueError(f"{operation} has no root, got root={root}")
    if algorithm.one_host and not fits(algorithm, topology):
        raise ValueError(
            f"algorithm {algorithm.name!r} needs all ranks on one host, at most {_MOST_DIRECT}; "
            f"these {topology.world_size} ranks are on {len(topology.hosts)} hosts. "
            "Choose 'hierarchical', which uses memory inside hosts and the network between them"
        )
    return algorithm.operations[operation](topology, root)


def fits(algorithm: Algorithm, topology: Topology) -> bool:
    """Return whether the algorithm can run on this topology."""
    return not algorithm.one_host or (len(topology.hosts) == 1 and topology.world_size <= _MOST_DIRECT)


def _close(name: str, valid: Mapping[str, object] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name.replace("-", "_").lower(), valid, n=1)
    return f"; did you mean {close[0]!r}?" if close else "."
