"""The price of a schedule between hosts against the formulas of the literature, and the choice by price."""

from __future__ import annotations

import pytest

from phalanx._comm.schedules.cost import ETHERNET, cheapest, seconds_of
from phalanx.collectives import Link, Topology, build

MIB = 1 << 20
GAMMA = 1 / 8e9


def _formula(name: str, p: int, s: float, link: Link) -> float:
    """Return the seconds of an all_reduce, as docs/explanation/algorithms.md has them."""
    a, b, g = link.latency_s, 1 / link.bytes_per_s, GAMMA
    levels, q = (p - 1).bit_length(), 1 << (p.bit_length() - 1)
    fold = 0.0 if p == q else 2 * a + 2 * s * b + s * g
    part, of_q = s * (p - 1) / p, s * (q - 1) / q
    return {
        "ring": 2 * (p - 1) * a + 2 * part * b + part * g,
        "halving_doubling": 2 * (q.bit_length() - 1) * a + 2 * of_q * b + of_q * g + fold,
        "doubling": (q.bit_length() - 1) * (a + s * b + s * g) + fold,
        "tree": levels * (2 * a + 2 * s * b + s * g),
        "single": (p - 1) * (2 * a + 2 * s * b + s * g),
    }[name]


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "doubling", "tree", "single"])
@pytest.mark.parametrize("nbytes", [0, 4, 64 * MIB])
def test_a_schedule_costs_what_its_formula_says(name: str, nbytes: int) -> None:
    for p in [*range(1, 10), 12, 16, 17]:
        priced = seconds_of(build(name, "all_reduce", Topology.flat(p)), nbytes, ETHERNET)
        assert priced == pytest.approx(_formula(name, p, nbytes, ETHERNET), rel=1e-9)


def test_small_buffers_go_in_few_steps_and_large_ones_in_few_bytes() -> None:
    assert cheapest("all_reduce", 4, 6) == "doubling"
    assert cheapest("all_reduce", 64 * MIB, 6) == "ring"
    assert cheapest("all_reduce", MIB // 16, 8) == "halving_doubling"


def test_a_lead_smaller_than_the_error_of_the_model_is_no_reason_to_leave_the_ring() -> None:
    ring, halving = (
        seconds_of(build(name, "all_reduce", Topology.flat(8)), 64 * MIB, ETHERNET)
        for name in ("ring", "halving_doubling")
    )
    assert halving < ring < 1.1 * halving
    assert cheapest("all_reduce", 64 * MIB, 8) == "ring"


def test_a_link_of_higher_latency_makes_few_steps_worth_more() -> None:
    assert cheapest("all_reduce", MIB, 6) == "ring"
    assert cheapest("all_reduce", MIB, 6, Link(latency_s=1.0, bytes_per_s=125e6)) == "doubling"


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"])
def test_every_operation_has_a_cheapest_algorithm_for_any_number_of_hosts(operation: str) -> None:
    for num_hosts in (1, 2, 3, 5):
        name = cheapest(operation, 0, num_hosts)  # type: ignore[arg-type]
        build(name, operation, Topology.flat(num_hosts))  # type: ignore[arg-type]


def test_an_unknown_operation_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match="operation 'allreduce' is unknown; did you mean 'all_reduce'"):
        cheapest("allreduce", 4, 2)  # type: ignore[arg-type]
