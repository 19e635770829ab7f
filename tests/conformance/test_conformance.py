"""The part of PyTorch's own suite that runs with every `make test`; conformance.md says how to run all of it."""

import sys
import unittest

import pytest
import torch.distributed as dist
from tests.conformance import run
from tests.conformance.torch_suite import TEST_SKIPS, Result, TorchSuite

WORLD_SIZE = 3  # the smallest that is neither even nor two

# One of each kind. torch's tests of all_reduce's reductions compare no values: tests/backend does.
QUICK = [
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather",
    "test_all_gather_coalesced_with_empty",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_ddp_logging_data_cpu",
    "test_gather",
    "test_isend",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_scatter",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
]


@pytest.fixture(scope="module")
def suite():
    return TorchSuite("phalanx", WORLD_SIZE)


@pytest.mark.parametrize("test", QUICK)
def test_phalanx_passes_what_gloo_passes(suite, test):
    result = suite.run(test)
    assert result.outcome == "passed", result.text


def test_what_is_run_is_what_gloo_passes_and_phalanx_has_no_excuse_for():
    assert set(QUICK) <= set(run.gloo_passes(WORLD_SIZE)) - set(run.differences())


def test_every_difference_is_of_a_test_that_gloo_passes_and_has_a_reason():
    passes = {test for world_size in run.WORLD_SIZES for test in run.gloo_passes(world_size)}
    for test, reason in run.differences().items():
        assert test in passes
        assert len(reason) > 20


@pytest.fixture
def add(suite, monkeypatch):
    """Puts a test of our own into the suite, and runs it."""

    def run_added(method):
        monkeypatch.setattr(suite._module.DistributedTest._DistTestBase, "test_added", method, raising=False)
        return suite.run("test_added")

    return run_added


@pytest.mark.slow
def test_the_suite_tells_each_ranks_failure_and_why_it_skips(add):
    def fail(case):
        raise AssertionError(f"rank {case.rank} disagrees")

    def skip(case):
        raise unittest.SkipTest("not on a Saturday")

    def skip_by_exit_code(case):
        sys.exit(TEST_SKIPS["small_worldsize"].exit_code)

    failed = add(fail)
    assert failed.outcome == "failed"
    assert all(f"rank {rank} disagrees" in failed.text for rank in range(WORLD_SIZE))
    assert add(skip) == Result("test_added", "skipped", "not on a Saturday")
    assert add(skip_by_exit_code) == Result("test_added", "skipped", "Skipped due to small world size.")


def test_groups_made_by_the_suite_are_of_the_backend_that_was_asked_for(add):
    # A suite that quietly ran Gloo would pass everything.
    def look(case):
        group = dist.new_group()
        assert (dist.get_backend(), dist.get_backend(group)) == ("phalanx", "phalanx")
        assert type(dist.group.WORLD).__name__ == type(group).__name__ == "PhalanxProcessGroup"

    assert add(look).outcome == "passed"


@pytest.mark.slow
def test_mpis_tests_of_all_to_all_on_the_cpu_pass_as_well():
    suite = TorchSuite("phalanx", 2, part="mpi")
    for test in (
        "test_all_to_all_single_unequal_split",
        "test_all_to_all_single_equal_split_complex",
        "test_all_to_all",
    ):
        result = suite.run(test)
        assert result.outcome == "passed", result.text
