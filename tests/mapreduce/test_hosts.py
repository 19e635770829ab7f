"""On several hosts, where only the network carries buckets."""

import tempfile

import pytest
from tests.system.hosts_jobs import on_hosts

from phalanx.mapreduce import map_reduce
from phalanx.testing import why_no_hosts


def count(rank, world_size, machines):
    """Each rank spills to a folder that no other knows."""

    def remainders(number):
        for by in range(2, 12):
            yield by, (number % by, "x" * 1000)

    def counted(by, values):
        return [remainder for remainder, _ in values]

    with tempfile.TemporaryDirectory() as folder:
        result = map_reduce(
            range(400), remainders, counted, gather=True, partitions=6, memory_bytes=1 << 20, spill_folder=folder
        )
        assert dict(result) == {by: [number % by for number in range(400)] for by in range(2, 12)}
        result.close()


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_buckets_go_from_host_to_host():
    on_hosts((1, 2), count)
