"""Latency and bandwidth out of measured times."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from phalanx.collectives import Link, Links, Topology
from phalanx.collectives.closed_form import predict
from phalanx.collectives.fit import Measurement, fit
from phalanx.collectives.schedule import Operation

TRUTH = Links(intra=Link(1e-6, 8e9), inter=Link(42e-6, 1.1e8), reduce_bytes_per_s=4e9)
GUESS = replace(TRUTH, inter=Link(1.0, 1.0))


def measured(topology: Topology, sizes: list[int], noise: float = 0.0, algorithm: str = "ring") -> list[Measurement]:
    rng = random.Random(7)
    operation: Operation = "all_reduce"
    runs = []
    for nbytes in sizes:
        seconds = predict(algorithm, operation, nbytes, topology, TRUTH).seconds * (1 + rng.uniform(-noise, noise))
        runs.append(Measurement(algorithm, operation, topology, nbytes, seconds))
    return runs


SIZES = [4, 16 << 10, 256 << 10, 1 << 20, 64 << 20]


@pytest.mark.parametrize("topology", [Topology.flat(4), Topology.of_sizes([2, 2]), Topology.flat(7)])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "hierarchical", "halving_doubling"])
def test_exact_times_give_back_the_link_that_made_them(topology: Topology, algorithm: str) -> None:
    result = fit(measured(topology, SIZES, algorithm=algorithm), GUESS)
    assert result.links.inter.latency_s == pytest.approx(42e-6, rel=0.03)
    assert result.links.inter.bytes_per_s == pytest.approx(1.1e8, rel=0.03)
    assert result.links.intra == TRUTH.intra
    assert result.worst_error < 0.03


def test_the_link_inside_a_host_can_be_fitted_too() -> None:
    result = fit(measured(Topology.one_host(4), SIZES), replace(TRUTH, intra=Link(1.0, 1.0)), which="intra")
    assert result.links.intra.latency_s == pytest.approx(1e-6)
    assert result.links.intra.bytes_per_s == pytest.approx(8e9)


def test_noise_of_ten_percent_leaves_errors_of_that_size() -> None:
    runs = [run for p in (2, 3, 4, 6) for run in measured(Topology.flat(p), SIZES, noise=0.1)]
    result = fit(runs, GUESS)
    assert result.links.inter.bytes_per_s == pytest.approx(1.1e8, rel=0.1)
    assert 0 < result.median_error <= result.worst_error < 0.25
    assert len(result.errors) == len(result.predicted) == len(runs)


def test_times_that_do_not_grow_with_size_give_no_negative_cost_per_byte() -> None:
    topology = Topology.flat(2)
    runs = [Measurement("tree", "all_reduce", topology, n, s) for n, s in ((4, 2e-3), (1 << 20, 1e-3))]
    result = fit(runs, replace(GUESS, reduce_bytes_per_s=float("inf")))
    assert result.links.inter.bytes_per_s == float("inf")
    assert result.links.inter.latency_s > 0


def test_one_measurement_is_too_few() -> None:
    with pytest.raises(ValueError, match="takes at least 2 measurements, got 1"):
        fit(measured(Topology.flat(2), [4]), GUESS)


def test_measurements_of_one_size_cannot_tell_latency_from_bandwidth() -> None:
    with pytest.raises(ValueError, match="cannot tell the latency of the inter link from its bandwidth"):
        fit(measured(Topology.flat(2), [4096, 4096]), GUESS)


def test_measurements_that_never_use_the_link_are_refused() -> None:
    with pytest.raises(ValueError, match="with ranks that use the link"):
        fit(measured(Topology.one_host(3), SIZES), GUESS)


def test_a_time_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="more than zero seconds, got 0"):
        Measurement("ring", "all_reduce", Topology.flat(2), 4, 0.0)
