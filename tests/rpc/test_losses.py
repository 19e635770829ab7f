"""Workers that die, that join and leave, and that are started again under the same name."""

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist
from tests.rpc import soak
from tests.rpc.workers import (
    Counter,
    dismiss,
    event,
    join,
    nothing,
    pid,
    run_workers,
    same,
    set_event,
    until,
    wait_event,
    worker,
)

from phalanx import rpc
from phalanx.errors import DeadlineError, PeerLostError
from phalanx.rpc import current
from phalanx.rpc.worker_info import WorkerAddress
from phalanx.rpc.workers import Workers
from phalanx.testing import RankFailed

_kept = []


def _keep(rref):
    _kept.append(rref)


def _fork_and_wait():
    """A child that holds all descriptors of this worker, and lives on."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the worker is gone
        time.sleep(1)  # and still a while
        os._exit(0)
    os.close(read)
    return write


def _lose(rank, folder):
    join(rank, 3, folder)
    if rank == 1:
        signal.pause()  # until it is killed
    if rank == 0:
        _check_loss()
    with pytest.raises(PeerLostError, match="worker of rank 1 is lost"):
        rpc.shutdown()


def _options(folder):
    return rpc.RpcBackendOptions(init_method=f"file://{folder}/store")


def _check_loss():
    agent = current.agent()
    mine = rpc.RRef(Counter(1))
    rpc.rpc_sync("w1", _keep, (mine,))
    assert agent.references.count()["num_forks"] == 1
    theirs = rpc.remote("w1", Counter, (2,))
    assert theirs.rpc_sync().add(1) == 3
    rpc.rpc_sync("w2", _keep, (theirs,))
    rpc.rpc_sync("w1", _fork_and_wait)
    its_pid = rpc.rpc_sync("w1", pid)
    unmade = rpc.remote("w1", wait_event, ("never",), timeout=0)
    fetch = rpc.rpc_async("w2", _fetch, (unmade,), timeout=0)
    rpc.rpc_sync("w2", wait_event, ("fetching",))
    calls = [rpc.rpc_async("w1", wait_event, ("never",), timeout=0) for _ in range(20)]
    os.kill(its_pid, signal.SIGKILL)
    with pytest.raises(PeerLostError, match=r"RRef of worker 'w1'.*the owner is lost.*The object is lost with it"):
        fetch.wait()
    for call in calls:
        with pytest.raises(PeerLostError, match=r"^rpc_async\(wait_event\) to worker 'w1' \(rank 1, pid \d+ on .*\): "):
            call.wait()
    with pytest.raises(PeerLostError, match=r"rpc_sync\(nothing\) to worker 'w1'.*the worker is lost"):
        rpc.rpc_sync("w1", nothing)
    for use in (theirs.to_here, theirs.rpc_sync().add, lambda: rpc.rpc_sync("w2", _use_kept)):
        with pytest.raises(PeerLostError, match=r"RRef of worker 'w1'.*the owner is lost.*The object is lost with it"):
            use()
    assert agent.references.count()["num_forks"] == 0, "what it held was let go"
    assert mine.local_value().value == 1
    assert rpc.rpc_sync("w2", same, (5,)) == 5


def _fetch(rref):
    set_event("fetching")
    return rref.to_here(timeout=0)


def _use_kept():
    return _kept[0].to_here()


def test_the_loss_of_a_worker_fails_its_calls_and_frees_its_references():
    run_workers(_lose, 3, lost=[1])


def _hand_back():
    return _kept[0], rpc.RRef(1), _kept[0], rpc.RRef(2)


def _type_of_kept():
    _kept[0].to_here()


def _counts():
    return sum(current.agent().references.count().values())


def _hand_on_what_is_lost(rank, folder):
    join(rank, None, folder)  # they join and leave
    if rank == 2:
        signal.pause()  # until it is killed
    if rank == 1:
        wait_event("over")
        return
    for name in ("w1", "w2"):
        until(lambda name=name: current.agent().membership.find(name) is not None)
    theirs, mine = rpc.remote("w2", Counter, (2,)), rpc.RRef(3)
    rpc.rpc_sync("w1", _keep, (theirs,))
    rpc.rpc_sync("w1", _type_of_kept)  # so w1 is connected with w2, and hears of its end
    os.kill(rpc.rpc_sync("w2", pid), signal.SIGKILL)
    until(lambda: not _knows_w2() and not rpc.rpc_sync("w1", _knows_w2))
    for _ in range(3):
        with pytest.raises(PeerLostError, match="RRef: its owner, worker 'w2', is lost"):
            rpc.rpc_sync("w1", _hand_back)
        with pytest.raises(PeerLostError, match="RRef: its owner, worker 'w2', is lost"):
            rpc.rpc_sync("w1", same, ((theirs, mine, theirs),))
    until(lambda: not _counts() and not rpc.rpc_sync("w1", _counts))
    dismiss("w1", "over")
    rpc.shutdown(graceful=False)


def _knows_w2():
    return current.agent().membership.find("w2") is not None


def test_references_beside_one_whose_owner_is_lost_are_released():
    """They stayed at their owners for ever, where workers join and leave."""
    run_workers(_hand_on_what_is_lost, 3, lost=[2])


def _lose_stranger(rank, folder):
    join(rank, 3, folder)
    if rank == 1:
        os.kill(rpc.rpc_sync("w2", pid), signal.SIGKILL)
    if rank == 2:
        signal.pause()  # until it is killed
    with pytest.raises(PeerLostError, match="worker of rank 2 is lost"):
        rpc.shutdown()


def test_the_end_does_not_wait_for_a_lost_worker_that_rank_0_never_spoke_to():
    """Rank 0 collects who has come to the end. It hears of a process's end only if it is connected with it: a trainer
    was killed that had talked to the servers alone, and shutdown of all others hung."""
    run_workers(_lose_stranger, 3, lost=[2])


def _join(rank, folder):
    if rank == 0:
        join(rank, None, folder)
        assert rpc.get_worker_info() == rpc.WorkerInfo("w0", 0)
        for time_ in range(3):
            _await_worker("w1")
            assert rpc.rpc_sync(1, same, (time_,)) == time_
            rref = rpc.remote("w1", Counter, (time_,))
            assert rref.rpc_sync().add(1) == time_ + 1
            gone = current.agent().membership.find("w1")
            _send_away("w1")
            _await_gone(gone)
            with pytest.raises(PeerLostError, match="worker 'w1'"):
                rref.to_here()
        _await_worker("w1")
        _send_away("w1")
        rpc.shutdown()
        return
    for _ in range(4):
        join(rank, None, folder)
        _await_worker("w0")
        event("has met w0").set()
        wait_event("leave")
        for name in ("has met w0", "leave"):
            event(name).clear()
        rpc.shutdown()


def _send_away(name):
    """Once it has met w0: it may answer before its own first call, and w0's last round ends with w0."""
    rpc.rpc_sync(name, wait_event, ("has met w0",))
    rpc.rpc_sync(name, set_event, ("leave",))


def _await_worker(name):
    until(lambda: rpc.rpc_sync(name, same, (1,)) == 1)


def _await_gone(member):
    """Of one incarnation: the next one of the name may come before we look."""
    until(lambda: current.agent().peer(member).lost)


def test_workers_join_and_leave_and_come_again_under_the_same_name():
    run_workers(_join, 2)


def _join_and_call_all(rank, folder):
    join(rank, None, folder)
    for to in range(4):
        until(lambda to=to: rpc.rpc_sync(to, same, (rank,)) == rank)
    for to in range(4):
        rpc.rpc_sync(f"w{to}", set_event, (f"rank {rank} has met all",))
    for other in range(4):
        wait_event(f"rank {other} has met all")
    rpc.shutdown()


def test_workers_that_join_at_the_same_time_all_find_each_other_by_number_and_name():
    run_workers(_join_and_call_all, 4)


def _same_name(rank, folder, world_size):
    rpc.init_rpc("w", rank=rank, world_size=world_size, rpc_backend_options=_options(folder))


def test_two_workers_of_one_name_are_reported():
    with pytest.raises(RankFailed, match=r"RPC worker name is not unique: rank 0 is 'w', rank 1 is 'w'"):
        run_workers(_same_name, 2, 2)


def _crowd(rank, folder):
    with worker(rank, 2, folder, max_calls_in_flight=10, max_bytes_in_flight=1 << 20):
        if rank == 0:
            calls = [rpc.rpc_async("w1", wait_event, ("crowd",)) for _ in range(10)]
            with pytest.raises(DeadlineError, match=r"10 calls .* are in flight.*this one was not sent"):
                rpc.rpc_async("w1", nothing, timeout=0.05)
            more = threading.Thread(target=lambda: calls.append(rpc.rpc_async("w1", same, (1,))), name="phalanx-more")
            more.start()
            current.agent().control(current.agent().membership.find("w1"), "set", None)
            for call in list(calls):
                call.wait()
            more.join()
            assert calls[-1].wait() == 1
        else:
            current.agent().controls["set"] = lambda member, argument: set_event("crowd")


def test_a_caller_waits_while_too_many_of_its_calls_are_under_way():
    run_workers(_crowd, 2)


def _soak(rank, folder):
    return soak.soak(2.0, 1000, kill_every_s=0.4)


@pytest.mark.slow
def test_no_call_is_lost_or_runs_twice_while_workers_are_killed_and_come_again():
    (report,) = run_workers(_soak, 1)
    assert report.kills > 0
    assert report.answered > 0
    assert (report.lost, report.run_twice, report.answered_without_run) == (0, 0, 0)
    assert report.reasons.keys() <= {"PeerLostError"}


def test_a_worker_that_was_lost_while_it_was_looked_up_does_not_hide_the_next_one():
    """A thread read the entry of a worker in the store, and before it had noted it, another one heard that this worker
    was lost. It noted the dead one, and all calls to that name failed from then on, though another had joined."""
    store = dist.HashStore()
    members = Workers(store, None)
    dead, alive = (WorkerAddress.of_self("w1", 1, "host") for _ in range(2))
    store.set("name/w1", dead.to_json())
    read = members.find("w1")
    assert read == dead
    members.forget(dead)
    members.add(WorkerAddress.from_json(dead.to_json()))
    assert members.find("w1") is None
    store.set("name/w1", alive.to_json())
    assert members.find("w1") == alive
    members.add(WorkerAddress.from_json(alive.to_json()))
    members.forget(alive)
    assert members.find("w1") is None


def test_a_worker_that_left_unheard_before_its_first_call_does_not_hide_the_next_one():
    """It says goodbye to those that it is connected to only: the first call of the name failed with PeerLostError."""
    store = dist.HashStore()
    members = Workers(store, None)
    gone, here = (WorkerAddress.of_self("w1", 1, "host") for _ in range(2))
    members.add(gone)  # as `join` finds it
    store.set("name/w1", here.to_json())
    assert members.find(1) == here
    assert members.find("w1") == here
    assert members.by_uid(gone.uid) is None
