"""Ranks under `ulimit`: they make do with little, or name the limit."""

import os
import resource

import pytest
import torch.distributed as dist
from tests.backend.default_group import join_by_file
from tests.on_ranks import on_ranks

import phalanx
from phalanx.errors import PhalanxError
from phalanx.testing import RankFailed, run_ranks


@on_ranks(2, init=False)
def test_a_heap_fits_into_what_address_space_is_left(rank, world_size, tmp_path) -> None:
    path = str(tmp_path / "store")
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    join_by_file(rank, world_size, path)
    shared = phalanx.shared_empty(1000).fill_(1.0)
    dist.all_reduce(shared)
    with pytest.raises(PhalanxError, match=r"the group's heap of [0-9]+ bytes per rank is full"):
        phalanx.shared_empty(1 << 26)
    assert shared[7].item() == 2.0


def _with_few_files(rank, world_size, path, left):
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        taken = []
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            for _ in range(left):
                os.close(taken.pop())
    join_by_file(rank, world_size, path)


def test_a_rank_that_may_open_too_few_files_names_the_limit(tmp_path) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_with_few_files, 2, str(tmp_path / "store"), 3, init=False)
    message = str(caught.value.errors[1])
    assert message.startswith("init_process_group of group '0' on rank 1: ")
    assert "open files" in message
    assert "ulimit -n" in message
