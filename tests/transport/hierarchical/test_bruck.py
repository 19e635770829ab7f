"""Leaders of many hosts forward each other's messages: few are sent, and whoever is to blame is named as before."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import limit, on_hosts

from phalanx._comm.transport.hierarchical import bruck
from phalanx._comm.transport.hierarchical.exchange import SMALL_BYTES
from phalanx.errors import DeadlineError, MismatchError, PeerLostError
from phalanx.testing import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
CALLS = 20


def _count_messages(rank, world_size, machines):
    """Return how many messages this rank sends in a call, of each kind of small operation."""
    group = dist.group.WORLD
    messages = group.transport.session.engine.short_messages
    send, count = messages.send, 0

    def counted(*arguments):
        nonlocal count
        count += 1
        return send(*arguments)

    messages.send = counted
    found = []
    for operation in ("sum", "barrier", "gather", "broadcast", "scatter"):
        count = 0
        for n in range(CALLS):
            tensor = torch.tensor([float(n + rank)])
            if operation == "sum":
                dist.all_reduce(tensor)
                assert tensor.item() == n * world_size + sum(range(world_size))
            elif operation == "barrier":
                dist.barrier()
            elif operation == "gather":
                whole = torch.empty(world_size)
                dist.all_gather_single(whole, tensor)
                assert whole.tolist() == [float(n + r) for r in range(world_size)]
            elif operation == "broadcast":
                dist.broadcast(tensor, src=n % world_size)
                assert tensor.item() == n + n % world_size
            else:
                dist.reduce_scatter_single(tensor, torch.arange(float(world_size)) + n)
                assert tensor.item() == world_size * (rank + n)
        found.append(count / CALLS)
    del messages.send
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("num_hosts", "messages"), [(3, 2), (4, 2), (6, 3)])
def test_a_call_costs_each_of_many_hosts_as_many_messages_as_its_number_has_bits(num_hosts, messages):
    told = on_hosts((1,) * num_hosts, _count_messages, run_s=120)
    assert told == [[messages] * 5] * num_hosts


def _sizes_around_the_limit(rank, world_size, machines):
    """Add up what is just small enough, so that the messages of all other hosts fill their memory to the end."""
    most = SMALL_BYTES // (world_size - 1) // 4
    for count in (most - 1, most, most + 1, 3 * most):
        tensor = torch.arange(count, dtype=torch.float32) + rank
        dist.all_reduce(tensor)
        total = world_size * torch.arange(count, dtype=torch.float32) + sum(range(world_size))
        assert torch.equal(tensor, total), count
        outputs = torch.empty(world_size * (count // world_size))
        dist.all_gather_single(outputs, torch.full((count // world_size,), float(rank)))
        assert torch.equal(outputs, torch.arange(float(world_size)).repeat_interleave(count // world_size)), count


@pytest.mark.slow
def test_sums_are_right_on_both_sides_of_the_limit_of_what_travels_with_the_heads():
    on_hosts((1,) * 9, _sizes_around_the_limit, run_s=120)


def _fails(rank, world_size, machines, how):
    """Have the third rank fail in the tenth call, and return what this one is told."""
    store = dist.distributed_c10d._get_default_store()
    for n in range(20):
        tensor = torch.tensor([float(n)])
        if n == 10:
            dist.barrier()
            if how == "late":
                limit(2.0)
        if n == 10 and rank == 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "late":
                store.wait(["told"])
            if how == "differs":
                tensor = torch.tensor([float(n), 0.0])
        try:
            dist.all_reduce(tensor)
        except (PeerLostError, DeadlineError, MismatchError) as error:
            if rank != 2:
                store.set("told", "")
            return n, type(error).__name__, str(error)
    return None


@pytest.mark.slow(but=("differs-MismatchError-(1, 2, 2, 1)",))
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (1, 2, 2, 1)], ids=str)
@pytest.mark.parametrize(
    ("how", "kind"), [("killed", "PeerLostError"), ("late", "DeadlineError"), ("differs", "MismatchError")]
)
def test_the_rank_to_blame_is_named_on_all_although_few_wait_for_its_own_message(monkeypatch, sizes, how, kind):
    monkeypatch.setattr(bruck, "MOST_DIRECT", 2)
    told = on_hosts(sizes, _fails, how, lost=(2,) if how == "killed" else (), run_s=100)
    for rank, said in enumerate(told):
        if rank == 2 and how != "differs":
            continue  # it is gone, or comes when the job's store is
        n, name, text = said
        assert (n, name) == (10, kind), told
        if how == "differs":
            assert "2 elements" in text or "[2]" in text or "(2" in text, text
        else:
            assert "rank 2" in text, text
