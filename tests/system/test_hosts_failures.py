"""What goes wrong across hosts: every rank, wherever it is, raises the same error, and names the group's ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import limit, on_hosts

import phalanx
from phalanx._comm.backend import connect
from phalanx._comm.engines.message_streams import StreamListener
from phalanx.errors import ClosedError, DeadlineError, MismatchError, PeerLostError, PhalanxError
from phalanx.testing import RankFailed, why_no_hosts

pytestmark = [
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()),
    pytest.mark.usefixtures("small_segments"),
]


def cause_of(error):
    """What the message says after the operation and the rank: the same on every rank."""
    return str(error).partition(": ")[2]


@pytest.mark.slow(but=("(1, 1, 1)",))
@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1), (3, 1), (1, 2)], ids=str)
def test_everybody_learns_which_rank_of_another_host_died(sizes):
    victim = sum(sizes) - 1

    def check(rank, world_size, machines):
        dist.barrier()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError) as caught:
            dist.all_reduce(torch.ones(1000))
        with pytest.raises(PeerLostError, match="is gone"):  # and it stays so
            dist.barrier()
        return cause_of(caught.value), caught.value.ranks, str(caught.value)

    results = on_hosts(sizes, check, lost=(victim,))[:victim]
    assert len({text for text, _, _ in results}) == 1
    for rank, (text, ranks, message) in enumerate(results):
        assert ranks == (victim,)
        assert f"all_reduce #3 in group '0' on rank {rank}: rank {victim} (pid " in message
        assert f"10.77.0.{len(sizes)}) is gone: " in text
        assert "Read its log first. The group can no longer be used." in text
        if sizes[-1] > 1:  # a rank of its host saw how
            assert "killed by SIGKILL" in text or "it ended without notice" in text


TRANSFERS = {
    "broadcast": lambda tensor, rank: dist.broadcast(tensor, src=1),
    "asynchronous broadcast": lambda tensor, rank: dist.broadcast(tensor, src=1, async_op=True).wait(),
    "message": lambda tensor, rank: dist.send(tensor, 0) if rank == 1 else dist.recv(tensor, 1),
}


@pytest.mark.slow(but=("broadcast-1-True-False", "message-0-True-False"))
@pytest.mark.parametrize("without_memory", [False, True])
@pytest.mark.parametrize("in_main", [True, False])
@pytest.mark.parametrize(
    ("what", "victim"), [("broadcast", 1), ("asynchronous broadcast", 1), ("message", 1), ("message", 0)]
)
def test_a_rank_that_dies_in_the_middle_of_a_transfer_is_named_before_the_timeout_and_in_the_next_call(
    monkeypatch, what, victim, in_main, without_memory
):
    """Gloo wakes whoever waits for a message when its connection goes, but not if the message had begun to come: the
    others heard of a death in the middle of a segment when their time was up, and called it late. The thread that
    waited in Gloo kept the group's lock: a barrier in an `except` waited until the timeout, and said in the end that
    another thread's collective was still under way. Where ranks cannot share memory, nobody looked at the connections;
    outside of the main thread nothing was heard at all.
    """
    if without_memory:
        monkeypatch.setattr("phalanx._comm.backend.create._cannot_share", lambda *_: "the test says so")

    def check(rank, world_size, machines):
        tensor, heard = torch.ones(2 * 2**20), []
        dist.barrier()
        if rank == victim:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

        def move():
            with pytest.raises(PeerLostError) as caught:
                _call_until_it_fails(lambda: TRANSFERS[what](tensor, rank))
            heard.append(caught.value.ranks)

        if in_main:
            move()
        else:
            thread = threading.Thread(target=move)
            thread.start()
            thread.join()
        with pytest.raises(PeerLostError, match=rf"barrier.* in group '0' on rank {1 - victim}: rank {victim} "):
            dist.barrier()
        return heard

    assert on_hosts((1, 1), check, lost=(victim,), timeout_s=90.0, rate="1gbit")[1 - victim] == [(victim,)]


@pytest.mark.slow
def test_a_rank_that_dies_in_the_middle_of_a_small_collective_is_named_before_the_timeout():
    """What travels with the heads is up to 256 KiB for a host: on a slow link its sender can die while it does."""

    def check(rank, world_size, machines):
        tensor = torch.ones(60000)
        dist.barrier()
        if rank == 1:  # its kernel holds little, or it would send the rest for the dead
            Path("/proc/sys/net/ipv4/tcp_wmem").write_text("4096 16384 16384")  # of this host's network alone
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with pytest.raises(PeerLostError) as caught:
            _call_until_it_fails(lambda: dist.broadcast(tensor, src=1))
        return caught.value.ranks

    assert on_hosts((1, 1), check, lost=(1,), timeout_s=90.0, rate="20mbit")[0] == (1,)


def _call_until_it_fails(call):
    while True:
        call()


def test_a_rank_that_dies_while_others_wait_for_its_message_is_named():
    def check(rank, world_size, machines):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError) as caught:
            dist.recv(torch.empty(3), 1)
        return str(caught.value)

    message = on_hosts((1, 1), check, lost=(1,))[0]
    assert "recv from rank 1 in group '0' on rank 0: rank 1 (pid " in message


SMALL, LARGE = 1000, 200_000  # elements: with the head of the call, and in segments


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_whatever_two_ranks_call_differently_is_named_on_all_and_changes_no_tensor(odd):
    """Little tensors travel with the head of their call and large ones behind it, on other ways: each meets each."""

    def calls(tensor, world_size, group):
        """By name: what most ranks call, and what one calls."""
        large, parts = torch.ones(LARGE), [torch.empty_like(tensor) for _ in range(world_size)]
        whole = torch.empty(world_size * SMALL)
        return {
            "another reduction": (
                lambda: dist.all_reduce(tensor, group=group),
                lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group),
            ),
            "another size": (
                lambda: dist.all_reduce(tensor, group=group),
                lambda: dist.all_reduce(tensor[:5], group=group),
            ),
            "another root": (
                lambda: dist.broadcast(tensor, src=3, group=group),
                lambda: dist.broadcast(tensor, src=0, group=group),
            ),
            "as many bytes of another type": (
                lambda: dist.all_reduce(tensor, group=group),
                lambda: dist.all_reduce(tensor.view(torch.int32), group=group),
            ),
            "another operation on as many bytes": (
                lambda: dist.broadcast(tensor, src=3, group=group),
                lambda: dist.all_reduce(tensor, group=group),
            ),
            "a large one": (
                lambda: dist.all_reduce(tensor, group=group),
                lambda: dist.all_reduce(large, group=group),
            ),
            "a little one": (
                lambda: dist.all_reduce(large, group=group),
                lambda: dist.all_reduce(tensor, group=group),
            ),
            "another large one": (
                lambda: dist.all_reduce(large, group=group),
                lambda: dist.broadcast(large, src=3, group=group),
            ),
            "nothing to bring": (
                lambda: dist.all_gather(parts, tensor, group=group),
                lambda: dist.barrier(group=group),
            ),
            "something to bring": (
                lambda: dist.barrier(group=group),
                lambda: dist.all_gather_single(whole, tensor, group=group),
            ),
            "asynchronously": (
                lambda: dist.all_reduce(tensor, group=group, async_op=True).wait(),
                lambda: dist.all_reduce(tensor[:-1], group=group, async_op=True).wait(),
            ),
            "one more before": (
                lambda: [dist.all_reduce(tensor, group=group), dist.barrier(group=group)],
                lambda: [dist.barrier(group=group), dist.all_reduce(tensor, group=group)],
            ),
        }

    def check(rank, world_size, machines):
        said = {}
        for name in calls(torch.ones(SMALL), world_size, None):
            group = dist.new_group(list(range(world_size)), backend="phalanx")
            tensor = torch.ones(SMALL)
            mine = calls(tensor, world_size, group)[name][rank == odd]
            with pytest.raises(MismatchError) as caught:
                mine()
            assert torch.equal(tensor, torch.ones(SMALL)), name
            said[name] = cause_of(caught.value), caught.value.calls
        return said

    results = on_hosts((2, 2), check)
    expected = {
        "another size": ("all_reduce(SUM) of float32 (5,)", f"all_reduce(SUM) of float32 ({SMALL},)"),
        "another root": (f"broadcast(src=0) of float32 ({SMALL},)", f"broadcast(src=3) of float32 ({SMALL},)"),
        "as many bytes of another type": (
            f"all_reduce(SUM) of int32 ({SMALL},)", f"all_reduce(SUM) of float32 ({SMALL},)",
        ),
        "another operation on as many bytes": (
            f"all_reduce(SUM) of float32 ({SMALL},)", f"broadcast(src=3) of float32 ({SMALL},)",
        ),
    }  # fmt: skip
    for name, (text, calls) in results[0].items():
        assert {result[name][0] for result in results} == {text}, name
        assert sorted(calls) == [0, 1, 2, 3], name
        assert "the ranks' calls do not match; no tensor was changed." in text
        assert "test_hosts_failures.py:" in calls[odd]
        one, others = expected.get(name, ("", ""))
        assert calls[odd].startswith(one), name
        assert all(call.startswith(others) for rank, call in calls.items() if rank != odd), name


def test_a_split_that_does_not_fit_is_named_on_both_sides():
    def check(rank, world_size, machines):
        output = torch.empty(3 if rank == 0 else 2)
        with pytest.raises(MismatchError) as caught:
            dist.all_to_all_single(output, torch.ones(2), [1, 2] if rank == 0 else [1, 1], [1, 1])
        return cause_of(caught.value)

    texts = on_hosts((1, 1), check)
    assert texts[0] == texts[1]
    assert "rank 0: all_to_all that expects 8 bytes from rank 1" in texts[0]
    assert "rank 1: all_to_all that sends 4 bytes to rank 0" in texts[0]


def test_a_message_that_does_not_fit_its_receiver_is_refused():
    def check(rank, world_size, machines):
        if rank == 0:
            with pytest.raises(MismatchError, match="send and recv do not match; the tensor was not changed") as caught:
                dist.recv(torch.empty(3), 1)
            return str(caught.value)
        with pytest.raises(PhalanxError):  # its message was never taken
            dist.send(torch.ones(4), 0)
        return None

    message = on_hosts((1, 1), check)[0]
    assert "rank 1: send of 16 bytes of float32 to rank 0" in message
    assert "rank 0: recv of 12 bytes of float32 from rank 1" in message


@pytest.mark.slow(but=("sizes0-1",))
@pytest.mark.parametrize(("sizes", "late"), [((1, 1), 1), ((2, 2), 3)])
def test_a_late_rank_is_named_with_what_it_did_last(sizes, late):
    def check(rank, world_size, machines):
        dist.barrier()
        limit(2.0)
        store = dist.group.WORLD.get_group_store()
        if rank == late:
            while (
                dist.group.WORLD.transport.session.reports.report is None
            ):  # it comes only when the others have given up
                time.sleep(0.01)
            store.set("it has heard", "yes")
        with pytest.raises(DeadlineError) as caught:
            dist.all_reduce(torch.ones(3))
        if rank == 0:  # the store lives in it
            store.wait(["it has heard"], timedelta(seconds=20))
        return cause_of(caught.value), caught.value.missing

    results = on_hosts(sizes, check)
    assert len({text for text, _ in results}) == 1
    text, missing = results[0]
    assert missing == (late,)
    assert f"no answer from rank {late} within 2.0 s.\nRank {late} (pid " in text
    assert "last finished barrier #2 (" in text
    assert "Read the log of the missing rank first; if it is only slow, raise the timeout of the group.\n" in text


@pytest.mark.slow
def test_a_stopped_rank_is_one_that_does_not_answer():
    def check(rank, world_size, machines):
        dist.barrier()
        limit(2.0)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(DeadlineError, match="does not answer: it hangs, is stopped, or is cut off") as caught:
            dist.all_reduce(torch.ones(3))
        return caught.value.missing

    assert on_hosts((1, 1), check, lost=(1,))[0] == (1,)


@pytest.mark.slow
def test_a_host_whose_link_is_cut_in_the_middle_of_a_large_transfer_is_named_within_the_timeout():
    def check(rank, world_size, machines):
        dist.barrier()
        limit(3.0)
        tensor = torch.ones(4 * 2**20)
        if rank == 0:
            threading.Timer(0.3, machines[1].cut_off).start()
        with pytest.raises(DeadlineError) as caught:
            _call_until_it_fails(lambda: [dist.broadcast(tensor, src=1), dist.all_reduce(tensor)])
        return caught.value.missing, str(caught.value)

    results = on_hosts((2, 2), check)
    assert [missing for missing, _ in results] == [(2, 3), (2, 3), (0, 1), (0, 1)], results
    assert all("within 3.0 s" in text for _, text in results)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 2**20])
def test_a_host_that_is_cut_off_is_late_as_a_whole_and_its_ranks_tell_that_it_is_where_the_time_of_one_is_up_first(
    size,
):
    """The first told why in the job's store, which it could not reach, and woke the others of its host: they knew only
    who had woken them, and called it gone, `killed, or crashed`, though it was in the operation or had ended in order.
    """

    def check(rank, world_size, machines):
        dist.barrier()
        limit(2.0 if rank == 2 else 12.0)
        if rank == 0:
            machines[1].cut_off()
        with pytest.raises(DeadlineError) as caught:
            _call_until_it_fails(lambda: dist.all_reduce(torch.ones(size)))  # enough for one may have come before
        return caught.value.missing, cause_of(caught.value)

    results = on_hosts((2, 2), check)
    assert [missing for missing, _ in results] == [(2, 3), (2, 3), (0, 1), (0, 1)], results
    assert "does not answer: it hangs, is stopped, or is cut off." in results[0][1]
    assert results[2][1] == results[3][1]
    assert "no answer from ranks 0, 1 within 2.0 s" in results[3][1]
    assert "The job's store does not answer either: this host may be cut off." in results[3][1]


@pytest.mark.parametrize("count", [3, 2**20])
def test_a_rank_that_ends_while_its_thread_waits_does_not_call_the_rank_lost_for_which_that_waits(count):
    """It closes its own connections, and its thread told everybody that the other end had done so."""

    def check(rank, world_size, machines):
        store = dist.distributed_c10d._get_default_store()
        group, said = dist.new_group([0, 1], backend="phalanx"), []

        def work():
            with pytest.raises(PeerLostError) as caught:
                _call_until_it_fails(lambda: dist.all_reduce(torch.ones(count), group=group))
            said.append((caught.value.ranks, str(caught.value)))

        if rank == 1:
            session, has_begun = group.transport.session, threading.Event()
            begin = session._begin

            def begin_and_tell(*arguments):
                record = begin(*arguments)
                has_begun.set()
                return record

            session._begin = begin_and_tell
            thread = threading.Thread(target=work)
            thread.start()
            has_begun.wait()
            group.leave_at_exit("it ended with ValueError: bad luck")
            thread.join()
            store.set("left", "")
        else:
            store.wait(["left"])
            work()
        return said

    for ranks, message in chain(*on_hosts((1, 1), check)):
        assert ranks == (1,)
        assert "is gone: it ended with ValueError: bad luck." in message


def test_a_rank_that_ends_with_an_error_says_so_to_the_other_hosts():
    def check(rank, world_size, machines):
        dist.barrier()
        if rank == 1:
            from phalanx._comm.backend.process_group.group import leave_all

            leave_all("it ended with ValueError: bad luck")
            os._exit(1)
        with pytest.raises(PeerLostError) as caught:
            dist.all_reduce(torch.ones(3))
        return str(caught.value)

    assert "is gone: it ended with ValueError: bad luck." in on_hosts((1, 1), check, lost=(1,))[0]


@pytest.mark.slow(but=("collective",))
@pytest.mark.parametrize("waits_for", ["collective", "large collective", "message"])
def test_ctrl_c_is_heard_while_another_host_is_waited_for(waits_for):
    # Gloo waits in C++, where no signal is heard: it was heard at the timeout.
    def check(rank, world_size, machines):
        dist.barrier()
        group = dist.group.WORLD
        if rank == 1:
            while group.transport.session.reports.report is None:  # the health monitor hears of it
                time.sleep(0.01)
            with pytest.raises(PeerLostError) as caught:
                dist.all_reduce(torch.ones(3))
            group.get_group_store().set("heard", "yes")
            return str(caught.value)

        def is_time():
            return _waits_for_work() if waits_for == "message" else group.transport.session.position.inside

        thread = threading.Thread(target=_signal_when, args=(is_time,))
        thread.start()
        calls = {
            "collective": (dist.all_reduce, (torch.ones(3),)),
            "large collective": (dist.all_reduce, (torch.ones(2**19),)),
            "message": (dist.recv, (torch.empty(3), 1)),
        }
        call = calls[waits_for]
        with pytest.raises(KeyboardInterrupt) as caught:
            call[0](*call[1])
        thread.join()
        group.get_group_store().wait(["heard"], timedelta(seconds=60))
        return str(caught.value)

    said, text = on_hosts((1, 1), check, timeout_s=600.0, run_s=300.0)
    if waits_for != "message":
        assert "all_reduce #3 (" in said
        assert "in group '0' on rank 0: interrupted (KeyboardInterrupt) while waiting for rank 1.\nRank 1 (pid " in said
        assert "last finished barrier #2" in said
    else:
        assert (
            "recv from rank 1 in group '0' on rank 0: interrupted (KeyboardInterrupt) while waiting for rank 1" in said
        )
    assert "rank 0 (pid " in text
    assert "was interrupted (KeyboardInterrupt) while the group waited; it has been in " in text


@pytest.mark.parametrize("count", [3, 2**18 + 1])
def test_a_signal_handler_runs_during_a_wait_for_another_host_and_its_collective_is_refused(count):
    """A little tensor is waited for in the main thread, a large one in another: a handler runs in either wait."""

    def check(rank, world_size, machines):
        dist.barrier()
        store, told = dist.group.WORLD.get_group_store(), []
        if rank == 1:
            store.wait(["the handler has run"], timedelta(seconds=20))
        else:

            def handler(number, frame):
                with pytest.raises(PhalanxError) as caught:
                    dist.barrier()
                told.append(str(caught.value))
                threading.Thread(target=store.set, args=("the handler has run", "yes")).start()

            signal.signal(signal.SIGUSR1, handler)
            session = dist.group.WORLD.transport.session
            threading.Thread(target=_signal_when, args=(lambda: session.position.inside, signal.SIGUSR1)).start()
        tensor = torch.full((count,), rank + 1.0)
        dist.all_reduce(tensor)  # it goes on behind the handler
        dist.barrier()
        return told, bool((tensor == 3.0).all())

    (told, whole), other = on_hosts((1, 1), check)
    assert whole
    assert other == ([], True)
    assert len(told) == 1
    assert "called in a signal handler that interrupted an operation of the same group" in told[0]


def test_ctrl_c_is_heard_while_the_hosts_connect():
    """Gloo connects in C++: Ctrl-C was heard when its time was up, and the other hosts never learned why."""

    def check(rank, world_size, machines):
        dist.barrier()
        if rank == 1:  # it does not come to connect
            connect.GlooEngine = lambda *args, **kwargs: threading.Event().wait()
        else:
            threading.Thread(target=_signal_when, args=(lambda: _is_running("phalanx-1-connect"),)).start()
        with pytest.raises(KeyboardInterrupt if rank == 0 else PeerLostError) as caught:
            dist.new_group([0, 1], backend="phalanx", timeout=timedelta(seconds=25))
        return str(caught.value)

    mine, others = on_hosts((1, 1), check, timeout_s=30.0, run_s=20.0)
    assert (
        "init_process_group in group '1' on rank 0: interrupted (KeyboardInterrupt) while connecting to rank 1." in mine
    )
    assert "init_process_group in group '1' on rank 1: rank 0 (pid " in others
    assert "was interrupted (KeyboardInterrupt in init_process_group) while the group waited" in others


def test_a_rank_that_is_interrupted_while_it_connects_is_named_by_one_whose_connection_it_closes():
    """Its peer called it unreachable, with advice about firewalls: the connection was reset, and nobody asked why."""

    def check(rank, world_size, machines):
        connect_streams = StreamListener.connect

        def close_instead(listener, *arguments):
            listener.close()
            raise KeyboardInterrupt

        def connect_late(*arguments):
            store.wait(["it has closed"])
            return connect_streams(*arguments)

        store = dist.distributed_c10d._get_default_store()
        StreamListener.connect = close_instead if rank == 1 else connect_late
        with pytest.raises(KeyboardInterrupt if rank == 1 else PeerLostError) as caught:
            dist.new_group([0, 1, 2], backend="phalanx")
        store.set("it has closed", "")
        return str(caught.value)

    for rank in (0, 2):
        assert "was interrupted (KeyboardInterrupt in init_process_group)" in on_hosts((1, 1, 1), check)[rank]


def test_connections_that_are_made_after_ctrl_c_are_closed_again():
    """They were shut down, and their sockets were left to the garbage collector, with a ResourceWarning each."""
    calls, may_connect, has_ended = [], threading.Event(), threading.Event()

    class Engine:
        def close(self):
            calls.append("close")

        def free(self):
            calls.append("free")
            has_ended.set()

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        connect._interruptible(lambda: may_connect.wait() and Engine(), interrupt, "late")
    may_connect.set()
    assert has_ended.wait(20.0)
    assert calls == ["close", "free"]


def _is_running(name):
    return any(thread.name == name for thread in threading.enumerate())


def _waits_for_work():
    """Whether the main thread is in the wait of an operation that another thread carries out."""
    frame = sys._current_frames()[threading.main_thread().ident]
    named = [(Path(each.f_code.co_filename).name, each.f_code.co_name) for each, _ in traceback.walk_stack(frame)]
    return named[0] == ("threading.py", "wait") and ("work.py", "wait") in named


def _signal_when(is_time, number=signal.SIGINT):
    """Send this process a signal once `is_time()` and its main thread stands in a wait."""
    main = threading.main_thread()
    before, same = None, 0
    while same < 5:  # asleep at one and the same instruction, each time that it is looked at
        time.sleep(0.01)
        frame = sys._current_frames()[main.ident]
        here = (id(frame), frame.f_lasti)
        state = Path(f"/proc/self/task/{main.native_id}/stat").read_text().rpartition(")")[2].split()[0]
        same = same + 1 if is_time() and state == "S" and here == before else 0
        before = here
        del frame
    os.kill(os.getpid(), number)


def test_ranks_with_different_options_are_told_before_anything_is_built():
    options = [phalanx.Options(algorithm="ring"), phalanx.Options(algorithm="tree")]
    with pytest.raises(RankFailed) as caught:
        on_hosts((1, 1), lambda rank, world_size, machines: None, options=options)
    for error in caught.value.errors.values():
        assert "the ranks were given different options" in str(error)
        assert "rank 0: algorithm=ring" in str(error)
        assert "rank 1: algorithm=tree" in str(error)


@pytest.mark.slow(but=("option-eth7", "variable-^docker,lo"))
@pytest.mark.parametrize("value", ["^docker,lo", "eth7"])
@pytest.mark.parametrize("by", ["option", "variable"])
def test_a_wrong_interface_is_named_with_its_value_and_the_interfaces_that_exist(monkeypatch, by, value):
    """The error blamed the network between the hosts; with two ranks of three right, those waited for the third."""
    options, named = None, f"GLOO_SOCKET_IFNAME={value}"
    if by == "option":
        options, named = [None, None, phalanx.Options(interface=value)], f"Options(interface={value!r})"
    else:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    with pytest.raises(RankFailed) as caught:
        on_hosts((2, 1), lambda *a: None, options=options)
    wrong = value if by == "option" else value.partition(",")[0]
    for rank in range(3):
        text = str(caught.value.errors[rank])
        assert (
            f": {named}: interface {wrong!r} does not exist on {os.uname().nodename}, which has lo (127.0.0.1), eth0 (1"
            in text
        )
        assert ("rank 2: " if by == "option" else "ranks 0-1: ") in text.replace("ranks 0, 1", "ranks 0-1")
        assert "reach each other" not in text


def test_a_destroyed_group_refuses_calls():
    def check(rank, world_size, machines):
        group = dist.new_group([0, 1])
        dist.destroy_process_group(group)
        with pytest.raises(ClosedError):
            group.barrier()
        return True

    assert all(on_hosts((1, 1), check))


@pytest.mark.slow(but=("0-9",))
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_the_rank_to_blame_is_blamed_also_where_it_keeps_the_store(how, victim):
    """Rank 0 keeps the store in which the others tell each other what they saw. When it was killed, its neighbour
    closed its connections, could not say why, and was blamed: 7 times of 7. When it was stopped, its neighbour blamed
    the ranks of the other host. And when it told of another and ended, the store went before all had heard.
    """

    def check(rank, world_size, machines):
        dist.barrier()
        limit(3.0)
        if rank == victim:
            os.kill(os.getpid(), how)
        with pytest.raises((PeerLostError, DeadlineError)) as caught:
            dist.all_reduce(torch.ones(1000))
        error = caught.value  # and the program ends with it
        return type(error), error.ranks if isinstance(error, PeerLostError) else error.missing, str(error)

    results = on_hosts((2, 2), check, lost=(victim,))
    for kind, ranks, message in (result for result in results if result):
        assert kind is (PeerLostError if how is signal.SIGKILL else DeadlineError), message
        assert ranks == (victim,), message
