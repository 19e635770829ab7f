import pytest

from phalanx._job.agent.placement import plan_placement


@pytest.mark.parametrize("num_cpus", [1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_blocks_are_contiguous_disjoint_and_use_every_core(num_cpus: int, num_ranks: int) -> None:
    cpus = tuple(range(10, 10 + num_cpus))
    placement = plan_placement(cpus, num_ranks)
    assert len(placement.cpus) == num_ranks
    if num_ranks > num_cpus:
        assert placement.cpus == ((),) * num_ranks
        assert placement.threads == 1
        return
    assert sum(placement.cpus, ()) == cpus
    sizes = [len(block) for block in placement.cpus]
    assert max(sizes) - min(sizes) <= 1
    assert placement.threads == min(sizes) == num_cpus // num_ranks


def test_only_the_cores_that_the_agent_may_use_are_divided() -> None:
    assert plan_placement((9, 1, 4, 6), 2).cpus == ((1, 4), (6, 9))


def test_no_affinity_keeps_the_threads_and_pins_nothing() -> None:
    placement = plan_placement(range(8), 2, pin=False)
    assert placement.threads == 4
    assert placement.cpus == ((), ())


def test_zero_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        plan_placement(range(2), 0)


def test_a_quota_below_the_cores_divides_the_threads_and_keeps_the_blocks() -> None:
    placement = plan_placement(range(8), 2, cores=3)
    assert placement.threads == 1
    assert placement.cpus == ((0, 1, 2, 3), (4, 5, 6, 7))
