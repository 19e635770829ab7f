"""What can be known of NCCL without a GPU: who may use which, and how torch's backends become groups."""

from datetime import timedelta

import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch._C._distributed_c10d import ProcessGroupGloo

from phalanx._comm.engines.nccl import find_shared_gpu, group_of, is_available


def test_one_rank_per_gpu_is_well_and_every_shared_one_is_named() -> None:
    assert find_shared_gpu([]) == find_shared_gpu(["GPU-a"]) == find_shared_gpu(["GPU-a", "GPU-b"]) == ""
    assert find_shared_gpu(["GPU-a", "GPU-b", "GPU-a", "GPU-b", "GPU-c"]) == (
        "ranks 0, 2 use GPU-a; ranks 1, 3 use GPU-b, and NCCL takes one rank per GPU."
    )


def test_it_is_not_available_without_a_gpu() -> None:
    assert is_available() == (dist.is_nccl_available() and torch.cuda.is_available())


@on_ranks(3)
def test_a_backend_of_torch_s_becomes_a_group_that_carries_one_kind_of_device(rank, world_size) -> None:
    store = dist.PrefixStore("inside", dist.group.WORLD.get_group_store())
    backend = ProcessGroupGloo(store, rank, world_size, timedelta(seconds=20))
    group = group_of(backend, "gloo", torch.device("cpu"), store, rank, world_size, "inside")
    tensor = torch.tensor([float(rank + 1)])
    group.allreduce([tensor]).wait()
    names = (group.group_name, group.size(), group.rank() == rank, group._device_types)
    group.shutdown()
    assert (tensor.item(), names) == (6.0, ("inside", 3, True, [torch.device("cpu")]))
