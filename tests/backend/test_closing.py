"""The end of a group: in order, in the middle of things, in a forked child; and nothing is left behind."""

import gc
import os
import resource
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks

from phalanx.errors import ClosedError
from phalanx.testing import run_ranks


@on_ranks(2)
def test_a_destroyed_group_says_so(rank, world_size):
    group = dist.group.WORLD
    dist.destroy_process_group()
    dist.destroy_process_group() if dist.is_initialized() else None
    for call in (
        lambda: group.allreduce([torch.ones(1)]),
        lambda: group.barrier(),
        lambda: group.send([torch.ones(1)], 1 - rank, 0),
        lambda: group.recv([torch.ones(1)], 1 - rank, 0),
    ):
        with pytest.raises(ClosedError, match="group '0': it was destroyed in this process"):
            call()
    group.shutdown()  # again: nothing happens
    assert group.size() == world_size
    assert group._get_sequence_number_for_group() == 0


@on_ranks(2)
def test_destroying_waits_for_what_is_in_flight():
    tensors = [torch.ones(10_000) for _ in range(10)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.destroy_process_group()
    assert all(bool((t == 2).all()) for t in tensors)


@on_ranks(2)
def test_a_forked_child_is_refused_and_its_parent_is_unharmed(rank, world_size):
    dist.all_reduce(torch.ones(1), async_op=True).wait()  # the group's thread exists, and not in the child
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answers = []
        for call in (
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
            lambda: dist.send(torch.ones(1), 1 - rank),
            lambda: dist.recv(torch.ones(1), 1 - rank),
        ):
            try:
                call()
                answers.append("nothing raised")
            except BaseException as error:
                answers.append(f"{type(error).__name__}: {error}")
        dist.destroy_process_group()
        os.write(writer, "|".join(answers).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answers = pipe.read().decode().split("|")
    assert os.waitpid(child, 0)[1] == 0
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world_size
    assert len(answers) == 4
    for answer in answers:
        assert answer.startswith("ClosedError: group '0':"), answers
        assert "forked from a rank" in answer


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(index * index)


@pytest.mark.slow(but=("fork",))
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where there is one core
@pytest.mark.parametrize("start", ["fork", "spawn"])
@on_ranks(2)
def test_data_loaders_have_workers_while_the_group_is_alive_and_busy(rank, world_size, start):
    workers = 2 if start == "fork" or rank == 0 else 0  # each that is spawned imports torch
    loader = torch.utils.data.DataLoader(
        Squares(),
        batch_size=4,
        num_workers=workers,
        multiprocessing_context=start if workers else None,
        persistent_workers=workers > 0,
    )
    for epoch in range(2):
        works = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(4)]  # while workers start
        for batch in loader:
            dist.all_reduce(batch)
            assert bool((batch % world_size == 0).all()), epoch
        for work in works:
            work.wait()
    dist.barrier()


@pytest.mark.slow
@on_ranks(2)
def test_hundreds_of_groups_live_at_once_within_few_descriptors(world_size):
    import phalanx

    limit = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    groups = [dist.new_group() for _ in range(200)]
    for group in groups[:: len(groups) - 1]:  # the first and the last
        shared = phalanx.shared_empty(2000, group=group).fill_(1.0)
        dist.all_reduce(shared, group=group)
        assert shared[-1] == world_size
    assert len(groups) == 200


@on_ranks(2, init=False)
def test_a_group_of_the_same_name_meets_anew_at_once(rank, world_size, tmp_path):
    """The keys of the first bootstrap were deleted when its ranks could already be in the second."""
    store = dist.FileStore(str(tmp_path / "store"), world_size)
    for _ in range(40):
        dist.init_process_group("phalanx", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
        dist.destroy_process_group()


@on_ranks(2)
def test_groups_come_and_go_without_leaving_anything():
    def held():
        with open("/proc/self/maps") as f:
            mapped = sum("memfd:phalanx" in line for line in f)
        threads = sum(t.name.startswith("phalanx-") for t in threading.enumerate())
        return len(os.listdir("/proc/self/fd")), mapped, threads

    import phalanx

    def use_one():
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
        tensor = phalanx.shared_empty(10, group=group)
        dist.all_reduce(tensor, group=group)
        del tensor
        dist.destroy_process_group(group)

    use_one()
    gc.collect()
    before = held()
    for _ in range(25):
        use_one()
    gc.collect()
    assert held() == before


def test_nothing_has_a_name_or_a_port_even_after_sigkill():
    def check(rank, world_size):
        import phalanx

        tensor = phalanx.shared_empty(10_000)
        dist.all_reduce(tensor)
        names = set(os.listdir("/dev/shm"))
        sockets = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)]
        assert not [target for target in sockets if target.startswith("socket:")]
        assert not [name for name in names if "phalanx" in name]
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    def _exists(fd):
        return os.path.islink(f"/proc/self/fd/{fd}")

    before = set(os.listdir("/dev/shm"))
    run_ranks(check, 2, lost=(0, 1))
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "phalanx" in name]


@on_ranks(8)
def test_eight_ranks_carry_a_mixed_load_in_step(rank, world_size):
    """All kinds at once, more ranks than cores: sizes of one sync and of many, queued and waited for, and messages."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    total = sum(range(world_size))
    for size in (1, 3_000, 90_001):
        mine = torch.full((size,), float(rank))
        queued = [mine.clone() for _ in range(3)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in queued]
        received = torch.zeros(size)
        incoming = dist.irecv(received, before)
        dist.send(mine, after)
        incoming.wait()
        assert received[-1] == before
        gathered = torch.zeros(world_size * size)
        dist.all_gather_single(gathered, mine)
        assert gathered[::size].tolist() == list(range(world_size))
        turned = torch.zeros(world_size)
        dist.all_to_all_single(turned, torch.arange(world_size, dtype=torch.float32) * 10 + rank)
        assert turned.tolist() == [10.0 * rank + r for r in range(world_size)]
        for work in works:
            work.wait()
        assert all(bool((tensor == total).all()) for tensor in queued)
