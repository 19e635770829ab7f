import pytest

from phalanx._job.agent.plan import plan_pinning


@pytest.mark.parametrize("num_cpus", [1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_blocks_are_contiguous_disjoint_and_use_every_core(num_cpus: int, num_ranks: int) -> None:
    cpus = tuple(range(10, 10 + num_cpus))
    pinning = plan_pinning(cpus, num_ranks)
    assert len(pinning.cpus) == num_ranks
    if num_ranks > num_cpus:
        assert pinning.cpus == ((),) * num_ranks
        assert pinning.threads == 1
        return
    assert sum(pinning.cpus, ()) == cpus
    sizes = [len(block) for block in pinning.cpus]
    assert max(sizes) - min(sizes) <= 1
    assert pinning.threads == min(sizes) == num_cpus // num_ranks


def test_only_the_cores_that_the_agent_may_use_are_divided() -> None:
    assert plan_pinning((9, 1, 4, 6), 2).cpus == ((1, 4), (6, 9))


def test_no_affinity_keeps_the_threads_and_pins_nothing() -> None:
    pinning = plan_pinning(range(8), 2, pin=False)
    assert pinning.threads == 4
    assert pinning.cpus == ((), ())


def test_zero_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        plan_pinning(range(2), 0)


def test_a_quota_below_the_cores_divides_the_threads_and_keeps_the_blocks() -> None:
    pinning = plan_pinning(range(8), 2, cores=3)
    assert pinning.threads == 1
    assert pinning.cpus == ((0, 1, 2, 3), (4, 5, 6, 7))
