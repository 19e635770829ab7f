"""What libraries call on PyTorch's wrapper besides its documented methods."""

import pytest
import torch
from tests.on_ranks import on_ranks
from tests.small_models import batch_of, batchnorm_model
from tests.training import copy_gradients
from torch import nn

from phalanx import DistributedDataParallel

TheirWrapper = nn.parallel.DistributedDataParallel

# PyTorch's own steps of construction, forward and backward, which nobody calls from outside.
_INNER = {
    "_active_ddp_module", "_assign_modules_buffers", "_build_debug_param_to_name_mapping", "_build_params_for_reducer",
    "_check_and_sync_module_buffers", "_check_comm_hook", "_check_default_group",
    "_check_global_requires_backward_grad_sync", "_check_reducer_finalized", "_check_sync_bufs_post_fwd",
    "_check_sync_bufs_pre_fwd", "_clear_grad_buffer", "_ddp_init_helper", "_default_broadcast_coalesced",
    "_delayed_all_reduce_hook", "_distributed_broadcast_coalesced", "_distributed_rank", "_find_common_rank",
    "_fire_reducer_autograd_hook", "_get_active_ddp_module", "_get_data_parallel_params", "_get_parameters",
    "_inside_ddp_forward", "_lazy_init", "_log_and_throw", "_match_all_reduce_for_bwd_pass",
    "_match_unused_params_allreduce", "_module_wait_for_copy_hook", "_passing_sync_batchnorm_handle", "_post_forward",
    "_pre_forward", "_register_accum_grad_hook", "_register_delay_all_reduce_hook", "_remove_autograd_hooks",
    "_root_copy_hook", "_run_ddp_forward", "_setup_in_backward_optimizers", "_sync_final_model", "_sync_module_buffers",
}  # fmt: skip


def _step(ddp, rank):
    ddp(batch_of(rank, shape=(5, 3))).sum().backward()
    return copy_gradients(ddp)


def test_every_method_of_pytorchs_that_is_called_from_outside_is_there():
    missing = {name for name in vars(TheirWrapper) if not hasattr(DistributedDataParallel, name)}
    assert missing <= _INNER | {"broadcast_buffers"}  # which is an attribute of each object here


@on_ranks(2)
def test_a_static_graph_can_be_said_after_construction_and_before_the_first_backward(rank):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = batchnorm_model(), nn.Linear(2, 2)

        def forward(self, inputs):
            return self.used(inputs) + self.used(inputs)

    said, given = DistributedDataParallel(Twice()), DistributedDataParallel(Twice(), static_graph=True)
    said._set_static_graph()
    assert said.static_graph
    with pytest.warns(UserWarning, match="static_graph is True already"):
        said._set_static_graph()
    for step in range(3):
        for ddp in (said, given):
            ddp(batch_of(rank, step, shape=(5, 3))).sum().backward()
        for mine, other in zip(said.parameters(), given.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, other.grad)
    late = DistributedDataParallel(batchnorm_model())
    _step(late, rank)
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        late._set_static_graph()


@on_ranks(2)
def test_logging_data_says_what_pytorchs_says_of_settings_buckets_and_steps(rank, backend):
    options = {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}
    ours, theirs = DistributedDataParallel(batchnorm_model(), **options), TheirWrapper(batchnorm_model(), **options)
    _compare(ours._get_ddp_logging_data(), theirs._get_ddp_logging_data())
    for _ in range(3):
        _step(ours, rank), _step(theirs, rank)
    found = _compare(ours._get_ddp_logging_data(), theirs._get_ddp_logging_data())
    assert found["has_rebuilt_buckets"] == 1
    ours._set_ddp_runtime_logging_sample_rate(10)
    with pytest.raises(ValueError, match="sample rate should be equal or greater than 1"):
        ours._set_ddp_runtime_logging_sample_rate(0)


def _compare(ours, theirs):
    # Ours counts steps that are over, and its caps leave room between gradients.
    differing = {"iteration", "bucket_sizes", "rebuilt_bucket_sizes", "dtypes", "rebuilt_per_bucket_param_indices"}
    for name in (ours.keys() & theirs.keys()) - differing:
        assert ours[name] == theirs[name], name
    return ours


@on_ranks(2)
def test_attributes_are_pytorchs(rank):
    ours, theirs = DistributedDataParallel(batchnorm_model()), TheirWrapper(batchnorm_model())
    for name in ("device_type", "is_multi_device_module", "parameters_to_ignore", "bucket_bytes_cap"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours.modules_buffers) == len(theirs.modules_buffers)
    seen = []
    for ddp in (ours, theirs):
        said = [ddp.will_sync_module_buffers()]
        with ddp.no_sync():
            _step(ddp, rank)
        said += [ddp.require_forward_param_sync, ddp.will_sync_module_buffers()]
        _step(ddp, rank)
        said += [ddp.require_forward_param_sync, ddp.will_sync_module_buffers()]
        ddp.module[1].running_mean.fill_(rank)
        ddp._sync_buffers()
        said.append(ddp.module[1].running_mean.tolist())
        seen.append(said)
    assert seen[0] == seen[1]
    moved = ours.to_kwargs((torch.ones(1),), {"a": torch.ones(1)}, 0)
    assert [len(part) for part in moved] == [1, 1]
    assert moved[1][0]["a"].item() == 1
    ours._set_ddp_sink_clone(False)


@on_ranks(1)
def test_what_cannot_work_says_what_to_do_instead():
    ddp = DistributedDataParallel(batchnorm_model())
    for call, advice in (
        (lambda: ddp._register_fused_optim(torch.optim.SGD, lr=0.1), "optimizers step after backward"),
        (lambda: ddp._register_buffer_comm_hook(None, print), "broadcast_buffers=False"),
        (lambda: ddp._update_process_group(ddp.process_group), "wrap the module again"),
        (lambda: ddp._set_sparse_metadata({}), "exchanged in every step"),
        (lambda: setattr(ddp, "require_manual_backward_finalization", True), "averaged when backward returns"),
    ):
        with pytest.raises(NotImplementedError, match=advice):
            call()
    ddp.require_manual_backward_finalization = False
    assert not ddp.should_finalize_after_backward
    with pytest.raises(RuntimeError, match="finalize_backward: require_manual_backward_finalization is False"):
        ddp.finalize_backward()
