"""Object collectives, batched and coalesced forms, point to point: what each rank ends with is what Gloo gives."""

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from tests.parity.beside_gloo import assert_same_as_gloo


class Parcel:
    """Something that only pickle can send."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    __hash__ = None


def _object(rank):
    return {"rank": rank, "text": "x" * (100 * rank), "parcel": Parcel(rank), "nothing": None}


@pytest.mark.parametrize("world_size", [1, 3])
def test_object_collectives_deliver_what_gloo_delivers(world_size):
    def exchange(rank, world_size):
        everybody = [None] * world_size
        dist.all_gather_object(everybody, _object(rank))
        last = world_size - 1
        gathered = [None] * world_size if rank == last else None
        dist.gather_object(_object(rank), gathered, dst=last)
        told = [_object(7), "and more", 3] if rank == last else [None] * 3
        dist.broadcast_object_list(told, src=last)
        dealt = [None]
        dist.scatter_object_list(dealt, [_object(r) for r in range(world_size)] if rank == 0 else None, src=0)
        return everybody, gathered, told, dealt

    everybody, _, told, dealt = assert_same_as_gloo(exchange, world_size)[world_size - 1]
    assert everybody == [_object(r) for r in range(world_size)]
    assert told == [_object(7), "and more", 3]
    assert dealt == [_object(world_size - 1)]


def test_lists_of_objects_travel_between_two_ranks():
    def exchange(rank, world_size):
        if rank == 0:
            dist.send_object_list([_object(4), [1, 2], "end"], dst=1)
            return None
        received = [None] * 3
        dist.recv_object_list(received, src=0)
        return received

    assert assert_same_as_gloo(exchange, 2)[1] == [_object(4), [1, 2], "end"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_batch_of_sends_and_receives_moves_round_the_ring(world_size):
    def exchange(rank, world_size):
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        sent = [torch.arange(n, dtype=torch.float32) + 100 * rank for n in (0, 1, 5000)]
        received = [torch.full_like(t, -1) for t in sent]
        operations = [dist.P2POp(dist.irecv, t, before, tag=i) for i, t in enumerate(received)]
        operations += [dist.P2POp(dist.isend, t, after, tag=i) for i, t in enumerate(sent)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    ours = assert_same_as_gloo(exchange, world_size)
    assert ours[0][2][1].item() == 100 * (world_size - 1) + 1


def test_sends_from_anybody_say_who_they_are_from():
    def exchange(rank, world_size):
        if rank:
            dist.send(torch.full((3,), float(rank)), dst=0)
            return None
        seen = {}
        for _ in range(world_size - 1):
            tensor = torch.zeros(3)
            seen[dist.recv(tensor)] = tensor
        return dict(sorted(seen.items()))

    assert_same_as_gloo(exchange, 3)


def test_tags_keep_messages_apart():
    def exchange(rank, world_size):
        if rank == 0:
            works = [dist.isend(torch.full((2,), float(tag)), dst=1, tag=tag) for tag in (5, 6, 7)]
            for work in works:
                work.wait()
            return None
        tensors = {tag: torch.zeros(2) for tag in (7, 5, 6)}
        for tag, tensor in tensors.items():
            dist.recv(tensor, src=0, tag=tag)
        return tensors

    assert_same_as_gloo(exchange, 2)


@pytest.mark.filterwarnings("ignore:.*_single. instead:FutureWarning")  # the older names are what people use
@on_ranks(2)
def test_the_coalescing_manager_reduces_every_tensor_of_the_block(rank, world_size):
    # Gloo has no such block for CPU tensors, so the values are compared with those of single calls.
    tensors = [torch.arange(4.0) + rank, torch.ones(3) * (rank + 1)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as block:
        for tensor in tensors:
            dist.all_reduce(tensor)
    block.wait()
    gathered, parts = torch.zeros(2 * world_size), torch.arange(2.0) + 10 * rank
    reduced, whole = torch.zeros(2), torch.arange(2.0 * world_size) + rank
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.all_gather_into_tensor(gathered, parts)
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.reduce_scatter_tensor(reduced, whole)
    assert tensors[0].tolist() == [1, 3, 5, 7]
    assert tensors[1].tolist() == [3, 3, 3]
    assert gathered.tolist() == [0, 1, 10, 11]
    assert reduced.tolist() == [[1, 3], [5, 7]][rank]


def test_coalesced_forms_give_what_gloo_gives():
    def exchange(rank, world_size):
        tensors = [torch.arange(5.0) * (rank + 1), torch.ones(2, 2) + rank]
        with pytest.warns(FutureWarning):
            dist.all_reduce_coalesced(tensors)
        gathered = [[torch.zeros(3), torch.zeros(2)] for _ in range(world_size)]
        with pytest.warns(FutureWarning):
            dist.all_gather_coalesced(gathered, [torch.ones(3) * rank, torch.ones(2) - rank])
        return tensors, gathered

    assert_same_as_gloo(exchange, 3)
