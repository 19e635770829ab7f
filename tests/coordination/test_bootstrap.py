"""How a group forms: whoever does not belong there, or believes something else, is told at once, on every rank.

Ranks that believed in world sizes 2 and 3 joined and reduced: both got the average of two, and a whole epoch with the
wrong shards. Two processes with one RANK overlooked each other, and "rank 2 never joined" was all that was said, when
time was up; a RANK that does not exist ended in an IndexError, and the others waited. And a file that an incomplete
start had left behind made the next two healthy jobs fail, with words about the ranks of the first.
"""

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx._base.deadline import Deadline
from phalanx._comm.backend import create
from phalanx._comm.rendezvous import bootstrap
from phalanx._comm.rendezvous.bootstrap import exchange
from phalanx._comm.rendezvous.rank_info import RankArrival, RankInfo, find_dead, find_problem, host_identity
from phalanx._comm.symmetric_memory.watch import ProcessId
from phalanx.errors import DeadlineError, MismatchError, PeerLostError
from phalanx.testing import run_ranks

LONG = timedelta(seconds=60)  # nothing here may wait for it


def start(path, rank, world_size, timeout=LONG):
    dist.init_process_group("phalanx", init_method=f"file://{path}", rank=rank, world_size=world_size, timeout=timeout)


def total_of(path, rank, world_size):
    start(path, rank, world_size)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor[0].item()


def _refused(path, rank, world_size, error=MismatchError):
    with pytest.raises(error) as caught:
        start(path, rank, world_size)
    assert not dist.is_initialized()
    return str(caught.value)


def _disagree(rank, _, folder):
    sizes = _refused(folder / "sizes", rank, 3 if rank == 1 else 4)
    twice = _refused(folder / "twice", min(rank, 1), 3)
    nobody = _refused(folder / "nobody", rank + 1, 3, ValueError if rank == 2 else MismatchError)
    beyond = _refused(folder / "beyond", -2 if rank == 0 else rank, 3, ValueError if rank == 0 else MismatchError)
    # The file of a start that failed is no obstacle, whatever it was.
    return sizes, twice, nobody, beyond, [total_of(folder / name, rank, 3) for name in ("sizes", "twice", "beyond")]


@pytest.mark.slow
def test_ranks_that_do_not_fit_together_are_all_told_who_believes_what(tmp_path) -> None:
    results = run_ranks(_disagree, 3, tmp_path, init=False)
    for rank, (sizes, twice, nobody, beyond, totals) in enumerate(results):
        assert sizes.startswith(f"init_process_group of group '0' on rank {rank}: the ranks were given different world")
        assert "  rank 1 (pid " in sizes
        assert ": world size 3\n" in sizes
        assert ": world size 4\n" in sizes
        assert "same WORLD_SIZE" in sizes
        assert f"on rank {min(rank, 1)}: two processes are rank 1 of 3:\n  pid " in twice
        assert f"on rank {rank + 1}: pid " in nobody
        assert "is rank 3 of 3, whose ranks are 0 to 2.\nCheck RANK" in nobody
        assert "is rank -2 of 3, whose ranks are 0 to 2" in beyond
        assert totals == [3.0, 3.0, 3.0]
    for case in range(4):
        assert len({result[case].partition(": ")[2] for result in results}) == 1


def _alone_for_a_moment(path):
    with pytest.raises(DeadlineError, match="rank 1 of 2 never joined within"):
        start(path, 0, 2, timedelta(seconds=0.2))
    os._exit(0)  # the store's file stays, as it does when the interpreter is killed


def _killed_while_it_waits(path):
    def end_once_it_has_come(*_):
        if path.exists() and b"rank/0" in path.read_bytes():
            os.kill(os.getpid(), signal.SIGKILL)

    signal.signal(signal.SIGALRM, end_once_it_has_come)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    start(path, 0, 2)


def _run_alone(leave, path):
    earlier = multiprocessing.get_context("fork").Process(target=leave, args=(path,))
    earlier.start()
    earlier.join()


@pytest.mark.parametrize("leave", [_alone_for_a_moment, _killed_while_it_waits])
def test_a_file_that_an_incomplete_start_left_behind_is_begun_afresh(leave, tmp_path) -> None:
    path = tmp_path / "store"
    _run_alone(leave, path)
    assert path.exists()
    for _ in range(2):
        assert run_ranks(_totals, 2, path, init=False) == [2.0, 2.0]


def _totals(rank, world_size, path):
    return total_of(path, rank, world_size)


def test_who_waits_in_vain_hears_of_the_earlier_start_at_that_file(tmp_path) -> None:
    path = tmp_path / "store"
    _run_alone(_alone_for_a_moment, path)

    def check(rank, world_size):
        with pytest.raises(DeadlineError) as caught:
            start(path, 1, 2, timedelta(seconds=0.1))
        return str(caught.value)

    message = run_ranks(check, 1, init=False)[0]
    assert "rank 0 of 2 never joined within 0.1 s." in message
    assert "\nBefore this start, an earlier start ended at " in message
    assert message.endswith(": rank 1 of 2 never joined within 0.2 s.")


@pytest.mark.slow(but=("0",))
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_ends_while_it_waits_for_the_others_is_named_at_once(victim, tmp_path) -> None:
    """It was told as a rank that never came, when time was up."""

    def check(rank, world_size):
        store = dist.FileStore(str(tmp_path / "store"), 4)

        def die():
            while not store.check([f"0/rank/{i}" for i in range(3)]):  # all have said who they are
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == 3:
            return None  # it is late: the others wait for it
        if rank == victim:
            threading.Thread(target=die, daemon=True).start()
        with pytest.raises(PeerLostError) as caught:
            exchange(store, rank, 4, _info(), "dp", Deadline.after(60))
        return str(caught.value), caught.value.ranks

    results = run_ranks(check, 4, init=False, lost=(victim,))
    for message, ranks in (result for result in results if result):
        assert ranks == (victim,)
        assert f"rank {victim} (pid " in message
        assert "joined, but ended before all ranks had joined.\nRead its log first." in message


def test_a_process_of_another_job_learns_that_its_rank_is_taken_by_a_group_that_was_formed_there(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(bootstrap, "NOTICE_S", 0.0)

    def check(rank, world_size):
        path = tmp_path / "store"
        other = dist.FileStore(str(tmp_path / "other"), 3)
        if rank < 2:
            start(path, rank, 2)
            other.set(f"formed/{rank}", "")
            other.wait(["told"], LONG)
            dist.barrier()
            return None
        other.wait(["formed/0", "formed/1"], LONG)
        outcome = _refused(path, 1, 2)
        other.set("told", "")
        return outcome

    outcome = run_ranks(check, 3, init=False)[2]
    assert "on rank 1: no other rank has joined, and rank 1 is already another process, pid " in outcome
    assert "which still runs; a group of this name was formed here at " in outcome


def test_a_start_is_not_confused_by_one_that_died_between_two_words(tmp_path) -> None:
    """A place in the row that nobody fills, because its process ended before it had said who it is."""

    def check(rank, world_size):
        store = dist.PrefixStore("p", dist.FileStore(str(tmp_path / "store"), 2))
        if rank == 0:
            store.add("0/came", 1)
            store.set("row", "")
        store.wait(["row"], LONG)
        return len(exchange(store, rank, 2, _info(), "dp", Deadline.after(60)).infos)

    assert run_ranks(check, 2, init=False) == [2, 2]


def _info(process=None):
    return RankInfo(host_identity(), "here", "", process or ProcessId.of_self(), frozenset(), 1)


def test_who_fits_and_who_does_not() -> None:
    a, b, c = (RankArrival(rank, 3, _info(), time.time()) for rank in range(3))
    assert find_problem([]) is find_problem([c]) is find_problem([c, a, b]) is None
    assert "different versions of Phalanx" in find_problem([a, RankArrival(1, 3, _info(), 0.0, 1)]).text
    old = RankArrival(1, 3, _info(), 0.0, 1).to_json()
    del old["rank_info"]["secret"]  # which that version did not have
    assert "different versions of Phalanx" in find_problem([a, RankArrival.from_json(old)]).text
    many = find_problem([RankArrival(r, 20, _info()) for r in range(20)] + [RankArrival(0, 1, _info())])
    assert "  and 12 more: world size 20" in many.text
    assert find_problem([a, RankArrival.from_json(b.to_json()), c]) is None


def test_only_a_process_that_can_be_seen_counts_as_dead() -> None:
    me, gone = ProcessId.of_self(), ProcessId(1 << 22, 1, ProcessId.of_self().namespace)
    assert not find_dead([RankArrival(0, 2, _info()), RankArrival(1, 2, _info())], _info())
    assert find_dead([RankArrival(1, 2, _info(gone))], _info()).ranks == {1: f"pid {1 << 22} on here"}
    assert not find_dead([RankArrival(1, 2, _info(ProcessId(1 << 22, 1, "elsewhere")))], _info())
    assert me.is_running()
    assert not me.has_ended()
    assert not ProcessId(me.pid, me.start_ticks + 1, me.namespace).is_running()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_ends_between_the_bootstrap_and_the_memory_is_named_at_once(victim, tmp_path, monkeypatch) -> None:
    """Who hands out the memory waited for it until time was up, and blamed a rank that "did not fetch the memory"."""

    def check(rank, world_size):
        if rank == victim:
            monkeypatch.setattr(create, "open_symmetric_memory", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(PeerLostError) as caught:
            start(tmp_path / "store", rank, world_size)
        return caught.value.ranks, str(caught.value)

    for ranks, message in (result for result in run_ranks(check, 3, init=False, lost=(victim,)) if result):
        if victim == 2 and ranks == (0,):
            continue  # it had the memory, and rank 0 was gone when it looked around
        assert ranks == (victim,)
        assert f"rank {victim} (pid " in message
