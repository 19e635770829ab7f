"""How many open files a process may have, and waiting for descriptors with high numbers."""

import os
import resource
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts

from phalanx._base.descriptors import wait_readable
from phalanx.testing import why_no_hosts

# In a process of its own: a hard limit that was lowered can't be raised again by everybody.
_LIMIT = """
import resource, sys
from phalanx._base.descriptors import find_shortage, raise_limit
soft, hard, wanted = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(raise_limit(wanted), resource.getrlimit(resource.RLIMIT_NOFILE)[0], find_shortage(wanted))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "expected"),
    [(100, 400, 300, 300), (100, 400, 400, 400), (100, 400, 5000, 400), (200, 400, 20, 200)],
)
def test_the_limit_is_raised_as_far_as_it_may_be_and_never_lowered(soft, hard, wanted, expected):
    line = [sys.executable, "-c", _LIMIT, *map(str, (soft, hard, wanted))]
    said = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    raised, limit, shortage = said.split(" ", 2)
    assert int(raised) == int(limit) == expected
    if wanted > 390:
        assert f"needs {wanted} more open files" in shortage
        assert "its limit is 400" in shortage
        assert "ulimit -Hn" in shortage
    else:
        assert shortage == "\n"


def test_what_can_be_read_is_found_among_descriptors_of_any_number():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"no more than {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = []
    try:
        while not held or held[-1] < 1500:
            held.append(os.dup(0))
        pairs = [socket.socketpair() for _ in range(4)]
        sources = [pair[0] for pair in pairs]
        assert all(source.fileno() > 1024 for source in sources)
        assert wait_readable(sources, 0.0) == []
        pairs[1][1].send(b"x")
        pairs[3][1].close()  # the end can be read, too
        assert wait_readable(sources) == [sources[1], sources[3]]
        assert wait_readable([source.fileno() for source in sources], 1.0) == [
            sources[1].fileno(),
            sources[3].fileno(),
        ]
        for pair in pairs:
            for one in pair:
                one.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
@pytest.mark.parametrize("hard", [False, True])
def test_a_rank_without_room_for_its_connections_raises_the_limit_or_says_so_to_all(hard):
    """Gloo ends the whole process where a connection finds no descriptor."""

    def job(rank, world_size, machines):
        if rank == 1:
            limit = len(os.listdir("/proc/self/fd")) + 20
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (limit, limit if hard else resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            )
        try:
            group = dist.new_group()
        except Exception as error:
            return str(error)
        ones = torch.ones(1)
        dist.all_reduce(ones, group=group)
        return ones.item()

    first, second = on_hosts((1, 1), job)
    if hard:
        assert "rank 1" in first
        assert "too few open files for all connections in init_process_group" in first
        assert " more open files" in second
    else:
        assert first == second == 2.0
