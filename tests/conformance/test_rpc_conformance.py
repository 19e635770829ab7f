"""The part of PyTorch's rpc suite that runs with every `make test`; conformance.md says how to run all of it."""

import pytest
from tests.conformance import rpc_run
from tests.conformance.rpc_suite import RpcSuite

# One of each kind.
QUICK = [
    "DistAutogradTest.test_backward_autograd_engine_error",
    "DistAutogradTest.test_backward_rref_nested",
    "DistOptimizerTest.test_dist_optim",
    "RpcTest.test_async_function_multi_fanout",
    "RpcTest.test_builtin_remote_ret",
    "RpcTest.test_function_not_on_callee",
    "RpcTest.test_nested_rref",
    "RpcTest.test_py_nested_pickle",
    "RpcTest.test_use_rref_after_shutdown",
    "TensorPipeAgentDistAutogradTest.test_backward_rref_sparse",
]


@pytest.fixture(scope="module")
def suite():
    return RpcSuite("phalanx")


@pytest.mark.slow(but=("DistAutogradTest.test_backward_rref_nested",))
@pytest.mark.parametrize("test", QUICK)
def test_phalanx_rpc_passes_what_tensorpipe_passes(suite, test):
    result = suite.run(test)
    assert result.outcome == "passed", result.text


def test_what_is_run_is_what_tensorpipe_passes_and_phalanx_has_no_excuse_for():
    assert set(QUICK) <= set(rpc_run.tensorpipe_passes()) - set(rpc_run.differences())


def test_every_difference_is_of_a_test_that_tensorpipe_passes_and_has_a_reason():
    for test, reason in rpc_run.differences().items():
        assert test in rpc_run.tensorpipe_passes()
        assert len(reason) > 20
