"""Schedules between real processes, over Gloo's sends and receives of torch tensors, against Gloo's own all_reduce."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from phalanx._comm.schedules import play
from phalanx.collectives import ALGORITHMS, Topology, build
from phalanx.testing import run_ranks

LENGTH = 1003


def reduce_with_every_algorithm(rank: int, world_size: int, sizes: list[int]) -> dict[str, bytes]:
    results = {}
    for name, algorithm in ALGORITHMS.items():
        topology = Topology.one_host(world_size) if algorithm.one_host else Topology.of_sizes(sizes)
        schedule = build(name, "all_reduce", topology)
        tensor = torch.randn(LENGTH, generator=torch.Generator().manual_seed(rank))
        expected = tensor.clone()
        dist.all_reduce(expected)
        steps = play(
            schedule,
            rank,
            tensor,
            send=lambda dst, view: dist.isend(view, dst),
            recv=lambda src, view: dist.irecv(view, src),
            combine=lambda into, first, second: torch.add(first, second, out=into),
            scratch=lambda n: torch.full((n,), float("nan")),
        )
        for _ in steps:
            pass
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)
        results[name] = tensor.numpy().tobytes()
    return results


@pytest.mark.parametrize("sizes", [[2, 1], [2, 2]])
def test_every_algorithm_gives_gloos_sum_and_the_same_bits_on_all_ranks(sizes: list[int]) -> None:
    results = run_ranks(reduce_with_every_algorithm, sum(sizes), sizes, backend="gloo")
    assert len(results[0]) == len(ALGORITHMS)
    assert all(result == results[0] for result in results)
