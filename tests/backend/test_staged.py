"""Tensors of a device that no engine carries go through the host's memory. No GPU is needed.

`float64` tensors stand for those of a device, all ranks' on the same GPU, which NCCL refuses: every collective then
goes this way, with values, and must leave the bits that the CPU's own way leaves for `float32`. What needs a
real device (memory that the host must not touch, streams) is in tests/gpu.
"""

import pytest
import torch
import torch.distributed as dist
from tests.backend.staged import CPU, join_staged
from tests.comparisons import assert_equal
from tests.gpu.collectives import all_collectives
from tests.small_models import batch_of
from tests.training import train

import phalanx
from phalanx._comm.backend.job import decide_device, find_cuda_backend
from phalanx.errors import DeadlineError, MismatchError, PeerLostError
from phalanx.testing import RankFailed, run_ranks

LARGE = 100_003  # in the ranks' symmetric memory


@pytest.fixture
def path(tmp_path):
    """Where the ranks meet."""
    return str(tmp_path / "store")


def _everything(rank, world_size, path):
    join_staged(rank, world_size, path)
    # The staged ones first: torch 2.15 asks the group for the backend of the device, which float32 shares here.
    staged, plain = (all_collectives(CPU, dtype, rank, world_size) for dtype in (torch.float64, torch.float32))
    group = dist.group.WORLD
    before = group.transport.seq
    large = torch.full((LARGE,), rank + 1.0, dtype=torch.float64)
    works = [dist.all_reduce(one, async_op=True) for one in (large, torch.ones(3), large.clone())]  # one order for all
    for work in works:
        work.wait()
    return plain, staged, group.transport.seq - before, large[0].item(), sorted(group._staged), group._inside


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_collective_leaves_the_same_on_a_device_without_an_engine_as_on_the_cpu(path, world_size) -> None:
    for plain, staged, collectives, total, kinds, inside in run_ranks(_everything, world_size, path, init=False):
        assert plain == staged
        assert len(plain) >= 18
        assert collectives == 3  # none of them hidden from the order that all share
        assert total == world_size * (world_size + 1) / 2
        assert inside == {}
        assert kinds == ["cpu"]


def _refused(rank, world_size, path):
    join_staged(rank, world_size, path)
    messages = []

    def refuse(kind, call, *args, **kwargs):
        with pytest.raises(kind) as caught:
            call(*args, **kwargs)
        messages.append(str(caught.value).splitlines()[0])

    f64 = {"dtype": torch.float64}
    dist.all_reduce(torch.ones(1, **f64))
    refuse(ValueError, dist.all_reduce, torch.ones(1, **f64).expand(3))
    refuse(ValueError, dist.all_gather, [torch.ones(2, **f64)], torch.ones(2, **f64))
    refuse(ValueError, dist.broadcast, torch.empty(2, **f64), src=5)
    freed = torch.ones(2, **f64)
    freed.untyped_storage().resize_(0)
    refuse(ValueError, dist.all_reduce, freed)
    dist.all_reduce(total := torch.ones(1, **f64))  # the group goes on
    mine = torch.full((2 + rank,), 7.0, **f64)
    with pytest.raises(MismatchError) as caught:
        dist.all_reduce(mine)
    return messages, total.item(), str(caught.value), mine.tolist()


def test_wrong_calls_are_refused_in_the_cpus_words_and_change_nothing(path) -> None:
    for messages, total, mismatch, mine in run_ranks(_refused, 2, path, init=False):
        assert "share memory, so no result can be written to it" in messages[0]
        assert (
            messages[1] == "all_gather: invalid output tensor list: tensor_list holds 1 tensors, the group has 2 ranks"
        )
        assert "5" in messages[2]
        assert "its storage was freed" in messages[3]
        assert total == 2.0
        assert "rank 0: all_reduce(SUM) of float64 (2,) at " in mismatch
        assert "rank 1: all_reduce(SUM) of float64 (3,) at " in mismatch
        assert set(mine) == {7.0}


def _one_leaves(rank, world_size, path):
    join_staged(rank, world_size, path)
    dist.all_reduce(torch.ones(1, dtype=torch.float64))
    if rank == 1:
        raise RuntimeError("out of memory")
    work = dist.all_reduce(torch.ones(LARGE, dtype=torch.float64), async_op=True)
    with pytest.raises(PeerLostError) as caught:
        work.wait()
    future = work.get_future()
    with pytest.raises(RuntimeError, match="rank 1"):
        future.wait()
    return str(caught.value)


def test_a_rank_that_fails_is_named_to_those_who_wait_for_it(path) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_one_leaves, 2, path, init=False)
    assert list(caught.value.errors) == [1]


def _message_first(rank, world_size, path):
    """Two ranks on one device exchanged messages before any collective, so they asked NCCL, which refuses them."""
    join_staged(rank, world_size, path)
    got = torch.zeros(LARGE, dtype=torch.float64)
    works = [dist.isend(torch.full((LARGE,), rank + 1.0, dtype=torch.float64), 1 - rank), dist.irecv(got, 1 - rank)]
    for work in works:
        work.wait()
    source = None
    if rank == 0:
        dist.send(got, 1)
    else:
        source = dist.recv(got)  # from anybody
    return got[0].item(), source, sorted(dist.group.WORLD._agreed)


def test_messages_before_any_collective_go_the_way_that_ranks_on_one_device_need(path) -> None:
    assert run_ranks(_message_first, 2, path, init=False) == [(2.0, None, []), (2.0, 0, [])]


def _ring_first(rank, world_size, path):
    join_staged(rank, world_size, path)
    mine, theirs = torch.full((2,), float(rank), dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    works = [dist.isend(mine, (rank + 1) % world_size), dist.irecv(theirs, (rank - 1) % world_size)]
    for work in works:
        work.wait()
    return theirs[0].item()


def test_messages_in_a_ring_may_be_the_first_on_a_device(path) -> None:
    """Each rank waited for the next one's device before it sent its own to the one before."""
    assert run_ranks(_ring_first, 3, path, init=False) == [2.0, 0.0, 1.0]


def _from_anybody_first(rank, world_size, path):
    join_staged(rank, world_size, path)
    tensor = torch.full((2,), float(rank), dtype=torch.float64)
    return dist.send(tensor, 0) if rank else dist.recv(tensor)


def test_a_receive_from_any_rank_may_be_the_first_on_a_device(path) -> None:
    """The sender waited for the receiver's device."""
    assert run_ranks(_from_anybody_first, 2, path, init=False) == [1, None]


def _receive_until_it_gives_up():
    while True:
        dist.recv(torch.empty(1, dtype=torch.float64), 0)


def _one_is_late(rank, world_size, path):
    join_staged(rank, world_size, path, timeout_s=1.0)
    dist.all_reduce(torch.ones(1, dtype=torch.float64))
    if rank == 0:
        with pytest.raises(DeadlineError) as caught:
            dist.all_reduce(torch.ones(3, dtype=torch.float64))
        message = str(caught.value)
    else:
        message = None
        with pytest.raises((DeadlineError, PeerLostError)):
            _receive_until_it_gives_up()
    return message


def test_a_rank_that_does_not_come_in_time_is_named(path) -> None:
    message, _ = run_ranks(_one_is_late, 2, path, init=False)
    assert "all_reduce #" in message
    assert "rank 1" in message


def _train(rank, world_size, path):
    join_staged(rank, world_size, path)
    trained = []
    for wrap in (phalanx.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel):
        torch.manual_seed(0)
        model = wrap(torch.nn.Linear(300, 3).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [batch_of(rank, step, shape=(4, 300)).double() for step in range(3)]
        trained.append(train(model, optimizer, batches))
    assert_equal(*trained)
    return trained[0][1].tolist()


def test_models_are_trained_over_staged_collectives(path) -> None:
    first, second = run_ranks(_train, 2, path, init=False)
    assert first == second


@pytest.mark.parametrize(
    ("local_rank", "ranks_here", "gpus", "per_gpu", "config", "device"),
    [
        (0, 1, 0, 1, "phalanx", "cpu"),
        (0, 1, 1, 1, "cpu:phalanx,cuda:phalanx", "cuda:0"),
        (3, 4, 4, 1, "phalanx", "cuda:3"),
        (3, 4, 1, 4, "phalanx", "cuda:0"),
        (3, 4, 2, 2, "phalanx", "cuda:1"),
        (3, 16, 8, 1, "phalanx", "cpu"),  # a rank per core
        (3, 4, 1, 1, "cuda:nccl", "cuda:0"),
        (3, 4, 1, 1, "cpu:gloo,cuda:nccl", "cuda:0"),
        (0, 1, 1, 1, "cpu:gloo,cuda:gloo", "cpu"),  # a script for Gloo has always trained on the CPU
        (0, 1, 1, 1, "cpu:phalanx", "cpu"),
        (0, 1, 1, 1, "mpi", "cpu"),
        (3, None, 4, 1, "phalanx", "cuda:3"),  # 16 ranks on four hosts, by a launcher that says LOCAL_RANK only
        (4, None, 4, 1, "phalanx", "cpu"),
    ],
)
def test_neighbours_share_a_gpu_and_ranks_that_were_counted_by_cores_have_none(
    local_rank, ranks_here, gpus, per_gpu, config, device
) -> None:
    assert decide_device(local_rank, ranks_here, gpus, per_gpu, find_cuda_backend(config)) == torch.device(device)
