"""Many groups over several hosts cost a rank connections to their ranks, and little else."""

import os

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts

from phalanx.testing import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
NUM_GROUPS = 8


def costs():
    """This process's threads and descriptors, by their numbers and by what the descriptors stand for."""
    links = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]
    sockets = sum(target.startswith("socket:") for target in targets)
    return len(os.listdir("/proc/self/task")), sockets, len(targets) - sockets


@pytest.mark.slow(but=("sizes0",))
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_groups_share_threads_the_port_and_the_connections_to_the_store(sizes):
    def job(rank, world_size, machines):
        def use(group):
            small, large = torch.full((4,), rank + 1.0), torch.full((1 << 18,), rank + 1.0)
            for tensor in (small, large):
                dist.all_reduce(tensor, group=group)
            return [small[0].item(), large[-1].item()]

        sums = [use(dist.new_group()) for _ in range(2)]  # the first bring what all share
        dist.barrier()
        before = costs()
        groups = [dist.new_group() for _ in range(NUM_GROUPS)]
        sums += [use(group) for group in groups]
        dist.barrier()
        after = costs()
        for group in groups:
            dist.destroy_process_group(group)
        dist.barrier()
        return sums, [now - then for now, then in zip(after, before, strict=True)], costs()[0] - before[0]

    total = sum(range(1, sum(sizes) + 1))
    for sums, (threads, sockets, others), left in on_hosts(sizes, job):
        assert sums == [[total, total]] * (NUM_GROUPS + 2)
        # Which thread of two wins a race decides whether a second one waits; it does not depend on the groups.
        collectives = 0 if 2 in sizes else NUM_GROUPS  # a rank that has its host for itself: Gloo's own have a thread
        assert threads <= collectives + 2
        assert left <= 2
        shared_memory = 6 * NUM_GROUPS if 2 in sizes else 0  # ranks of one host: memory, and who is alive
        streams = len(sizes) - 1  # between leaders
        assert sockets <= (sum(sizes) - 1 + streams) * NUM_GROUPS + shared_memory
        assert others <= shared_memory
