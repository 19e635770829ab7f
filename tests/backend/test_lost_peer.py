"""A rank that dies while others wait: every survivor learns who, and how it ended."""

import os
import re
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks

from phalanx.errors import PeerLostError
from phalanx.testing import run_ranks


def _segfault():
    import ctypes
    import faulthandler

    faulthandler.disable()
    ctypes.string_at(0)


def _raise():
    raise ValueError("bad luck")


def _as_a_program(end):
    """End as a rank that runs a script does: with Python's own shutdown, its hooks and its exit code."""

    def run():
        import atexit
        import weakref

        weakref.finalize._registry.clear()  # those of the process that we were forked from are not ours to run
        try:
            end()
        except SystemExit as error:
            code = error.code
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            code = 1
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(code)

    return run


# How rank 1 ends, and what the others read.
ENDS = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
    "SIGSEGV": (_segfault, "killed by SIGSEGV"),
    "os._exit": (lambda: os._exit(3), "it exited with code 3"),
    "sys.exit": (_as_a_program(lambda: sys.exit(4)), "it ended without destroy_process_group"),
    "exception": (_as_a_program(_raise), "it ended with ValueError: bad luck"),
}


def waiting_in(operation, rank):
    tensor = torch.ones(4)
    if operation == "all_reduce":
        dist.all_reduce(tensor)
    elif operation == "large all_reduce":
        dist.all_reduce(torch.ones(300_000))
    elif operation == "recv":
        dist.recv(tensor, 1)
    elif operation == "send":
        dist.send(torch.ones(300_000), 1)
    elif operation == "asynchronous":
        dist.all_reduce(tensor, async_op=True).wait()
    elif operation == "future":
        dist.all_reduce(tensor, async_op=True).get_future().wait()


@pytest.mark.slow(but=("SIGKILL", "exception"))
@pytest.mark.parametrize("end", ENDS)
def test_survivors_of_a_collective_learn_who_died_and_how(end, capfd):
    die, how = ENDS[end]

    def check(rank, world_size):
        dist.barrier()
        if rank == 1:
            die()
        with pytest.raises(PeerLostError) as caught:
            dist.all_reduce(torch.ones(4))
        assert isinstance(caught.value, dist.DistBackendError)
        return str(caught.value), caught.value.ranks

    results = run_ranks(check, 3, lost=(1,))
    for rank in (0, 2):
        message, ranks = results[rank]
        assert ranks == (1,)
        assert re.match(rf"all_reduce #\d+ in group '0' on rank {rank}: rank 1 \(pid \d+\) is gone: ", message)
        # A zombie tells how it ended; one that its parent has buried no longer can.
        assert how in message or "it ended without notice (killed, or crashed)" in message, message
        if end in ("sys.exit", "exception"):
            assert how in message
        assert re.search(r"It last finished barrier #\d+ \(.*test_lost_peer\.py:\d+\)\.", message)
        assert "Read its log first." in message
        assert message.endswith("The group can no longer be used.")


@pytest.mark.parametrize("operation", ["large all_reduce", "recv", "send", "asynchronous", "future"])
def test_every_kind_of_wait_ends_when_the_peer_is_gone(operation):
    def check(rank, world_size):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        # torch's futures carry the text of an error, not its class
        with pytest.raises(RuntimeError if operation == "future" else PeerLostError) as caught:
            waiting_in(operation, rank)
        return str(caught.value)

    message = run_ranks(check, 2, lost=(1,))[0]
    assert "rank 1 (pid " in message
    assert "is gone" in message


def test_a_rank_that_leaves_the_group_is_named_as_one_that_left():
    def check(rank, world_size):
        if rank == 0:
            dist.destroy_process_group()
            return None
        with pytest.raises(PeerLostError, match=r"it left the group \(destroy_process_group\)") as caught:
            dist.barrier()
        return caught.value.ranks

    assert run_ranks(check, 2) == [None, (0,)]


def test_ctrl_c_in_a_collective_is_heard_at_once_and_the_others_learn_why():
    def check(rank, world_size):
        import threading

        if rank == 1:
            dist.barrier()
            timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(torch.ones(3))
            timer.join()
            return "interrupted"
        if rank == 2:
            dist.barrier()
            with pytest.raises(PeerLostError) as caught:
                dist.all_reduce(torch.ones(3))
            return str(caught.value)
        dist.barrier()
        while dist.group.WORLD.symm_mem.core.poison()[0] == 0:  # rank 0 comes only when it is over
            os.sched_yield()
        with pytest.raises(PeerLostError) as caught:
            dist.all_reduce(torch.ones(3))
        return str(caught.value)

    first, second, third = run_ranks(check, 3)
    assert second == "interrupted"
    for message in (first, third):
        assert re.search(
            r": rank 1 \(pid \d+\) was interrupted \((KeyboardInterrupt|a signal handler raised)\) while the group "
            r"waited; it (is|was) in all_reduce #2 \(\S+:\d+\)( for \d\.\d s|, which failed)\. "
            r"The group can no longer be used\.$",
            message,
        )


def test_errors_reach_sub_groups_in_the_numbering_of_the_sub_group():
    def check(rank, world_size):
        group = dist.new_group([1, 3])
        dist.barrier()
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            with pytest.raises(PeerLostError) as caught:
                dist.all_reduce(torch.ones(3), group=group)
            return str(caught.value), caught.value.ranks
        return None

    message, ranks = run_ranks(check, 4, lost=(3,))[1]
    assert ranks == (1,)
    assert "on rank 0: rank 1 (pid" in message


def test_each_of_two_operations_that_fail_together_is_called_by_its_own_name():
    def check(rank, world_size):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        receiving = dist.irecv(torch.ones(2), 1)
        with pytest.raises(PeerLostError) as collective:
            dist.all_reduce(torch.ones(2))
        with pytest.raises(PeerLostError) as message:
            receiving.wait()
        return str(collective.value), str(message.value)

    collective, message = run_ranks(check, 2, lost=(1,))[0]
    assert collective.startswith("all_reduce #")
    assert message.startswith("recv from rank 1 in group '0' on rank 0: rank 1 (pid ")


def _await_death_of(rank):
    while dist.group.WORLD.symm_mem.core.alive(rank):
        os.sched_yield()


def test_what_a_rank_sent_before_it_died_is_received_and_then_its_death():
    def check(rank, world_size):
        if rank == 1:
            dist.send(torch.full((1000,), 1.0), 0, tag=1)
            dist.send(torch.full((1000,), 2.0), 0, tag=2)
            os.kill(os.getpid(), signal.SIGKILL)
        _await_death_of(1)
        tensor = torch.zeros(1000)
        for tag in (2, 1):
            dist.recv(tensor, 1, tag=tag)
            assert tensor[-1] == tag
        with pytest.raises(PeerLostError) as caught:
            dist.recv(tensor, 1, tag=1)
        return caught.value.ranks, str(caught.value)

    ranks, message = run_ranks(check, 2, lost=(1,))[0]
    assert ranks == (1,)
    assert message.startswith("recv from rank 1 in group '0' on rank 0: rank 1 (pid ")


def test_half_a_message_from_a_rank_that_died_is_no_message():
    def check(rank, world_size):
        if rank == 1:
            dist.isend(torch.ones(1_000_000), 0)
            dist.recv(torch.zeros(1), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.send(torch.zeros(1), 1)
        _await_death_of(1)
        with pytest.raises(PeerLostError) as caught:
            dist.recv(torch.zeros(1_000_000), 1)
        return caught.value.ranks

    assert run_ranks(check, 2, lost=(1,))[0] == (1,)


@on_ranks(2, lost=(1,))
def test_a_send_that_fits_does_not_notice_and_the_next_wait_does(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _await_death_of(1)
    dist.send(torch.zeros(10), 1)
    works = [dist.irecv(torch.zeros(1), 1, tag=tag) for tag in range(3)]
    for work in reversed(works):  # every posted receive hears of it
        with pytest.raises(PeerLostError):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert work.exception().ranks == (1,)
    with pytest.raises(PeerLostError):
        dist.isend(torch.zeros(10), 1).wait()


def test_a_receive_from_anybody_waits_as_long_as_anybody_lives():
    def check(rank, world_size):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _await_death_of(1)
        if rank == 2:
            dist.send(torch.ones(1), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        tensor = torch.zeros(1)
        assert dist.recv(tensor, None) == 2
        assert tensor.item() == 1
        with pytest.raises(PeerLostError) as caught:
            dist.recv(tensor, None)
        return caught.value.ranks

    assert run_ranks(check, 3, lost=(1, 2))[0] in ((1,), (2,))


@on_ranks(2, lost=(1,))
def test_a_receive_that_nobody_waits_for_tells_its_future_when_the_peer_dies(rank):
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    heard = threading.Event()
    dist.irecv(torch.zeros(1), 1).get_future().add_done_callback(lambda future: heard.set())
    assert heard.wait(20)
    with pytest.raises(PeerLostError):
        dist.barrier()
