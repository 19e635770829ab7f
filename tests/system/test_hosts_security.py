"""What ranks on several hosts send each other is not protected: where it may go, and who decides."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts

import phalanx
from phalanx.testing import RankFailed, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
PUBLIC = "8.77.0"


def _sum(rank, world_size, machines):
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor[0].item()


def test_a_public_address_is_refused_on_all_ranks_before_anything_listens():
    with pytest.raises(RankFailed) as caught:
        on_hosts((1, 2), _sum, network=PUBLIC)
    assert sorted(caught.value.errors) == [0, 1, 2]
    for rank, error in caught.value.errors.items():
        assert f"init_process_group of group '0' on rank {rank}: tensors would be sent to and from" in str(error)
        assert f"{PUBLIC}.1 on " in str(error)
        assert f"{PUBLIC}.2 on " in str(error)
        assert "Options(allow_public_address=True), or PHALANX_ALLOW_PUBLIC_ADDRESS=1" in str(error)


def test_whoever_asks_for_a_public_address_by_option_or_variable_gets_it():
    def check(rank, world_size, machines):
        os.environ["PHALANX_ALLOW_PUBLIC_ADDRESS"] = "1"
        dist.new_group([0, 1], backend="phalanx")
        return _sum(rank, world_size, machines)

    assert on_hosts((1, 1), check, network=PUBLIC, options=phalanx.Options(allow_public_address=True)) == [2.0, 2.0]


def test_ranks_listen_at_the_interface_that_is_asked_for_and_at_no_other():
    """They meet at a public address, and send tensors through a private network between the same hosts."""

    def check(rank, world_size, machines):
        totals = []
        for options in (phalanx.Options(interface="eth0"), None):  # then by the variable
            if options is None:
                os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
            group = dist.new_group([0, 1], backend="phalanx", pg_options=options)
            tensor = torch.ones(3)
            dist.all_reduce(tensor, group=group)
            totals.append(tensor[0].item())
        inodes = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_there(fd)}
        return totals, [at for at, inode in _listeners() if f"socket:[{inode}]" in inodes]

    for rank, (totals, listens) in enumerate(on_hosts((1, 1), check)):
        assert totals == [2.0, 2.0]
        assert f"10.77.0.{rank + 1}" in listens
        assert set(listens) <= {f"10.77.0.{rank + 1}", "::"}  # the latter is PyTorch's store, on rank 0
        assert rank == 0 or "::" not in listens


def _is_there(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


def _listeners():
    """Address and inode of each TCP socket of this network that listens."""
    for name, words in (("tcp", 4), ("tcp6", 16)):
        with open(f"/proc/net/{name}") as table:
            for line in list(table)[1:]:
                fields = line.split()
                if fields[3] != "0A":
                    continue
                digits = fields[1].partition(":")[0]
                if words == 4:
                    yield ".".join(str(int(digits[i : i + 2], 16)) for i in (6, 4, 2, 0)), fields[9]
                elif set(digits) == {"0"}:
                    yield "::", fields[9]
                else:  # an IPv4 address in IPv6's clothes
                    yield ".".join(str(int(digits[i : i + 2], 16)) for i in (30, 28, 26, 24)), fields[9]
