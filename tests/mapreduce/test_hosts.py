"""On several hosts, where only the network carries buckets, and where a rank of another host is lost."""

import os
import signal
import tempfile

import pytest
from tests.system.hosts_jobs import on_hosts

from phalanx.mapreduce import map_reduce
from phalanx.testing import why_no_hosts


def count(rank, world_size, machines, victims):
    """Each rank spills to a folder that no other knows."""
    calls = 0

    def remainders(number):
        nonlocal calls
        calls += 1
        if rank in victims and calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        for by in range(2, 12):
            yield by, (number % by, "x" * 1000)

    def counted(by, values):
        found = [remainder for remainder, _ in values]
        if rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)  # it had fewer than three records
        return found

    with tempfile.TemporaryDirectory() as folder:
        result = map_reduce(
            range(400), remainders, counted, gather=True, partitions=6, memory_bytes=1 << 20, spill_folder=folder
        )
        assert dict(result) == {by: [number % by for number in range(400)] for by in range(2, 12)}
        result.close()
    return result.lost


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_buckets_go_from_host_to_host():
    assert on_hosts((1, 2), count, ()) == [()] * 3


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
@pytest.mark.parametrize(("sizes", "victims"), [((1, 2), (2,)), ((2, 1, 2), (3, 4)), ((1, 2, 2), (1, 2, 4))], ids=str)
@pytest.mark.slow
def test_ranks_and_whole_hosts_are_lost_and_the_others_do_their_part(sizes, victims):
    lost = [victims if rank not in victims else None for rank in range(sum(sizes))]
    assert on_hosts(sizes, count, victims, lost=victims) == lost
