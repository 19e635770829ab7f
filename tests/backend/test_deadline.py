"""A rank that never comes, to the group or to a collective: the others learn who, and where it is instead."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.backend.default_group import join_by_file
from tests.logs import logged
from tests.on_ranks import on_ranks

from phalanx._base.deadline import Deadline
from phalanx._comm.rendezvous import bootstrap
from phalanx._comm.rendezvous.rank_info import RankInfo, host_identity
from phalanx._comm.symmetric_memory.watch import ProcessId
from phalanx._comm.transport import shared_memory
from phalanx.errors import DeadlineError
from phalanx.testing import run_ranks


def test_a_rank_that_never_reaches_init_is_named_on_every_rank_that_did(tmp_path):
    def check(rank, world_size):
        if rank == 2:
            return None
        started = dist.FileStore(str(tmp_path / "started"), world_size)
        started.set(str(rank), "")
        started.wait(["0", "1", "3"], timedelta(seconds=30))  # on a busy machine one starts a second after the other
        with pytest.raises(DeadlineError) as caught:
            join_by_file(rank, world_size, tmp_path / "store", 1.0)
        assert isinstance(caught.value, TimeoutError)
        return str(caught.value), caught.value.missing

    for message, missing in run_ranks(check, 4, init=False)[:2]:
        assert missing == (2,)
        assert message.startswith("init_process_group of group '0': rank 2 of 4 never joined within 1.0 s.\n")
        assert "Check that 4 processes were started" in message


def test_a_rank_that_makes_one_group_more_reads_of_groups_and_not_of_processes(tmp_path):
    """It read "Check that 3 processes were started", and all had been."""

    def check(rank, world_size):
        over = dist.FileStore(str(tmp_path / "over"), world_size)
        if rank > 0:
            over.wait(["over"], timedelta(seconds=60))
            return None
        with pytest.raises(DeadlineError) as caught:
            dist.new_group(timeout=timedelta(seconds=0.5))
        over.set("over", "")
        return str(caught.value)

    message, *_ = run_ranks(check, 3)
    assert "ranks 1, 2 of 3 never joined within 0.5 s" in message
    assert "All ranks must create all groups in the same order" in message
    assert "processes were started" not in message


def test_a_rank_that_does_not_come_to_a_collective_is_named_with_its_last_step(tmp_path):
    def check(rank, world_size):
        group = dist.new_group()
        dist.barrier(group)
        group.set_timeout(timedelta(seconds=0.4))  # for what is to fail, not for what leads to it
        store = dist.FileStore(str(tmp_path / "over"), world_size)
        if rank == 2:  # busy elsewhere until the others have given up
            store.wait(["0", "1"], timedelta(seconds=30))
            with pytest.raises(DeadlineError) as caught:
                dist.all_reduce(torch.ones(3), group=group)
            return str(caught.value), caught.value.missing
        with pytest.raises(DeadlineError) as caught:
            dist.all_reduce(torch.ones(3), group=group)
        store.set(str(rank), "over")
        return str(caught.value), caught.value.missing

    results = run_ranks(check, 3)
    for message, missing in results[:2]:
        assert missing == (2,)
        assert "on rank" in message
        assert "all_reduce #" in message
        assert "no answer from rank 2" in message
        assert re.search(r"\nRank 2 \(pid \d+\) last finished barrier #", message)
        assert "test_deadline.py:" in message
        assert "Read the log of the missing rank first; if it is only slow, raise the timeout of the group." in message
    assert any("within 0.4 s" in message for message, _ in results[:2])
    assert "gave up waiting" in results[2][0]


def test_a_rank_that_is_somewhere_else_is_named_with_where_it_is():
    def check(rank, world_size):
        groups = [dist.new_group() for _ in range(2)]
        groups[0].set_timeout(timedelta(seconds=0.3))
        if rank == 0:
            with pytest.raises(DeadlineError) as caught:
                dist.recv(torch.ones(3), 1, group=groups[0])
            dist.barrier(groups[1])
            return str(caught.value), caught.value.missing
        dist.barrier(groups[1])
        return None

    message, missing = run_ranks(check, 2)[0]
    assert missing == (1,)
    assert "recv from rank 1 in group" in message
    assert "no answer from rank 1 within 0.3 s" in message


@on_ranks(2)
def test_monitored_barrier_has_a_timeout_of_its_own(rank):
    if rank == 0:
        with pytest.raises(DeadlineError, match=r"no answer from rank 1 within 0\.2 s"):
            dist.group.WORLD.monitored_barrier(timedelta(seconds=0.2))
    else:
        while dist.group.WORLD.symm_mem.core.poison()[0] == 0:
            pass


def test_a_long_wait_is_announced_once_with_who_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "NOTICE_S", 0.5)

    def check(rank, world_size):
        store = dist.FileStore(str(tmp_path / "said"), world_size)
        with logged() as lines:
            if rank == 0:
                work = dist.all_reduce(torch.ones(3), async_op=True)
                while not lines:
                    pass
                store.set("said", "yes")
                work.wait()
                return lines
            store.wait(["said"], timedelta(seconds=30))
            dist.all_reduce(torch.ones(3))
            return lines

    first, second = run_ranks(check, 2)
    assert len(first) == 1
    assert second == []
    assert "all_reduce #" in first[0]
    assert "in group '0' on rank 0: waiting for rank 1 for" in first[0]
    assert "rank 1 has called nothing yet" in first[0]


def test_a_long_wait_at_init_is_announced_with_who_is_missing(monkeypatch, caplog):
    monkeypatch.setattr(bootstrap, "NOTICE_S", 0.0)
    info = RankInfo(host_identity(), "here", "", ProcessId.of_self(), frozenset({0}), 1)
    with pytest.raises(DeadlineError, match=r"ranks 1, 2 of 3 never joined within 0\.4 s"):
        bootstrap.exchange(dist.HashStore(), 0, 3, info, "dp", Deadline.after(0.4))
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == "init_process_group of group 'dp': waiting for ranks 1, 2 for 0 s; giving up after 0 s."


@pytest.mark.parametrize("seconds", [0, -1])
@on_ranks(2, init=False)
def test_a_timeout_that_leaves_no_time_is_refused_before_anybody_waits(rank, world_size, seconds, tmp_path):
    with pytest.raises(ValueError, match="timeout"):
        join_by_file(rank, world_size, tmp_path / "store", seconds)
