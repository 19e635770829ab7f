"""A rank that has finished its part may leave at once: the others finish theirs, however late they are."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts

from phalanx.errors import PhalanxError
from phalanx.testing import why_no_hosts

pytestmark = [
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()),
    pytest.mark.usefixtures("small_segments"),
]
CALLS = 5


def _left_behind(rank, world_size, machines, leaver):
    """`leaver` goes after the last call; the other has sent its part of it, and stands still until then."""
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(backend="phalanx")
    leaders = group.transport.session.leaders
    receive, num_calls = leaders.receive, 0

    def late(deadline):
        nonlocal num_calls
        num_calls += 1
        if num_calls == CALLS:
            store.wait(["left"])
        return receive(deadline)

    if rank != leaver:
        leaders.receive = late
    got = []
    for n in range(CALLS):
        tensor = torch.tensor([10.0 * n + rank])
        dist.all_reduce(tensor, group=group)
        got.append(tensor.item())
    dist.destroy_process_group(group)
    if rank == leaver:
        store.set("left", "")
    dist.barrier()
    assert got == [20.0 * n + 1 for n in range(CALLS)]


@pytest.mark.parametrize("leaver", [0, 1])
def test_whoever_is_last_in_a_collective_does_not_miss_one_who_has_left_after_it(leaver):
    """Collectives ended with receives for the next ones. To a rank that had left these could not be posted, and a job's
    last all_gather failed on the slower host: "rank 1 is gone: it left the group"."""
    on_hosts((1, 1), _left_behind, leaver)


def _leave_with_the_last_word(rank, world_size, machines, root, count):
    group = dist.new_group(backend="phalanx")
    tensor = torch.arange(count, dtype=torch.float32) if rank == root else torch.zeros(count)
    dist.barrier(group=group)
    begin = time.monotonic()
    dist.broadcast(tensor, root, group=group)
    took_s = time.monotonic() - begin
    dist.destroy_process_group(group)
    assert torch.equal(tensor, torch.arange(count, dtype=torch.float32))
    dist.barrier()
    return took_s


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("count", [50_000, 150_000], ids=["with the heads", "in segments"])
def test_what_a_rank_sent_last_arrives_although_it_leaves_before_the_link_has_carried_it(root, count):
    """The root of a broadcast is done when its tensor is in the kernel's hands, or even before: who left then threw the
    rest away."""
    on_hosts((1, 1), _leave_with_the_last_word, root, count, rate="4mbit")


def _end_while_a_thread_sends(rank, world_size, machines):
    group = dist.new_group(backend="phalanx")
    streams, users, has_sent = group.transport.session.engine.short_messages, set(), threading.Event()
    flush = streams.flush

    def recorded(deadline):
        users.add(threading.current_thread())
        has_sent.set()
        flush(deadline)

    def send_for_ever():
        while True:
            dist.broadcast(torch.ones(60_000), 1, group=group)

    def work():
        with pytest.raises(PhalanxError):
            send_for_ever()

    streams.flush = recorded
    thread = threading.Thread(target=work)
    thread.start()
    if rank == 1:
        has_sent.wait()
        group.leave_at_exit("it ended")
    thread.join()
    assert users == {thread}


def test_a_rank_that_ends_leaves_the_sending_to_the_thread_that_does_it():
    """Its main thread sent what the kernel had not accepted, while the other thread did: the peer got bytes twice, and
    took them for the tensor's."""
    on_hosts((1, 1), _end_while_a_thread_sends, rate="4mbit")
